"""Tags: what a scope leaves on the FX nodes that were traced inside it.

A tag is one entry of `node.meta["custom"]`, put there by `torch.fx.traceback.annotate`, which
also carries it into the forward and the backward ATen graph.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from torchair_scope.capture.targets import CARRIES_RANDOM_STATE, is_unpacking

KEY = "torchair_scope"
# A dict with the others, which AOTAutograd copies from forward to backward nodes, with mistakes in
# bodies.
KEY_IN_BACKWARD = "torchair_scope_in_backward"
KEY_OF_BODIES = "torchair_scope_of_bodies"
KEY_OF_GRADIENTS = "torchair_scope_of_gradients"
UNKNOWN = "unknown"

_KNOWN = ("custom", "partitioner_tag")
_SAVED_STATE = re.compile(r"rng_state_output_(\d+)")


class Tag(NamedTuple):
    """A scope as it stands on a node.

    Args:
        scope: its path, `outer/inner`.
        opened_at: where it was opened, `model.py:12`.
        options: the key of its options, for `torchair_scope.options.options_with_key`.
    """

    scope: str
    opened_at: str
    options: str = ""


def tag_in(annotations: Mapping[str, Any] | None) -> Tag | None:
    """The tag among the annotations of a node (the value of `node.meta["custom"]`)."""
    value = own_annotations(annotations).get(KEY)
    return Tag(*value) if value else None


def own_annotations(annotations: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Those annotations of a node that are right if they are of this package."""
    annotations = annotations or {}
    own: Mapping[str, Any] = annotations.get(KEY_IN_BACKWARD, annotations)
    return own


def tag_of(node: torch.fx.Node) -> Tag | None:
    """The tag of the innermost scope that `node` was born in, or None."""
    return tag_in(node.meta.get("custom"))


def put_tag(node: torch.fx.Node, tag: Tag | None) -> None:
    """Give a node a tag, or take the one away that it has."""
    # Nodes share these dicts: a new one is put in the place of the old.
    annotations = with_tag(node.meta.get("custom"), tag)
    if annotations or "custom" in node.meta:
        node.meta["custom"] = annotations


def annotate_node(node: torch.fx.Node, key: str, value: Any) -> None:
    """Give a node one more annotation."""
    node.meta["custom"] = {**(node.meta.get("custom") or {}), key: value}


def with_tag(annotations: Mapping[str, Any] | None, tag: Tag | None) -> dict[str, Any]:
    """The same annotations with another tag, or with none."""
    kept = {k: v for k, v in (annotations or {}).items() if k not in (KEY, KEY_IN_BACKWARD)}
    return kept if tag is None else {**kept, KEY: tuple(tag)}


def scope_of(node: torch.fx.Node) -> str | None:
    """The path of the innermost scope that `node` was born in (`outer/inner`), or None."""
    tag = tag_of(node)
    return None if tag is None else tag.scope


def has_tags(gm: torch.fx.GraphModule) -> bool:
    """Whether any operator of the graph, bodies of control flow included, was born in a scope."""
    return any(tag_of(node) is not None for node in _operators(gm))


def graphs_in(gm: torch.fx.GraphModule) -> Iterator[torch.fx.Graph]:
    """The graph of a module and those of the bodies in it."""
    modules = (module for module in gm.modules() if isinstance(module, torch.fx.GraphModule))
    return (module.graph for module in modules)


def _operators(gm: torch.fx.GraphModule) -> Iterator[torch.fx.Node]:
    nodes = (node for graph in graphs_in(gm) for node in graph.nodes)
    return (node for node in nodes if node.op.startswith("call_"))


class TagsOfRandomOperators:
    """Tags of random operators that run again in the backward, for those that took their place.

    AOTAutograd replaces them by operators that run them with a saved random state, and leaves what
    it knew of them on the nodes that unpack the results. In the backward there may be no such node;
    the saved states are numbered there as the operators in the forward.
    """

    def __init__(self) -> None:
        self._of_forward: list[dict[str, Any]] = []

    def restore(self, graph: torch.fx.Graph) -> None:
        """Put the tags on the nodes of a forward graph, and later on those of its backward."""
        for node in graph.nodes:
            name = getattr(node.target, "__name__", None)
            if name in CARRIES_RANDOM_STATE:
                known = self._known(node)
                if name == "run_and_save_rng_state":
                    self._of_forward.append(known)
                node.meta.update({key: known[key] for key in known if key not in node.meta})

    def _known(self, node: torch.fx.Node) -> dict[str, Any]:
        for user in node.users:
            if is_unpacking(user) and "partitioner_tag" in user.meta:
                return {key: user.meta[key] for key in _KNOWN if key in user.meta}
        state = _SAVED_STATE.fullmatch(str(node.args[0])) if node.args else None
        number = int(state[1]) if state else len(self._of_forward)
        return self._of_forward[number] if number < len(self._of_forward) else {}


def tag_what_stands_between(graph: torch.fx.Graph) -> None:
    """Tag nodes that come without a tag of their own, and stand between operators of a scope.

    These are the additions with which gradients are summed up in the backward: AOTAutograd
    annotates none of them, since a sum may join gradients from anywhere. One that joins values
    of a scope only belongs to it as well. And these are nodes without an origin, which a pass has
    put in the place of others.
    """
    sums = [node for node in graph.nodes if _is_sum_of_gradients(node)]
    known = set(sums)
    between = [node for node in graph.nodes if node in known or _has_no_origin(node)]
    made_of: dict[torch.fx.Node, Tag] = {}
    for node in between:
        sources = (made_of.get(source) or tag_of(source) for source in node.all_input_nodes)
        made_of.update((node, tag) for tag in filter(None, sources))
    used_in: dict[torch.fx.Node, Tag] = {}
    for node in reversed(between):
        uses = (used_in.get(user) or tag_of(user) for user in node.users)
        used_in.update((node, tag) for tag in filter(None, uses))
    for node in between:
        if node in made_of and node in used_in:
            _put_common_tag(node, [made_of[node], used_in[node]])
    for node in sums:
        _put_common_tag(node, [tag_of(source) for source in node.all_input_nodes])


def _is_sum_of_gradients(node: torch.fx.Node) -> bool:
    if node.meta.get("is_gradient_acc"):
        return True
    annotations = node.meta.get("custom") or {}
    return KEY_OF_GRADIENTS in annotations and node.target is torch.ops.aten.add.Tensor


def _has_no_origin(node: torch.fx.Node) -> bool:
    return node.op == "call_function" and not {"stack_trace", "seq_nr"} & node.meta.keys()


def _put_common_tag(node: torch.fx.Node, tags: Sequence[Tag | None]) -> None:
    """Tag `node` with the innermost scope that all the tags lie in, if there is one."""
    known = [tag for tag in tags if tag is not None]
    if tag_of(node) is not None or len(known) < len(tags):
        return
    path = _common_path([tag.scope.split("/") for tag in known])
    if path:
        options = {tag.options for tag in known}
        unknown = Tag(path, UNKNOWN, options.pop() if len(options) == 1 else "")
        put_tag(node, next((tag for tag in known if tag.scope == path), unknown))


def _common_path(paths: Sequence[Sequence[str]]) -> str:
    steps = itertools.takewhile(lambda step: len(set(step)) == 1, zip(*paths, strict=False))
    return "/".join(names[0] for names in steps)
