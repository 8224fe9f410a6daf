"""Scopes for those who call AOTAutograd themselves: a compiler of one ATen graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from torchair_scope import _torch_private
from torchair_scope.backends.aot import AtenPieces
from torchair_scope.bisection import prober
from torchair_scope.capture.compiler import Scoper, direction_of
from torchair_scope.capture.twin import Twin


def aten_compiler(
    scoper: Scoper,
) -> Callable[[torch.fx.GraphModule, Sequence[Any]], Callable[..., Any]]:
    """A compiler `(gm, example_inputs) -> callable` with Inductor for what is not dumped."""
    pieces = AtenPieces("inductor", _torch_private.compile_aten_with_inductor)

    def compile_graph(
        gm: torch.fx.GraphModule, example_inputs: Sequence[Any]
    ) -> Callable[..., Any]:
        direction = direction_of(gm)
        twin = Twin(gm, scoper.settings, below_autograd=True)
        asked = prober(scoper) or scoper
        if asked.interprets_whole(gm):
            run = asked.interpret(gm, direction)
        else:
            run = asked.compile(gm, example_inputs, direction, pieces)
        call = _torch_private.boxed_call(run)
        either = twin.beside(lambda *args: call(list(args)))
        return lambda *args: tuple(either(*args))

    return compile_graph
