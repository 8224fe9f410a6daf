"""Which nodes may share memory, and which write to it: read from the operators' schemas."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import fx
from torch._ops import OpOverload

from torchair_scope.capture.symbols import is_symbolic, value_of
from torchair_scope.capture.targets import (
    body_nodes,
    is_call,
    is_functional,
    is_opaque,
    is_plain_python,
    name_of,
    operands,
)

# Dynamo refuses branches that return a view of an operand.
_RETURNS_NEW_MEMORY = {"cond"}
_NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool, int, float)
_WRITES_FIRST_ARGUMENT = {
    *("iadd", "iand", "iconcat", "ifloordiv", "ilshift", "imatmul", "imod", "imul", "ior"),
    *("ipow", "irshift", "isub", "itruediv", "ixor", "setitem", "delitem"),
}


def written_by(node: fx.Node) -> list[fx.Node]:
    """The nodes whose memory the node writes to.

    A node that nothing is known about, or with a body that writes, counts as writing all it uses.
    """
    if is_opaque(node):
        return operands(node)
    if isinstance(node.target, OpOverload):
        return _given_to(node, _annotations(node.target).written)
    if is_plain_python(node):
        return list(_nodes_in(node.args[:1])) if name_of(node) in _WRITES_FIRST_ARGUMENT else []
    return operands(node) if any(map(written_by, body_nodes(node))) else []


def shared_by(node: fx.Node) -> list[fx.Node]:
    """The nodes whose memory the node's value may share, as a view does."""
    if is_opaque(node):
        return operands(node)
    if isinstance(node.target, OpOverload):
        return _given_to(node, _annotations(node.target).shared)
    if is_symbolic(node) or is_functional(node) or name_of(node) in _RETURNS_NEW_MEMORY:
        return []
    return [operand for operand in operands(node) if not isinstance(value_of(operand), _NUMBERS)]


def storages(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """For each node a representative of all the nodes that may share memory with it.

    Every placeholder is memory of its own; views are followed from there.
    """
    parent: dict[fx.Node, fx.Node] = {node: node for node in graph.nodes}
    attributes: dict[Any, fx.Node] = {}

    def find(node: fx.Node) -> fx.Node:
        while parent[node] is not node:
            parent[node] = parent[parent[node]]
            node = parent[node]
        return node

    for node in graph.nodes:
        if node.op == "get_attr":
            parent[node] = attributes.setdefault(node.target, node)
        elif is_call(node):
            for other in shared_by(node):
                parent[find(node)] = find(other)
    return {node: find(node) for node in graph.nodes}


def aliased_write(
    nodes: Iterable[fx.Node], inputs: Iterable[fx.Node], storage: dict[fx.Node, fx.Node]
) -> fx.Node | None:
    """The first node that writes to memory which more than one input lies in; None if none does.

        storage = storages(gm.graph)
        aliased_write(region.nodes, region.inputs, storage)

    A compiler that takes its inputs to be memory of their own (`compile_fx_inner` does) may put
    such a write before a read through another input, which gives wrong results. AOTAutograd, as in
    `standalone_compile`, sees from the inputs' fake values that they share memory, and is safe.
    """
    seen: set[fx.Node] = set()
    shared: set[fx.Node] = set()
    for node in inputs:
        (shared if storage[node] in seen else seen).add(storage[node])
    writes = (node for node in nodes if shared)
    return next(
        (node for node in writes if shared & {storage[to] for to in written_by(node)}), None
    )


class _Annotations(NamedTuple):
    """The names of an operator's arguments that it writes, and that its result may be a view of."""

    written: frozenset[str]
    shared: frozenset[str]


@functools.cache
def _annotations(target: OpOverload) -> _Annotations:
    schema = target._schema
    aliases = {argument.name: argument.alias_info for argument in schema.arguments}
    annotated = {name: alias for name, alias in aliases.items() if alias is not None}
    written = frozenset(name for name, alias in annotated.items() if alias.is_write)
    if torch.Tag.inplace_view in target.tags:
        # `set_` makes its first argument a view of its second.
        return _Annotations(written, frozenset(aliases))
    if all(result.alias_info is None for result in schema.returns):
        return _Annotations(written, frozenset())
    return _Annotations(written, frozenset(annotated))


def _given_to(node: fx.Node, names: frozenset[str]) -> list[fx.Node]:
    """The nodes among the arguments of these names."""
    if not names or not isinstance(node.target, OpOverload):
        return []
    positional = zip(node.target._schema.arguments, node.args, strict=False)
    given = [value for argument, value in positional if argument.name in names]
    given += [value for name, value in node.kwargs.items() if name in names]
    return list(_nodes_in(given))


def _nodes_in(value: Any) -> Iterator[fx.Node]:
    if isinstance(value, fx.Node):
        yield value
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from _nodes_in(part)
