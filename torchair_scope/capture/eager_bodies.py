"""Operators with bodies in eager code: their bodies run node by node, under names of their own.

The names are those that the same code has when it is compiled (`bodies.py`). Torch compiles
`cond` and its like even in eager code, with a backend that leaves the graphs to Python. So bodies
are graphs there too, and their nodes tell the user's lines of code, and the scopes in them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch._ops import HigherOrderOperator, OperatorBase
from torch.fx.node import map_aggregate

from torchair_scope import _torch_private
from torchair_scope.capture.bodies import Label, as_returned, labels_of, numbered

AtNode = Callable[[torch.fx.Node], None]


class Names:
    """Gives the operators that run names, as FX gives them to the nodes of one graph.

    Args:
        place: what the names of calls begin with; empty outside of bodies.
    """

    def __init__(self, place: str = "") -> None:
        self.place = place
        self._graph = torch.fx.Graph()

    def node(
        self, operator: OperatorBase, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> torch.fx.Node:
        """An operator as a node, without tensors and bodies, for all that asks nodes."""
        name = _torch_private.node_name_of(operator)
        plain = map_aggregate((args, kwargs), _without_tensors)
        node = self._graph.create_node("call_function", operator, *plain, name=name)
        self._graph.erase_node(node)
        return node


def _without_tensors(value: Any) -> Any:
    return None if isinstance(value, (torch.Tensor, torch.nn.Module)) else value


class GraphRun(torch.fx.Interpreter):
    """Runs a graph, and tells which node's operators are about to run."""

    def __init__(self, gm: torch.fx.GraphModule, at_node: AtNode) -> None:
        super().__init__(gm)
        self.extra_traceback = False  # An exception of the user's stays what it is.
        self._at_node = at_node

    def run_node(self, n: torch.fx.Node) -> Any:
        """Run one node."""
        self._at_node(n)
        return super().run_node(n)


def watched_bodies(
    operator: HigherOrderOperator,
    args: tuple[Any, ...],
    place: str,
    running: Callable[[str], AbstractContextManager[AtNode]],
) -> Iterator[Any]:
    """The arguments of an operator, with its bodies replaced by what runs them in `running`.

    Args:
        operator: the operator that is about to run.
        args: its arguments.
        place: what the names of calls in it begin with.
        running: is entered around each run, with what names begin with in that run, and gives
            what is to be told of each node.
    """
    labels = labels_of(operator.__name__)
    for argument in args:
        is_body = callable(argument) and not isinstance(argument, OperatorBase)
        yield _watched(argument, next(labels), place, running) if is_body else argument


def _watched(
    body: Callable[..., Any],
    label: Label,
    place: str,
    running: Callable[[str], AbstractContextManager[AtNode]],
) -> Callable[..., Any]:
    numbers = itertools.count()

    def run(*operands: Any) -> Any:
        with running(place + label.of_run(next(numbers))) as at_node:
            if not isinstance(body, torch.fx.GraphModule):
                return body(*operands)
            return as_returned(GraphRun(body, at_node).run(*operands))

    return run


def place_in(names: Names, node: torch.fx.Node) -> str:
    """What the names of calls inside an operator with bodies begin with."""
    return f"{names.place}{numbered(node.name)}__"
