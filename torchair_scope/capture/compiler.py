"""The one place that decides what becomes of a graph: untouched, cut, or dumped as a whole.

Two levels meet here. `Scoper.wants` looks at the Dynamo graph that a backend is entered with;
`Scoper.compile` is given each ATen graph that the inner compiler would otherwise get.
"""

from __future__ import annotations

import functools
import itertools
import os
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from torchair_scope.capture.backward_tags import keep_tags_in_backward
from torchair_scope.capture.cut import CutGraph, Part
from torchair_scope.capture.dynamo_graph import facts_of, warn_of_dead_code
from torchair_scope.capture.graph_dump import write_graph
from torchair_scope.capture.partition import Region, partition
from torchair_scope.capture.parts import PieceCompiler, RegionCompiler, dumped
from torchair_scope.capture.saved import (
    Selection,
    describe_nodes,
    is_for_the_interpreter,
    warn_of_unknown_bodies,
)
from torchair_scope.capture.shared_bodies import separate_shared_bodies
from torchair_scope.capture.symbols import bind_symbols
from torchair_scope.capture.tags import (
    Tag,
    TagsOfRandomOperators,
    graphs_in,
    has_tags,
    tag_what_stands_between,
)
from torchair_scope.store.run import open_run
from torchair_scope.store.writer import GraphDump, Step

Direction = Literal["forward", "backward", "inference"]
DIRECTIONS: tuple[Direction, ...] = ("forward", "backward", "inference")
PATH_VARIABLE = "TORCHAIR_SCOPE_PATH"
Filter = Callable[[torch.fx.Node], torch.fx.Node | None]

_FALLS_BACK = (
    "config.debug.data_dump.type is 'npy' and the graph has no scope: it is not compiled, and the "
    "whole graph will FALLBACK to EAGER execution, to dump every operator. Put a "
    "torchair.scope.data_dump() around the code in question to keep the rest compiled, and unset "
    "the option when you have the dump."
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
    def of(cls, config: Any, on_error: Literal["warn", "raise"]) -> DumpSettings:
        """The settings that stand in a compiler config, ours or TorchAir's."""
        data_dump, graph_dump = config.debug.data_dump, config.debug.graph_dump
        return cls(
            path=data_dump.path or os.environ.get(PATH_VARIABLE),
            filter=data_dump.filter,
            whole_graph=data_dump.enabled,
            on_error=on_error,
            graph_file=graph_dump.full_path if graph_dump.enabled else None,
        )


_count = functools.partial(next, itertools.count(1))
_numbers: set[int] = set()
_numbering = threading.Lock()


def claim_number(next_number: Callable[[], int]) -> int:
    """The next number that no graph of this process has, whichever counter it came from."""
    with _numbering:
        number = next_number()
        while number in _numbers:
            number = next_number()
        _numbers.add(number)
        return number


def next_graph_number() -> int:
    """The next number, where no compiler counts graphs of its own."""
    return claim_number(_count)


def direction_of(gm: torch.fx.GraphModule) -> Direction:
    """AOTAutograd names the inputs of a forward graph `primals_…`, of a backward `tangents_…`."""
    names = [node.name for node in gm.graph.nodes if node.op == "placeholder"]
    if any(name.startswith("tangents_") for name in names):
        return "backward"
    return "forward" if any(name.startswith("primals_") for name in names) else "inference"


@dataclass(frozen=True)
class Scoper:
    """Compiles graphs with scopes in them, by the settings of one backend.

    Args:
        settings: what to dump, and where.
        inner_name: how the manifest and messages call the inner compiler.
        facts: what is known of the Dynamo graph that the ATen graphs come from.
        next_number: gives the number of a graph that is dumped.
        random_operators: what their forward graph tells their backward graph.
    """

    settings: DumpSettings
    inner_name: str
    facts: Mapping[str, Any] = field(default_factory=dict)
    next_number: Callable[[], int] = _count
    random_operators: TagsOfRandomOperators = field(default_factory=TagsOfRandomOperators)

    def wants(self, gm: torch.fx.GraphModule) -> bool:
        """Whether a Dynamo graph is to pass through `compile`; else it goes on as it is."""
        return self.settings.graph_file is not None or self.dumps_whole(gm) or has_tags(gm)

    def dumps_whole(self, gm: torch.fx.GraphModule) -> bool:
        """Whether the whole graph is dumped: the option is set, and no scope narrows it."""
        return self.settings.whole_graph and not has_tags(gm)

    def entered_with(self, gm: torch.fx.GraphModule) -> Scoper:
        """The scoper for the ATen graphs that this Dynamo graph gives rise to."""
        separate_shared_bodies(gm)
        keep_tags_in_backward(gm)
        warn_of_dead_code(gm)
        return replace(self, facts=facts_of(gm), random_operators=TagsOfRandomOperators())

    def compile(
        self,
        gm: torch.fx.GraphModule,
        example_inputs: Sequence[Any],
        direction: Direction,
        pieces: PieceCompiler,
    ) -> Any:
        """Compile one ATen graph: its tagged nodes are dumped, all others are compiled."""
        self.random_operators.restore(gm.graph)
        for graph in graphs_in(gm):
            tag_what_stands_between(graph)
        warn_of_unknown_bodies(gm.graph)
        saved = Selection(self._wants_tagged, direction).of(gm.graph)
        is_cut = any(map(saved.holds, gm.graph.nodes))
        if is_cut or self.settings.graph_file is not None:
            number = self._number(gm)
        if not is_cut:
            return pieces.whole(gm, example_inputs)
        bind_symbols(gm.graph)
        regions = partition(
            gm.graph, lambda node: saved.holds(node) or is_for_the_interpreter(node)
        )
        pieces.check(regions)
        compiled = RegionCompiler(gm, example_inputs, pieces)
        parts = [
            dumped(gm, region, saved) if region.kind == "dumped" else compiled.part(region)
            for region in regions
        ]
        return self._cut(gm, number, direction, regions, parts)

    def interpret(self, gm: torch.fx.GraphModule, direction: Direction) -> Any:
        """Dump a whole ATen graph, which then runs uncompiled."""
        warnings.warn(_FALLS_BACK, stacklevel=2)
        saved = Selection(self._wants_any, direction).of(gm.graph)
        number = self._number(gm)
        regions = partition(gm.graph, lambda node: True)
        parts = [dumped(gm, region, saved) for region in regions]
        return self._cut(gm, number, direction, regions, parts)

    def _number(self, gm: torch.fx.GraphModule) -> int:
        number = claim_number(self.next_number)
        if self.settings.graph_file is not None:
            write_graph(gm, self.settings.graph_file(f"dynamo_original_graph_{number}"))
        return number

    def _wants_tagged(self, node: torch.fx.Node, tag: Tag | None) -> bool:
        return tag is not None and self._wants_any(node, tag)

    def _wants_any(self, node: torch.fx.Node, tag: Tag | None) -> bool:
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
            "nodes": describe_nodes(gm.graph),
        }
        return CutGraph(gm, parts, _Graph(self.settings, number, description))


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
