"""Operators that run graphs, or other operators, and under which names their calls are saved.

The names of calls inside an operator are `{place}{label}{inner node}`:

* The place is the operator's node name, with `_0` if it has no number (FX gives the first node of
  a name none), and `__`: `cond_0__sin`, `cond_1__sin`.
* The label is empty for a body that runs once, and `{run}__` for one that runs again and again,
  counted from 0: `while_loop_0__2__add`. The condition of a loop has `{run}__cond__`.

Places nest: `while_loop_0__2__cond_0__sin`. In a graph record `*` stands for the number of the run.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch._ops import HigherOrderOperator, OpOverload

from torchair_scope.capture.tags import KEY_OF_BODIES, Tag, tag_of
from torchair_scope.capture.targets import bodies, body_of, name_of

_NUMBERED = re.compile(r".*_\d+")


@dataclass(frozen=True)
class Label:
    """How the runs of one body are told apart; `*` in the pattern is the number of the run."""

    pattern: str

    def of_run(self, number: int) -> str:
        """The label of the run with this number."""
        return self.pattern.replace("*", str(number))


_ONCE, _EACH_TIME, _CONDITION = Label(""), Label("*__"), Label("*__cond__")

# The bodies of each operator in the order of its arguments. An operator is listed here if it does
# nothing with a body but call it.
_BODIES: dict[str, tuple[Label, ...]] = {
    "cond": (_ONCE, _ONCE),
    "while_loop": (_CONDITION, _EACH_TIME),
    "while_loop_stack_output": (_CONDITION, _EACH_TIME),
    "scan": (_EACH_TIME,),
    "map_impl": (_EACH_TIME,),
    "associative_scan": (_EACH_TIME,),
    "invoke_subgraph": (_ONCE,),
    "hints_wrapper": (_ONCE,),
}
# Their bodies are traced into one fused kernel, or mapped over every element.
_FUSED = {"flex_attention", "flex_attention_backward"}
# Operators that are given an operator and its arguments, and run it once.
_RUNS_OPERATOR = {
    "auto_functionalized",
    "auto_functionalized_v2",
    "with_effects",
    "run_and_save_rng_state",
    "run_with_rng_state",
    "graphsafe_run_with_rng_state",
}


class BodyArgument(NamedTuple):
    """A body that an operator calls: its position among the arguments, its attribute's name."""

    position: int
    name: str
    module: torch.fx.GraphModule
    label: Label


def called_bodies(node: torch.fx.Node) -> list[BodyArgument]:
    """The bodies of which each operator can be saved; none if it is not known how they run."""
    labels = _BODIES.get(name_of(node), ()) if _is_higher_order(node) else ()
    given = [
        (position, argument, module)
        for position, argument in enumerate(node.args)
        if isinstance(argument, torch.fx.Node) and (module := body_of(argument)) is not None
    ]
    return [
        BodyArgument(position, str(argument.target), module, label)
        for (position, argument, module), label in zip(given, labels, strict=False)
    ]


def runs_fused(node: torch.fx.Node) -> bool:
    """Whether the operators in the node's bodies never run one by one."""
    return _is_higher_order(node) and name_of(node) in _FUSED


def given_operator(node: torch.fx.Node) -> tuple[int, OpOverload] | None:
    """The operator that the node is given to run, and its position among the arguments."""
    if not _is_higher_order(node) or name_of(node) not in _RUNS_OPERATOR:
        return None
    given = enumerate(node.args)
    return next(((i, value) for i, value in given if isinstance(value, OpOverload)), None)


def place_of(node: torch.fx.Node) -> str:
    """What the names of calls inside an operator begin with, `cond_0__`; unique in its graph."""
    place = numbered(node.name)
    others = {other.name for other in node.graph.nodes if other is not node}
    while place in others or any(other.startswith(f"{place}__") for other in others):
        place += "_"
    return f"{place}__"


def numbered(name: str) -> str:
    """The name of a node with its number: FX gives the first one of a name none."""
    return name if _NUMBERED.fullmatch(name) else f"{name}_0"


def labels_of(operator: str) -> Iterator[Label]:
    """The labels of an operator's bodies in order, endless; any is taken to run each time."""
    return itertools.chain(_BODIES.get(operator, ()), itertools.repeat(_EACH_TIME))


def as_returned(result: Any) -> Any:
    """What an interpreter has made of a body, as operators expect it: FX has lists of its own."""
    return list(result) if isinstance(result, list) else result


def tags_in_bodies(node: torch.fx.Node) -> Iterator[Tag]:
    """The tags of all operators in the bodies of a node, and in the bodies of these.

    Of bodies that the node may not just call it is one that they had in the Dynamo graph, too.
    """
    had = (node.meta.get("custom") or {}).get(KEY_OF_BODIES)
    # The annotation is also copied to other nodes that the operator gives rise to.
    if had and next(bodies(node), None) is not None and not called_bodies(node):
        yield Tag(*had)
    for body in bodies(node):
        for inner in body.graph.nodes:
            tag = tag_of(inner) if inner.op.startswith("call_") else None
            if tag is None:
                yield from tags_in_bodies(inner)
            else:
                yield tag


def _is_higher_order(node: torch.fx.Node) -> bool:
    return isinstance(node.target, HigherOrderOperator)
