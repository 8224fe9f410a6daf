"""Which calls of a graph are saved, those in the bodies of its operators included."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from torchair_scope.capture import nodes
from torchair_scope.capture.account import number_of
from torchair_scope.capture.bodies import (
    Label,
    called_bodies,
    given_operator,
    place_of,
    runs_fused,
    tags_in_bodies,
)
from torchair_scope.capture.effects import is_irreproducible
from torchair_scope.capture.markers import markers_of
from torchair_scope.capture.partition import has_own_kind
from torchair_scope.capture.settings import selects_this_rank
from torchair_scope.capture.tags import Tag, tag_of
from torchair_scope.options import EngineName, Options
from torchair_scope.store.manifest import plain

Facts = Mapping[str, Any]
Wanted = Callable[[torch.fx.Node, Tag | None], bool]
OptionsOf = Callable[[Tag | None], Options]


@dataclass(frozen=True)
class SavedCall:
    """A call that is saved, as it is known at compile time.

    Args:
        facts: entries of its record.
        tag: of the scope that it is saved for.
        number: of the tagged node that it counts for in the account.
        engine: the engine that obtains its values.
        only_border: whether these are only the values at the border of the scope, if it can.
        on_this_rank: whether this process is one of those that dump the scope.
    """

    facts: Facts
    tag: Tag | None = None
    number: str | None = None
    engine: EngineName = "interpret"
    only_border: bool = False
    on_this_rank: bool = True


@dataclass(frozen=True)
class Saved:
    """What is saved of one graph, by names of its nodes.

    Attributes:
        calls: the nodes whose calls are saved.
        bodies: for an operator with bodies what is saved of each, by position among its arguments.
        given: the operators that nodes are given to run, and whose calls are saved.
    """

    calls: Mapping[str, SavedCall] = field(default_factory=dict)
    bodies: Mapping[str, Mapping[int, SavedBody]] = field(default_factory=dict)
    given: Mapping[str, SavedOperator] = field(default_factory=dict)

    def holds(self, node: torch.fx.Node) -> bool:
        """Whether anything of a node is saved: its own calls, or some in its bodies."""
        return node.name in self.calls or node.name in self.bodies

    def by(self, engine: EngineName) -> Saved:
        """What one engine obtains the values of."""
        calls = {name: call for name, call in self.calls.items() if call.engine == engine}
        of_engine = self if engine == "interpret" else Saved()  # the only one that enters bodies
        return Saved(calls, of_engine.bodies, of_engine.given)

    def all_calls(self) -> Iterator[SavedCall]:
        """What is saved of the graph and of all bodies in it."""
        yield from self.calls.values()
        for bodies in self.bodies.values():
            for body in bodies.values():
                yield from body.saved.all_calls()


@dataclass(frozen=True)
class SavedBody:
    """What is saved of a body, and what the names of its calls begin with."""

    place: str
    label: Label
    saved: Saved


@dataclass(frozen=True)
class SavedOperator:
    """An operator that another one is given at a position of its arguments."""

    name: str
    position: int
    call: SavedCall


@dataclass(frozen=True)
class Selection:
    """Says of a graph what is saved.

    Args:
        wanted: whether an operator is saved, given the scope that it belongs to.
        options_of: the options of a scope; of None for what is dumped outside of any.
        direction: of the graph that is compiled: "forward", "backward" or "inference".
    """

    wanted: Wanted
    options_of: OptionsOf
    direction: str

    def of(self, graph: torch.fx.Graph) -> Saved:
        """What is saved of a graph."""
        return self._in(graph, None, {}, "")

    def _in(self, graph: torch.fx.Graph, outer: Tag | None, of_body: Facts, pattern: str) -> Saved:
        calls: dict[str, SavedCall] = {}
        inside: dict[str, Mapping[int, SavedBody]] = {}
        given: dict[str, SavedOperator] = {}
        for node in filter(has_own_kind, graph.nodes):
            tag = tag_of(node) or outer
            engine = self._engine(node, tag)
            saved_bodies = self._bodies(node, tag, pattern) if engine == "interpret" else {}
            if saved_bodies:
                inside[node.name] = saved_bodies
            if engine != "interpret" or not called_bodies(node):
                tag = tag or next(tags_in_bodies(node), None)
            if self.wanted(node, tag):
                listed = {**of_body, "listed_as": pattern + node.name} if of_body else {}
                facts = {**self._facts(node, tag), **listed}
                calls[node.name] = self._call(facts, tag, number_of(node), engine)
                operator = self._given(node, calls[node.name], pattern)
                if operator is not None:
                    given[node.name] = operator
        return Saved(calls, inside, given)

    def _call(
        self, facts: Facts, tag: Tag | None, number: str | None, engine: EngineName
    ) -> SavedCall:
        options = self.options_of(tag)
        only_border, on_this_rank = options.tap == "boundary", selects_this_rank(options)
        return SavedCall(plain(facts), tag, number, engine, only_border, on_this_rank)

    def _engine(self, node: torch.fx.Node, tag: Tag | None) -> EngineName:
        return engine_for(node, tag, self.options_of)

    def _bodies(self, node: torch.fx.Node, tag: Tag | None, pattern: str) -> dict[int, SavedBody]:
        found: dict[int, SavedBody] = {}
        for position, name, module, label in called_bodies(node):
            place = place_of(node)
            inner_pattern = f"{pattern}{place}{label.pattern}"
            saved = self._in(module.graph, tag, {"body": name}, inner_pattern)
            if saved.calls or saved.bodies:
                found[position] = SavedBody(place, label, saved)
        return found

    def _given(self, node: torch.fx.Node, call: SavedCall, pattern: str) -> SavedOperator | None:
        found = given_operator(node)
        if found is None:
            return None
        position, operator = found
        name = place_of(node) + nodes.short_name(operator)
        own = {k: v for k, v in call.facts.items() if k not in ("operator", "listed_as")}
        facts = {**own, "listed_as": pattern + name}
        return SavedOperator(name, position, replace(call, facts=facts))

    def _facts(self, node: torch.fx.Node, tag: Tag | None) -> dict[str, Any]:
        """What a call record says beyond its arguments and results."""
        facts: dict[str, Any] = {
            "scope": tag.scope if tag else None,
            "opened_at": tag.opened_at if tag else None,
        }
        if nodes.operator_name(node) != nodes.target_name(node):
            facts["operator"] = nodes.operator_name(node)
        if is_irreproducible(node):
            facts["nondeterministic"] = True
        if self.direction == "backward" and nodes.is_of_forward(node):
            facts["recompute"] = True
        if runs_fused(node):
            facts["bodies"] = "fused"
        if markers_of(node):
            facts["scopes_not_in_force"] = [
                dict(zip(marker.keys, marker.values, strict=True)) for marker in markers_of(node)
            ]
        return facts


def engine_for(node: torch.fx.Node, tag: Tag | None, options_of: OptionsOf) -> EngineName:
    """The engine for a node with this tag: what runs in bodies can only be interpreted with it."""
    scopes: list[Tag | None] = [*tags_in_bodies(node)]
    if tag is not None or not scopes:
        scopes.append(tag)
    engines = {options_of(each).engine for each in scopes}
    return "tap" if engines == {"tap"} else "interpret"


def warn_of_closed_bodies(graph: torch.fx.Graph, options_of: OptionsOf) -> None:
    """Say which scopes lie in a body of which the operators cannot be saved one by one."""
    for node in graph.nodes:
        tags = dict.fromkeys(tags_in_bodies(node))
        if engine_for(node, tag_of(node), options_of) == "tap":
            for tag in (tag for tag in tags if tag != tag_of(node)):
                warnings.warn(
                    f"scope {tag.scope!r} opened at {tag.opened_at} lies in a body of "
                    f"{node.target}, out of which compiled code hands no values: {node.name} is "
                    "dumped as one operator. Open the scope with engine='interpret' to have the "
                    "operators in it dumped.",
                    stacklevel=2,
                )
            continue
        for module in (body.module for body in called_bodies(node)):
            warn_of_closed_bodies(module.graph, options_of)
        if called_bodies(node) or runs_fused(node):
            continue
        for tag in tags:
            warnings.warn(
                f"scope {tag.scope!r} opened at {tag.opened_at} lies in the body of {node.target}, "
                f"an operator that is not known to call it and no more: {node.name} is dumped as "
                "one operator, those in its body are not. Put the scope around code outside of it "
                "to have its operators dumped.",
                stacklevel=2,
            )


def describe_nodes(graph: torch.fx.Graph) -> list[dict[str, Any]]:
    """The operators of a graph and of its bodies, as the graph record of a manifest lists them."""
    return list(_described(graph, None, {}, ""))


def _described(
    graph: torch.fx.Graph, outer: Tag | None, of_body: Facts, pattern: str
) -> list[dict[str, Any]]:
    listed: list[dict[str, Any]] = []
    for node in graph.nodes:
        if not node.op.startswith("call_"):
            continue
        tag = tag_of(node) or outer
        entry = nodes.describe_node(node, tag)
        listed.append({**entry, "name": pattern + node.name, **of_body})
        operator = given_operator(node)
        if operator is not None:
            name = place_of(node) + nodes.short_name(operator[1])
            true = {"target": str(operator[1]), "operator": str(operator[1]), "output": None}
            listed.append({**entry, **true, "name": pattern + name, **of_body})
        for _, name, module, label in called_bodies(node):
            inner = f"{pattern}{place_of(node)}{label.pattern}"
            listed.extend(_described(module.graph, tag, {"body": name}, inner))
    return listed
