"""Run an operator, or many, again on given arguments: is a result as exact as its dtype allows?"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch

from torchair_scope.analysis.arguments import Arguments, by_slot, in_precision, map_leaves
from torchair_scope.analysis.metrics import Metrics, measure
from torchair_scope.analysis.numerics import EPSILONS, is_float, rounded
from torchair_scope.analysis.operators import BIT_CASTS, NotReplayableError
from torchair_scope.analysis.source import Array
from torchair_scope.store.arrays import to_numpy

Verdict = Literal["rounding", "bug", "cannot"]
Reference = Literal["float64", "float32"]

# A kernel may be this many times less exact than the one that runs here, and as inexact as this
# many roundings of each of its inputs make it.
_OF_RERUN = 8.0
_OF_SENSITIVITY = 4.0
_NARROW = 2.0**-10
_SEED = 20


class Result(NamedTuple):
    """A result to judge: its true dtype and shape, and its values."""

    dtype: str
    shape: tuple[int, ...]
    array: Array


@dataclass(frozen=True)
class Finding:
    """What running again has shown; see `Replay`."""

    verdict: Verdict
    reason: str
    slot: str | None = None
    dumped: Metrics | None = None
    rerun: Metrics | None = None


def judge(results: Mapping[str, Result], run: Rerun, reference: torch.dtype) -> Finding:
    """Judge results by a run in their own dtypes, and one in a higher precision.

    Args:
        results: what is judged, by slot.
        run: what has given them, on the same arguments.
        reference: the dtype of the exact run.

    Raises:
        NotReplayableError: it does not run here.
    """
    rerun = run.as_dumped()
    if missing := [slot for slot in results if slot not in rerun]:
        return Finding("bug", f"a run here gives no {missing[0]}", missing[0])
    exact = run.in_precision(reference)
    findings = []
    for slot, (dtype, shape, array) in results.items():
        if tuple(rerun[slot].shape) != shape:
            here = tuple(rerun[slot].shape)
            findings.append(Finding("bug", f"its shape is {shape}, here {here}", slot))
        elif rerun[slot].is_complex() != (array.dtype.kind == "c"):
            kind = str(rerun[slot].dtype).removeprefix("torch.")
            findings.append(Finding("bug", f"its dtype is {dtype}, here {kind}", slot))
        else:
            judged = _Judge(slot, dtype, array, to_numpy(rerun[slot]), run, reference)
            findings.append(judged.finding(exact.get(slot)))
    return _worst(findings)


def _worst(findings: Sequence[Finding]) -> Finding:
    rank = {"bug": 0, "cannot": 1, "rounding": 2}

    def key(finding: Finding) -> tuple[int, float]:
        error = finding.dumped.max_relative if finding.dumped else 0.0
        return rank[finding.verdict], -error

    return min(findings, key=key)


class Rerun:
    """Runs one operator on its dumped arguments, or on ones near them."""

    def __init__(self, operator: Callable[..., Any], arguments: Arguments, target: str) -> None:
        self._operator = operator
        self._arguments = arguments
        self._target = target
        self.has_floats = False
        self._near: dict[str, torch.Tensor] | None = None
        map_leaves(arguments, self._note)

    def _note(self, value: Any) -> None:
        if isinstance(value, torch.Tensor) and value.dtype.is_floating_point:
            self.has_floats = True

    def as_dumped(self) -> dict[str, torch.Tensor]:
        """The outputs in the dumped dtype."""
        try:
            return self._run(self._arguments)
        except Exception as error:
            text = str(error).strip().split("\n")[0]
            raise NotReplayableError(f"it fails here: {type(error).__name__}: {text}") from error

    def in_precision(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """The outputs in a higher precision; none if the operator does not have it."""
        if self._target in BIT_CASTS:
            return {}
        try:
            return self._run(in_precision(self._arguments, dtype, self._target))
        except Exception:  # any operator may refuse a dtype, each in its own way
            return {}

    def near(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """The outputs in a higher precision for arguments that are off by a rounding each."""
        if self._near is None:
            self._near = self._run_near(dtype)
        return self._near

    def _run_near(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(_SEED)

        def shift(value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or not value.dtype.is_floating_point:
                return value
            epsilon = EPSILONS.get(str(value.dtype).removeprefix("torch."), 0.0)
            signs = torch.randint(0, 2, value.shape, generator=generator).to(value.device) * 2 - 1
            return value.to(dtype) * (1 + epsilon / 2 * signs)

        moved = map_leaves(self._arguments, shift)
        return self._run(in_precision(moved, dtype, self._target))

    def _run(self, arguments: Arguments) -> dict[str, torch.Tensor]:
        args, kwargs = map_leaves(arguments, _own_memory)
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return by_slot(self._operator(*args, **kwargs))


def _own_memory(value: Any) -> Any:
    """An operator may change its arguments."""
    return value.clone() if isinstance(value, torch.Tensor) else value


class _Judge:
    """Judges one output."""

    def __init__(
        self,
        slot: str,
        dtype: str,
        dumped: Array,
        rerun: Array,
        run: Rerun,
        reference: torch.dtype,
    ) -> None:
        self.slot = slot
        self.dtype = dtype
        self.dumped = dumped
        self.rerun = rerun
        self.run = run
        self.reference = reference

    def finding(self, exact: torch.Tensor | None) -> Finding:
        """Judge it, by the exact result if there is one."""
        if not is_float(self.dtype):
            return self._of_integers()
        if exact is None or tuple(exact.shape) != self._true_shape():
            return self._without_reference()
        return self._with_reference(rounded(to_numpy(exact), self.dtype))

    def _true_shape(self) -> tuple[int, ...]:
        return tuple(self.dumped.shape)

    def _of_integers(self) -> Finding:
        errors = measure(self.rerun, self.dumped)
        if errors.equal:
            return Finding("rounding", "equal to a run here", self.slot, errors, errors)
        if self.run.has_floats and self.dtype == "int64":
            reason = "other indices than a run here: ties may be broken in another order"
            return Finding("cannot", reason, self.slot, errors)
        reason = f"{errors.beyond} of {errors.count} elements are not those of a run here"
        return Finding("bug", reason, self.slot, errors)

    def _without_reference(self) -> Finding:
        errors = measure(self.rerun, self.dumped, self.dtype, self.dtype)
        told = "the operator does not run in a higher precision"
        if not errors.mismatches and errors.max_absolute <= _OF_RERUN * errors.rounding_budget:
            return Finding("rounding", f"as a run here; {told}", self.slot, errors)
        reason = f"off by {errors.max_relative:.1e} from a run here; {told}"
        return Finding("bug", reason, self.slot, errors)

    def _with_reference(self, exact: Array) -> Finding:
        dumped = measure(exact, self.dumped, "float64", self.dtype)
        rerun = measure(exact, self.rerun, "float64", self.dtype)
        errors = (self.slot, dumped, rerun)
        if _is_within(dumped, _Errors(0.0, 0.0)):
            return Finding("rounding", "as exact as its dtype allows", *errors)
        sensitivity = self._sensitivity(exact)
        if _is_within(dumped, sensitivity.times(_OF_SENSITIVITY)):
            return Finding("rounding", "no worse than a rounding of its inputs", *errors)
        here = _Errors(rerun.max_absolute, rerun.rmse).times(_OF_RERUN)
        if dumped.mismatches <= rerun.mismatches and _is_within(dumped, here, mismatches=True):
            reason = "far from the reference, and so is a run here: not the fault of one kernel"
            return Finding("cannot", reason, *errors)
        return Finding("bug", _told(dumped, rerun), *errors)

    def _sensitivity(self, exact: Array) -> _Errors:
        """How far the exact result moves if each input is off by a rounding."""
        try:
            moved = rounded(to_numpy(self.run.near(self.reference)[self.slot]), self.dtype)
            errors = measure(exact, moved, "float64", "float64")
        except Exception:  # what cannot be computed so excuses nothing
            return _Errors(0.0, 0.0)
        return _Errors(errors.max_absolute, errors.rmse)


class _Errors(NamedTuple):
    """An error that is excused."""

    largest: float
    rmse: float

    def times(self, factor: float) -> _Errors:
        """A multiple of it."""
        return _Errors(self.largest * factor, self.rmse * factor)


def _is_within(errors: Metrics, excused: _Errors, mismatches: bool = False) -> bool:
    """Whether errors are those of rounding, apart from what is excused.

    Of a narrow dtype only the result is rounded, since kernels sum up in float32.
    """
    if errors.mismatches and not mismatches:
        return False
    narrow = errors.epsilon >= _NARROW
    relative = errors.epsilon if narrow else errors.tolerance.relative
    return (
        errors.max_absolute <= errors.rounding_budget + excused.largest
        and errors.rmse <= relative * errors.golden_rms + excused.rmse
    )


def _told(dumped: Metrics, rerun: Metrics) -> str:
    if dumped.nan_mismatches:
        return f"{dumped.nan_mismatches} elements are NaN on one side only"
    if dumped.infinity_mismatches:
        return f"{dumped.infinity_mismatches} elements are infinite on one side only"
    return (
        f"off by {dumped.max_relative:.1e} of the largest value; a run here is off by "
        f"{rerun.max_relative:.1e}"
    )
