"""The one place that decides what becomes of a graph: untouched, cut, or dumped as a whole.

Two levels meet here. `Scoper.wants` looks at the Dynamo graph that a backend is entered with;
`Scoper.compile` is given each ATen graph that the inner compiler would otherwise get.
"""

from __future__ import annotations

import itertools
import os
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from torchair_scope.capture import nodes
from torchair_scope.capture.bodies import tag_or_body_tag_of, warn_of_tagged_bodies
from torchair_scope.capture.cut import CutGraph, Part
from torchair_scope.capture.dynamo_graph import facts_of, warn_of_dead_code
from torchair_scope.capture.effects import is_irreproducible
from torchair_scope.capture.graph_dump import write_graph
from torchair_scope.capture.partition import Region, has_own_kind, partition
from torchair_scope.capture.parts import Facts, PieceCompiler, RegionCompiler, dumped
from torchair_scope.capture.symbols import bind_symbols
from torchair_scope.capture.tags import has_tags, tag_gradient_sums
from torchair_scope.config import CompilerConfig
from torchair_scope.store.run import open_run
from torchair_scope.store.writer import GraphDump, Step

Direction = Literal["forward", "backward", "inference"]
DIRECTIONS: tuple[Direction, ...] = ("forward", "backward", "inference")
PATH_VARIABLE = "TORCHAIR_SCOPE_PATH"
Filter = Callable[[torch.fx.Node], torch.fx.Node | None]

_FALLS_BACK = (
    "config.debug.data_dump.type is 'npy' and the graph has no scope: the whole graph FALLS BACK "
    "to EAGER execution and every operator is dumped. Put a torchair.scope.data_dump() around the "
    "code in question to keep the rest compiled, and unset the option when you have the dump."
)


@dataclass(frozen=True)
class DumpSettings:
    """What a user has asked for, wherever it was written.

    Args:
        path: the folder of the dump; the current one if None. Where the user has set none, it
            is the environment variable TORCHAIR_SCOPE_PATH's.
        filter: gets each node, and returns it, or None for a node that is not to be dumped.
        whole_graph: dump a graph that has no scope as a whole.
        on_error: "warn" or "raise", for what goes wrong while a dump is written.
        graph_file: for a graph's name the file that its text is to be written to.
    """

    path: str | None = None
    filter: Filter | None = None
    whole_graph: bool = False
    on_error: Literal["warn", "raise"] = "warn"
    graph_file: Callable[[str], str] | None = None

    @classmethod
    def of(cls, config: CompilerConfig, on_error: Literal["warn", "raise"]) -> DumpSettings:
        """The settings that stand in a compiler config."""
        data_dump, graph_dump = config.debug.data_dump, config.debug.graph_dump
        return cls(
            path=data_dump.path or os.environ.get(PATH_VARIABLE),
            filter=data_dump.filter,
            whole_graph=data_dump.enabled,
            on_error=on_error,
            graph_file=graph_dump.full_path if graph_dump.enabled else None,
        )


_graph_numbers = itertools.count(1)
_numbering = threading.Lock()


def next_graph_number() -> int:
    """The number of a graph, counted through the whole process in compile order."""
    with _numbering:
        return next(_graph_numbers)


