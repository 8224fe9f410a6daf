"""What is in a tensor on a CPU: by kernels in C, or where there are none, by operators of torch."""

from __future__ import annotations

import math

import torch

from torchair_scope.store import native
from torchair_scope.store.statistics import Part

# So many values stay in the second cache with all that is made of them.
_BLOCK = 1 << 16
# Below this share of the sum of squares, rounding has taken too much of the variance.
_CANCELLED = 1e-6


def part_on_cpu(values: torch.Tensor, tiny: float) -> Part:
    """What is in values that lie in a row; what is less than `tiny` and not zero is subnormal."""
    part = native.part_of(values, tiny)
    if part is not None:
        return part
    part = Part()
    for block in torch.split(values, _BLOCK) if values.numel() else ():
        part = part.joined(_part_of_block(block, tiny))
    return part


def _part_of_block(block: torch.Tensor, tiny: float) -> Part:
    wide = block.to(torch.float64)
    finite = wide[wide.isfinite()]
    not_finite = wide.isnan(), wide == math.inf, wide == -math.inf
    counts = [int(mask.count_nonzero()) for mask in not_finite]
    if not finite.numel():
        return Part(nans=counts[0], positive_infinities=counts[1], negative_infinities=counts[2])
    low, high = map(float, finite.aminmax())
    total, squares = float(finite.sum()), float(torch.dot(finite, finite))
    mean = total / finite.numel()
    spread = squares - total * mean
    if not spread > _CANCELLED * squares:
        spread = float((finite - mean).square_().sum())
    zeros = int((finite == 0).sum())
    small = int((finite.abs() < tiny).sum()) - zeros if tiny else 0
    return Part(low, high, mean, squares, spread, finite.numel(), zeros, small, *counts)
