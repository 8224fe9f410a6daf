"""A graph as the user wrote it, where the compiler has taken operators apart.

A compiler's decompositions make ten operators of one `gelu`, and a golden dump has the one. What
is handed out of the compiled code is therefore said of the operators that were written: the values
they were given, and those that the compiled code has made of them.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves, tree_map

from torchair_scope import _torch_private
from torchair_scope.capture.extract import named_copy
from torchair_scope.capture.symbols import binders, symbol_of, value_of
from torchair_scope.capture.targets import is_call

_RENAMES = (torch.ops.aten.alias.default, torch.ops.aten.detach.default)

# Nodes of the traced graph come to the compiled one as copies of the same name. A pass may give
# what it knew of a node to another one: this fact would then not be that node's name.
_NAME = "torchair_scope_name"


class NotHandedOut:
    """Stands in a record for a value that the compiled code does not return; its text says why."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def __repr__(self) -> str:
        return f"<not handed out by the compiled code: {self._reason}>"


_UNREAD = NotHandedOut("it is not read there")
_UNUSED = NotHandedOut("nothing uses it there")


@dataclass(frozen=True)
class Decomposed:
    """An operator that was taken apart while it was traced.

    Attributes:
        operator: what was written.
        args: its arguments, with nodes of the traced graph for tensors.
        kwargs: likewise.
        result: likewise.
        made: the nodes that were made of it, those of the result among them.
        unread: arguments that none of these reads.
    """

    operator: OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any
    made: tuple[fx.Node, ...]
    unread: frozenset[fx.Node]


