"""Tags: what a scope leaves on the FX nodes that were traced inside it.

A tag is one entry of `node.meta["custom"]`, put there by `torch.fx.traceback.annotate`, which
also carries it into the forward and the backward ATen graph.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

KEY = "torchair_scope"
UNKNOWN = "unknown"


class Tag(NamedTuple):
    """A scope as it stands on a node: its path (`outer/inner`) and where it was opened."""

    scope: str
    opened_at: str


def tag_in(annotations: Mapping[str, Any] | None) -> Tag | None:
    """The tag among the annotations of a node (the value of `node.meta["custom"]`)."""
    value = (annotations or {}).get(KEY)
    return None if value is None else Tag(*value)


def tag_of(node: torch.fx.Node) -> Tag | None:
    """The tag of the innermost scope that `node` was born in, or None."""
    return tag_in(node.meta.get("custom"))


def scope_of(node: torch.fx.Node) -> str | None:
    """The path of the innermost scope that `node` was born in (`outer/inner`), or None."""
    tag = tag_of(node)
    return None if tag is None else tag.scope


def has_tags(gm: torch.fx.GraphModule) -> bool:
    """Whether any operator of the graph, bodies of control flow included, was born in a scope."""
    return any(tag_of(node) is not None for node in _operators(gm))


def _operators(gm: torch.fx.GraphModule) -> Iterator[torch.fx.Node]:
    for module in gm.modules():
        if isinstance(module, torch.fx.GraphModule):
            for node in module.graph.nodes:
                if node.op.startswith("call_"):
                    yield node


def tag_gradient_sums(graph: torch.fx.Graph) -> None:
    """Tag the additions with which a scope's own gradients are summed up in the backward.

    AOTAutograd annotates none of them, since a sum may join gradients from anywhere. One that
    joins values of a scope only belongs to it, and so does one that stands between its operators.
    """
    sums = [node for node in graph.nodes if node.meta.get("is_gradient_acc")]
    for node in sums:
        if all(tag_of(source) is not None for source in node.all_input_nodes):
            _put_common_tag(node, node.all_input_nodes)
    for node in reversed(sums):
        if any(tag_of(source) is not None for source in node.all_input_nodes):
            _put_common_tag(node, list(node.users))


def _put_common_tag(node: torch.fx.Node, relatives: Sequence[torch.fx.Node]) -> None:
    tags = [tag_of(relative) for relative in relatives]
    if tag_of(node) is not None or not tags or None in tags:
        return
    known = [tag for tag in tags if tag is not None]
    path = "/".join(os.path.commonprefix([tag.scope.split("/") for tag in known]))
    if path:
        shared = next((tag for tag in known if tag.scope == path), Tag(path, UNKNOWN))
        node.meta["custom"] = {**(node.meta.get("custom") or {}), KEY: tuple(shared)}
