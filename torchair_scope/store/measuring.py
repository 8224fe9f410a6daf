"""Measure tensors: what is in them as numbers, and a hash of their exact bits.

A tensor on a CPU is read twice, for the hash and for the rest. One on another device is measured
there, by operators whose results stay there until `results` brings those of many over at once.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from torchair_scope.store.arrays import (
    FLOAT4_VALUES,
    dequantised,
    named_as_unsavable,
    plain_tensor,
    strided,
)
from torchair_scope.store.bits_hash import hash_on_cpu
from torchair_scope.store.measuring_on_cpu import part_on_cpu
from torchair_scope.store.measuring_on_device import rows_on_device
from torchair_scope.store.statistics import SUMS, Part, Statistics


def statistics_of(tensor: torch.Tensor) -> Statistics:
    """Measure one tensor of any dtype, layout and device.

        >>> import torch
        >>> from torchair_scope.store.measuring import statistics_of
        >>> found = statistics_of(torch.tensor([3.0, -4.0, float("nan")]))
        >>> found.minimum, found.maximum, found.mean, found.norm, found.nans
        (-4.0, 3.0, -0.5, 5.0, 1)

    **Raises:** `UnsavableTensorError` for the tensors that `to_numpy` raises it for.
    """
    return results([measure(tensor)])[0]


@dataclass(frozen=True, eq=False)
class Measured:
    """A tensor that was measured; `results` gives its statistics.

    Attributes:
        count: how many values it has.
        parts: what is in it, of a CPU as one `Part`; on a device each part is a row of the bits of
            a `Part`'s entries.
    """

    count: int
    parts: list[Part | torch.Tensor]

    @property
    def hashed(self) -> int | None:
        """The hash of the bytes; None if it is on a device."""
        (part, *others) = self.parts
        return part.hashed if isinstance(part, Part) and not others else None

    def is_certainly(self, other: Measured) -> bool:
        """Whether two tensors of one dtype are known to have the same bits."""
        return self is other or self.hashed == other.hashed is not None


def measure(tensor: torch.Tensor, hint: Measured | None = None) -> Measured:
    """Measure a tensor where it is, without waiting for its device.

    **Arguments:**

    - `tensor`: of any dtype, layout and device.
    - `hint`: what it was measured as when it was last seen. On a CPU, where the hash costs less
        than the rest, it is taken if the hash is the same.

    **Raises:** `UnsavableTensorError` for the tensors that `to_numpy` raises it for.
    """
    with torch.no_grad(), named_as_unsavable(tensor):
        values, data, tiny = _values_and_bytes(tensor)
        if values.device.type != "cpu":
            try:
                return Measured(values.numel(), list(rows_on_device(values, data, tiny)))
            except (RuntimeError, TypeError):  # it has no float64, or lacks one of the operators
                values, data = values.cpu(), data.cpu()
        hashed = hash_on_cpu(data)
        if hint is not None and hashed == hint.hashed:
            return hint
        return Measured(values.numel(), [part_on_cpu(values, tiny)._replace(hashed=hashed)])


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
        part = found.parts[0]
        if not isinstance(part, Part) or not data.is_cpu:
            return measure(tensor)
        return Measured(found.count, [part._replace(hashed=hash_on_cpu(data))])


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
        sums, counts = on_host[:, :SUMS].view(torch.float64), on_host[:, SUMS:]
        for row, floats, whole in zip(together, sums.tolist(), counts.tolist(), strict=True):
            found[id(row)] = Part(*floats, *whole)
    return found


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
