"""What the target of a node says about it: a check, a mode switch, something with a body, ..."""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch._ops import HigherOrderOperator, OpOverload

from torchair_scope.capture.symbols import is_symbolic, value_of

_MODE_SWITCH = re.compile(
    r"_?(set_grad_enabled"
    r"|(enter|exit)_(autocast|dual_level|inference_mode)"
    r"|\w*(in|de)crement_nesting"
    r"|record_function_(enter|exit)\w*"
    r"|scope_(enter|exit))"
)
_STREAM_ORDER = re.compile(r"(tagged_event_)?(record|wait)|super_kernel_scope_(begin|end)")
_ASSERT = re.compile(r"_assert\w*|sym_constrain_range\w*")

CARRIES_RANDOM_STATE = {
    "run_and_save_rng_state",
    "run_with_rng_state",
    "graphsafe_run_with_rng_state",
    "run_dtensor_rng_op",
}
_HANDLES_TOKENS = {"with_effects", "_make_token", "_sink_tokens"}
# What they run writes to copies at most, and no result shares memory with an argument.
_FUNCTIONAL = CARRIES_RANDOM_STATE | {
    "auto_functionalized",
    "auto_functionalized_v2",
    "inline_asm_elementwise",
    "out_dtype",
    "triton_kernel_wrapper_functional",
    "with_effects",
}


def is_call(node: fx.Node) -> bool:
    """Whether the node runs something: it is neither placeholder, get_attr nor output."""
    return node.op not in ("placeholder", "get_attr", "output")


def name_of(node: fx.Node) -> str:
    """The name of the node's target, without namespace and overload: `add` for aten.add.Tensor."""
    target = node.target
    if isinstance(target, OpOverload):
        return _operator_name(target)
    return target if isinstance(target, str) else str(getattr(target, "__name__", target))


def is_assert(node: fx.Node) -> bool:
    """Whether the node only checks a value: `aten._assert_async`, `sym_constrain_range`, ..."""
    return node.op == "call_function" and _matches(_ASSERT, name_of(node))


def is_mode_switch(node: fx.Node) -> bool:
    """Whether the node changes how later nodes run: autocast, grad mode, vmap nesting, ..."""
    return node.op == "call_function" and _matches(_MODE_SWITCH, name_of(node))


def orders_streams(node: fx.Node) -> bool:
    """Whether the node stands for all that runs before or after it: an NPU stream event, ..."""
    target = node.target
    if not isinstance(target, OpOverload) or target.namespace not in ("air", "npu", "npugraph_ex"):
        return False
    return _matches(_STREAM_ORDER, name_of(node))


def is_unpacking(node: fx.Node) -> bool:
    """Whether the node takes one value out of a tuple; it belongs where the tuple is made."""
    if node.op != "call_function" or node.target is not operator.getitem:
        return False
    producer, index = node.args
    if not isinstance(producer, fx.Node) or not isinstance(index, int):
        return False
    value = value_of(producer)
    return isinstance(value, (tuple, list)) if value is not None else _returns_tuple(producer)


def is_plain_python(node: fx.Node) -> bool:
    """Whether the node is a function of the modules `operator` or `math`."""
    module = getattr(node.target, "__module__", None)
    return node.op == "call_function" and module in ("_operator", "math")


def is_functional(node: fx.Node) -> bool:
    """Whether the node is a higher-order operator that leaves the memory of its arguments alone."""
    return isinstance(node.target, HigherOrderOperator) and name_of(node) in _FUNCTIONAL


def handles_tokens(node: fx.Node) -> bool:
    """Whether the node makes, passes on or takes effect tokens, which only order operators."""
    return node.op == "call_function" and name_of(node) in _HANDLES_TOKENS


def is_token(node: fx.Node) -> bool:
    """Whether the value of a call is an effect token."""
    if name_of(node) == "_make_token":
        return True
    if node.target is not operator.getitem:
        return False
    producer, index = node.args
    unpacks = isinstance(producer, fx.Node) and name_of(producer) == "with_effects"
    return unpacks and index in (0,)


def is_opaque(node: fx.Node) -> bool:
    """Whether nothing is known about what the node does."""
    target = node.target
    if isinstance(target, OpOverload):
        return torch.Tag.maybe_aliasing_or_mutating in target.tags
    if node.op != "call_function":
        return is_call(node)
    if isinstance(target, HigherOrderOperator):
        return not is_functional(node) and next(bodies(node), None) is None
    on_sizes = is_symbolic(node) or name_of(node).lstrip("_").startswith("sym_")
    return not (on_sizes or is_plain_python(node))


def bodies(node: fx.Node) -> Iterator[fx.GraphModule]:
    """The graphs that a node is given to run: the branches of `cond`, the body of `while_loop`."""
    for argument in node.all_input_nodes:
        body = body_of(argument)
        if body is not None:
            yield body


def body_nodes(node: fx.Node) -> Iterator[fx.Node]:
    """The nodes of its bodies; bodies of bodies are not entered."""
    return (inner for body in bodies(node) for inner in body.graph.nodes)


def operands(node: fx.Node) -> list[fx.Node]:
    """The nodes that a node uses, its bodies excepted."""
    return [argument for argument in node.all_input_nodes if body_of(argument) is None]


def body_of(node: fx.Node) -> fx.GraphModule | None:
    """The graph that a get_attr node stands for, if it is one."""
    root = node.graph.owning_module
    if node.op != "get_attr" or root is None:
        return None
    value: Any = operator.attrgetter(str(node.target))(root)
    return value if isinstance(value, fx.GraphModule) else None


def _returns_tuple(node: fx.Node) -> bool:
    if not isinstance(node.target, OpOverload):
        return True
    returns = node.target._schema.returns
    return len(returns) != 1 or isinstance(returns[0].type, torch.ListType)


@functools.cache
def _operator_name(target: OpOverload) -> str:
    return target._schema.name.partition("::")[2]


@functools.cache
def _matches(pattern: re.Pattern[str], name: str) -> bool:
    return pattern.fullmatch(name) is not None
