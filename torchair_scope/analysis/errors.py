"""Sums over the errors of a tensor, taken in a block at a time."""

from __future__ import annotations

from typing import Any

import numpy as np

from torchair_scope.analysis.numerics import Tolerance, is_float, rounded, ulp_distance
from torchair_scope.analysis.plain_errors import PlainBlocks
from torchair_scope.analysis.source import Array

# Elements that are measured at once in float64. Products of vectors this short are not spread over
# threads, which costs more than it gives.
_PIECE = 1 << 13


class ErrorSums:
    """What is known of a tensor's errors after some blocks.

    Args:
        tolerance: what `beyond` is counted with.
        stored: the dtypes of both arrays.
        dtype: the target's true one.
        rounds: whether the golden tensor has a higher precision than that.
        size: elements of the largest block.
    """

    def __init__(
        self,
        tolerance: Tolerance,
        stored: tuple[Any, Any],
        dtype: str,
        rounds: bool,
        size: int,
    ) -> None:
        self.tolerance = tolerance
        self.dtype = dtype
        self.rounds = rounds
        self.has_ulps = is_float(dtype)
        self.count = self.beyond = self.beyond_rounded = self.nans = self.infinities = 0
        self.scale = self.largest = self.total = self.squares = 0.0
        self.golden_squares = self.target_squares = self.products = 0.0
        self.largest_ulp = self.total_ulp = 0.0
        self.worst: tuple[int, float, float] | None = None  # position, golden, target
        self._worst_size = 0.0
        self._plain: PlainBlocks | None = None
        if PlainBlocks.can_measure(*stored, dtype):
            self._plain = PlainBlocks(stored, dtype, rounds, tolerance, size)

    def add(self, start: int, golden: Array, target: Array) -> None:
        """Take in a block, which begins at position `start`."""
        self.count += golden.size
        if self._plain is None or not self._add_plain(self._plain, start, golden, target):
            for at in range(0, golden.size, _PIECE):
                piece = slice(at, at + _PIECE)
                self._add_piece(start + at, golden[piece], target[piece])

    def _add_plain(self, plain: PlainBlocks, start: int, golden: Array, target: Array) -> bool:
        """Take in a block of ordinary floats; False if it is none."""
        if _same_bytes(golden, target):
            self._add_equal(*plain.squares_of(golden))
            return True
        errors = plain.errors_of(golden, target, self._worst_size)
        if errors is None:
            return False
        if errors.at >= 0 and errors.largest > self._worst_size:
            self._worst_size = errors.largest
            self.worst = start + errors.at, float(golden[errors.at]), float(target[errors.at])
        self.scale = max(self.scale, errors.scale)
        self.largest = max(self.largest, errors.largest)
        self.total += errors.total
        self.squares += errors.squares
        self.golden_squares += errors.golden_squares
        self.target_squares += errors.target_squares
        self.products += errors.products
        self.beyond += errors.beyond
        self.beyond_rounded += errors.beyond_rounded
        self.largest_ulp = max(self.largest_ulp, errors.largest_ulp)
        self.total_ulp += errors.total_ulp
        return True

    def _add_equal(self, scale: float, squares: float) -> None:
        self.golden_squares += squares
        self.target_squares += squares
        self.products += squares
        self.scale = max(self.scale, scale)

    @np.errstate(over="ignore")
    def _add_piece(self, start: int, golden: Array, target: Array) -> None:
        same = golden == target
        exact = golden.astype(np.float64), target.astype(np.float64)
        if same.all() and np.isfinite(exact[0]).all():
            self._add_equal(float(np.abs(exact[0]).max()), float(exact[0] @ exact[0]))
        else:
            self._add_different(start, *exact, same)

    def _add_different(self, start: int, golden: Array, target: Array, same: Array) -> None:
        finite = np.isfinite(golden) & np.isfinite(target)
        mismatch = ~finite & ~same & ~(np.isnan(golden) & np.isnan(target))
        self._count_mismatches(golden, target, mismatch)
        if finite.all():
            seen, compared = golden, target
        else:
            seen, compared = np.where(finite, golden, 0.0), np.where(finite, target, 0.0)
        error = np.abs(compared - seen)
        # Integers that float64 does not tell apart differ by 1 at least.
        error[finite & ~same & (error == 0)] = 1.0
        self._find_worst(start, error, mismatch, golden, target)
        self._add_errors(error, seen, compared)
        self._count_beyond(error, seen, compared, mismatch)
        if self.has_ulps:
            self._add_ulps(seen, compared)

    def _count_mismatches(self, golden: Array, target: Array, mismatch: Array) -> None:
        if mismatch.any():
            nan = int((mismatch & (np.isnan(golden) | np.isnan(target))).sum())
            self.nans += nan
            self.infinities += int(mismatch.sum()) - nan

    def _find_worst(
        self, start: int, error: Array, mismatch: Array, golden: Array, target: Array
    ) -> None:
        at = int(mismatch.argmax()) if mismatch.any() else int(error.argmax())
        size = np.inf if mismatch[at] else float(error[at])
        if size > self._worst_size:
            self._worst_size = size
            self.worst = start + at, float(golden[at]), float(target[at])

    def _add_errors(self, error: Array, golden: Array, target: Array) -> None:
        self.largest = max(self.largest, float(error.max()))
        self.total += float(error.sum())
        self.squares += float(error @ error)
        self.golden_squares += float(golden @ golden)
        self.target_squares += float(target @ target)
        self.products += float(golden @ target)
        self.scale = max(self.scale, float(golden.max()), -float(golden.min()))

    def _count_beyond(self, error: Array, golden: Array, target: Array, mismatch: Array) -> None:
        self.beyond += self._beyond(error, golden, mismatch)
        if not self.rounds:
            self.beyond_rounded = self.beyond
            return
        nearest = rounded(golden, self.dtype)
        with np.errstate(invalid="ignore"):
            nearest_error = np.where(nearest == target, 0.0, np.abs(target - nearest))
        self.beyond_rounded += self._beyond(nearest_error, nearest, mismatch)

    def _beyond(self, error: Array, golden: Array, mismatch: Array) -> int:
        allowed = np.abs(golden)
        allowed *= self.tolerance.relative
        allowed += self.tolerance.absolute
        return int(((error > allowed) | mismatch).sum())

    def _add_ulps(self, golden: Array, target: Array) -> None:
        distance = ulp_distance(rounded(golden, self.dtype), target, self.dtype)
        if distance is None:
            self.has_ulps = False
            return
        self.largest_ulp = max(self.largest_ulp, float(distance.max()))
        self.total_ulp += float(distance.sum())


def _same_bytes(golden: Array, target: Array) -> bool:
    if golden.dtype != target.dtype or golden[0] != target[0]:
        return False
    unsigned = np.dtype(f"u{golden.dtype.itemsize}")
    return np.array_equal(golden.view(unsigned), target.view(unsigned))
