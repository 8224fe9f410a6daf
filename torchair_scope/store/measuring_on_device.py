"""What is in a tensor on a device, by operators whose results stay there."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from torchair_scope.store.bits_hash import hash_on_device
from torchair_scope.store.statistics import SUMS, Part

_CHUNK = 1 << 23  # values that are made float64 at a time


def rows_on_device(values: torch.Tensor, data: torch.Tensor, tiny: float) -> Iterator[torch.Tensor]:
    """The bits of `Part`s, of which the last one has the hash."""
    for chunk in torch.split(values, _CHUNK):
        if chunk.numel():
            yield _row_on_device(chunk, tiny)
    none = Part()
    sums = torch.tensor(none[:SUMS], dtype=torch.float64).view(torch.int64)
    counts = torch.tensor(none[SUMS:-1])
    hashed = hash_on_device(data).view(1)
    yield torch.cat([sums.to(hashed.device), counts.to(hashed.device), hashed])


def _row_on_device(chunk: torch.Tensor, tiny: float) -> torch.Tensor:
    wide = chunk.to(torch.float64)
    is_finite = wide.isfinite()
    finite = torch.where(is_finite, wide, 0.0)
    number = is_finite.sum()
    mean = finite.sum() / number.clamp(min=1)
    is_zero = wide == 0
    sums = [
        torch.where(is_finite, wide, math.inf).amin(),
        torch.where(is_finite, wide, -math.inf).amax(),
        mean,
        finite.square().sum(),
        torch.where(is_finite, wide - mean, 0.0).square().sum(),
    ]
    counts = [
        number,
        is_zero.sum(),
        ((finite.abs() < tiny) & is_finite & ~is_zero).sum(),
        wide.isnan().sum(),
        (wide == math.inf).sum(),
        (wide == -math.inf).sum(),
        torch.zeros_like(number),
    ]
    return torch.cat([torch.stack(sums).view(torch.int64), torch.stack(counts)])
