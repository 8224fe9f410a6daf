"""Views that a part only takes of its inputs and hands out: they are not the compiler's to make.

TorchAir returns such a view by striding over the real input as the traced one was laid out, which
reads the wrong memory, or none, where a part before it has returned another layout.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch

from torchair_scope.capture.targets import operands


@dataclass(frozen=True)
class SplitOutputs:
    """The outputs of a part in two: what is computed, and what is a view of an input.

    Args:
        views: a module that takes the part's inputs and returns the views.
        computed: the positions of the other outputs, which the part is left with.
        viewed: the positions of the views.
    """

    views: torch.fx.GraphModule
    computed: tuple[int, ...]
    viewed: tuple[int, ...]

    def merge(self, views: tuple[object, ...], computed: tuple[object, ...]) -> tuple[object, ...]:
        """All outputs in the part's order."""
        values = dict(zip(self.viewed, views, strict=True))
        values.update(zip(self.computed, computed, strict=True))
        return tuple(values[position] for position in range(len(values)))


def split_off_views(gm: torch.fx.GraphModule) -> SplitOutputs | None:
    """Leave `gm` without the outputs that are views of its inputs; None if it has no such."""
    output = next(iter(reversed(gm.graph.nodes)))
    (values,) = output.args
    views = _views_of_inputs(gm.graph)
    viewed = tuple(index for index, value in enumerate(values) if value in views)
    if not viewed:
        return None
    computed = tuple(index for index in range(len(values)) if index not in viewed)
    graph = torch.fx.Graph()
    copies: dict[torch.fx.Node, torch.fx.Node] = {}
    for node in gm.graph.nodes:
        if node.op == "placeholder" or node in views:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[values[index]] for index in viewed))
    output.args = (tuple(values[index] for index in computed),)
    gm.graph.eliminate_dead_code(_must_stay)
    gm.recompile()
    return SplitOutputs(torch.fx.GraphModule(gm, graph), computed, viewed)


def is_view(node: torch.fx.Node) -> bool:
    """Whether the node is a view operator."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target.is_view


def _views_of_inputs(graph: torch.fx.Graph) -> set[torch.fx.Node]:
    views: set[torch.fx.Node] = set()
    for node in graph.nodes:
        if not is_view(node) and node.target is not operator.getitem:
            continue
        if all(source.op == "placeholder" or source in views for source in operands(node)):
            views.add(node)
    return views


def _must_stay(node: torch.fx.Node) -> bool:
    """Dead views go; everything else is left to the compiler's own judgement."""
    return not (is_view(node) or node.target is operator.getitem)
