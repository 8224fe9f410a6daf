"""How a scope meets TorchAir: inside its compiler, which makes GE or ACL graphs of ATen graphs.

Around that place everything of TorchAir stays in force: its decompositions, its marks on
parameters and geared dimensions, its stream, joint-graph and custom passes.
"""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._mode_utils import no_dispatch

from torchair_scope._torchair_private import (
    Package,
    is_marked_as_parameter,
    is_on,
    mark_as_parameter,
    without_npy_dump,
)
from torchair_scope.backends.views import is_view, split_off_views
from torchair_scope.bisection import prober
from torchair_scope.capture.compiler import Scoper, direction_of
from torchair_scope.capture.cut import Boxed, CutGraph
from torchair_scope.capture.layouts import layout_restorer
from torchair_scope.capture.markers import (
    has_dump_markers,
    lift_markers,
    lower_markers,
    lower_tags,
)
from torchair_scope.capture.partition import Region
from torchair_scope.capture.parts import CountsNoKernels
from torchair_scope.capture.settings import DumpSettings
from torchair_scope.capture.tags import has_tags
from torchair_scope.capture.targets import bodies, name_of
from torchair_scope.options import Options

CompileGraph = Callable[[torch.fx.GraphModule, Sequence[Any]], Any]

# These refer to each other by more than their arguments, so one graph has to hold both ends.
_PAIRED = (
    ("record", "wait"),
    ("tagged_event_record", "tagged_event_wait"),
    ("super_kernel_scope_begin", "super_kernel_scope_end"),
)


class AscendGraph:
    """A cut graph in the shape that TorchAir gives its compiled graphs: called unboxed."""

    def __init__(self, run: Boxed) -> None:
        self._run = run

    def __call__(self, *args: Any) -> tuple[Any, ...]:
        """Run the graph once."""
        return tuple(self._run(list(args)))

    def get_code(self, extend_config: Any = None) -> AscendGraph:
        """What TorchAir asks for when it fills a compile cache: there is no code to keep."""
        warnings.warn(
            "a graph with a dump scope is not put into TorchAir's compile cache, and is compiled "
            "again in the next process",
            stacklevel=2,
        )
        return self


