"""Make the parts of a cut graph: a region is compiled, or left to the interpreter."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from torchair_scope import _torch_private
from torchair_scope.capture import nodes
from torchair_scope.capture.cut import Boxed, Part, compiled_part, dumped_part
from torchair_scope.capture.extract import extract
from torchair_scope.capture.layouts import layout_restorer
from torchair_scope.capture.memory import aliased_write, storages, written_by
from torchair_scope.capture.partition import Region
from torchair_scope.capture.saved import Saved


class PieceCompiler(Protocol):
    """How one ATen graph, or a part of it, is compiled by an inner compiler."""

    @property
    def name(self) -> str:
        """How the manifest and messages call the compiler."""

    def check(self, regions: Sequence[Region]) -> None:
        """Refuse a cut that this compiler cannot live with, with the reason and the way out."""

    def whole(self, gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        """Compile a graph that is not cut, as the inner compiler does without us."""

    def part(self, gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Boxed:
        """Compile a part; it may change `gm`."""

    def whole_with_taps(
        self, gm: torch.fx.GraphModule, example_inputs: Sequence[Any], outputs: int
    ) -> Boxed:
        """Compile a graph that is not cut, and that returns taps after `outputs` of its own."""

    def kernels_made(self) -> int | None:
        """How many kernels the compiler has made so far; None if it does not count them."""

    def kernels_foreseen(self, compile: Callable[[], Any]) -> int | None:
        """How many kernels a compile would make, which is not done to the end for it."""


class CountsNoKernels:
    """A `PieceCompiler` that does not know how many kernels it makes."""

    def kernels_made(self) -> int | None:
        """Not known."""
        return None

    def kernels_foreseen(self, compile: Callable[[], Any]) -> int | None:
        """Not known."""
        return None


def dumped(gm: torch.fx.GraphModule, region: Region, saved: Saved) -> Part:
    """The part for a dumped region: it is interpreted, and its calls in `saved` are saved."""
    piece = extract(gm, region)
    restore = layout_restorer([node.meta.get("val") for node in piece.outputs])
    return dumped_part(piece.module, saved, restore, piece.inputs, piece.outputs)


def writes(region: Region) -> bool:
    """Whether a region writes to memory that it may have been given."""
    return any(map(written_by, region.nodes))


@dataclass(frozen=True)
class RegionCompiler:
    """Makes the parts for the compiled regions of one graph.

    A region that the compiler cannot take on its own runs uncompiled, and a warning says so: a
    scope never breaks a model.
    """

    gm: torch.fx.GraphModule
    example_inputs: Sequence[Any]
    compiler: PieceCompiler

    def part(self, region: Region) -> Part:
        """Compile one region."""
        code = self.code(region)
        return compiled_part(code, region.inputs, region.outputs, writes=writes(region))

    def code(self, region: Region) -> Boxed:
        """Compile one region to what takes its inputs and returns its outputs."""
        piece = extract(self.gm, region)
        if not any(map(nodes.computes, region.nodes)):
            return _torch_private.run_uncompiled(piece.module)
        reason = self.runs_uncompiled(region)
        if reason is not None:
            return self._uncompiled(region, reason)
        try:
            return self.compiler.part(piece.module, self.values_of(piece.inputs))
        except _torch_private.compiler_control_flow():
            raise
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
            return self._uncompiled(
                region, f"{self.compiler.name} does not compile it, saying {said}"
            )

    def for_later(self) -> RegionCompiler:
        """The same with nothing in it that holds a step's memory, to be kept for later compiles."""
        placeholders = (node for node in self.gm.graph.nodes if node.op == "placeholder")
        given = zip(placeholders, self.example_inputs, strict=True)
        return replace(self, example_inputs=[_without_memory(node, value) for node, value in given])

    def values_of(self, inputs: Sequence[torch.fx.Node]) -> list[Any]:
        """Example values for the inputs of a region."""
        return [self._inputs.get(node, node.meta.get("val")) for node in inputs]

    def runs_uncompiled(self, region: Region) -> str | None:
        """Why a region cannot be given to the compiler by itself; None if it can."""
        if aliased_write(region.nodes, region.inputs, self._storages):
            return "it writes to memory that two of its inputs share"
        return None

    def _uncompiled(self, region: Region, reason: str) -> Boxed:
        first, last = region.nodes[0].name, region.nodes[-1].name
        warnings.warn(
            f"the part of the graph from {first} to {last} runs uncompiled, with the right "
            f"results, since {reason}",
            stacklevel=2,
        )
        # Extracted again: the compiler may have changed the module that it failed on.
        return _torch_private.run_uncompiled(extract(self.gm, region).module)

    @functools.cached_property
    def _inputs(self) -> Mapping[torch.fx.Node, Any]:
        placeholders = (node for node in self.gm.graph.nodes if node.op == "placeholder")
        return dict(zip(placeholders, self.example_inputs, strict=True))

    @functools.cached_property
    def _storages(self) -> dict[torch.fx.Node, torch.fx.Node]:
        return storages(self.gm.graph)


def _without_memory(node: torch.fx.Node, value: Any) -> Any:
    is_real = isinstance(value, torch.Tensor) and not _torch_private.is_fake(value)
    return node.meta.get("val", value) if is_real else value
