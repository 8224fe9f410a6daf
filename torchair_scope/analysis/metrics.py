"""How far a tensor is from its golden one, read a block at a time."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from torchair_scope.analysis.blocks import BLOCK, blocks, flat_reals
from torchair_scope.analysis.errors import ErrorSums
from torchair_scope.analysis.numerics import Tolerance, epsilon_of, is_float, tolerance_of
from torchair_scope.analysis.source import Array

# Of float8 a few roundings are as much as the value: there it is one.
_COARSE = 2.0**-4


@dataclass(frozen=True)
class Worst:
    """The element with the largest error."""

    index: tuple[int, ...]
    golden: float
    target: float


@dataclass(frozen=True)
class Metrics:
    """The error of a tensor against its golden one.

    Elements that are NaN or infinite on a side are in the counts of mismatches, not in the errors.
    Complex numbers count as two elements each.

    Args:
        count: elements.
        scale: the largest magnitude of the golden tensor; what relative errors are relative to.
        golden_rms: the root of the mean square of the golden tensor.
        max_absolute, mean_absolute, rmse: of `target - golden`.
        max_relative, mean_relative: the same divided by `scale`.
        cosine: of the angle between both; 1 where both are zero, NaN where a square overflows.
        max_ulp, mean_ulp: values of the target's dtype that lie between; None for integers.
        beyond: elements that differ by more than the tolerance, mismatches among them.
        beyond_rounded: the same after rounding the golden tensor to the target's dtype.
        nan_mismatches: elements that are NaN on one side only.
        infinity_mismatches: elements that are infinite on one side only, or with another sign.
        worst: the element with the largest error, a mismatch before all others; None if all
            elements are equal.
        tolerance: what `beyond` was counted with.
        epsilon: the step of the mantissa of the coarsest dtype of these values.
    """

    count: int
    scale: float
    golden_rms: float
    max_absolute: float
    mean_absolute: float
    rmse: float
    max_relative: float
    mean_relative: float
    cosine: float
    max_ulp: float | None
    mean_ulp: float | None
    beyond: int
    beyond_rounded: int
    nan_mismatches: int
    infinity_mismatches: int
    worst: Worst | None
    tolerance: Tolerance
    epsilon: float

    @property
    def share_beyond(self) -> float:
        """The share of elements that differ by more than the tolerance."""
        return self.beyond / self.count if self.count else 0.0

    @property
    def mismatches(self) -> int:
        """Elements that are NaN or infinite on one side only."""
        return self.nan_mismatches + self.infinity_mismatches

    @property
    def rounding_budget(self) -> float:
        """The largest error that a few roundings of the largest value can make."""
        roundings = 4 if self.epsilon < _COARSE else 1
        relative = max(self.tolerance.relative, roundings * self.epsilon)
        return (relative + self.tolerance.absolute) * self.scale

    @property
    def equal(self) -> bool:
        """Whether all elements are equal; NaN equals NaN, and -0.0 equals 0.0."""
        return self.worst is None


class ShapesDifferError(ValueError):
    """Two tensors of different shapes cannot be compared."""


def measure(
    golden: Array,
    target: Array,
    golden_dtype: str | None = None,
    target_dtype: str | None = None,
    tolerance: Tolerance | None = None,
    computed_in: str | None = None,
) -> Metrics:
    """Measure the error of `target` against `golden`.

        >>> import numpy as np
        >>> from torchair_scope.analysis.metrics import measure
        >>> metrics = measure(np.float32([1, 2, 4]), np.float32([1, 2.5, 4]))
        >>> metrics.max_absolute, metrics.max_relative, metrics.beyond
        (0.5, 0.125, 1)
        >>> metrics.worst
        Worst(index=(1,), golden=2.0, target=2.5)

    Args:
        golden: the right values, in a memory-mapped array for instance; a block of it is in memory
            at a time.
        target: those to judge, likewise.
        golden_dtype: the true dtype, as `bfloat16`; that of the array if None.
        target_dtype: likewise.
        tolerance: that of `torch.testing` for the coarser dtype if None.
        computed_in: a coarser dtype that these floating-point values were computed from, whose
            rounding is in them.

    Raises:
        ShapesDifferError: the shapes differ.
    """
    if golden.shape != target.shape:
        raise ShapesDifferError(f"golden has shape {golden.shape}, target {target.shape}")
    golden_dtype = golden_dtype or str(golden.dtype)
    target_dtype = target_dtype or str(target.dtype)
    dtypes = [golden_dtype, target_dtype]
    if computed_in is not None and is_float(target_dtype):
        dtypes.append(computed_in)
    tolerance = tolerance or tolerance_of(*dtypes)
    rounds = is_float(golden_dtype) and epsilon_of(target_dtype) > epsilon_of(golden_dtype)
    if not golden.flags.c_contiguous and golden.flags.f_contiguous and target.flags.f_contiguous:
        given = golden_dtype, target_dtype, tolerance, computed_in
        return _transposed(measure(golden.T, target.T, *given))
    if golden.dtype.kind != target.dtype.kind == "c":
        golden = golden.astype(np.complex128)
    elif target.dtype.kind != golden.dtype.kind == "c":
        target = target.astype(np.complex128)
    flat_golden, flat_target = flat_reals(golden), flat_reals(target)
    stored = flat_golden.dtype, flat_target.dtype
    sums = ErrorSums(tolerance, stored, target_dtype, rounds, min(BLOCK, flat_golden.size))
    for start, block in blocks(flat_golden, flat_target):
        sums.add(start, *block)
    return _metrics(sums, golden, epsilon_of(*dtypes))


def _transposed(metrics: Metrics) -> Metrics:
    """The same errors in a tensor that lies in memory the other way round."""
    worst = metrics.worst
    if worst is None:
        return metrics
    return replace(metrics, worst=replace(worst, index=worst.index[::-1]))


def _metrics(sums: ErrorSums, golden: Array, epsilon: float) -> Metrics:
    count = max(sums.count, 1)
    scale = sums.scale or 1.0
    mean = sums.total / count
    ulps = sums.largest_ulp, sums.total_ulp / count
    return Metrics(
        count=sums.count,
        scale=sums.scale,
        golden_rms=float(np.sqrt(sums.golden_squares / count)),
        max_absolute=sums.largest,
        mean_absolute=mean,
        rmse=float(np.sqrt(sums.squares / count)),
        max_relative=sums.largest / scale,
        mean_relative=mean / scale,
        cosine=_cosine(sums),
        max_ulp=ulps[0] if sums.has_ulps else None,
        mean_ulp=ulps[1] if sums.has_ulps else None,
        beyond=sums.beyond,
        beyond_rounded=sums.beyond_rounded,
        nan_mismatches=sums.nans,
        infinity_mismatches=sums.infinities,
        worst=_worst(sums, golden),
        tolerance=sums.tolerance,
        epsilon=epsilon,
    )


def _cosine(sums: ErrorSums) -> float:
    if sums.golden_squares == sums.target_squares == sums.products:
        return 1.0
    lengths = float(np.sqrt(sums.golden_squares) * np.sqrt(sums.target_squares))
    if not np.isfinite([lengths, sums.products]).all():
        return float("nan")
    return min(1.0, max(-1.0, sums.products / lengths)) if lengths else 0.0


def _worst(sums: ErrorSums, golden: Array) -> Worst | None:
    if sums.worst is None:
        return None
    position, *values = sums.worst
    if golden.dtype.kind == "c":
        position //= 2
    index = np.unravel_index(position, golden.shape)
    return Worst(tuple(int(each) for each in index), *values)