@dataclass(frozen=True)
class Scoper:
    """Compiles graphs with scopes in them, by the settings of one backend.

    Args:
        settings: what to dump, and where.
        inner_name: how the manifest and messages call the inner compiler.
        facts: what is known of the Dynamo graph that the ATen graphs come from.
    """

    settings: DumpSettings
    inner_name: str
    facts: Mapping[str, Any] = field(default_factory=dict)

    def wants(self, gm: torch.fx.GraphModule) -> bool:
        """Whether a Dynamo graph is to pass through `compile`; else it goes on as it is."""
        return self.settings.graph_file is not None or self.dumps_whole(gm) or has_tags(gm)

    def dumps_whole(self, gm: torch.fx.GraphModule) -> bool:
        """Whether the whole graph is dumped: the option is set, and no scope narrows it."""
        return self.settings.whole_graph and not has_tags(gm)

    def entered_with(self, gm: torch.fx.GraphModule) -> Scoper:
        """The scoper for the ATen graphs that this Dynamo graph gives rise to."""
        warn_of_dead_code(gm)
        return replace(self, facts=facts_of(gm))

    def compile(
        self,
        gm: torch.fx.GraphModule,
        example_inputs: Sequence[Any],
        direction: Direction,
        pieces: PieceCompiler,
    ) -> Any:
        """Compile one ATen graph: its tagged nodes are dumped, all others are compiled."""
        tag_gradient_sums(gm.graph)
        warn_of_tagged_bodies(gm.graph)
        saved = self._saved_nodes(gm, lambda node: tag_or_body_tag_of(node) is not None)
        number = self._number(gm)
        if not saved:
            return pieces.whole(gm, example_inputs)
        bind_symbols(gm.graph)
        regions = partition(gm.graph, saved.__contains__)
        compiled = RegionCompiler(gm, example_inputs, pieces)
        parts = [
            dumped(gm, region, saved) if region.kind == "dumped" else compiled.part(region)
            for region in regions
        ]
        return self._cut(gm, number, direction, regions, parts)

    def interpret(self, gm: torch.fx.GraphModule, direction: Direction) -> Any:
        """Dump a whole ATen graph, which then runs uncompiled."""
        warnings.warn(_FALLS_BACK, stacklevel=2)
        saved = self._saved_nodes(gm, has_own_kind)
        number = self._number(gm)
        regions = partition(gm.graph, lambda node: True)
        parts = [dumped(gm, region, saved) for region in regions]
        return self._cut(gm, number, direction, regions, parts)

    def _number(self, gm: torch.fx.GraphModule) -> int:
        number = next_graph_number()
        if self.settings.graph_file is not None:
            write_graph(gm, self.settings.graph_file(f"dynamo_original_graph_{number}"))
        return number

    def _saved_nodes(
        self, gm: torch.fx.GraphModule, wanted: Callable[[torch.fx.Node], bool]
    ) -> dict[torch.fx.Node, Facts]:
        return {
            node: _facts(node)
            for node in gm.graph.nodes
            if has_own_kind(node) and wanted(node) and self._passes_filter(node)
        }

    def _passes_filter(self, node: torch.fx.Node) -> bool:
        return self.settings.filter is None or self.settings.filter(node) is not None

    def _cut(
        self,
        gm: torch.fx.GraphModule,
        number: int,
        direction: Direction,
        regions: Sequence[Region],
        parts: Sequence[Part],
    ) -> CutGraph:
        description = {
            "direction": direction,
            "inner": self.inner_name,
            **self.facts,
            "regions": [region.kind for region in regions],
            "nodes": [
                nodes.describe_node(node) for node in gm.graph.nodes if node.op.startswith("call_")
            ],
        }
        return CutGraph(gm, parts, _Graph(self.settings, number, description))


def _facts(node: torch.fx.Node) -> Facts:
    """What a call record says beyond its arguments and results."""
    tag = tag_or_body_tag_of(node)
    facts: dict[str, Any] = {"scope": tag.scope if tag else None}
    if nodes.operator_name(node) != nodes.target_name(node):
        facts["operator"] = nodes.operator_name(node)
    if is_irreproducible(node):
        facts["nondeterministic"] = True
    return facts


class _Graph:
    """One compiled graph on its way to the store; its record is written at its first run.

    A wrong path is found there and not while Dynamo compiles, so that the user gets the
    NotADirectoryError or PermissionError itself, and before any work is done.
    """

    def __init__(self, settings: DumpSettings, number: int, description: Mapping[str, Any]) -> None:
        self._settings = settings
        self._number = number
        self._description = dict(description)
        self._lock = threading.Lock()
        self._dump: GraphDump | None = None

    def begin_step(self) -> Step:
        """Begin to save one run of the graph."""
        with self._lock:
            if self._dump is None:
                run = open_run(self._settings.path, self._settings.on_error)
                self._dump = run.graph(self._number, self._description)
        return self._dump.begin_step()
