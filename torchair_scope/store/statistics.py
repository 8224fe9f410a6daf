"""What is in a tensor, in a few numbers, and a hash of its exact bits; see docs/statistics.md.

A tensor on a CPU is read once, a block at a time. One on another device is measured there, by
operators whose results stay there until `results` brings those of many tensors over at once.
"""

from __future__ import annotations

import functools
import itertools
import math
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np
import torch

from torchair_scope.store.arrays import (
    FLOAT4_VALUES,
    dequantised,
    named_as_unsavable,
    plain_tensor,
    strided,
)

# These two define the hash: its weights repeat after so many words of 8 bytes, and each byte is
# mixed with the one so many places after it.
HASH_PERIOD = 1 << 15
_DISTANCE = 5
# A block on a CPU is a period of the hash: all that is made of it stays in the second cache.
_BLOCK = 8 * HASH_PERIOD
_DEVICE_CHUNK = _BLOCK << 8
_SMALL = 1 << 12
_WRAP = (1 << 64) - 1
# Below this share of the sum of squares, rounding has taken too much of the variance.
_CANCELLED = 1e-6


@dataclass(frozen=True)
class Statistics:
    """What is in a tensor. NaN and infinite values are counted, and left out of the rest.

    Values are taken as float64. Of complex numbers the parts are taken, so that `count` is twice
    the number of elements.

    Attributes:
        count: how many values there are.
        minimum: the smallest value; NaN if there is none that is finite.
        maximum: the largest one, likewise.
        mean: likewise.
        std: the root of the mean square of the distance from the mean, as `numpy.std` has it.
        norm: the root of the sum of squares.
        zeros: how many are zero.
        subnormals: how many are not zero, but less than the smallest normal number of the dtype.
        nans: how many are NaN.
        positive_infinities: how many are Inf.
        negative_infinities: how many are -Inf.
        hash: of the exact bits, 16 hexadecimal digits.
    """

    count: int
    minimum: float
    maximum: float
    mean: float
    std: float
    norm: float
    zeros: int
    subnormals: int
    nans: int
    positive_infinities: int
    negative_infinities: int
    hash: str

    @property
    def infinities(self) -> int:
        """How many values are infinite."""
        return self.positive_infinities + self.negative_infinities

    @property
    def nonfinite(self) -> int:
        """How many values are NaN or infinite."""
        return self.nans + self.infinities


STATISTICS = tuple(field.name for field in fields(Statistics))


def statistics_of(tensor: torch.Tensor) -> Statistics:
    """Measure one tensor of any dtype, layout and device.

        >>> import torch
        >>> from torchair_scope.store.statistics import statistics_of
        >>> found = statistics_of(torch.tensor([3.0, -4.0, float("nan")]))
        >>> found.minimum, found.maximum, found.mean, found.norm, found.nans
        (-4.0, 3.0, -0.5, 5.0, 1)

    **Raises:** `UnsavableTensorError` for the tensors that `to_numpy` raises it for.
    """
    return results([measure(tensor)])[0]


class Part(NamedTuple):
    """What is in a part of a tensor: sums over its finite values, then counts.

    `spread` is the sum of squares of the distance from the mean, `hashed` a share in the hash.
    """

    minimum: float = math.inf
    maximum: float = -math.inf
    mean: float = 0.0
    squares: float = 0.0
    spread: float = 0.0
    finite: int = 0
    zeros: int = 0
    subnormals: int = 0
    nans: int = 0
    positive_infinities: int = 0
    negative_infinities: int = 0
    hashed: int = 0

    def joined(self, other: Part) -> Part:
        """Both parts as one."""
        finite = self.finite + other.finite
        share = other.finite / finite if finite else 0.0
        apart = other.mean - self.mean if self.finite and other.finite else 0.0
        counts: Any = zip(self[_SUMS:], other[_SUMS:], strict=True)
        return Part(
            min(self.minimum, other.minimum),
            max(self.maximum, other.maximum),
            self.mean + apart * share if self.finite else other.mean,
            self.squares + other.squares,
            self.spread + other.spread + apart * apart * self.finite * share,
            *(one + another for one, another in counts),
        )

    def statistics(self, count: int) -> Statistics:
        """The statistics of the whole tensor, which has `count` values."""
        mean_square = self.spread / self.finite if self.finite else math.nan
        return Statistics(
            count,
            self.minimum if self.finite else math.nan,
            self.maximum if self.finite else math.nan,
            self.mean if self.finite else math.nan,
            math.sqrt(mean_square),
            math.sqrt(self.squares),
            self.zeros,
            self.subnormals,
            self.nans,
            self.positive_infinities,
            self.negative_infinities,
            f"{self.hashed & _WRAP:016x}",
        )


_SUMS = 5  # the entries of a Part that are no counts


