"""Tensors that stand for those of the model: copies on the host, or nothing but what is known."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torchair_scope.store.arrays import Description
    from torchair_scope.store.measuring import Measured

_ATTRIBUTE = "torchair_scope_stands_for"


@dataclass(frozen=True)
class StandsFor:
    """What a tensor stands for.

    Args:
        description: of the model's tensor.
        measured: its statistics, if it has no other value.
        reason: why it has no other value, if one was wanted.
        part_of: the copy whose memory it shares, to be kept as long as itself.
    """

    description: Description
    measured: Measured | None = None
    reason: str | None = None
    part_of: torch.Tensor | None = None


def standing_for(tensor: torch.Tensor, original: StandsFor) -> torch.Tensor:
    """Make a new tensor stand for one of the model."""
    setattr(tensor, _ATTRIBUTE, original)
    return tensor


def stands_for(tensor: Any) -> StandsFor | None:
    """What a tensor stands for; None for one of the model."""
    return getattr(tensor, _ATTRIBUTE, None)
