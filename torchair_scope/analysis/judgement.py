"""Whether a tensor agrees with its golden one."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from torchair_scope.analysis.metrics import Metrics, ShapesDifferError, measure
from torchair_scope.analysis.numerics import Tolerance
from torchair_scope.analysis.source import Array
from torchair_scope.analysis.statistics import compared
from torchair_scope.analysis.tensors import MissingTensorError, Tensor

Agreement = Literal["equal", "close", "rounding", "differs", "unknown"]
AGREEMENTS: dict[Agreement, str] = {
    "equal": "every element is the same",
    "close": "every element is within the tolerance",
    "rounding": "the errors are within a few roundings of the largest value",
    "differs": "the errors are larger than that",
    "unknown": "there is nothing to compare: a file is missing or damaged",
}
_FEWEST = 16  # elements from which a file tells that it holds bfloat16


@dataclass(frozen=True)
class TensorPair:
    """A golden tensor and the target's: what is compared.

    Args:
        slot: which value of the call it is.
        golden, target: both of them.
        computed_in: the coarsest dtype that their run has computed in before.
    """

    slot: str
    golden: Tensor
    target: Tensor
    computed_in: str | None = None

    @property
    def key(self) -> Hashable:
        """Pairs of one key have one result: they share files, and are judged alike."""
        sides = self.golden, self.target
        if any(tensor.identity is None for tensor in sides):
            return id(self)
        files = tuple((tensor.identity, tensor.description.get("dtype")) for tensor in sides)
        return files, self.computed_in

    @property
    def size(self) -> int:
        """The bytes of both files."""
        return self.golden.size + self.target.size


@dataclass(frozen=True)
class TensorResult:
    """What the comparison of one tensor has shown.

    Args:
        slot: which value of the call it is.
        agreement: see `AGREEMENTS`.
        metrics: the errors; None if there is nothing to compare.
        dtypes: the true dtypes, golden and target.
        reason: what is in the way of a comparison, or what was assumed.
    """

    slot: str
    agreement: Agreement
    metrics: Metrics | None = None
    dtypes: tuple[str, str] = ("", "")
    reason: str | None = None

    @property
    def is_input(self) -> bool:
        """Whether it is an argument of the call, and not a result."""
        return not self.slot.startswith("OUTPUT")

    @property
    def is_suspicious(self) -> bool:
        """Whether it is close only since all its values are small: roundings explain less."""
        metrics = self.metrics
        if metrics is None or self.agreement != "close":
            return False
        return metrics.max_absolute > metrics.rounding_budget

    @property
    def agrees(self) -> bool:
        """Whether it is equal, close, or off by rounding."""
        return self.agreement in ("equal", "close", "rounding")


def compare_tensors(pair: TensorPair, tolerance: Tolerance | None = None) -> TensorResult:
    """Compare one tensor with its golden one. Never raises for what is wrong with a file."""
    told = compared(pair.golden, pair.target)
    if told is not None:
        kinds = pair.golden.dtype, pair.target.dtype
        is_equal, reason = told
        agreement: Agreement = "equal" if is_equal else "unknown"
        return TensorResult(pair.slot, agreement, dtypes=kinds, reason=reason)
    try:
        arrays = pair.golden.numpy(), pair.target.numpy()
    except MissingTensorError as error:
        return TensorResult(pair.slot, "unknown", reason=str(error))
    dtypes = _dtype(pair.golden, arrays[0]), _dtype(pair.target, arrays[1])
    try:
        metrics = measure(*arrays, *dtypes, tolerance, pair.computed_in)
    except ShapesDifferError as error:
        return TensorResult(pair.slot, "differs", dtypes=dtypes, reason=str(error))
    agreement = agreement_of(metrics, exact_scale=tolerance is not None)
    return TensorResult(pair.slot, agreement, metrics, dtypes)


def agreement_of(metrics: Metrics, exact_scale: bool = False) -> Agreement:
    """Judge errors. With `exact_scale` the tolerance holds for each element by itself."""
    if metrics.equal:
        return "equal"
    if metrics.beyond == 0 or metrics.beyond_rounded == 0:
        return "close"
    if exact_scale or metrics.mismatches:
        return "differs"
    return "rounding" if metrics.max_absolute <= metrics.rounding_budget else "differs"


def _dtype(tensor: Tensor, array: Array) -> str:
    """The true dtype; without a manifest, float32 with bfloat16's bits is taken for bfloat16."""
    if tensor.description or array.dtype != np.float32 or array.size < _FEWEST:
        return tensor.dtype
    first = array.reshape(-1)[:4096]
    return "float32" if (np.ascontiguousarray(first).view(np.uint32) & 0xFFFF).any() else "bfloat16"
