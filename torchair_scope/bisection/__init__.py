"""Narrow a wrong compiled model down to one operator, a run of its program at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchair_scope.bisection.plan import in_force

if TYPE_CHECKING:
    from torchair_scope.capture.compiler import Scoper


def prober(scoper: Scoper) -> Scoper | None:
    """What judges each graph in place of a `Scoper`, if a fault is being narrowed down."""
    if in_force() is None:
        return None
    from torchair_scope.bisection.probe import Prober

    return Prober(**vars(scoper))
