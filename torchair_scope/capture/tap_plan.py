"""Where the values of tapped calls come from, once a region of compiled code has run."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch.utils._pytree import tree_map

from torchair_scope.capture.partition import Region
from torchair_scope.capture.symbols import is_symbolic, value_of
from torchair_scope.capture.targets import is_token
from torchair_scope.capture.written import NotHandedOut, WrittenCall

_NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool, int, float)


@dataclass(frozen=True)
class Plan:
    """How the calls of one region get their values.

    Attributes:
        calls: with a node for each value that is there after `derived` is made.
        inputs: the inputs of the region that are read.
        taps: the values that the compiled code has to return beyond its own outputs.
        derived: nodes that are run on the values that are there: views, and numbers. They cost no
            output, and so no output is a view of another one.
    """

    calls: tuple[WrittenCall, ...]
    inputs: tuple[fx.Node, ...]
    taps: tuple[fx.Node, ...]
    derived: tuple[fx.Node, ...]


def plan_taps(region: Region, calls: Iterable[WrittenCall]) -> Plan:
    """Plan for calls that are in a region."""
    return _Planner(region).plan(calls)


class _Planner:
    def __init__(self, region: Region) -> None:
        self._inside = set(region.nodes)
        self._outputs = set(region.outputs)
        self._sources: dict[fx.Node, Any] = {}
        self._inputs: list[fx.Node] = []
        self._taps: list[fx.Node] = []
        self._derived: list[fx.Node] = []

    def plan(self, calls: Iterable[WrittenCall]) -> Plan:
        planned = tuple(
            replace(
                call,
                args=tree_map(self._source, call.args),
                kwargs=tree_map(self._source, call.kwargs),
                result=tree_map(self._source, call.result),
            )
            for call in calls
        )
        return Plan(planned, tuple(self._inputs), tuple(self._taps), tuple(self._derived))

    def _source(self, value: Any) -> Any:
        """A node whose value will be there, a tree of such, or what stands in its place."""
        if not isinstance(value, fx.Node):
            return value
        if value not in self._sources:
            self._sources[value] = self._find(value)
        return self._sources[value]

    def _find(self, node: fx.Node) -> Any:
        if node.op == "get_attr":
            return node
        if node not in self._inside:
            self._inputs.append(node)
            return node
        if node in self._outputs:
            return node
        if self._is_derived(node):
            for used in node.all_input_nodes:
                self._source(used)
            self._derived.append(node)
            return node
        return self._tapped(node, value_of(node))

    def _is_derived(self, node: fx.Node) -> bool:
        if is_view(node):
            return True
        if node.target is operator.getitem:
            producer = node.all_input_nodes[0]
            return producer in self._inside and self._is_derived(producer)
        return is_symbolic(node) and all(
            used not in self._inside or self._is_derived(used) for used in node.all_input_nodes
        )

    def _tapped(self, node: fx.Node, value: Any) -> Any:
        if is_token(node):
            return NotHandedOut("an effect token")
        if isinstance(value, (torch.Tensor, *_NUMBERS)):
            self._taps.append(node)
            return node
        if not isinstance(value, (tuple, list, dict)):
            return _without_node(value)
        elements = _elements(node)
        sources = {
            key: self._source(elements[key]) if key in elements else _without_node(item)
            for key, item in _items(value)
        }
        return sources if isinstance(value, dict) else type(value)(sources.values())


def unpack(node: fx.Node) -> None:
    """Give each tensor in the result of a node a node of its own."""
    value = value_of(node)
    if not isinstance(value, (tuple, list, dict)) or is_view(node):
        return
    known = _elements(node)
    for key, item in _items(value):
        if isinstance(item, torch.Tensor) and key not in known:
            with node.graph.inserting_after(node):
                element = node.graph.call_function(operator.getitem, (node, key))
            element.meta["val"] = item


def is_view(node: fx.Node) -> bool:
    """Whether a node computes nothing: it only looks at the memory of another one."""
    return isinstance(node.target, OpOverload) and node.target.is_view


def _items(value: Any) -> Iterable[tuple[Any, Any]]:
    return value.items() if isinstance(value, dict) else enumerate(value)


def _elements(node: fx.Node) -> dict[Any, fx.Node]:
    elements: dict[Any, fx.Node] = {}
    for user in node.users:
        if user.target is operator.getitem and user.args[0] is node:
            elements.setdefault(user.args[1], user)
    return elements


def _without_node(value: Any) -> Any:
    return None if value is None else NotHandedOut(f"a value of type {type(value).__name__}")