@dataclass(frozen=True)
class AscendPieces(CountsNoKernels):
    """Compiles parts of a graph, each to a GE or ACL graph that TorchAir itself makes.

    Args:
        package: the package of TorchAir's that compiles.
        compile_graph: its compiler, with its own npy dump off, which would interpret each part.
    """

    package: Package
    compile_graph: CompileGraph

    @property
    def name(self) -> str:
        """The name of the package."""
        return self.package.name

    def check(self, regions: Sequence[Region]) -> None:
        """Refuse to cut between two operators that TorchAir wants in one graph."""
        places: dict[str, set[int]] = {}
        for index, region in enumerate(regions):
            for node in region.nodes:
                places.setdefault(name_of(node), set()).add(index)
        for first, second in _PAIRED:
            ends = places.get(first, set()) | places.get(second, set())
            if len(ends) > 1:
                raise RuntimeError(
                    f"a dump scope cuts the graph between {first} and {second}, which have to be "
                    "in one NPU graph. Open the scope around both of them, or between others."
                )

    def whole(self, gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        """Compile a graph that is not cut."""
        return self.compile_graph(gm, example_inputs)

    def whole_with_taps(
        self, gm: torch.fx.GraphModule, example_inputs: Sequence[Any], outputs: int
    ) -> Boxed:
        """Compile a graph that is not cut, with taps."""
        return self.part(gm, example_inputs)

    def part(self, gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Boxed:
        """Compile a part of a graph; what it returns gets the layouts of the whole graph back."""
        _refuse_bodies(gm.graph)
        split = split_off_views(gm)
        lower_markers(gm.graph)
        gm.recompile()
        (outputs,) = next(iter(reversed(gm.graph.nodes))).args
        restore = layout_restorer([node.meta.get("val") for node in outputs])
        with self.package.keeping_scopes():
            compiled = self.compile_graph(gm, list(example_inputs))
        if split is None:
            return lambda args: restore(compiled(*args))
        return lambda args: split.merge(split.views(*args), restore(compiled(*args)))


def _refuse_bodies(graph: torch.fx.Graph) -> None:
    """GE refuses these by itself; an ACL graph of them is made, and fails at its first run."""
    for node in graph.nodes:
        if next(bodies(node), None) is not None:
            raise NotImplementedError(f"{name_of(node)} runs a graph of its own")


def _mark_views_of_parameters(graph: torch.fx.Graph, example_inputs: Sequence[Any]) -> None:
    """A view of a parameter stays where it is, too: a part that takes one need not copy it.

    Such views come to a part as they are, see `split_off_views`. An ACL graph reads what is marked
    in place, and copies everything else into memory of its own at each replay.
    """
    placeholders = (node for node in graph.nodes if node.op == "placeholder")
    in_place = {
        node
        for node, value in zip(placeholders, example_inputs, strict=True)
        if is_marked_as_parameter(value)
    }
    for node in graph.nodes:
        if is_view(node) and in_place.issuperset(node.all_input_nodes):
            in_place.add(node)
            mark_as_parameter(node.meta.get("val"))


def compile_with_scopes(
    package: Package,
    compiler: Any,
    compile_with: Callable[[Any, torch.fx.GraphModule, Sequence[Any]], Any],
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
) -> Any:
    """Compile one ATen graph as TorchAir's compiler does, but for the scopes in it.

    Args:
        package: the package of TorchAir's that compiles.
        compiler: the `_NpuFxCompiler` that was asked to.
        compile_with: its own way to compile, `(compiler, gm, example_inputs) -> callable`.
        gm: the graph; it is not changed.
        example_inputs: the graph's inputs; TorchAir's marks on them are kept.
    """
    config = compiler.config
    settings = _settings(config)
    scoper = Scoper(settings, package.name, next_number=package.next_graph_number)
    asked = prober(scoper)
    if asked is None:
        left = _left_to_torchair(package, compiler, compile_with, gm, example_inputs)
        if left is not None:
            return left()
    scoper = asked or scoper
    quiet = without_npy_dump(compiler)
    pieces = AscendPieces(package, lambda gm, inputs: compile_with(quiet, gm, inputs))
    lifted = _copy(gm)
    lift_markers(lifted.graph)
    if config.mode.value != "max-autotune":
        _mark_views_of_parameters(lifted.graph, example_inputs)
    direction = direction_of(gm)
    if scoper.interprets_whole(lifted):
        return AscendGraph(scoper.interpret(lifted, direction))
    compiled = scoper.compile(lifted, example_inputs, direction, pieces)
    return AscendGraph(compiled) if isinstance(compiled, CutGraph) else compiled


def _left_to_torchair(
    package: Package,
    compiler: Any,
    compile_with: Callable[[Any, torch.fx.GraphModule, Sequence[Any]], Any],
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
) -> Callable[[], Any] | None:
    """How TorchAir compiles a graph of which nothing is dumped by us; None for any other."""
    config = compiler.config
    whole = _settings(config).whole_graph
    scoped = has_tags(gm) or has_dump_markers(gm.graph)
    if not scoped and not whole:
        return lambda: compile_with(compiler, gm, example_inputs)
    if not whole and _dumps_by_itself(config):
        marked = _marked_for_own_dump(package, config, gm)
        return lambda: compile_with(compiler, marked, example_inputs)
    refusal = _why_not_dumped(config)
    if refusal is not None:
        warnings.warn(refusal, stacklevel=3)
        return lambda: compile_with(compiler, gm, example_inputs)
    return None


def _settings(config: Any) -> DumpSettings:
    if hasattr(config, "debug"):
        settings = DumpSettings.of(config)
        is_python = config.debug.graph_dump.type.value == "py"
        return settings if is_python else replace(settings, graph_file=None)
    whole = is_on(config.dump_tensor_data) and is_on(config.force_eager)
    return DumpSettings(
        Options(path=os.path.realpath(config.data_dump_dir.value)), whole_graph=whole
    )


def _dumps_by_itself(config: Any) -> bool:
    """Whether TorchAir's own dump of GE or ACL graphs is on: the scopes are then that dump's."""
    if hasattr(config, "debug"):
        return is_on(config.dump_config.enable_dump)
    return is_on(config.dump_tensor_data)


def _marked_for_own_dump(package: Package, config: Any, gm: torch.fx.GraphModule) -> Any:
    """The graph with TorchAir's own markers where it has our tags, if its dump looks at them."""
    if config.mode.value != "max-autotune":
        warnings.warn(
            f"TorchAir's own dump in mode {config.mode.value!r} saves every operator, in a scope "
            "or not. Turn it off to have the scopes dumped, and them only.",
            stacklevel=3,
        )
        return gm
    if direction_of(gm) == "backward":
        return gm
    marked = _copy(gm)
    lower_tags(marked.graph, package.markers)
    marked.recompile()
    return marked


def _why_not_dumped(config: Any) -> str | None:
    if not hasattr(config, "debug"):
        return None
    if is_on(config.export.export_mode):
        return "an exported graph runs without torchair_scope: its scopes are not dumped"
    if config.debug.fx_summary.enabled and config.mode.value == "max-autotune":
        return (
            "config.debug.fx_summary has TorchAir summarise graphs in place of compiling them: "
            "scopes are not dumped. Unset it to have them dumped."
        )
    return None


def _copy(gm: torch.fx.GraphModule) -> torch.fx.GraphModule:
    with no_dispatch():
        return copy.deepcopy(gm)
