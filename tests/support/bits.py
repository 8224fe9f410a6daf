"""Equality of tensors bit for bit: NaN equals the same NaN, and -0.0 differs from 0.0."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_flatten


def difference(actual: Any, expected: Any) -> str | None:
    """Say where two trees of tensors and numbers differ first, or None if they do not.

    Sequences are compared by their members, so a tuple may stand for a list or a named tuple.
    """
    actual_leaves, expected_leaves = tree_flatten(actual)[0], tree_flatten(expected)[0]
    if len(actual_leaves) != len(expected_leaves):
        return f"{len(actual_leaves)} values, expected {len(expected_leaves)}"
    for position, pair in enumerate(zip(actual_leaves, expected_leaves, strict=True)):
        detail = _leaf_difference(*pair)
        if detail is not None:
            return f"value {position}: {detail}"
    return None


def _leaf_difference(actual: Any, expected: Any) -> str | None:
    if not isinstance(actual, torch.Tensor) or not isinstance(expected, torch.Tensor):
        same = type(actual) is type(expected) and repr(actual) == repr(expected)
        return None if same else f"{actual!r}, expected {expected!r}"
    for fact in ("dtype", "shape", "layout"):
        if getattr(actual, fact) != getattr(expected, fact):
            return f"{fact} {getattr(actual, fact)}, expected {getattr(expected, fact)}"
    if actual.layout is not torch.strided:
        return _leaf_difference(actual.to_dense(), expected.to_dense())
    if actual.stride() != expected.stride():
        return f"stride {actual.stride()}, expected {expected.stride()}"
    unequal = int((_bytes(actual) != _bytes(expected)).any(dim=-1).sum())
    return f"{unequal} of {actual.numel()} elements" if unequal else None


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of `tensor`, one row an element."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    # A fresh tensor: one of a single element may count as contiguous with any stride.
    packed = torch.empty(plain.numel(), dtype=plain.dtype).copy_(plain.reshape(-1))
    return packed.view(torch.uint8).reshape(packed.numel(), packed.element_size())
