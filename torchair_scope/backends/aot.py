"""How a scope meets any compiler of ATen graphs: AOTAutograd runs, and hands each graph over."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torchair_scope import _torch_private
from torchair_scope.backends.whole_operators import keeping_meta
from torchair_scope.capture.compiler import DIRECTIONS, Direction, Scoper
from torchair_scope.capture.cut import Boxed
from torchair_scope.capture.partition import Region
from torchair_scope.capture.parts import CountsNoKernels


@dataclass(frozen=True)
class AtenCompiler:
    """A callable `(gm, example_inputs) -> callable` as the inner compiler.

    Args:
        compile_graph: compiles one ATen graph, or a part of one. What it returns takes the
            graph's inputs as positional arguments, or as one list if it has `_boxed_call`.
        decompositions: by operator overload, for AOTAutograd.
    """

    compile_graph: Callable[[torch.fx.GraphModule, Sequence[Any]], Callable[..., Any]]
    decompositions: Mapping[Any, Any]

    @property
    def name(self) -> str:
        """How messages and the manifest call the compiler."""
        return getattr(self.compile_graph, "__name__", type(self.compile_graph).__name__)

    def untouched(self, gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        """Compile a Dynamo graph without a scope."""
        compilers = dict.fromkeys(DIRECTIONS, self.compile_graph)
        return _torch_private.compile_with_aot(gm, example_inputs, compilers, self.decompositions)

    def scoped(
        self, gm: torch.fx.GraphModule, example_inputs: Sequence[Any], scoper: Scoper
    ) -> Any:
        """Compile a Dynamo graph with scopes: `scoper` gets each ATen graph."""
        pieces = AtenPieces(self.name, self.compile_graph)
        return each_direction(
            gm,
            example_inputs,
            lambda gm, inputs, direction: scoper.compile(gm, inputs, direction, pieces),
            self.decompositions,
        )


class AotEager(AtenCompiler):
    """No compiler: the ATen graph runs as it is, as with the backend `aot_eager`."""

    name = "aot_eager"

    def untouched(self, gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        """Compile a Dynamo graph without a scope, just as `aot_eager` does."""
        if self.decompositions:
            return super().untouched(gm, example_inputs)
        return _torch_private.dynamo_backend("aot_eager")(gm, example_inputs)


@dataclass(frozen=True)
class AtenPieces(CountsNoKernels):
    """Compiles ATen graphs and parts of them with one callable."""

    name: str
    compile_graph: Callable[[torch.fx.GraphModule, Sequence[Any]], Callable[..., Any]]

    def check(self, regions: Sequence[Region]) -> None:
        """Take any cut."""

    def whole(self, gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        """Compile a graph that is not cut."""
        return self.compile_graph(gm, example_inputs)

    def whole_with_taps(
        self, gm: torch.fx.GraphModule, example_inputs: Sequence[Any], outputs: int
    ) -> Boxed:
        """Compile a graph that is not cut, with taps."""
        with _torch_private.output_strides_reported(outputs):
            return _torch_private.boxed_call(self.whole(gm, example_inputs))

    def part(self, gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Boxed:
        """Compile a part of a graph."""
        with _torch_private.output_strides_unreported():
            return _torch_private.boxed_call(self.compile_graph(gm, example_inputs))


def run_as_it_is(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Boxed:
    """An ATen compiler that leaves the graph to Python."""
    return _torch_private.boxed(_torch_private.run_uncompiled(gm))


def interpret_whole(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    scoper: Scoper,
    decompositions: Mapping[Any, Any],
) -> Any:
    """Dump a Dynamo graph as a whole: AOTAutograd runs, and each ATen graph is interpreted."""
    return each_direction(
        gm,
        example_inputs,
        lambda gm, inputs, direction: scoper.interpret(gm, direction),
        decompositions,
    )


def each_direction(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    compile_graph: Callable[[torch.fx.GraphModule, Sequence[Any], Direction], Any],
    decompositions: Mapping[Any, Any],
) -> Any:
    """Run AOTAutograd, and tell `compile_graph` of each ATen graph which direction it has."""

    def compiler(direction: Direction) -> Callable[..., Any]:
        return lambda gm, inputs: compile_graph(gm, inputs, direction)

    compilers = {direction: compiler(direction) for direction in DIRECTIONS}
    with _torch_private.compiling_for_scopes(keeping_meta):
        return _torch_private.compile_with_aot(gm, example_inputs, compilers, decompositions)
