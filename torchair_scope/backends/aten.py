"""Scopes for those who call AOTAutograd themselves: a compiler of one ATen graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from torchair_scope import _torch_private
from torchair_scope.backends.aot import AtenPieces
from torchair_scope.capture.compiler import Direction, Scoper


def aten_compiler(
    scoper: Scoper,
) -> Callable[[torch.fx.GraphModule, Sequence[Any]], Callable[..., Any]]:
    """A compiler `(gm, example_inputs) -> callable` with Inductor for what is not dumped."""
    pieces = AtenPieces("inductor", _torch_private.compile_aten_with_inductor)

    def compile_graph(
        gm: torch.fx.GraphModule, example_inputs: Sequence[Any]
    ) -> Callable[..., Any]:
        direction = _direction(gm)
        if scoper.dumps_whole(gm):
            run = scoper.interpret(gm, direction)
        else:
            run = scoper.compile(gm, example_inputs, direction, pieces)
        call = _torch_private.boxed_call(run)
        return lambda *args: tuple(call(list(args)))

    return compile_graph


def _direction(gm: torch.fx.GraphModule) -> Direction:
    """AOTAutograd names the inputs of a forward graph `primals_…`, of a backward `tangents_…`."""
    names = [node.name for node in gm.graph.nodes if node.op == "placeholder"]
    if any(name.startswith("tangents_") for name in names):
        return "backward"
    return "forward" if any(name.startswith("primals_") for name in names) else "inference"
