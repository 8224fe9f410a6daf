"""Cut a graph at positions among its operators, into pieces that can each be run by itself."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Mapping, Sequence
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
        regions: by index, the pieces that compute something, with what they need and give. Random
            operators are in none of them.
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


def cut_at(graph: fx.Graph, cuts: Iterable[int]) -> Pieces:
    """Cut a graph before the operators at these positions.

    What a random operator returns is given to the pieces, since no run could draw it again. The
    graph gets a copy of each value that it overwrites.
    """
    operators = tuple(filter(has_own_kind, graph.nodes))
    written = _in_written_memory(graph)
    copies = {node: _copy_of(graph, node) for node in written if _is_tensor_of_a_call(node)}
    inner = {cut for cut in cuts if 0 < cut < len(operators)}
    bounds = (0, *sorted(inner), len(operators))
    stages = _stages(graph, operators, bounds, {copy: node for node, copy in copies.items()})
    (whole,) = staged(graph, dict.fromkeys(stages, 0)).values()
    regions = {
        stage: replace(region, outputs=tuple(copies.get(node, node) for node in region.outputs))
        for stage, region in staged(graph, stages).items()
        if stage < len(bounds)
    }
    needed = {node for region in regions.values() for node in (*region.inputs, *region.outputs)}
    needed = {copies.get(node, node) for node in needed} | set(whole.outputs)
    outputs = tuple(node for node in whole.nodes if node in needed)
    inputs = frozenset(node for node in written if node.op == "placeholder")
    return Pieces(operators, bounds, regions, replace(whole, outputs=outputs), inputs, copies)


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
