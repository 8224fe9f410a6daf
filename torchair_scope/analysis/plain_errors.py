"""The errors of a block of ordinary floats, in few passes and in the precision that they have."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from torchair_scope.analysis.blocks import BLOCK
from torchair_scope.analysis.numerics import STORED, Tolerance, rounded_bits
from torchair_scope.analysis.source import Array

# Products of vectors this short are not spread over threads, and lose little in float32.
_ROW = 1 << 12
_ONES = {name: np.ones((1, _ROW, 1), name) for name in ("float32", "float64")}
# Magnitudes whose squares a dtype holds, with room for a sum of them.
_LEAST = {"float32": 1e-17, "float64": 1e-140}
_MOST = {"float16": 65504.0, "float32": 1e15, "float64": 1e140}
# Above this share of the golden tensor's square, sums of the target are not told by the error's.
_SMALL = 0.01
# The bits of a float16 in a float32: its sign, and 15 that are shifted by 13.
_HALF = np.int32(-(1 << 31) | 0x7FFF << 13)
# Float32 cannot tell whether an error is beyond its tolerance if it is this near to it.
_MARGIN = 1e-5


class PlainErrors(NamedTuple):
    """Sums over one block; see `Metrics` for what becomes of them."""

    at: int
    largest: float
    total: float
    squares: float
    scale: float
    golden_squares: float
    target_squares: float
    products: float
    beyond: int
    beyond_rounded: int
    largest_ulp: float
    total_ulp: float


class PlainBlocks:
    """Measures blocks whose values are finite, and neither huge nor tiny.

    Such a block needs no more precision than float32 if that is what it is stored as: the
    difference of two near values is exact, and all passes stay in the processor's cache. Where
    float32 cannot tell, it is not asked: such blocks and elements are measured in float64.

    Args:
        stored: the dtypes of both arrays.
        dtype: the target's true one.
        rounds: whether the golden tensor has a higher precision than that.
        tolerance: what `beyond` is counted with.
        size: elements of the largest block.
    """

    def __init__(
        self, stored: tuple[Any, Any], dtype: str, rounds: bool, tolerance: Tolerance, size: int
    ) -> None:
        self._work = np.result_type(*stored, np.float32)
        self._dtype = dtype
        self._rounds = rounds
        self._tolerance = tolerance
        self._range = _LEAST[self._work.name], min(_MOST[each.name] for each in stored)
        buffers = [np.empty(size, self._work) for _ in range(4)]
        self._error, self._magnitude, self._golden, self._target = buffers
        self._above = np.empty(size, np.bool_)
        # What is done with first leaves its memory to what comes after it, to stay in the cache.
        integer = np.dtype(STORED[dtype][1])
        fits = integer.itemsize <= self._work.itemsize
        self._distance = self._magnitude.view(integer) if fits else np.empty(size, integer)

    @staticmethod
    def can_measure(golden: Any, target: Any, dtype: str) -> bool:
        """Whether it measures arrays of these dtypes, where the target's true one is `dtype`."""
        return golden.name in _MOST and target.name in _MOST and dtype in STORED

    def squares_of(self, values: Array) -> tuple[float, float]:
        """The largest magnitude and the sum of squares of the finite values."""
        taken = self._taken(values, self._golden)
        scale = float(np.abs(taken, out=self._magnitude[: taken.size]).max())
        if self._is_plain(scale):
            return scale, _dot(taken, taken)
        finite = np.where(np.isfinite(values), values, 0).astype(np.float64)
        return float(np.abs(finite).max()), float(np.square(finite).sum())

    def errors_of(self, golden: Array, target: Array, worst: float) -> PlainErrors | None:
        """The errors of a block; None if its values are not ordinary numbers.

        The place of the largest one is found if it is larger than `worst`, else it is -1.
        """
        stored = golden, target
        golden, target = self._taken(golden, self._golden), self._taken(target, self._target)
        with np.errstate(over="ignore", invalid="ignore"):
            return self._errors_of(golden, target, stored, worst)

    def _errors_of(
        self, golden: Array, target: Array, stored: tuple[Array, Array], worst: float
    ) -> PlainErrors | None:
        error = np.subtract(target, golden, out=self._error[: golden.size])
        squares, along = _dot(error, error), _dot(golden, error)
        np.abs(error, out=error)
        largest = float(error.max())
        magnitude = np.abs(golden, out=self._magnitude[: golden.size])
        scale, least = float(magnitude.max()), float(magnitude.min())
        if not self._is_plain(largest) or not self._is_plain(scale):
            return None
        golden_squares = _dot(golden, golden)
        if squares <= _SMALL * golden_squares:
            others = golden_squares + 2 * along + squares, golden_squares + along
        else:
            others = _dot(target, target), _dot(golden, target)
        if largest * (1 + _MARGIN) > worst:
            at = int(error.argmax())
            largest = abs(float(target[at]) - float(golden[at]))
        else:
            at = -1
        may_cross = largest * (1 + _MARGIN) >= least
        total = self._sum(error)
        beyond = 0
        if self._may_be_beyond(largest, least):
            beyond = self._beyond(error, magnitude, golden, target)
        if self._rounds:
            nearest = self._nearest(golden)
            beyond_rounded = self._beyond_rounded(nearest, target)
            stored = nearest, stored[1]
        else:
            beyond_rounded = beyond
        ulps = self._ulps(*stored, may_cross)
        return PlainErrors(
            at,
            largest,
            total,
            squares,
            scale,
            golden_squares,
            *others,
            beyond,
            beyond_rounded,
            *ulps,
        )

    def _taken(self, values: Array, buffer: Array) -> Array:
        """The values in the dtype that is computed in."""
        if values.dtype == self._work:
            return values
        taken = buffer[: values.size]
        if values.dtype == np.float16 and self._work == np.float32:
            _widen(values, taken)
        else:
            np.copyto(taken, values)
        return taken

    def _is_plain(self, value: float) -> bool:
        least, most = self._range
        return least <= value <= most

    def _sum(self, values: Array) -> float:
        rows = values.size // _ROW * _ROW
        sums = np.matmul(values[:rows].reshape(-1, 1, _ROW), _ONES[self._work.name])
        return float(sums.sum(dtype=np.float64)) + float(values[rows:].sum(dtype=np.float64))

    def _may_be_beyond(self, largest: float, least: float) -> bool:
        allowed = self._tolerance.absolute + self._tolerance.relative * least
        return largest * (1 + _MARGIN) > allowed

    def _beyond(self, error: Array, magnitude: Array, golden: Array, target: Array) -> int:
        relative, absolute = self._tolerance.relative, self._tolerance.absolute
        magnitude *= relative * (1 - _MARGIN)
        magnitude += absolute * (1 - _MARGIN)
        above = np.greater(error, magnitude, out=self._above[: error.size])
        possible = int(np.count_nonzero(above))
        magnitude *= (1 + _MARGIN) / (1 - _MARGIN)
        if possible == 0 or possible == np.count_nonzero(error > magnitude):
            return possible
        at = np.flatnonzero(above)
        exact = golden[at].astype(np.float64)
        wrong = np.abs(target[at].astype(np.float64) - exact)
        return int((wrong > absolute + relative * np.abs(exact)).sum())

    def _nearest(self, golden: Array) -> Array:
        """The golden values, rounded to the target's dtype."""
        if self._dtype == "bfloat16":
            return rounded_bits(golden.astype(np.float32)).view(np.float32).astype(self._work)
        return golden.astype(STORED[self._dtype][0]).astype(self._work)

    def _beyond_rounded(self, nearest: Array, target: Array) -> int:
        error = np.abs(np.subtract(target, nearest, out=self._error[: target.size]))
        if not np.isfinite(error.max()):  # where both are infinite
            error[target == nearest] = 0.0
        magnitude = np.abs(nearest, out=self._magnitude[: target.size])
        if not self._may_be_beyond(float(error.max()), float(magnitude.min())):
            return 0
        return self._beyond(error, magnitude, nearest, target)

    def _ulps(self, golden: Array, target: Array, may_cross: bool) -> tuple[float, float]:
        before, after = self._bits(golden), self._bits(target)
        distance = np.subtract(after, before, out=self._distance[: target.size])
        largest = total = 0.0
        if may_cross:  # bits of one sign are in the order of their values
            at = np.flatnonzero((before ^ after) < 0)
            if at.size:
                magnitude = np.iinfo(before.dtype).max >> STORED[self._dtype][2]
                apart = (before[at] & magnitude).astype(np.float64) + (after[at] & magnitude)
                largest, total = float(apart.max()), float(apart.sum())
                distance[at] = 0
        np.abs(distance, out=distance)
        most = int(distance.max())
        if distance.itemsize == 8:
            kind: Any = np.float64
        else:
            kind = np.int32 if most < 2**31 // BLOCK else np.int64
        return max(largest, float(most)), total + float(distance.sum(dtype=kind))

    def _bits(self, values: Array) -> Array:
        stored, integer, dropped = STORED[self._dtype]
        bits = values.astype(stored, copy=False).view(integer)
        return np.asarray(bits >> dropped) if dropped else bits


def _widen(half: Array, single: Array) -> None:
    """Write float16 values as float32; infinities and NaN become numbers above the largest."""
    bits = single.view(np.int32)
    np.copyto(bits, half.view(np.int16))
    bits <<= 13
    bits &= _HALF
    single *= np.float32(2.0**112)


def _dot(one: Array, other: Array) -> float:
    """The sum of products: of short rows in the arrays' precision, of all rows in float64."""
    rows = one.size // _ROW * _ROW
    products = np.matmul(one[:rows].reshape(-1, 1, _ROW), other[:rows].reshape(-1, _ROW, 1))
    total = float(products.sum(dtype=np.float64))
    return total if rows == one.size else total + float(one[rows:] @ other[rows:])
