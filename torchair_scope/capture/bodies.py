"""Scopes in the bodies of operators that run graphs: the branches of `cond`, the body of a loop."""

from __future__ import annotations

import warnings

import torch

from torchair_scope.capture.tags import Tag, tag_of
from torchair_scope.capture.targets import bodies


def tag_or_body_tag_of(node: torch.fx.Node) -> Tag | None:
    """The tag of an operator, or the first in its bodies.

    An operator with a scope in its body is run by the interpreter: a body is a part of the
    operator's argument, and operators in a scope, which stay whole, are not for the compiler.
    """
    tag = tag_of(node)
    return tag if tag is not None else next(iter(_tags_in_bodies(node)), None)


def warn_of_tagged_bodies(graph: torch.fx.Graph) -> None:
    """Say which scopes lie in a body, of which only the operator around it is dumped."""
    for node in graph.nodes:
        for tag in dict.fromkeys(_tags_in_bodies(node)):
            warnings.warn(
                f"scope {tag.scope!r} opened at {tag.opened_at} lies in the body of {node.target}: "
                f"{node.name} is dumped as one operator, the operators in its body are not. Put "
                "the scope around code outside of control flow to have its operators dumped.",
                stacklevel=2,
            )


def _tags_in_bodies(node: torch.fx.Node) -> list[Tag]:
    tags: list[Tag] = []
    for body in bodies(node):
        for inner in body.graph.nodes:
            tag = tag_of(inner) if inner.op.startswith("call_") else None
            tags.extend(_tags_in_bodies(inner) if tag is None else [tag])
    return tags
