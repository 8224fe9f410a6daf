"""The one place that decides what becomes of a graph: untouched, cut, or dumped as a whole.

Two levels meet here. `Scoper.wants` looks at the Dynamo graph that a backend is entered with;
`Scoper.compile` is given each ATen graph that the inner compiler would otherwise get.
"""

from __future__ import annotations

import functools
import itertools
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from torchair_scope.capture.account import Outcome, account, number_of
from torchair_scope.capture.backward_tags import (
    forget_copied_tags,
    keep_tags_in_backward,
    keep_tags_in_gradients,
)
from torchair_scope.capture.cut import CutGraph, Part
from torchair_scope.capture.dynamo_graph import facts_of, warn_of_dead_code
from torchair_scope.capture.engines import engines_of, part_of
from torchair_scope.capture.graph_dump import write_graph
from torchair_scope.capture.partition import Region, partition
from torchair_scope.capture.parts import PieceCompiler, RegionCompiler, dumped
from torchair_scope.capture.saved import (
    Saved,
    Selection,
    describe_nodes,
    warn_of_closed_bodies,
)
from torchair_scope.capture.settings import DumpSettings, Filter
from torchair_scope.capture.shared_bodies import separate_shared_bodies
from torchair_scope.capture.steps import DumpedGraph
from torchair_scope.capture.symbols import bind_symbols
from torchair_scope.capture.tags import (
    Tag,
    TagsOfRandomOperators,
    graphs_in,
    has_tags,
    tag_what_stands_between,
)
from torchair_scope.capture.written import DecomposedOperators, as_written
from torchair_scope.options import NONE, EngineName, Options

Direction = Literal["forward", "backward", "inference"]
DIRECTIONS: tuple[Direction, ...] = ("forward", "backward", "inference")