class DecomposedOperators:
    """The operators of scopes that are taken apart while one Dynamo graph is traced."""

    def __init__(self) -> None:
        self._found: list[Decomposed] = []
        self._is_inside = False

    def __iter__(self) -> Iterator[Decomposed]:
        return iter(self._found)

    def trace(
        self,
        operator: OpOverload,
        decomposition: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Take an operator apart; those that it is made of may be taken apart in turn."""
        graph = _torch_private.traced_graph()
        if self._is_inside or graph is None or _torch_private.traces_a_body():
            return decomposition(*args, **kwargs)
        given = _traced((args, kwargs))
        last = next(iter(reversed(graph.nodes)), None)
        self._is_inside = True
        try:
            result = decomposition(*args, **kwargs)
        finally:
            self._is_inside = False
        made = _nodes_after(graph, last)
        returned = _traced(result)
        if given is None or returned is None or not set(_nodes_in(returned)) <= set(made):
            return result
        unread = frozenset(
            _without_renames(node) for node in _nodes_in(given) if not node.users.keys() & set(made)
        )
        args, kwargs = tree_map(_without_renames, given)
        for node in (*_nodes_in((args, kwargs)), *made):
            node.meta[_NAME] = node.name
        self._found.append(Decomposed(operator, args, kwargs, returned, made, unread))
        return result


def _traced(values: Any) -> Any:
    """The nodes that stand for the tensors in some values; None if one has no node."""
    missing = object()

    def node_of(value: Any) -> Any:
        return (
            _torch_private.node_of_traced(value) or missing
            if isinstance(value, torch.Tensor)
            else value
        )

    nodes = tree_map(node_of, values)
    return None if any(leaf is missing for leaf in tree_leaves(nodes)) else nodes


def _without_renames(value: Any) -> Any:
    """The node that a chain of aliases, which passes remove, begins with."""
    while isinstance(value, fx.Node) and value.target in _RENAMES:
        value = value.args[0]
    return value


def _nodes_in(tree: Any) -> list[fx.Node]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, fx.Node)]


def _nodes_after(graph: fx.Graph, last: fx.Node | None) -> tuple[fx.Node, ...]:
    nodes: list[fx.Node] = []
    for node in reversed(graph.nodes):
        if node is last:
            break
        nodes.append(node)
    return tuple(reversed(nodes))


@dataclass(frozen=True)
class WrittenCall:
    """An operator as it was written, in terms of the graph that is compiled.

    Attributes:
        node: of the graph as it was written.
        args: with nodes of the compiled graph for values.
        kwargs: likewise.
        result: a node of the compiled graph, or a tuple of such.
        place: where in the compiled graph its first result is made.
    """

    node: fx.Node
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any
    place: fx.Node


@dataclass
class Written:
    """A graph as it was written.

    Attributes:
        graph: has a node for each operator that was taken apart, in place of what became of it. It
            is there to be read, not to be run.
        calls: by its nodes.
    """

    graph: fx.Graph
    calls: dict[fx.Node, WrittenCall] = field(default_factory=dict)


def as_written(gm: fx.GraphModule, decomposed: Iterable[Decomposed]) -> Written:
    """Undo decompositions, as far as the compiled graph has the values of what was written.

    One of which all results are gone, or an argument that it reads, or of which a part is used
    elsewhere, stays as the operators that it was made of.
    """
    found = list(_found(gm.graph, decomposed))
    if not found:
        calls = {node: _as_it_is(node, node) for node in gm.graph.nodes if is_call(node)}
        return Written(gm.graph, calls)
    return _Rewriting(gm, found).written


def _as_it_is(node: fx.Node, compiled: fx.Node) -> WrittenCall:
    return WrittenCall(node, compiled.args, compiled.kwargs, compiled, compiled)


@dataclass(frozen=True)
class _Found:
    """A decomposition with nodes of the compiled graph."""

    operator: OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any
    value: Any
    made: frozenset[fx.Node]
    place: fx.Node


def _found(graph: fx.Graph, decomposed: Iterable[Decomposed]) -> Iterator[_Found]:
    named = {node.name: node for node in graph.nodes if node.meta.get(_NAME) == node.name}
    order = {node: index for index, node in enumerate(graph.nodes)}
    sizes = binders(graph)

    def read(value: Any, unread: frozenset[fx.Node]) -> Any:
        if isinstance(value, fx.Node):
            return named.get(value.name, _UNREAD) if value in unread else named[value.name]
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return sizes[symbol_of(value) or ""]
        return value

    def made_of(value: Any) -> Any:
        return named.get(value.name, _UNUSED) if isinstance(value, fx.Node) else value

    taken: set[fx.Node] = set()
    for each in decomposed:
        try:
            given = functools.partial(read, unread=each.unread)
            args, kwargs = tree_map(given, (each.args, each.kwargs))
        except KeyError:
            continue
        result = tree_map(made_of, each.result)
        made = {named[node.name] for node in each.made if node.name in named}
        made = {node for node in made if is_call(node)}
        results = _nodes_in(result)
        place = min(results, key=order.__getitem__, default=None)
        if place is None or not made.issuperset(results) or made & taken:
            continue
        is_late = any(order[node] > order[place] for node in _nodes_in((args, kwargs)))
        if not is_late and not _is_used_elsewhere(made.difference(results), made):
            taken |= made
            value = tree_map(_value_of, each.result)
            yield _Found(each.operator, args, kwargs, result, value, frozenset(made), place)


def _value_of(value: Any) -> Any:
    return value_of(value) if isinstance(value, fx.Node) else value


def _is_used_elsewhere(nodes: Iterable[fx.Node], made: set[fx.Node]) -> bool:
    users = (user for node in nodes for user in node.users)
    return any(user.op != "output" and user not in made for user in users)


class _Rewriting:
    """Makes the graph as it was written."""

    def __init__(self, gm: fx.GraphModule, found: Iterable[_Found]) -> None:
        self.written = Written(fx.Graph())
        self.written.graph.owning_module = gm
        self._names = {node.name for node in gm.graph.nodes}
        self._copies: dict[fx.Node, fx.Node] = {}
        found_at = {each.place: each for each in found}
        inside = {node for each in found_at.values() for node in each.made}
        for node in gm.graph.nodes:
            if node in found_at:
                self._add_whole(found_at[node])
            elif node not in inside and node.op != "output":
                self._add(node)

    def _add(self, node: fx.Node) -> None:
        args, kwargs = fx.map_arg((node.args, node.kwargs), self._copies.__getitem__)
        copy = named_copy(self.written.graph, node, node.op, node.target, args, kwargs)
        copy.meta = dict(node.meta)
        self._copies[node] = copy
        if is_call(node):
            self.written.calls[copy] = _as_it_is(copy, node)

    def _add_whole(self, found: _Found) -> None:
        graph = self.written.graph
        args, kwargs = tree_map(self._copy_of, (found.args, found.kwargs))
        node = graph.call_function(found.operator, args, kwargs)
        node.name = self._unused(_torch_private.node_name_of(found.operator))
        node.meta = dict(found.place.meta)
        node.meta["val"] = found.value
        call = WrittenCall(node, found.args, found.kwargs, found.result, found.place)
        self.written.calls[node] = call
        if isinstance(found.result, fx.Node):
            self._copies[found.result] = node
            return
        for index, each in enumerate(found.result):
            if isinstance(each, fx.Node):
                self._copies[each] = graph.call_function(operator.getitem, (node, index))
                self._copies[each].meta = dict(each.meta)

    def _copy_of(self, value: Any) -> Any:
        if isinstance(value, NotHandedOut):
            return None
        return self._copies[value] if isinstance(value, fx.Node) else value

    def _unused(self, name: str) -> str:
        names = (name, *(f"{name}_{number}" for number in range(1, len(self._names) + 2)))
        unused = next(each for each in names if each not in self._names)
        self._names.add(unused)
        return unused
