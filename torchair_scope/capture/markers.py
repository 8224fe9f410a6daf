"""TorchAir's marker operators: `scope_enter` and `scope_exit`, which stand between the operators.

They have no data edges, so a graph can only be cut when they are lifted into `node.meta`: those
of `data_dump` become tags, those of other scopes (streams, core limits, super kernels) are put
back, in balanced pairs, around exactly their operators in each part.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from torchair_scope.capture.tags import UNKNOWN, Tag, put_tag, tag_of

META = "torchair_scope_markers"
NAMESPACES = ("air", "npugraph_ex")
DATA_DUMP = ("torchair_enable_data_dump", "True")


class Marker(NamedTuple):
    """One `scope_enter`: its arguments, and which of the graph's it is."""

    namespace: str
    keys: tuple[str, ...]
    values: tuple[str, ...]
    serial: int


def markers_of(node: torch.fx.Node) -> tuple[Marker, ...]:
    """The scopes other than dump scopes that a node stands in, outermost first."""
    return tuple(node.meta.get(META, ()))


def has_dump_markers(graph: torch.fx.Graph) -> bool:
    """Whether an operator stands between the markers of TorchAir's own `data_dump`."""
    depth = 0
    open_scopes: list[bool] = []
    for node in graph.nodes:
        if _is(node, "scope_enter"):
            open_scopes.append(DATA_DUMP in _pairs(node))
            depth += open_scopes[-1]
        elif _is(node, "scope_exit") and open_scopes:
            depth -= open_scopes.pop()
        elif depth and node.op == "call_function":
            return True
    return False


def lift_markers(graph: torch.fx.Graph) -> None:
    """Turn the graph's markers into tags and `node.meta`.

    Raises:
        ValueError: the markers are not balanced.
    """
    serials = itertools.count()
    stack: list[tuple[bool, Marker | None]] = []
    for node in list(graph.nodes):
        if _is(node, "scope_enter"):
            stack.append(_opened(node, next(serials)))
            graph.erase_node(node)
        elif _is(node, "scope_exit"):
            if not stack:
                raise ValueError("the graph has a scope_exit without a scope_enter")
            stack.pop()
            graph.erase_node(node)
        elif node.op not in ("placeholder", "get_attr", "output"):
            node.meta[META] = tuple(marker for _, marker in stack if marker is not None)
            if any(dumps for dumps, _ in stack) and tag_of(node) is None:
                put_tag(node, Tag("data_dump", UNKNOWN))
    if stack:
        raise ValueError("the graph has a scope_enter without a scope_exit")


def lower_markers(graph: torch.fx.Graph) -> None:
    """Put markers around the operators of each scope, a pair for each unbroken run of them."""
    _bracket(graph, {node: markers_of(node) for node in graph.nodes})


def lower_tags(graph: torch.fx.Graph, namespace: str) -> None:
    """Put TorchAir's `data_dump` markers around the tagged operators, for its own dumps."""
    keys, values = zip(DATA_DUMP, strict=True)
    marker = Marker(namespace, keys, values, -1)
    _bracket(graph, {node: (marker,) if tag_of(node) else () for node in graph.nodes})


def _bracket(graph: torch.fx.Graph, wanted: dict[torch.fx.Node, Sequence[Marker]]) -> None:
    is_open: list[Marker] = []
    for node in list(graph.nodes):
        if node.op in ("placeholder", "get_attr"):
            continue
        scopes = list(wanted[node])
        shared = _shared_length(is_open, scopes)
        with graph.inserting_before(node):
            for marker in reversed(is_open[shared:]):
                graph.call_function(_operator(marker.namespace, "scope_exit"), ())
            for marker in scopes[shared:]:
                arguments = (list(marker.keys), list(marker.values))
                graph.call_function(_operator(marker.namespace, "scope_enter"), arguments)
        is_open = scopes


def _shared_length(first: Sequence[Marker], second: Sequence[Marker]) -> int:
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))
    return len(list(same))


def _opened(node: torch.fx.Node, serial: int) -> tuple[bool, Marker | None]:
    """Whether a `scope_enter` opens a dump scope, and the marker of what else it opens."""
    others = [pair for pair in _pairs(node) if pair != DATA_DUMP]
    if not others:
        return True, None
    keys, values = zip(*others, strict=True)
    dumps = len(others) < len(_pairs(node))
    return dumps, Marker(node.target.namespace, keys, values, serial)  # type: ignore[union-attr]


def _pairs(node: torch.fx.Node) -> list[tuple[str, str]]:
    keys, values = node.args[:2]
    return list(zip(_texts(keys), _texts(values), strict=True))


def _texts(argument: object) -> Iterable[str]:
    return [str(item) for item in argument] if isinstance(argument, (list, tuple)) else []


def _is(node: torch.fx.Node, name: str) -> bool:
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target.namespace not in NAMESPACES:
        return False
    return target._schema.name == f"{target.namespace}::{name}"


def _operator(namespace: str, name: str) -> torch._ops.OpOverload:
    operator: torch._ops.OpOverload = getattr(getattr(torch.ops, namespace), name).default
    return operator
