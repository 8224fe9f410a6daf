"""Compile a region so that it returns further values, the taps, after its outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from torchair_scope import _torch_private
from torchair_scope.capture import nodes
from torchair_scope.capture.cut import Boxed, Part, TapFacts, announcing, compiled_part
from torchair_scope.capture.extract import extract, with_outputs
from torchair_scope.capture.partition import Region
from torchair_scope.capture.parts import RegionCompiler, writes
from torchair_scope.capture.targets import is_call


class CannotTapError(Exception):
    """The inner compiler does not take the region with taps; the text is the reason."""


@dataclass(frozen=True)
class TappedCode:
    """A compiled region.

    Attributes:
        run: takes the values of `inputs`, and returns those of the region's outputs and the taps.
        inputs: nodes of the whole graph.
        facts: what the taps cost.
    """

    run: Boxed
    inputs: tuple[torch.fx.Node, ...]
    facts: TapFacts


def compile_with_taps(
    compiler: RegionCompiler, region: Region, taps: Sequence[torch.fx.Node]
) -> TappedCode:
    """Compile a region with taps.

    Raises:
        CannotTapError: the compiler does not take it.
    """
    code = _code_of(compiler, region)
    pieces = compiler.compiler
    before = pieces.kernels_made()
    try:
        run = code.compiled(taps)
    except _torch_private.compiler_control_flow():
        raise
    except CannotTapError:
        raise
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
        raise CannotTapError(f"{pieces.name} does not compile it so, saying {said}") from error
    after = pieces.kernels_made()
    kernels = None if before is None or after is None else after - before
    foreseen = pieces.kernels_foreseen(lambda: code.compiled(())) if taps else kernels
    run = announcing(run) if writes(region) else run
    return TappedCode(run, code.inputs, TapFacts(len(taps), kernels, foreseen))


def compile_without_taps(compiler: RegionCompiler, region: Region) -> Part:
    """Compile a region of which the compiler does not take the taps, as without a scope."""
    code = _code_of(compiler, region)
    if isinstance(code, _WholeGraph):
        return compiled_part(code.compiled(()), code.inputs, region.outputs, writes=writes(region))
    return compiler.part(region)


def _code_of(compiler: RegionCompiler, region: Region) -> _WholeGraph | _Piece:
    is_whole = len(region.nodes) == sum(map(is_call, compiler.gm.graph.nodes))
    return _WholeGraph(compiler, region) if is_whole else _Piece(compiler, region)


class _WholeGraph:
    """A region that is all of a graph: it is compiled with all that is known of the graph.

    What else the compiler is told, as which inputs stay where they are, names places among the
    inputs and outputs, so these stay in their order.
    """

    def __init__(self, compiler: RegionCompiler, region: Region) -> None:
        self._compiler = compiler
        self._region = region
        graph = compiler.gm.graph
        self.inputs = tuple(node for node in graph.nodes if node.op == "placeholder")

    def compiled(self, taps: Sequence[torch.fx.Node]) -> Boxed:
        compiler, gm = self._compiler, self._compiler.gm
        (results,) = next(iter(reversed(gm.graph.nodes))).args
        count = len(results)
        module = with_outputs(gm, taps)
        run = compiler.compiler.whole_with_taps(module, compiler.example_inputs, count)
        own = [results.index(node) for node in self._region.outputs]

        def run_and_pick(args: list[Any]) -> list[Any]:
            values = run(args)
            return [*(values[position] for position in own), *values[count:]]

        return run_and_pick


class _Piece:
    """A region of a graph that is cut."""

    def __init__(self, compiler: RegionCompiler, region: Region) -> None:
        self._compiler = compiler
        self._region = region
        self.inputs = region.inputs

    def compiled(self, taps: Sequence[torch.fx.Node]) -> Boxed:
        compiler, region = self._compiler, self._region
        piece = extract(compiler.gm, replace(region, outputs=(*region.outputs, *taps)))
        if not any(map(nodes.computes, region.nodes)):
            return _torch_private.run_uncompiled(piece.module)
        reason = compiler.runs_uncompiled(region)
        if reason is not None:
            raise CannotTapError(reason)
        return compiler.compiler.part(piece.module, compiler.values_of(piece.inputs))
