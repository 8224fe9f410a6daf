"""Compile a region so that it returns further values, the taps, after its outputs; and without."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from torchair_scope import _torch_private
from torchair_scope.capture import nodes
from torchair_scope.capture.cut import Boxed, TapFacts, announcing
from torchair_scope.capture.extract import extract, with_outputs
from torchair_scope.capture.partition import Region
from torchair_scope.capture.parts import RegionCompiler, writes
from torchair_scope.capture.symbols import value_of
from torchair_scope.capture.targets import is_call


class CannotTapError(Exception):
    """The inner compiler does not take the region with taps; the text is the reason."""


@dataclass(frozen=True)
class Code:
    """A compiled region, or some of it.

    Attributes:
        run: takes the values of `inputs`, and returns those of `outputs`, then those of taps.
        inputs: nodes of the whole graph.
        outputs: likewise.
        facts: what its taps cost, if it has any.
    """

    run: Boxed
    inputs: tuple[torch.fx.Node, ...]
    outputs: tuple[torch.fx.Node, ...]
    facts: TapFacts | None = None


@dataclass(frozen=True)
class TappedRegion:
    """A region that can be compiled with taps and without.

    Args:
        compiler: of its graph.
        region: with what parts of the graph need of each other for their taps.
        taps: the values that are returned besides.
        added: nodes of the graph that are there for taps only.
    """

    compiler: RegionCompiler
    region: Region
    taps: tuple[torch.fx.Node, ...]
    added: Collection[torch.fx.Node]

    def for_later(self) -> TappedRegion:
        """The same, to be kept for later compiles."""
        return replace(self, compiler=self.compiler.for_later())

    @property
    def inputs(self) -> tuple[torch.fx.Node, ...]:
        """All that code of the region may take."""
        return self._graph_inputs if self._is_whole else self.region.inputs

    def with_taps(self) -> Code:
        """Compile it with taps.

        Raises:
            CannotTapError: the compiler does not take it.
        """
        pieces = self.compiler.compiler
        before = pieces.kernels_made()
        try:
            code = self._compiled(_read(self.region), self.taps)
        except _torch_private.compiler_control_flow():
            raise
        except CannotTapError:
            raise
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
            raise CannotTapError(f"{pieces.name} does not compile it so, saying {said}") from error
        after = pieces.kernels_made()
        kernels = None if before is None or after is None else after - before
        facts = TapFacts(len(self.taps), kernels, self._kernels_foreseen(kernels))
        return replace(code, facts=facts)

    def without_taps(self) -> Code:
        """Compile it as without a scope."""
        return self._compiled(self._bare, (), self.added)

    def without_taps_in_any_case(self) -> Code:
        """Compile it as without a scope, or have it run uncompiled if the compiler refuses it."""
        if self._is_whole:
            return self.without_taps()
        bare = self._bare
        run = self.compiler.code(bare)
        return Code(announcing(run) if writes(bare) else run, bare.inputs, bare.outputs)

    def _kernels_foreseen(self, kernels: int | None) -> int | None:
        if not self.taps:
            return kernels
        return self.compiler.compiler.kernels_foreseen(self.without_taps)

    def _compiled(
        self,
        region: Region,
        taps: Sequence[torch.fx.Node],
        left_out: Collection[torch.fx.Node] = (),
    ) -> Code:
        if self._is_whole:
            run = self._compiled_whole(taps, left_out)
            inputs = self._graph_inputs
        else:
            run = self._compiled_piece(region, taps)
            inputs = region.inputs
        return Code(announcing(run) if writes(region) else run, inputs, region.outputs)

    # A region that is all of a graph is compiled with all that is known of the graph. What else
    # the compiler is told, as which inputs stay where they are, names places among the inputs and
    # outputs, so these stay in their order.

    @property
    def _is_whole(self) -> bool:
        graph = self.compiler.gm.graph
        return len(self.region.nodes) == sum(map(is_call, graph.nodes))

    @property
    def _graph_inputs(self) -> tuple[torch.fx.Node, ...]:
        graph = self.compiler.gm.graph
        return tuple(node for node in graph.nodes if node.op == "placeholder")

    def _compiled_whole(
        self, taps: Sequence[torch.fx.Node], left_out: Collection[torch.fx.Node]
    ) -> Boxed:
        compiler, gm = self.compiler, self.compiler.gm
        (results,) = next(iter(reversed(gm.graph.nodes))).args
        count = len(results)
        module = with_outputs(gm, taps, left_out)
        run = compiler.compiler.whole_with_taps(module, compiler.example_inputs, count)
        own = [results.index(node) for node in self.region.outputs]

        def run_and_pick(args: list[Any]) -> list[Any]:
            values = run(args)
            return [*(values[position] for position in own), *values[count:]]

        return run_and_pick

    # A region of a graph that is cut.

    def _compiled_piece(self, region: Region, taps: Sequence[torch.fx.Node]) -> Boxed:
        compiler = self.compiler
        piece = extract(compiler.gm, replace(region, outputs=(*region.outputs, *taps)))
        if not any(map(nodes.computes, region.nodes)):
            return _torch_private.run_uncompiled(piece.module)
        reason = compiler.runs_uncompiled(region)
        if reason is not None:
            raise CannotTapError(reason)
        return compiler.compiler.part(piece.module, compiler.values_of(piece.inputs))

    @property
    def _bare(self) -> Region:
        """The region without all that taps have brought into it."""
        region = self.region
        inside = tuple(node for node in region.nodes if node not in self.added)
        known = {*region.nodes, *self.added}
        outputs = tuple(node for node in inside if not known.issuperset(node.users))
        return _read(replace(region, nodes=inside, outputs=outputs))


def _read(region: Region) -> Region:
    """A region without tensors among its inputs that none of its nodes reads."""
    inside = set(region.nodes)
    inputs = (
        node
        for node in region.inputs
        if not isinstance(value_of(node), torch.Tensor) or not inside.isdisjoint(node.users)
    )
    return replace(region, inputs=tuple(inputs))