@dataclass(frozen=True, eq=False)
class Measured:
    """A tensor that was measured; `results` gives its statistics.

    Attributes:
        count: how many values it has.
        parts: what is in its parts; on a device each is a row of the bits of a `Part`'s entries.
    """

    count: int
    parts: list[Part | torch.Tensor]

    @functools.cached_property
    def hash_on_cpu(self) -> int | None:
        """The hash of the bytes; None if it is on a device."""
        if not all(isinstance(part, Part) for part in self.parts):
            return None
        return sum(part.hashed for part in self.parts if isinstance(part, Part)) & _WRAP

    def is_certainly(self, other: Measured) -> bool:
        """Whether two tensors of one dtype are known to have the same bits."""
        return self is other or self.hash_on_cpu == other.hash_on_cpu is not None


def measure(tensor: torch.Tensor, hint: Measured | None = None) -> Measured:
    """Measure a tensor where it is, without waiting for its device.

    **Arguments:**

    - `tensor`: of any dtype, layout and device.
    - `hint`: what it was measured as when it was last seen. On a CPU, where the hash costs a
        quarter of the rest, it is taken if the hash is the same.

    **Raises:** `UnsavableTensorError` for the tensors that `to_numpy` raises it for.
    """
    with torch.no_grad(), named_as_unsavable(tensor):
        values, data, tiny = _values_and_bytes(tensor)
        if values.device.type != "cpu":
            try:
                return Measured(values.numel(), list(_rows_on_device(values, data, tiny)))
            except (RuntimeError, TypeError):  # it has no float64, or lacks one of the operators
                values, data = values.cpu(), data.cpu()
        if hint is not None and _hash_on_cpu(data) == hint.hash_on_cpu:
            return hint
        return Measured(values.numel(), list(_parts_on_cpu(values, data, tiny)))


def in_memory_order(tensor: torch.Tensor) -> torch.Tensor | None:
    """The elements of a strided tensor in a row as they lie in memory; None if there are gaps."""
    if tensor.is_contiguous():
        return tensor.view(-1)
    expected = 1
    for step, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if step != expected:
                return None
            expected *= size
    return tensor.as_strided((expected,), (1,))


def rearranged(found: Measured, tensor: torch.Tensor) -> Measured:
    """What is in a tensor that has the same elements in another order: only the hash differs."""
    with torch.no_grad(), named_as_unsavable(tensor):
        _, data, _ = _values_and_bytes(tensor)
        if not data.is_cpu:
            return measure(tensor)
        parts = [part._replace(hashed=0) for part in found.parts if isinstance(part, Part)]
        return Measured(found.count, [*parts, Part(hashed=_hash_on_cpu(data))])


def results(tensors: Sequence[Measured]) -> list[Statistics]:
    """Give the statistics of measured tensors, with one transfer from each device."""
    rows = [part for each in tensors for part in each.parts if isinstance(part, torch.Tensor)]
    arrived = _arrived(rows)
    found = []
    for each in tensors:
        parts = (part if isinstance(part, Part) else arrived[id(part)] for part in each.parts)
        found.append(functools.reduce(Part.joined, parts, Part()).statistics(each.count))
    return found


def _arrived(rows: Sequence[torch.Tensor]) -> dict[int, Part]:
    """The parts that rows on devices stand for, by the rows' ids."""
    by_device: dict[torch.device, list[torch.Tensor]] = defaultdict(list)
    for row in rows:
        by_device[row.device].append(row)
    found = {}
    for together in by_device.values():
        on_host = torch.stack(together).cpu()
        sums, counts = on_host[:, :_SUMS].view(torch.float64), on_host[:, _SUMS:]
        for row, floats, whole in zip(together, sums.tolist(), counts.tolist(), strict=True):
            found[id(row)] = Part(*floats, *whole)
    return found


# What is measured


def _values_and_bytes(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, float]:
    """The values in a row, the bytes in a row, and the smallest normal number; 0 if all are."""
    tensor = plain_tensor(tensor)
    if tensor.is_quantized:
        whole = tensor.int_repr().contiguous().view(-1)
        return torch.from_numpy(dequantised(tensor.cpu())).view(-1), whole.view(torch.uint8), 0.0
    tensor = strided(tensor).resolve_conj().resolve_neg()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    dtype = tensor.dtype
    if dtype.itemsize == 1:  # of these dtypes, not all can be copied
        tensor = tensor.view(torch.uint8)
    flat = tensor.contiguous().view(-1)
    return _values(flat, dtype), flat.view(torch.uint8), _smallest_normal(dtype)


