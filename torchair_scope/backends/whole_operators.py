"""Operators in a scope stay whole, as the user wrote them.

Inductor takes operators apart while it traces (a batch norm becomes some twenty primitives), and
its joint-graph passes merge, fold and replace others. In a scope neither may happen: what is
dumped has the same operators with every inner compiler, in an eager golden run and on an NPU,
and no pass makes a tagged node into an untagged one.
"""

from __future__ import annotations

import contextlib
import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from torchair_scope import _torch_private
from torchair_scope.capture.tags import KEY_OF_BODIES, Tag, tag_in, tag_of
from torchair_scope.capture.targets import name_of
from torchair_scope.capture.written import DecomposedOperators


def keep_whole(
    table: Mapping[Any, Callable[..., Any]],
    is_kept: Callable[[Tag], bool],
    decomposed: DecomposedOperators,
) -> dict[Any, Callable[..., Any]]:
    """The same decompositions, for all operators but those that are traced in some scopes.

    Args:
        table: decompositions by operator overload.
        is_kept: whether the operators of a scope are kept whole.
        decomposed: is told of those in scopes that are not.
    """
    return {
        target: _outside_scopes(target, decomposition, is_kept, decomposed)
        for target, decomposition in table.items()
    }


def _outside_scopes(
    target: Any,
    decomposition: Callable[..., Any],
    is_kept: Callable[[Tag], bool],
    decomposed: DecomposedOperators,
) -> Callable[..., Any]:
    @functools.wraps(decomposition)
    def decompose(*args: Any, **kwargs: Any) -> Any:
        tag = tag_of_traced(_torch_private.annotations_of_traced_operator())
        if tag is None:
            return decomposition(*args, **kwargs)
        if is_kept(tag):
            return NotImplemented
        return decomposed.trace(target, decomposition, args, kwargs)

    return decompose


def tag_of_traced(annotations: Mapping[str, Any]) -> Tag | None:
    """The scope that an operator with these annotations lies in, or that its body has."""
    tag = tag_in(annotations)
    if tag is None and KEY_OF_BODIES in annotations and _torch_private.traces_a_body():
        return Tag(*annotations[KEY_OF_BODIES])
    return tag


class HiddenOperator:
    """Stands for an operator where passes look for operators they know: they do not know it."""

    def __init__(self, operator: torch._ops.OpOverload) -> None:
        self.operator = operator
        self.__name__ = f"hidden_{operator.__name__}"
        self.__module__ = __name__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the operator: passes that fold constants do."""
        return self.operator(*args, **kwargs)

    def __repr__(self) -> str:
        return f"hidden {self.operator}"


@functools.cache
def _hidden(operator: torch._ops.OpOverload) -> HiddenOperator:
    return HiddenOperator(operator)


def hide_operators(graph: torch.fx.Graph, is_kept: Callable[[Tag], bool]) -> None:
    """Hide the operators of some scopes; those that have side effects are to be known by them."""
    for node in graph.nodes:
        tag = tag_of(node)
        if tag is None or not is_kept(tag) or not isinstance(node.target, torch._ops.OpOverload):
            continue
        if not node.target._schema.is_mutable and not node.is_impure():
            node.target = _hidden(node.target)


def show_operators(graph: torch.fx.Graph) -> None:
    """Put the operators back that `hide_operators` hid."""
    for node in graph.nodes:
        if isinstance(node.target, HiddenOperator):
            node.target = node.target.operator


@contextlib.contextmanager
def keeping_meta(graph: torch.fx.Graph) -> Iterator[None]:
    """Give the nodes that a pass puts in the place of others the tag and source line of these.

    A node's replacement stands where it stood: between the same two nodes that stay.
    """
    before = list(graph.nodes)
    takes_floats = {node for node in before if any(map(_is_float, node.all_input_nodes))}
    yield
    stayed = set(graph.nodes)
    replaced = _by_predecessor(before, stayed)
    for predecessor, new_nodes in _by_predecessor(graph.nodes, set(before)).items():
        origins = [node for node in replaced.get(predecessor, ()) if node in takes_floats]
        _pass_meta_on(origins, new_nodes)


def _is_float(node: torch.fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.SymFloat)


def _by_predecessor(
    nodes: Iterable[torch.fx.Node], shared: set[torch.fx.Node]
) -> dict[torch.fx.Node | None, list[torch.fx.Node]]:
    """The nodes that are not shared, by the last shared node before them."""
    predecessor: torch.fx.Node | None = None
    others: dict[torch.fx.Node | None, list[torch.fx.Node]] = defaultdict(list)
    for node in nodes:
        if node in shared:
            predecessor = node
        else:
            others[predecessor].append(node)
    return others


def _pass_meta_on(replaced: list[torch.fx.Node], replacements: list[torch.fx.Node]) -> None:
    """Pair operators by name, in order; what comes before is a number on its way to a tensor."""
    origins = iter(replaced)
    origin = next(origins, None)
    made: torch.fx.Node | None = None
    for node in replacements:
        if origin is not None and name_of(node) == name_of(origin):
            node.meta = {**origin.meta, **node.meta}
            made, origin = node, next(origins, None)
        elif made is not None and made in node.all_input_nodes:
            node.meta = {**made.meta, **node.meta}
