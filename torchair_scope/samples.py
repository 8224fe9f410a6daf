"""Which part of a huge tensor is saved: its first elements, or slices of its dimensions."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

_HEAD = re.compile(r"head=(\d+)")
_SLICE = re.compile(r"(\d*):(\d*)(?::(\d+))?")
_MEANT = (
    "it can be a number of elements from the first on, as {'head': 1000}, 1000 or 'head=1000', "
    "or a slice for each dimension from the first on, as (slice(2), slice(None, None, 4)) or "
    "':2, ::4'"
)


@dataclass(frozen=True)
class Sample:
    """A part of a tensor.

    Args:
        head: how many elements from the first on, in the order of the last dimension first; None
            for slices.
        slices: start, stop and step of each dimension from the first on; the others are whole.
    """

    head: int | None = None
    slices: tuple[tuple[int | None, int | None, int | None], ...] = ()

    def __str__(self) -> str:
        if self.head is not None:
            return f"head={self.head}"
        return ", ".join(map(_as_text, self.slices))

    def of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The part of a tensor; None if that is all of it, or if it has too few dimensions."""
        if self.head is not None:
            return tensor.reshape(-1)[: self.head] if tensor.numel() > self.head else None
        if tensor.dim() < len(self.slices):
            return None
        part = tensor[tuple(slice(*bounds) for bounds in self.slices)]
        return None if part.shape == tensor.shape else part


def _as_text(bounds: tuple[int | None, int | None, int | None]) -> str:
    start, stop, step = ("" if bound is None else str(bound) for bound in bounds)
    return f"{start}:{stop}:{step}" if step else f"{start}:{stop}"


def sample(value: Any) -> Sample:
    """The sample that `value` stands for.

        >>> from torchair_scope.samples import sample
        >>> str(sample(1000)), str(sample((slice(2), slice(None, None, 4))))
        ('head=1000', ':2, ::4')

    Raises:
        TypeError: `value` is nothing of the kind.
        ValueError: it cannot have this value.
    """
    if isinstance(value, Sample):
        return value
    if isinstance(value, Mapping) and list(value) == ["head"]:
        return _head(value["head"])
    if isinstance(value, str):
        return _of_text(value)
    if isinstance(value, slice):
        value = (value,)
    if isinstance(value, (tuple, list)) and value and all(isinstance(s, slice) for s in value):
        return Sample(slices=tuple(map(_bounds, value)))
    return _head(value)


def _head(number: Any) -> Sample:
    if isinstance(number, bool) or not isinstance(number, int):
        raise TypeError(f"sample is {number!r}; {_MEANT}")
    if number < 1:
        raise ValueError(f"sample is {number!r}, but an empty part is of no use; {_MEANT}")
    return Sample(head=number)


def _of_text(text: str) -> Sample:
    head = _HEAD.fullmatch(text.strip())
    if head is not None or text.strip().isdecimal():
        return _head(int(head[1] if head is not None else text))
    matches = [_SLICE.fullmatch(part.strip()) for part in text.split(",")]
    if None in matches:
        raise ValueError(f"sample is {text!r}; {_MEANT}")
    parts = [match.groups() for match in matches if match is not None]
    return Sample(
        slices=tuple(
            _bounds(slice(*(int(bound) if bound else None for bound in part))) for part in parts
        )
    )


def _bounds(part: slice) -> tuple[int | None, int | None, int | None]:
    bounds = (part.start, part.stop, part.step)
    for bound in bounds:
        if bound is not None and (isinstance(bound, bool) or not isinstance(bound, int)):
            raise TypeError(f"sample has {part!r}; {_MEANT}")
    if part.step is not None and part.step < 1:
        raise ValueError(f"sample has {part!r}, but the step of a tensor's slice is 1 or more")
    return bounds
