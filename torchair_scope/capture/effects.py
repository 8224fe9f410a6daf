"""Which nodes of a graph must keep their program order, beyond what their arguments say.

Three rules, each in one direction only: too careful is allowed, too bold is not.

* Side effects (`Effect.ORDERED`) stay in order among one another: mutations, random numbers,
  collectives, effect tokens, and everything that cannot be looked into.
* Nothing crosses a mode switch (`Effect.BARRIER`): what runs between switching autocast on and off
  must run there, and a graph does not say which operators a mode would change.
* A mutation stays behind every earlier and before every later reader of the same memory, through
  whichever view.

Asserts and `sym_constrain_range` are no effects: when they run does not matter, that they run does.
"""

from __future__ import annotations

import enum
import functools
import operator
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import fx
from torch._ops import HigherOrderOperator, OpOverload

from torchair_scope.capture.symbols import is_symbolic, value_of

_COLLECTIVES = {"_c10d_functional", "c10d_functional", "_c10d_functional_autograd", "c10d"}
_MODE_SWITCH = re.compile(
    r"_?(set_grad_enabled"
    r"|(enter|exit)_(autocast|dual_level|inference_mode)"
    r"|\w*(in|de)crement_nesting"
    r"|record_function_(enter|exit)\w*"
    r"|scope_(enter|exit))"
)
_ASSERT = re.compile(r"_assert\w*|sym_constrain_range\w*")
_RANDOM_PRIMS = {"prims::inductor_random", "prims::inductor_randint"}
_RANDOM_HIGHER_ORDER = {
    "run_and_save_rng_state",
    "run_with_rng_state",
    "graphsafe_run_with_rng_state",
    "run_dtensor_rng_op",
}
# They run what they are given on copies: no argument is written, no result shares memory with one.
_FUNCTIONAL_HIGHER_ORDER = {
    "auto_functionalized",
    "auto_functionalized_v2",
    "triton_kernel_wrapper_functional",
    "out_dtype",
    "inline_asm_elementwise",
}
_WRITES_FIRST_ARGUMENT = {
    *("iadd", "iand", "iconcat", "ifloordiv", "ilshift", "imatmul", "imod", "imul", "ior"),
    *("ipow", "irshift", "isub", "itruediv", "ixor", "setitem", "delitem"),
}


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
    if node.op in ("placeholder", "get_attr", "output") or is_assert(node):
        return Effect.NONE
    if is_mode_switch(node):
        return Effect.BARRIER
    if is_random(node) or _is_opaque(node) or written_by(node):
        return Effect.ORDERED
    if isinstance(node.target, OpOverload):
        ordered = _is_ordered_operator(node.target)
    else:
        ordered = any(effect_of(inner) is not Effect.NONE for inner in _body_nodes(node))
    return Effect.ORDERED if ordered else Effect.NONE


def is_random(node: fx.Node) -> bool:
    """Whether the node draws random numbers, so that running it again gives another value.

    True for operators tagged `nondeterministic_seeded` (attention with `dropout_p=0` excepted), for
    Inductor's random primitives, for the operators that carry a generator state, and for operators
    that are given a random operator or a body with one.
    """
    target = node.target
    if isinstance(target, OpOverload):
        return _is_random_operator(target) and _may_drop_out(node)
    if isinstance(target, HigherOrderOperator) and _short_name(node) in _RANDOM_HIGHER_ORDER:
        return True
    given = (part for part in node.args if isinstance(part, OpOverload))
    return any(map(_is_random_operator, given)) or any(map(is_random, _body_nodes(node)))


def is_assert(node: fx.Node) -> bool:
    """Whether the node only checks a value: `aten._assert_async`, `sym_constrain_range`, ..."""
    return node.op == "call_function" and _ASSERT.fullmatch(_short_name(node)) is not None


def is_mode_switch(node: fx.Node) -> bool:
    """Whether the node changes how later nodes run: autocast, grad mode, vmap nesting, ..."""
    return node.op == "call_function" and _MODE_SWITCH.fullmatch(_short_name(node)) is not None


def is_unpacking(node: fx.Node) -> bool:
    """Whether the node takes one value out of a tuple; it belongs where the tuple is made."""
    if node.op != "call_function" or node.target is not operator.getitem:
        return False
    producer, index = node.args
    if not isinstance(producer, fx.Node) or not isinstance(index, int):
        return False
    value = value_of(producer)
    return isinstance(value, (tuple, list)) if value is not None else _returns_tuple(producer)


def written_by(node: fx.Node) -> list[fx.Node]:
    """The nodes whose memory the node writes to."""
    target = node.target
    if isinstance(target, OpOverload):
        if torch.Tag.maybe_aliasing_or_mutating in target.tags:
            return _tensors_into(node)
        return _given_to(node, _memory(target).written)
    if _is_operator_module(node):
        first = node.args[:1] if _short_name(node) in _WRITES_FIRST_ARGUMENT else ()
        return list(_nodes_in(first))
    if _is_opaque(node) or any(map(written_by, _body_nodes(node))):
        return _tensors_into(node)
    return []


def shared_by(node: fx.Node) -> list[fx.Node]:
    """The nodes whose memory the node's value may share, as a view does."""
    target = node.target
    if isinstance(target, OpOverload):
        if torch.Tag.maybe_aliasing_or_mutating in target.tags:
            return _tensors_into(node)
        return _given_to(node, _memory(target).shared)
    if is_symbolic(node) or _is_functional(node):
        return []
    return _tensors_into(node)


