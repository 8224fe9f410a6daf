"""Values that a graph overwrites before it ends: copies are made where they are read."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_map

from torchair_scope.capture.memory import storages, written_by
from torchair_scope.capture.symbols import value_of
from torchair_scope.capture.targets import is_call
from torchair_scope.capture.written import WrittenCall


def with_copies(graph: fx.Graph, calls: Sequence[WrittenCall]) -> list[WrittenCall]:
    """The calls with copies in place of values that the graph overwrites later.

    Values are looked at when all of the compiled code has run. The copies are put into the graph.
    """
    writes = _writes(graph)
    if not writes:
        return list(calls)
    copies = _Copies(graph, writes)
    return [
        replace(
            call,
            args=tree_map(copies.before(call), call.args),
            kwargs=tree_map(copies.before(call), call.kwargs),
            result=tree_map(copies.after(call), call.result),
        )
        for call in calls
    ]


def _writes(graph: fx.Graph) -> Mapping[fx.Node, list[int]]:
    """For each memory that is written to the places of the nodes that do."""
    writing = [
        (index, written)
        for index, node in enumerate(graph.nodes)
        if is_call(node)
        for written in written_by(node)
    ]
    storage = storages(graph) if writing else {}
    writes: dict[fx.Node, list[int]] = defaultdict(list)
    for index, written in writing:
        writes[storage[written]].append(index)
    return writes


class _Copies:
    """Copies of values of one graph, one for each state that a value is read in."""

    def __init__(self, graph: fx.Graph, writes: Mapping[fx.Node, list[int]]) -> None:
        self._graph = graph
        self._writes = writes
        self._storage = storages(graph)
        self._places = {node: index for index, node in enumerate(graph.nodes)}
        self._made: dict[tuple[fx.Node, int], fx.Node] = {}

    def before(self, call: WrittenCall) -> Callable[[Any], Any]:
        """Gives what has the value of a node as the call reads it."""
        return lambda value: self._as_of(value, call.place, self._places[call.place])

    def after(self, call: WrittenCall) -> Callable[[Any], Any]:
        """Gives what has the value of a node as the call leaves it."""
        return lambda value: self._as_of(value, call.place, self._places[call.place] + 1)

    def _as_of(self, value: Any, at: fx.Node, index: int) -> Any:
        if not isinstance(value, fx.Node) or not isinstance(value_of(value), torch.Tensor):
            return value
        writes = self._writes.get(self._storage[value], ())
        if not any(write >= index for write in writes):
            return value
        state = (value, sum(write < index for write in writes))
        if state not in self._made:
            after = index > self._places[at]
            with self._graph.inserting_after(at) if after else self._graph.inserting_before(at):
                self._made[state] = copy_of(self._graph, value)
        return self._made[state]


def copy_of(graph: fx.Graph, value: fx.Node) -> fx.Node:
    """A node that copies the value of one, where nodes are being inserted."""
    copy = graph.call_function(torch.ops.aten.clone.default, (value,))
    # A fake value of its own, since compilers read from these which nodes share memory.
    traced = value_of(value)
    with traced.fake_mode:
        copy.meta["val"] = traced.clone()
    return copy
