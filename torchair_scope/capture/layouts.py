"""Bring values back into the layout that the rest of the graph was traced with.

A compiler may return a dense tensor in another order of strides (GE returns contiguous ones
always); a view that a later part computes from the traced strides would then be wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

Restorer = Callable[[Sequence[Any]], tuple[Any, ...]]


def layout_restorer(traced: Sequence[Any]) -> Restorer:
    """A function that gives the values of a part the strides of the traced ones.

    Only tensors that were traced as dense are looked at: one with gaps is a view of an input,
    and keeps its strides.
    """
    orders = {index: order for index, value in enumerate(traced) if (order := _order(value))}

    def restore(values: Sequence[Any]) -> tuple[Any, ...]:
        restored = list(values)
        for index, order in orders.items():
            restored[index] = _in_order(restored[index], order)
        return tuple(restored)

    return restore


def _in_order(value: Any, order: Sequence[int]) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    strides, step = [0] * value.dim(), 1
    for dim in reversed(order):
        strides[dim] = step
        step *= max(value.size(dim), 1)
    matters = (dim for dim in order if value.size(dim) > 1)
    if value.numel() == 0 or all(value.stride(dim) == strides[dim] for dim in matters):
        return value
    restored = torch.empty_strided(value.size(), strides, dtype=value.dtype, device=value.device)
    return restored.copy_(value)


def _order(traced: Any) -> list[int] | None:
    """The dimensions of a dense tensor from the largest stride to the smallest, else None."""
    if not isinstance(traced, torch.Tensor) or traced.layout is not torch.strided:
        return None
    sizes = [hint(size) for size in traced.shape]
    strides = [hint(stride) for stride in traced.stride()]
    if None in sizes or None in strides:
        return None
    order = sorted(range(traced.dim()), key=lambda dim: (-strides[dim], -sizes[dim]))
    step = 1
    for dim in reversed(order):
        if sizes[dim] != 1 and strides[dim] != step:
            return None
        step *= max(sizes[dim], 1)
    return order


def hint(size: Any) -> Any:
    """The size itself, or what a symbolic one was while tracing, without a guard on it."""
    if isinstance(size, int):
        return size
    return size.node.hint if size.node.has_hint() else None
