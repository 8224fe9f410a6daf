"""Scopes for those who call AOTAutograd themselves: a compiler of one ATen graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from torchair_scope import _torch_private
from torchair_scope.backends.aot import AtenPieces
from torchair_scope.capture.compiler import Scoper, direction_of


def aten_compiler(
    scoper: Scoper,
) -> Callable[[torch.fx.GraphModule, Sequence[Any]], Callable[..., Any]]:
    """A compiler `(gm, example_inputs) -> callable` with Inductor for what is not dumped."""
    pieces = AtenPieces("inductor", _torch_private.compile_aten_with_inductor)

    def compile_graph(
        gm: torch.fx.GraphModule, example_inputs: Sequence[Any]
    ) -> Callable[..., Any]:
        direction = direction_of(gm)
        if scoper.interprets_whole(gm):
            run = scoper.interpret(gm, direction)
        else:
            run = scoper.compile(gm, example_inputs, direction, pieces)
        call = _torch_private.boxed_call(run)
        return lambda *args: tuple(call(list(args)))

    return compile_graph