def _values(flat: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The elements of a dtype as values of one that all operators take."""
    name = str(dtype).removeprefix("torch.")
    if name.startswith("float8"):
        return flat.view(dtype).to(torch.float32)
    if dtype is torch.float4_e2m1fn_x2:
        pairs = torch.stack([flat & 15, flat >> 4], dim=-1).view(-1)
        return torch.from_numpy(FLOAT4_VALUES).to(flat.device)[pairs.long()]
    if dtype.itemsize == 1:
        return flat.view(torch.int8) if name.startswith("int") else flat
    wider = _WIDER.get(name)
    return flat if wider is None else flat.view(getattr(torch, _UNSIGNED.get(name, name))).to(wider)


# Few operators take these, and float64 is what all values are taken as in the end.
_WIDER = {
    "uint16": torch.int32,
    "bits16": torch.int32,
    "uint32": torch.int64,
    "uint64": torch.float64,
}
_UNSIGNED = {"bits16": "uint16"}


def _smallest_normal(dtype: torch.dtype) -> float:
    if dtype is torch.float4_e2m1fn_x2:
        return 1.0
    return torch.finfo(dtype).smallest_normal if dtype.is_floating_point else 0.0


# On a CPU


class _Memory(threading.local):
    """What a thread computes blocks in; fresh memory would cost more than all that is computed."""

    def __init__(self) -> None:
        with torch.inference_mode(False):  # what is made in it cannot be written to outside of it
            self.mixed = torch.empty(_BLOCK, dtype=torch.uint8, device="cpu")
            self._wide = torch.empty(2, _BLOCK // 4, dtype=torch.float64, device="cpu")

    def wide(self, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Two rows for so many values."""
        if size <= _SMALL:
            return torch.empty(size, dtype=torch.float64, device="cpu"), self._wide[0, :size]
        if size > self._wide.shape[1]:
            with torch.inference_mode(False):
                self._wide = torch.empty(2, size, dtype=torch.float64, device="cpu")
        return self._wide[0, :size], self._wide[1, :size]


_memory = _Memory()


def _parts_on_cpu(values: torch.Tensor, data: torch.Tensor, tiny: float) -> Iterator[Part]:
    """What is in each block, which is read from memory once."""
    for number, (block, here, there) in enumerate(_blocks(values, data)):
        part = _part_of_block(block, tiny)
        yield part._replace(hashed=_hash_of_block(here, there) * _odd(_FACTOR + number))


def _blocks(
    values: torch.Tensor, data: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """The values of each block, its bytes, and the bytes that these are mixed with."""
    count = data.numel()
    if count <= _BLOCK:
        return iter([(values, data, data[_DISTANCE:])] if count else [])
    # The last block may be too short for there to be another one.
    there = itertools.chain(torch.split(data[_DISTANCE:], _BLOCK), [data[:0]])
    size = values.numel() * _BLOCK // count
    return zip(torch.split(values, size), torch.split(data, _BLOCK), there, strict=False)


def _part_of_block(block: torch.Tensor, tiny: float) -> Part:
    finite, scratch = _memory.wide(block.numel())
    wide = finite.copy_(block)
    low, high = _extremes(block)
    counts = (0, 0, 0)
    if not (math.isfinite(low) and math.isfinite(high)):
        counts = (_count(wide.isnan()), _count(wide == math.inf), _count(wide == -math.inf))
        finite = wide[wide.isfinite()]
        if not finite.numel():
            return Part(
                nans=counts[0], positive_infinities=counts[1], negative_infinities=counts[2]
            )
        low, high = _extremes(finite)
    total, squares = float(finite.sum()), float(torch.dot(finite, finite))
    mean = total / finite.numel()
    spread = squares - total * mean
    if not spread > _CANCELLED * squares:
        spread = float((finite - mean).square_().sum())
    may_be_small = low < (tiny or 1) and high > -(tiny or 1)
    small = _small(block, wide, scratch, tiny) if may_be_small else (0, 0)
    return Part(low, high, mean, squares, spread, finite.numel(), *small, *counts)


def _extremes(block: torch.Tensor) -> tuple[float, float]:
    """The smallest and the largest value; NaN if there is one."""
    if block.dtype in (torch.float32, torch.float64):  # two passes are faster than that for both
        return float(block.amin()), float(block.amax())
    low, high = block.aminmax()
    return float(low), float(high)


def _small(
    block: torch.Tensor, wide: torch.Tensor, scratch: torch.Tensor, tiny: float
) -> tuple[int, int]:
    """How many values are zero, and how many subnormal."""
    if tiny and float(_smallest_magnitude(block, scratch)) >= tiny:
        return 0, 0
    zeros = int(torch.eq(wide, 0, out=scratch).sum())
    if not tiny:
        return zeros, 0
    torch.abs(wide, out=scratch)
    return zeros, int(torch.lt(scratch, tiny, out=scratch).sum()) - zeros


def _smallest_magnitude(block: torch.Tensor, scratch: torch.Tensor) -> torch.Tensor:
    magnitudes = torch.abs(block, out=scratch.view(block.dtype)[: block.numel()])
    if block.itemsize > 2:
        return magnitudes.amin()
    # Without a sign, the bits of floating point numbers have their order.
    return magnitudes.view(torch.int16).amin().view(block.dtype)


def _count(mask: torch.Tensor) -> int:
    return int(mask.count_nonzero())


def _hash_on_cpu(data: torch.Tensor) -> int:
    blocks = enumerate(_blocks(data, data))
    return sum(_hash_of_block(h, t) * _odd(_FACTOR + n) for n, (_, h, t) in blocks) & _WRAP


def _hash_of_block(here: torch.Tensor, there: torch.Tensor) -> int:
    mixed, weights = _memory.mixed, _weights()
    if here.numel() < _BLOCK:
        mixed = mixed[: -(-here.numel() // 8) * 8]
        weights = weights[: mixed.numel() // 8]
    _mix(here, there, mixed)
    return int(torch.dot(mixed.view(torch.int64), weights))


def _mix(here: torch.Tensor, there: torch.Tensor, mixed: torch.Tensor) -> None:
    """Mix each byte with the one that stands for it `there`; pad with zeros."""
    size, paired = here.numel(), there.numel()
    if size == paired == mixed.numel():
        torch.bitwise_xor(here, there, out=mixed)
        return
    torch.bitwise_xor(here[:paired], there, out=mixed[:paired])
    mixed[paired:size] = here[paired:]
    mixed[size:] = 0


# Weights of the hash

_FACTOR = 1 << 32


def _odd(number: int) -> int:
    """The number's output of the generator splitmix64, made odd."""
    state = (number + 1) * 0x9E3779B97F4A7C15 & _WRAP
    state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & _WRAP
    state = (state ^ state >> 27) * 0x94D049BB133111EB & _WRAP
    return state ^ state >> 31 | 1


@functools.cache
def _weights(device: str = "cpu") -> torch.Tensor:
    """The weights of the words of a period."""
    words = np.array([_odd(number) for number in range(HASH_PERIOD)], dtype=np.uint64)
    return torch.from_numpy(words.view(np.int64)).to(device)


# On a device


def _rows_on_device(
    values: torch.Tensor, data: torch.Tensor, tiny: float
) -> Iterator[torch.Tensor]:
    """The bits of `Part`s, of which the last one has the hash."""
    for chunk in torch.split(values, _DEVICE_CHUNK // 8):
        if chunk.numel():
            yield _row_on_device(chunk, tiny)
    none = Part()
    sums = torch.tensor(none[:_SUMS], dtype=torch.float64).view(torch.int64)
    counts = torch.tensor(none[_SUMS:-1])
    hashed = _hash_on_device(data).view(1)
    yield torch.cat([sums.to(hashed.device), counts.to(hashed.device), hashed])


def _row_on_device(chunk: torch.Tensor, tiny: float) -> torch.Tensor:
    wide = chunk.to(torch.float64)
    is_finite = wide.isfinite()
    finite = torch.where(is_finite, wide, 0.0)
    number = is_finite.sum()
    mean = finite.sum() / number.clamp(min=1)
    small = finite.abs() < (tiny or 1)
    zeros = (wide == 0).sum()
    sums = [
        torch.where(is_finite, wide, math.inf).amin(),
        torch.where(is_finite, wide, -math.inf).amax(),
        mean,
        finite.square().sum(),
        torch.where(is_finite, wide - mean, 0.0).square().sum(),
    ]
    counts = [
        number,
        zeros,
        (small & is_finite).sum() - zeros,
        wide.isnan().sum(),
        (wide == math.inf).sum(),
        (wide == -math.inf).sum(),
        torch.zeros_like(zeros),
    ]
    return torch.cat([torch.stack(sums).view(torch.int64), torch.stack(counts)])


def _hash_on_device(data: torch.Tensor) -> torch.Tensor:
    weights = _weights(str(data.device))
    hashed = torch.zeros((), dtype=torch.int64, device=data.device)
    for first in range(0, data.numel(), _DEVICE_CHUNK):
        block, others = data[first : first + _DEVICE_CHUNK], data[first + _DISTANCE :]
        others = others[:_DEVICE_CHUNK]
        periods = -(-block.numel() // _BLOCK)
        mixed = torch.zeros(periods * _BLOCK, dtype=torch.uint8, device=data.device)
        _mix(block, others, mixed)
        factors = [_signed(_odd(_FACTOR + first // _BLOCK + period)) for period in range(periods)]
        products = (mixed.view(torch.int64).view(periods, HASH_PERIOD) * weights).sum(dim=1)
        hashed += (products * torch.tensor(factors, device=data.device)).sum()
    return hashed


def _signed(word: int) -> int:
    return word - (word >> 63 << 64)