def storages(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """For each node a representative of all the nodes that may share memory with it.

    Every placeholder is memory of its own; views are followed through the operators' schemas.
    """
    parent: dict[fx.Node, fx.Node] = {node: node for node in graph.nodes}
    attributes: dict[Any, fx.Node] = {}

    def find(node: fx.Node) -> fx.Node:
        while parent[node] is not node:
            parent[node] = parent[parent[node]]
            node = parent[node]
        return node

    for node in graph.nodes:
        if node.op == "get_attr":
            parent[node] = attributes.setdefault(node.target, node)
        elif node.op not in ("placeholder", "output"):
            for other in shared_by(node):
                parent[find(node)] = find(other)
    return {node: find(node) for node in graph.nodes}


def order_dependencies(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """For each node the earlier nodes that must run before it, apart from those it uses.

    Linear in the size of the graph. Nodes without such dependencies are left out, and so are
    `getitem`s on tuples, which go where the tuple is made.
    """
    before: dict[fx.Node, list[fx.Node]] = defaultdict(list)
    calls = [node for node in graph.nodes if node.op not in ("placeholder", "get_attr", "output")]
    calls = [node for node in calls if not is_unpacking(node)]
    _order_effects(calls, before)
    writes = {node: written for node in calls if (written := written_by(node))}
    if writes:
        _order_memory(calls, writes, storages(graph), before)
    return dict(before)


def _order_effects(calls: list[fx.Node], before: dict[fx.Node, list[fx.Node]]) -> None:
    barrier: fx.Node | None = None
    last_effect: fx.Node | None = None
    since_barrier: list[fx.Node] = []
    for node in calls:
        effect = effect_of(node)
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


def _short_name(node: fx.Node) -> str:
    target = node.target
    if isinstance(target, OpOverload):
        return target._schema.name.partition("::")[2]
    return target if isinstance(target, str) else str(getattr(target, "__name__", target))


def _is_operator_module(node: fx.Node) -> bool:
    return node.op == "call_function" and getattr(node.target, "__module__", "") in (
        "_operator",
        "math",
    )


def _is_functional(node: fx.Node) -> bool:
    return (
        isinstance(node.target, HigherOrderOperator)
        and _short_name(node) in _FUNCTIONAL_HIGHER_ORDER
    )


def _is_opaque(node: fx.Node) -> bool:
    """Whether nothing is known about what the node does."""
    target = node.target
    if node.op != "call_function":
        return True
    if isinstance(target, OpOverload):
        return torch.Tag.maybe_aliasing_or_mutating in target.tags
    if isinstance(target, HigherOrderOperator):
        return not _is_functional(node) and next(_bodies(node), None) is None
    return not (
        is_symbolic(node) or _is_operator_module(node) or _short_name(node).startswith("sym_")
    )


@functools.cache
def _is_ordered_operator(target: OpOverload) -> bool:
    return target.namespace in _COLLECTIVES or fx.Graph().call_function(target).is_impure()


@functools.cache
def _is_random_operator(target: OpOverload) -> bool:
    tagged = torch.Tag.nondeterministic_seeded in target.tags
    return tagged or target._schema.name in _RANDOM_PRIMS


class _Memory(NamedTuple):
    """The names of an operator's arguments that it writes, and that its result may be a view of."""

    written: frozenset[str]
    shared: frozenset[str]


@functools.cache
def _memory(target: OpOverload) -> _Memory:
    schema = target._schema
    aliases = {argument.name: argument.alias_info for argument in schema.arguments}
    annotated = {name: alias for name, alias in aliases.items() if alias is not None}
    written = frozenset(name for name, alias in annotated.items() if alias.is_write)
    if torch.Tag.inplace_view in target.tags:
        # `set_` makes its first argument a view of its second.
        return _Memory(written, frozenset(aliases))
    if all(result.alias_info is None for result in schema.returns):
        return _Memory(written, frozenset())
    return _Memory(written, frozenset(annotated))


def _given_to(node: fx.Node, names: frozenset[str]) -> list[fx.Node]:
    """The nodes among the arguments of these names."""
    if not names or not isinstance(node.target, OpOverload):
        return []
    positional = zip(node.target._schema.arguments, node.args, strict=False)
    given = [value for argument, value in positional if argument.name in names]
    given += [value for name, value in node.kwargs.items() if name in names]
    return list(_nodes_in(given))


def _may_drop_out(node: fx.Node) -> bool:
    """Whether an operator with a `dropout_p` is given another one than zero; True without one."""
    assert isinstance(node.target, OpOverload)
    for position, argument in enumerate(node.target._schema.arguments):
        if argument.name == "dropout_p":
            given = node.args[position] if position < len(node.args) else argument.default_value
            return bool(node.kwargs.get("dropout_p", given) != 0)
    return True


def _returns_tuple(node: fx.Node) -> bool:
    if not isinstance(node.target, OpOverload):
        return True
    returns = node.target._schema.returns
    return len(returns) != 1 or isinstance(returns[0].type, torch.ListType)


def _tensors_into(node: fx.Node) -> list[fx.Node]:
    bodies = {id(body) for body in _bodies(node)}
    return [tensor for tensor in node.all_input_nodes if id(_attribute(tensor)) not in bodies]


def _nodes_in(value: Any) -> Iterator[fx.Node]:
    if isinstance(value, fx.Node):
        yield value
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from _nodes_in(part)


def _bodies(node: fx.Node) -> Iterator[fx.GraphModule]:
    for argument in node.all_input_nodes:
        body = _attribute(argument)
        if isinstance(body, fx.GraphModule):
            yield body


def _body_nodes(node: fx.Node) -> Iterable[fx.Node]:
    return (inner for body in _bodies(node) for inner in body.graph.nodes)


def _attribute(node: fx.Node) -> Any:
    root = node.graph.owning_module
    if node.op != "get_attr" or root is None:
        return None
    return operator.attrgetter(str(node.target))(root)
