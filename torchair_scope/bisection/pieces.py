"""Cut a graph at positions among its operators, into pieces that can each be run by itself."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

from torchair_scope.capture.effects import is_irreproducible
from torchair_scope.capture.memory import storages, written_by
from torchair_scope.capture.overwritten import copy_of
from torchair_scope.capture.partition import Region, has_own_kind, staged
from torchair_scope.capture.symbols import value_of
from torchair_scope.capture.targets import is_call, is_unpacking


@dataclass(frozen=True)
class Pieces:
    """The pieces of a graph.

    Attributes:
        operators: the operators of the graph, in program order; positions count these.
        bounds: where each piece begins, and where the last one ends.
        regions: by index, the pieces that are judged and compute something, with what they need
            and give. Random operators are in none of them.
        whole: the graph as one region, which also gives all that the pieces need and give.
        written: the inputs of the graph that it writes to.
        copies: for values in memory that the graph writes to later, the nodes that copy them.
    """

    operators: tuple[fx.Node, ...]
    bounds: tuple[int, ...]
    regions: Mapping[int, Region]
    whole: Region
    written: frozenset[fx.Node]
    copies: Mapping[fx.Node, fx.Node]


Ranges = Sequence[tuple[int, int]]


def operators_of(graph: fx.Graph) -> tuple[fx.Node, ...]:
    """The operators of a graph, in program order."""
    return tuple(filter(has_own_kind, graph.nodes))


def cut_at(graph: fx.Graph, cuts: Iterable[int], judged: Ranges | None = None) -> Pieces:
    """Cut a graph before the operators at these positions.

    What a random operator returns is given to the pieces, since no run could draw it again. The
    graph gets a copy of each value that it overwrites.

    Args:
        graph: is given the copies.
        cuts: positions among its operators.
        judged: ranges of positions, between cuts, whose pieces are judged; all if None.
    """
    operators = operators_of(graph)
    judged = [(0, len(operators))] if judged is None else judged
    written = _in_written_memory(graph)
    copies = {node: _copy_of(graph, node) for node in written if _is_tensor_of_a_call(node)}
    inner = {cut for cut in cuts if 0 < cut < len(operators)}
    bounds = (0, *sorted(inner), len(operators))
    stages = _stages(graph, operators, bounds, {copy: node for node, copy in copies.items()})
    (whole,) = staged(graph, dict.fromkeys(stages, 0)).values()
    regions = {
        stage: replace(region, outputs=tuple(copies.get(node, node) for node in region.outputs))
        for stage, region in staged(graph, stages).items()
        if stage < len(bounds) and _is_in(judged, *bounds[stage : stage + 2])
    }
    needed = {node for region in regions.values() for node in (*region.inputs, *region.outputs)}
    needed = {copies.get(node, node) for node in needed} | set(whole.outputs)
    outputs = tuple(node for node in whole.nodes if node in needed)
    inputs = frozenset(node for node in written if node.op == "placeholder")
    return Pieces(operators, bounds, regions, replace(whole, outputs=outputs), inputs, copies)


def _is_in(ranges: Ranges, start: int, stop: int) -> bool:
    return any(first <= start and stop <= last for first, last in ranges)


def moved(
    cuts: Sequence[int], operators: Sequence[fx.Node], is_known: Callable[[fx.Node], bool]
) -> tuple[int, ...]:
    """Cuts where only known values flow: the outer ones as they are, the others the nearest.

    Args:
        cuts: positions among the operators, in order.
        operators: of a graph, in program order.
        is_known: whether the value of a node is known. Those of the graph's inputs do not matter.
    """
    if not cuts:
        return ()
    free = _known_positions(operators, is_known)[cuts[0] + 1 : cuts[-1]]
    inside = [cuts[0] + 1 + offset for offset, is_free in enumerate(free) if is_free]
    if not inside:
        return tuple(dict.fromkeys((cuts[0], cuts[-1])))
    nearest = {min(inside, key=lambda position: abs(position - cut)) for cut in cuts[1:-1]}
    return tuple(dict.fromkeys((cuts[0], *sorted(nearest), cuts[-1])))


def _known_positions(
    operators: Sequence[fx.Node], is_known: Callable[[fx.Node], bool]
) -> list[bool]:
    """For each position whether all that operators before it give to later ones is known."""
    position_of = {node: position for position, node in enumerate(operators)}
    last_read: dict[fx.Node, int] = {}
    for position, node in enumerate(operators):
        for value in _read_by(node):
            last_read[value] = position
    unknown = [0] * (len(operators) + 1)
    for value, last in last_read.items():
        made = position_of[_producer(value)]
        if made < last and not is_known(value):
            unknown[made + 1] += 1
            unknown[last + 1] -= 1
    return [count == 0 for count in itertools.accumulate(unknown)]


def _read_by(node: fx.Node) -> Iterator[fx.Node]:
    """The tensors that an operator reads and that another one has computed."""
    for value in node.all_input_nodes:
        if is_call(value) and isinstance(value_of(value), torch.Tensor):
            yield value


def _producer(node: fx.Node) -> fx.Node:
    while is_unpacking(node):
        node = node.all_input_nodes[0]
    return node


def _in_written_memory(graph: fx.Graph) -> list[fx.Node]:
    """The nodes whose values lie in memory that some node writes to."""
    memory = storages(graph)
    overwritten = {memory[node] for writer in graph.nodes for node in written_by(writer)}
    return [node for node in graph.nodes if memory[node] in overwritten]


def _is_tensor_of_a_call(node: fx.Node) -> bool:
    return is_call(node) and isinstance(value_of(node), torch.Tensor)


def _copy_of(graph: fx.Graph, node: fx.Node) -> fx.Node:
    with graph.inserting_after(node):
        return copy_of(graph, node)


def _stages(
    graph: fx.Graph,
    operators: Sequence[fx.Node],
    bounds: Sequence[int],
    copied: Mapping[fx.Node, fx.Node],
) -> dict[fx.Node, int]:
    """The piece of each node. A random operator has one of its own, past those of the others."""
    known = set(operators)
    position = -1
    stages: dict[fx.Node, int] = {}
    for node in filter(is_call, graph.nodes):
        position += node in known
        if node in copied or is_unpacking(node):
            stages[node] = stages[node.all_input_nodes[0]]
        elif node in known and is_irreproducible(node):
            stages[node] = len(bounds) + position
        else:
            stages[node] = max(0, bisect.bisect_right(bounds, position) - 1)
    return stages
