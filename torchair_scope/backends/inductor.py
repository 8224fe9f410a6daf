"""How a scope meets Inductor, on a CPU or a GPU: the compiler where there is no TorchAir."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torchair_scope import _torch_private
from torchair_scope.backends.whole_operators import (
    hide_operators,
    keep_whole,
    keeping_meta,
    show_operators,
)
from torchair_scope.capture.compiler import Direction, Scoper
from torchair_scope.capture.cut import Boxed
from torchair_scope.capture.partition import Region
from torchair_scope.capture.tags import Tag


@dataclass(frozen=True)
class Inductor:
    """Inductor as the inner compiler: its whole pipeline runs, and its last step gets the parts.

    Args:
        decompositions: by operator overload, laid over Inductor's own table.
    """

    decompositions: Mapping[Any, Any]
    name = "inductor"

    def untouched(self, gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        """Compile a Dynamo graph without a scope, just as Inductor does."""
        if not self.decompositions:
            return _torch_private.dynamo_backend("inductor")(gm, example_inputs)
        return _torch_private.compile_with_inductor(
            gm, example_inputs, decompositions=self._table()
        )

    def scoped(
        self, gm: torch.fx.GraphModule, example_inputs: Sequence[Any], scoper: Scoper
    ) -> Any:
        """Compile a Dynamo graph with scopes: `scoper` gets each ATen graph."""
        joint_passes = _torch_private.inductor_joint_passes()

        def inner_compile(
            gm: torch.fx.GraphModule, example_inputs: Sequence[Any], **options: Any
        ) -> Any:
            pieces = InductorPieces(joint_passes, options)
            return scoper.compile(gm, example_inputs, _direction(options), pieces)

        def is_kept(tag: Tag) -> bool:
            return scoper.engine_of(tag) == "interpret"

        with _torch_private.compiling_for_scopes(keeping_meta):
            return _torch_private.compile_with_inductor(
                gm,
                example_inputs,
                inner_compile=inner_compile,
                decompositions=keep_whole(self._table(), is_kept, scoper.decomposed),
                before_joint_passes=lambda graph: hide_operators(graph, is_kept),
                after_joint_passes=show_operators,
            )

    def _table(self) -> dict[Any, Any]:
        return {**_torch_private.inductor_decompositions(), **self.decompositions}


@dataclass(frozen=True)
class InductorPieces:
    """Compiles the ATen graphs of one `compile_fx` call, or parts of them."""

    joint_passes: Mapping[str, Any]
    options: Mapping[str, Any]
    name = "inductor"

    def check(self, regions: Sequence[Region]) -> None:
        """Take any cut."""

    def whole(self, gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        """Compile a graph that is not cut."""
        return _torch_private.compile_whole_with_inductor(
            gm, example_inputs, joint_passes=self.joint_passes, **self.options
        )

    def whole_with_taps(
        self, gm: torch.fx.GraphModule, example_inputs: Sequence[Any], outputs: int
    ) -> Boxed:
        """Compile a graph that is not cut, with taps."""
        with _torch_private.output_strides_reported(outputs):
            return _torch_private.boxed_call(self.whole(gm, example_inputs))

    def kernels_made(self) -> int | None:
        """How many kernels Inductor has made so far."""
        return _torch_private.inductor_kernels_made()

    def kernels_foreseen(self, compile: Callable[[], Any]) -> int | None:
        """How many kernels Inductor would make."""
        return _torch_private.inductor_kernels_foreseen(compile)

    def part(self, gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Boxed:
        """Compile a part of a graph."""
        options = {**self.options, "static_input_idxs": ()}
        return _torch_private.compile_piece_with_inductor(
            gm, example_inputs, joint_passes=self.joint_passes, **options
        )


def _direction(options: Mapping[str, Any]) -> Direction:
    if options.get("is_backward"):
        return "backward"
    return "inference" if options.get("is_inference") else "forward"
