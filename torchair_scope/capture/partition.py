"""Cut a graph at its tags: into the fewest regions that are each compiled or dumped as a whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import fx

from torchair_scope.capture.effects import order_dependencies
from torchair_scope.capture.symbols import binders, is_symbolic, symbol_bound_by, symbols_of
from torchair_scope.capture.targets import is_assert, is_call, is_mode_switch, is_unpacking

Kind = Literal["compiled", "dumped"]


@dataclass(frozen=True)
class Region:
    """A part of a graph that is compiled, or dumped, as a whole.

    Attributes:
        kind: "compiled" (by the inner compiler) or "dumped" (interpreted).
        nodes: its nodes in program order; neither placeholders, get_attr nodes nor the output.
        inputs: what it needs from outside: first the nodes that its nodes use, in the order of
            their first use (get_attr nodes excepted), then the nodes that bind the symbols of its
            values.
        outputs: its nodes that another region or the graph's output needs, in program order.
    """

    kind: Kind
    nodes: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]


def partition(graph: fx.Graph, dumped: Callable[[fx.Node], bool]) -> list[Region]:
    """Cut a graph into compiled and dumped regions, as few as its dependencies allow.

        regions = partition(gm.graph, lambda node: scope_of(node) is not None)
        [region.kind for region in regions]      # ["compiled", "dumped", "compiled"]

    The graph is not changed. To run the regions one after the other, in the order of the list,
    gives what the graph gives, side effects included (see `effects`). Nodes without a user stay.
    Call `bind_symbols(graph)` first if the graph may hold operators like `nonzero`.

    Why the number is the smallest: neighbours of one kind can be merged, so a best cut alternates
    between the kinds. Given the kind of the first region, give each node the earliest region that
    follows all its predecessors' and has its kind. By induction no alternating cut has a node in an
    earlier region, so none has fewer. Both first kinds are tried.

    Args:
        graph: an FX graph, at ATen level for good results: functions that cannot be looked into
            keep their program order.
        dumped: says whether a node is tagged. It is not asked about nodes that have no kind of
            their own (`has_own_kind`).

    Returns:
        The regions in execution order. Of two cuts with equally many regions the one with fewer
        compiled regions, and of those the one that starts compiled.
    """
    nodes = [node for node in graph.nodes if is_call(node)]
    kinds: dict[fx.Node, Kind] = {
        node: "dumped" if dumped(node) else "compiled" for node in nodes if has_own_kind(node)
    }
    symbols = {node: symbols_of(node) for node in graph.nodes}
    bound_by = binders(graph)
    before = _predecessors(graph, nodes, symbols, bound_by)
    orders: list[tuple[Kind, Kind]] = [("compiled", "dumped")]
    if "dumped" in kinds.values():
        orders.append(("dumped", "compiled"))
    cuts = [(order, _stages(nodes, kinds, before, order)) for order in orders]
    order, stages = min(cuts, key=lambda cut: _cost(*cut))
    return _regions(graph, order, stages, symbols, bound_by)


def staged(graph: fx.Graph, stages: dict[fx.Node, int]) -> dict[int, Region]:
    """The regions of a graph in which each node that runs something has been given a stage.

        stages = {node: 0 for node in graph.nodes if is_call(node)}
        (whole,) = staged(graph, stages).values()

    Args:
        graph: an FX graph.
        stages: numbers of regions; what a node needs is never in a later one.
    """
    symbols = {node: symbols_of(node) for node in graph.nodes}
    regions = _regions(graph, ("compiled", "compiled"), stages, symbols, binders(graph))
    return dict(zip(sorted(set(stages.values())), regions, strict=True))


def has_own_kind(node: fx.Node) -> bool:
    """Whether a node is compiled or dumped for its own sake.

    Arithmetic on sizes, asserts, mode switches and `getitem` on a tuple are not: they go with the
    latest node that they depend on, whether tagged or not.
    """
    goes_along = is_unpacking(node) or is_symbolic(node) or is_assert(node) or is_mode_switch(node)
    return is_call(node) and not goes_along


def _predecessors(
    graph: fx.Graph,
    nodes: list[fx.Node],
    symbols: dict[fx.Node, list[str]],
    bound_by: dict[str, fx.Node],
) -> dict[fx.Node, list[fx.Node]]:
    order = order_dependencies(graph)
    before: dict[fx.Node, list[fx.Node]] = {}
    for node in nodes:
        if is_unpacking(node):
            before[node] = node.all_input_nodes
            continue
        binding = (bound_by.get(symbol) for symbol in symbols[node])
        # A binder further down is no predecessor; `before` knows what came already.
        earlier = [binder for binder in binding if binder in before]
        before[node] = [*node.all_input_nodes, *order.get(node, ()), *earlier]
    return before


def _stages(
    nodes: list[fx.Node],
    kinds: dict[fx.Node, Kind],
    before: dict[fx.Node, list[fx.Node]],
    order: tuple[Kind, Kind],
) -> dict[fx.Node, int]:
    stages: dict[fx.Node, int] = {}
    for node in nodes:
        stage = max((stages[other] for other in before[node] if other in stages), default=0)
        if node in kinds and kinds[node] != order[stage % 2]:
            stage += 1
        stages[node] = stage
    return stages


def _cost(order: tuple[Kind, Kind], stages: dict[fx.Node, int]) -> tuple[int, int]:
    used = set(stages.values())
    return len(used), sum(order[stage % 2] == "compiled" for stage in used)


def _regions(
    graph: fx.Graph,
    order: tuple[Kind, Kind],
    stages: dict[fx.Node, int],
    symbols: dict[fx.Node, list[str]],
    bound_by: dict[str, fx.Node],
) -> list[Region]:
    members: dict[int, list[fx.Node]] = {stage: [] for stage in sorted(set(stages.values()))}
    for node, stage in stages.items():
        members[stage].append(node)
    inputs = {}
    for stage, nodes in members.items():
        used = _used_from_outside(nodes, stage, stages)
        inputs[stage] = used + _missing_binders(
            [*nodes, *used], used, stage, stages, symbols, bound_by
        )
    needed = {node for nodes in inputs.values() for node in nodes}
    needed.update(node for last in graph.find_nodes(op="output") for node in last.all_input_nodes)
    return [
        Region(
            kind=order[stage % 2],
            nodes=tuple(nodes),
            inputs=tuple(inputs[stage]),
            outputs=tuple(node for node in nodes if node in needed),
        )
        for stage, nodes in members.items()
    ]


def _used_from_outside(
    nodes: list[fx.Node], stage: int, stages: dict[fx.Node, int]
) -> list[fx.Node]:
    used = dict.fromkeys(
        source
        for node in nodes
        for source in node.all_input_nodes
        if source.op != "get_attr" and stages.get(source) != stage
    )
    return list(used)


def _missing_binders(
    values: list[fx.Node],
    inputs: list[fx.Node],
    stage: int,
    stages: dict[fx.Node, int],
    symbols: dict[fx.Node, list[str]],
    bound_by: dict[str, fx.Node],
) -> list[fx.Node]:
    known = {symbol_bound_by(node) for node in inputs}
    needed = dict.fromkeys(symbol for node in values for symbol in symbols[node])
    candidates = [
        bound_by[symbol] for symbol in needed if symbol in bound_by and symbol not in known
    ]
    # What this region itself binds it cannot be given. Placeholders have no stage and come first.
    return [node for node in candidates if stages.get(node, -1) < stage]