_FALLS_BACK = (
    "config.debug.data_dump.type is 'npy', or config.dump_config.enable_dump is set without a "
    "dump_layer, and the graph has no scope: it is not compiled, and the whole graph will FALLBACK "
    "to EAGER execution, to dump every operator. Put a torchair.scope.data_dump() around the code "
    "in question to keep the rest compiled, and unset the option when you have the dump."
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


def why_left_out(options: Options, wanted: Filter | None, node: torch.fx.Node) -> Outcome | None:
    """What the account says of an operator that is not to be dumped; None for one that is."""
    if not options.selects_operator(node):
        return Outcome.OPS
    if wanted is not None and wanted(node) is None:
        return Outcome.FILTER
    return None


@dataclass(frozen=True)
class Scoper:
    """Compiles graphs with scopes in them, by the settings of one backend.

    Args:
        settings: what to dump, and where.
        inner_name: how the manifest and messages call the inner compiler.
        facts: what is known of the Dynamo graph that the ATen graphs come from.
        is_traced: whether the account knows that Dynamo graph.
        next_number: gives the number of a graph that is dumped.
        random_operators: what their forward graph tells their backward graph.
        decomposed: operators in scopes that the compiler has taken apart.
    """

    settings: DumpSettings
    inner_name: str
    facts: Mapping[str, Any] = field(default_factory=dict)
    is_traced: bool = False
    next_number: Callable[[], int] = _count
    random_operators: TagsOfRandomOperators = field(default_factory=TagsOfRandomOperators)
    decomposed: DecomposedOperators = field(default_factory=DecomposedOperators)

    def wants(self, gm: torch.fx.GraphModule) -> bool:
        """Whether a Dynamo graph is to pass through `compile`; else it goes on as it is."""
        settings = self.settings
        asked = settings.graph_file is not None or settings.layers
        return bool(asked) or self.dumps_whole(gm) or has_tags(gm)

    def dumps_whole(self, gm: torch.fx.GraphModule) -> bool:
        """Whether the whole graph is dumped: the option is set, and no scope narrows it."""
        return self.settings.whole_graph and not has_tags(gm)

    def interprets_whole(self, gm: torch.fx.GraphModule) -> bool:
        """Whether the whole graph is dumped, and runs uncompiled for it."""
        return self.dumps_whole(gm) and self.engine_of(None) == "interpret"

    def engine_of(self, tag: Tag | None) -> EngineName:
        """The engine of a scope; without a tag, for what is dumped outside of any."""
        return self.settings.options_of(tag).engine or "interpret"

    def entered_with(self, gm: torch.fx.GraphModule) -> Scoper:
        """The scoper for the ATen graphs that this Dynamo graph gives rise to."""
        separate_shared_bodies(gm)
        account.traced(gm)
        keep_tags_in_backward(gm)
        keep_tags_in_gradients(gm)
        warn_of_dead_code(gm)
        return replace(
            self,
            facts=facts_of(gm),
            is_traced=True,
            random_operators=TagsOfRandomOperators(),
            decomposed=DecomposedOperators(),
        )

    def compile(
        self,
        gm: torch.fx.GraphModule,
        example_inputs: Sequence[Any],
        direction: Direction,
        pieces: PieceCompiler,
    ) -> Any:
        """Compile one ATen graph: what is tagged is dumped, by the engine of its scope."""
        self.random_operators.restore(gm.graph)
        forget_copied_tags(gm)
        for graph in graphs_in(gm):
            tag_what_stands_between(graph)
        account.reached(gm, is_traced=self.is_traced)
        if self.settings.layers:
            account.named(gm, self.settings.layers)
        warn_of_closed_bodies(gm.graph, self.settings.options_of)
        wants = self._wants_any if self.dumps_whole(gm) else self._wants_tagged
        written = as_written(gm, self.decomposed)
        saved = Selection(wants, self.settings.options_of, direction).of(written.graph)
        is_dumped = any(map(saved.holds, written.graph.nodes))
        if is_dumped or self.settings.graph_file is not None:
            number = self._number(gm)
        if not is_dumped:
            return pieces.whole(gm, example_inputs)
        nodes = describe_nodes(written.graph)
        bind_symbols(gm.graph)
        engines = engines_of(gm, written, saved)
        cutting = [engine for engine in engines if engine.cuts]
        regions = partition(gm.graph, lambda node: any(each.holds(node) for each in cutting))
        pieces.check(regions)
        for engine in engines:
            regions = engine.connected(regions)
        compiler = RegionCompiler(gm, example_inputs, pieces)
        parts = [part_of(region, engines, compiler) for region in regions]
        return self._cut(gm, number, direction, regions, parts, saved, nodes)

    def interpret(self, gm: torch.fx.GraphModule, direction: Direction) -> Any:
        """Dump a whole ATen graph, which then runs uncompiled."""
        warnings.warn(_FALLS_BACK, stacklevel=2)
        account.untagged(gm)
        saved = Selection(self._wants_any, lambda tag: NONE, direction).of(gm.graph)
        number = self._number(gm)
        regions = partition(gm.graph, lambda node: True)
        parts = [dumped(gm, region, saved) for region in regions]
        nodes = describe_nodes(gm.graph)
        return self._cut(gm, number, direction, regions, parts, saved, nodes)

    def _number(self, gm: torch.fx.GraphModule) -> int:
        number = claim_number(self.next_number)
        if self.settings.graph_file is not None:
            write_graph(gm, self.settings.graph_file(f"dynamo_original_graph_{number}"))
        return number

    def _wants_tagged(self, node: torch.fx.Node, tag: Tag | None) -> bool:
        if node.name in self.settings.layers:
            return True
        return tag is not None and self._wants_any(node, tag)

    def _wants_any(self, node: torch.fx.Node, tag: Tag | None) -> bool:
        options = self.settings.options_of(tag)
        outcome = why_left_out(options, self.settings.filter, node) or Outcome.NOT_RUN
        account.note([number_of(node)], outcome)
        return outcome is Outcome.NOT_RUN

    def _cut(
        self,
        gm: torch.fx.GraphModule,
        number: int,
        direction: Direction,
        regions: Sequence[Region],
        parts: Sequence[Part],
        saved: Saved,
        nodes: list[dict[str, Any]],
    ) -> CutGraph:
        def describe() -> dict[str, Any]:
            return {
                "direction": direction,
                "inner": self.inner_name,
                **self.facts,
                "regions": [region.kind for region in regions],
                **_costs(parts),
                "nodes": nodes,
            }

        return CutGraph(gm, parts, DumpedGraph(self.settings, number, describe, saved))


def _costs(parts: Sequence[Part]) -> dict[str, Any]:
    """What the graph record says of taps: what their graph would be without them."""
    taps = [facts for part in parts if (facts := part.taps()) is not None]
    if not taps:
        return {}
    return {
        "taps": {
            "values": sum(each.values for each in taps),
            "kernels": _sum(each.kernels for each in taps),
            "kernels_without_taps": _sum(each.kernels_without_taps for each in taps),
        }
    }


def _sum(numbers: Iterable[int | None]) -> int | None:
    known = list(numbers)
    return None if None in known else sum(filter(None, known))
