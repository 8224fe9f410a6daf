"""Which nodes of a graph must keep their program order, beyond what their arguments say.

Three rules, each careful rather than bold:

* Side effects (`Effect.ORDERED`) stay in order among one another: mutations, random numbers,
  collectives, effect tokens, and everything that cannot be looked into.
* Nothing crosses a mode switch (`Effect.BARRIER`): what runs between switching autocast on and off
  must run there, and a graph does not say which operators a mode would change. The same holds for
  events of NPU streams, which stand for all that was issued before them.
* A mutation stays behind every earlier and before every later reader of the same memory, through
  whichever view.

Asserts and `sym_constrain_range` are no effects: when they run does not matter, that they run does.
"""

from __future__ import annotations

import enum
import functools
import re
from collections import defaultdict

import torch
from torch import fx
from torch._ops import HigherOrderOperator, OpOverload

from torchair_scope.capture.memory import storages, written_by
from torchair_scope.capture.targets import (
    CARRIES_RANDOM_STATE,
    body_nodes,
    is_assert,
    is_call,
    is_mode_switch,
    is_opaque,
    is_unpacking,
    name_of,
    orders_streams,
)

_COLLECTIVES = {"_c10d_functional", "c10d_functional", "_c10d_functional_autograd", "c10d"}
_EMPTY = re.compile(r"_?(new_)?empty(_\w+)?")
_RANDOM_PRIMS = {"prims::inductor_random", "prims::inductor_randint"}


class Effect(enum.Enum):
    """What a node does besides computing its value."""

    NONE = "none"
    ORDERED = "ordered"
    BARRIER = "barrier"


def effect_of(node: fx.Node) -> Effect:
    """The side effect of a node.

        effect_of(node) is Effect.NONE          # aten.add.Tensor, aten.view, operator.mul on sizes
        effect_of(node) is Effect.ORDERED       # aten.add_.Tensor, aten.rand, a collective
        effect_of(node) is Effect.BARRIER       # torch._C._set_grad_enabled

    An operator with a body (`cond`, `while_loop`) has the effects of its body. What is neither an
    operator overload nor known to be pure counts as ordered.
    """
    if not is_call(node) or is_assert(node):
        return Effect.NONE
    if is_mode_switch(node) or orders_streams(node):
        return Effect.BARRIER
    return Effect.ORDERED if _is_ordered(node) else Effect.NONE


def is_random(node: fx.Node) -> bool:
    """Whether the node draws random numbers, so that running it again gives another value.

    True for operators tagged `nondeterministic_seeded` (attention with `dropout_p=0` excepted), for
    Inductor's random primitives, for the operators that carry a generator state, and for operators
    that are given a random operator or a body with one.
    """
    target = node.target
    if isinstance(target, OpOverload):
        return _is_random_operator(target) and not _is_told_not_to_drop(node, target)
    if isinstance(target, HigherOrderOperator) and name_of(node) in CARRIES_RANDOM_STATE:
        return True
    given = (part for part in node.args if isinstance(part, OpOverload))
    return any(map(_is_random_operator, given)) or any(map(is_random, body_nodes(node)))


def is_irreproducible(node: fx.Node) -> bool:
    """Whether running the node again may give another value: random numbers, `empty_like`, ..."""
    return is_random(node) or _EMPTY.fullmatch(name_of(node)) is not None


def order_dependencies(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """For each node the earlier nodes that must run before it, apart from those it uses.

    Linear in the size of the graph. Nodes without such dependencies are left out, and so are
    `getitem`s on tuples, which go where the tuple is made.
    """
    before: dict[fx.Node, list[fx.Node]] = defaultdict(list)
    calls = [node for node in graph.nodes if is_call(node) and not is_unpacking(node)]
    effects = {node: effect_of(node) for node in calls}
    _order_effects(effects, before)
    ordered = (node for node in calls if effects[node] is Effect.ORDERED)
    writes = {node: written for node in ordered if (written := written_by(node))}
    if writes:
        _order_memory(calls, writes, storages(graph), before)
    return dict(before)


def _order_effects(effects: dict[fx.Node, Effect], before: dict[fx.Node, list[fx.Node]]) -> None:
    barrier: fx.Node | None = None
    last_effect: fx.Node | None = None
    since_barrier: list[fx.Node] = []
    for node, effect in effects.items():
        if barrier is not None:
            before[node].append(barrier)
        if effect is Effect.BARRIER:
            before[node].extend(since_barrier)
            barrier, since_barrier = node, []
        else:
            since_barrier.append(node)
        if effect is not Effect.NONE:
            if last_effect is not None:
                before[node].append(last_effect)
            last_effect = node


def _order_memory(
    calls: list[fx.Node],
    writes: dict[fx.Node, list[fx.Node]],
    storage: dict[fx.Node, fx.Node],
    before: dict[fx.Node, list[fx.Node]],
) -> None:
    mutated = {storage[tensor] for tensors in writes.values() for tensor in tensors}
    last_write: dict[fx.Node, fx.Node] = {}
    # Each reader is listed once and dropped by the next write, so all of this stays linear.
    readers: dict[fx.Node, list[fx.Node]] = defaultdict(list)
    for node in calls:
        written = {storage[tensor] for tensor in writes.get(node, ())}
        for memory in mutated.intersection(storage[tensor] for tensor in node.all_input_nodes):
            if memory in last_write:
                before[node].append(last_write[memory])
            if memory in written:
                before[node].extend(readers.pop(memory, ()))
                last_write[memory] = node
            else:
                readers[memory].append(node)


def _is_ordered(node: fx.Node) -> bool:
    if is_opaque(node) or is_random(node) or written_by(node):
        return True
    if isinstance(node.target, OpOverload):
        return _is_ordered_operator(node.target)
    return name_of(node) == "with_effects" or any(
        effect_of(inner) is not Effect.NONE for inner in body_nodes(node)
    )


@functools.cache
def _is_ordered_operator(target: OpOverload) -> bool:
    return target.namespace in _COLLECTIVES or fx.Graph().call_function(target).is_impure()


@functools.cache
def _is_random_operator(target: OpOverload) -> bool:
    tagged = torch.Tag.nondeterministic_seeded in target.tags
    return tagged or target._schema.name in _RANDOM_PRIMS


def _is_told_not_to_drop(node: fx.Node, target: OpOverload) -> bool:
    """Whether an operator that takes a `dropout_p` is given zero."""
    for position, argument in enumerate(target._schema.arguments):
        if argument.name == "dropout_p":
            given = node.args[position] if position < len(node.args) else argument.default_value
            return bool(node.kwargs.get("dropout_p", given) == 0)
    return False
