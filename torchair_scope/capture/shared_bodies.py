"""Nested compile regions: one body for calls inside a scope and calls outside of it.

Dynamo traces a region at its first call, and all calls share that graph with the tags of the first
call. Here calls in another scope get a copy, tagged as if it had been traced where they are, so
that the compiler compiles the one and the interpreter runs the other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

import torch

from torchair_scope.capture.tags import Tag, put_tag, tag_of
from torchair_scope.capture.targets import body_of, name_of


class _Call(NamedTuple):
    owner: torch.fx.GraphModule
    node: torch.fx.Node
    body: torch.fx.GraphModule


class _Move(NamedTuple):
    """From the scope that a body was traced in to that of another call; `mark` names the copy."""

    before: Tag | None
    after: Tag | None
    mark: str


def separate_shared_bodies(gm: torch.fx.GraphModule) -> None:
    """Give the calls of a nested compile region a body of their own in each scope."""
    calls: dict[torch.fx.GraphModule, list[_Call]] = defaultdict(list)
    for call in _calls(gm, set()):
        calls[call.body].append(call)
    for sharing in calls.values():
        _separate(sharing)


def _separate(calls: list[_Call]) -> None:
    traced_in = tag_of(calls[0].node)
    copies: dict[Tag | None, tuple[torch.fx.GraphModule, str]] = {}
    for owner, node, body in calls:
        tag = tag_of(node)
        if tag == traced_in:
            continue
        if tag not in copies:
            move = _Move(traced_in, tag, f"_scope_{len(copies)}")
            copies[tag] = (_moved_copy(body, move), move.mark)
        _give_body(owner, node, *copies[tag])


def _calls(gm: torch.fx.GraphModule, seen: set[torch.fx.GraphModule]) -> Iterator[_Call]:
    """The calls of regions in the order that Dynamo traced them, each body once."""
    if gm in seen:
        return
    seen.add(gm)
    for node in gm.graph.nodes:
        for argument in node.all_input_nodes:
            body = body_of(argument)
            if body is None:
                continue
            if name_of(node) == "invoke_subgraph":
                yield _Call(gm, node, body)
            yield from _calls(body, seen)


def _give_body(
    owner: torch.fx.GraphModule, node: torch.fx.Node, body: torch.fx.GraphModule, mark: str
) -> None:
    """Let a call run another body; the identifier is what compilers know a body by."""
    shared, identifier, *operands = node.args
    assert isinstance(shared, torch.fx.Node)
    name = f"{shared.target}{mark}"
    if not hasattr(owner, name):
        owner.add_module(name, body)
    with node.graph.inserting_before(node):
        own = node.graph.create_node("get_attr", name)
    own.meta = dict(shared.meta)
    node.args = (own, f"{identifier}{mark}", *operands)
    if not shared.users:
        node.graph.erase_node(shared)
    owner.recompile()


def _moved_copy(body: torch.fx.GraphModule, move: _Move) -> torch.fx.GraphModule:
    graph = torch.fx.Graph()
    copies: dict[torch.fx.Node, torch.fx.Node] = {}
    for node in body.graph.nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
        put_tag(copies[node], _moved(tag_of(node), move))
    copy = torch.fx.GraphModule(body, graph)
    copy.meta = dict(body.meta)
    for node in list(graph.nodes):
        inner = body_of(node)
        if inner is not None:
            setattr(copy, str(node.target), _moved_copy(inner, move))
        if name_of(node) == "invoke_subgraph":
            node.args = (node.args[0], f"{node.args[1]}{move.mark}", *node.args[2:])
    copy.recompile()
    return copy


def _moved(tag: Tag | None, move: _Move) -> Tag | None:
    """The tag that a node of the body would have if it had been traced at the other call."""
    outside = "" if move.before is None else move.before.scope
    if tag is None or tag == move.before:
        return move.after
    opened_inside = tag.scope.removeprefix(f"{outside}/") if outside else tag.scope
    around = "" if move.after is None else f"{move.after.scope}/"
    return tag._replace(scope=around + opened_inside)
