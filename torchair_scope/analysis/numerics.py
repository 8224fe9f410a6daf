"""What a dtype can hold: its tolerances, its rounding, and the distance of two values in it."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

from torchair_scope.analysis.source import Array


@dataclass(frozen=True)
class Tolerance:
    """Two values agree if `|target - golden| <= absolute + relative * |golden|`."""

    relative: float
    absolute: float


EXACT = Tolerance(0.0, 0.0)
# Those of torch.testing; it has none for the narrow dtypes, where it is one step of their mantissa.
TOLERANCES = {
    "float64": Tolerance(1e-7, 1e-7),
    "complex128": Tolerance(1e-7, 1e-7),
    "float32": Tolerance(1.3e-6, 1e-5),
    "complex64": Tolerance(1.3e-6, 1e-5),
    "float16": Tolerance(1e-3, 1e-5),
    "complex32": Tolerance(1e-3, 1e-5),
    "bfloat16": Tolerance(1.6e-2, 1e-5),
    "float8_e4m3fn": Tolerance(2**-3, 2**-9),
    "float8_e4m3fnuz": Tolerance(2**-3, 2**-10),
    "float8_e5m2": Tolerance(2**-2, 2**-16),
    "float8_e5m2fnuz": Tolerance(2**-2, 2**-17),
    "float8_e8m0fnu": Tolerance(1.0, 0.0),
    "float4_e2m1fn_x2": Tolerance(0.5, 0.5),
}
_QUANTISED = ("quint8", "qint8", "qint32", "quint4x2")
# The step of the mantissa at 1.
EPSILONS = {
    "float64": 2.0**-52,
    "complex128": 2.0**-52,
    "float32": 2.0**-23,
    "complex64": 2.0**-23,
    "float16": 2.0**-10,
    "complex32": 2.0**-10,
    "bfloat16": 2.0**-7,
    "float8_e4m3fn": 2.0**-3,
    "float8_e4m3fnuz": 2.0**-3,
    "float8_e5m2": 2.0**-2,
    "float8_e5m2fnuz": 2.0**-2,
    "float8_e8m0fnu": 1.0,
    "float4_e2m1fn_x2": 0.5,
}
# Narrower ones are what values are stored in; operators compute in these.
COMPUTED_IN = frozenset(("float64", "float32", "float16", "bfloat16"))


def is_float(dtype: str) -> bool:
    """Whether values of a dtype are rounded; those of integers and bools are exact."""
    return dtype in EPSILONS or dtype in _QUANTISED


def tolerance_of(*dtypes: str) -> Tolerance:
    """The tolerance for values of these dtypes: that of the coarsest, and none for integers.

    >>> from torchair_scope.analysis.numerics import tolerance_of
    >>> tolerance_of("float32", "bfloat16")
    Tolerance(relative=0.016, absolute=1e-05)
    """
    found = [_tolerance(dtype) for dtype in dtypes]
    return Tolerance(max(each.relative for each in found), max(each.absolute for each in found))


def _tolerance(dtype: str) -> Tolerance:
    return TOLERANCES["float32"] if dtype in _QUANTISED else TOLERANCES.get(dtype, EXACT)


def epsilon_of(*dtypes: str) -> float:
    """The step of the mantissa of the coarsest of these dtypes; 0 for integers."""
    return max(EPSILONS.get(dtype, 2.0**-23 if dtype in _QUANTISED else 0.0) for dtype in dtypes)


def rounded(values: Array, dtype: str) -> Array:
    """Values as they are after rounding to a dtype, as float64; too large ones become infinite."""
    if dtype in ("float64", "complex128") or not is_float(dtype) or dtype in _QUANTISED:
        return values
    with np.errstate(over="ignore"):
        if dtype in ("float32", "complex64"):
            return values.astype(np.float32).astype(np.float64)
        if dtype in ("float16", "complex32"):
            return values.astype(np.float16).astype(np.float64)
        single = values.astype(np.float32)
    if dtype == "bfloat16":
        return rounded_bits(single).view(np.float32).astype(np.float64)
    table = _narrow_values(dtype)
    return np.asarray(table[_nearest(table, single)])


def rounded_bits(single: Array) -> Array:
    """Float32 bits, rounded to the nearest bfloat16, ties to even."""
    bits = np.asarray(single, order="C").view(np.uint32)
    carry = ((bits >> 16) & 1) + np.uint32(0x7FFF)
    rounded_bits = (bits + carry) & np.uint32(0xFFFF0000)
    return np.asarray(np.where(np.isnan(single), np.uint32(0x7FC00000), rounded_bits))


def ulp_distance(golden: Array, target: Array, dtype: str) -> Array | None:
    """How many values of a dtype lie between each two, as float64; None for integers.

    Both must be values of the dtype already. NaN counts as no distance from NaN, and as an
    infinite one from all else.
    """
    if not is_float(dtype) or dtype in _QUANTISED:
        return None
    before, after = _position(golden, dtype), _position(target, dtype)
    distance = np.abs(after.astype(np.float64) - before.astype(np.float64))
    if before.itemsize == 8:  # float64 cannot tell these positions apart; their difference is exact
        distance = np.where(distance < 2.0**62, np.abs(after - before), distance)
    nan = np.isnan(golden) | np.isnan(target)
    if nan.any():
        both = np.isnan(golden) & np.isnan(target)
        distance = np.where(nan, np.where(both, 0.0, np.inf), distance)
    return np.asarray(distance)


# Of each dtype: what it is stored as, integers as wide, and bits of these that it does not have.
STORED: dict[str, tuple[Any, Any, int]] = {
    "float64": (np.float64, np.int64, 0),
    "complex128": (np.float64, np.int64, 0),
    "float32": (np.float32, np.int32, 0),
    "complex64": (np.float32, np.int32, 0),
    "float16": (np.float16, np.int16, 0),
    "complex32": (np.float16, np.int16, 0),
    "bfloat16": (np.float32, np.int32, 16),
}


def _position(values: Array, dtype: str) -> Array:
    """The place of each value in the row of all values of a dtype; 0 is at 0."""
    if dtype not in STORED:
        return np.asarray(_nearest(_narrow_values(dtype), values.astype(np.float32)))
    stored, integer, dropped = STORED[dtype]
    bits = np.asarray(values.astype(stored), order="C").view(integer)
    magnitude = (bits & np.iinfo(integer).max) >> dropped
    return np.asarray(np.where(bits < 0, -magnitude, magnitude))


@functools.cache
def _narrow_values(dtype: str) -> Array:
    """All values of float8 and float4, in order."""
    if dtype == "float4_e2m1fn_x2":
        half = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
        return np.unique(np.concatenate([half, -half]))
    import torch

    codes = torch.arange(256, dtype=torch.uint8).view(getattr(torch, dtype)).float().numpy()
    return np.unique(codes[~np.isnan(codes)].astype(np.float64))


def _nearest(table: Array, values: Array) -> Array:
    after = np.searchsorted(table, values).clip(1, len(table) - 1)
    before = after - 1
    with np.errstate(invalid="ignore"):  # infinities are in the table themselves
        nearer = np.abs(values - table[before]) <= np.abs(table[after] - values)
    return np.where(nearer, before, after)
