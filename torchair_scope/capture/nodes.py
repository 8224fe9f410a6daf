"""What an FX node tells about itself: its operator, its place in the user's code, its value."""

from __future__ import annotations

import os
import re
from typing import Any, NamedTuple

import torch
from torch.fx.experimental.symbolic_shapes import is_symbolic

from torchair_scope import _torch_private
from torchair_scope.capture.bodies import given_operator
from torchair_scope.capture.partition import has_own_kind
from torchair_scope.capture.tags import Tag

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in [^\n]+(?:\n(?P<code>[^\n]*))?')
_TORCH = os.path.dirname(torch.__file__) + os.sep
_MODULE_STEP = re.compile(r"\['([^']+)'\]|\[(\d+)\]|\.?([A-Za-z0-9_]+)")
_RUNS_TRITON_KERNEL = ("triton_kernel_wrapper_functional", "triton_kernel_wrapper_mutation")


class Source(NamedTuple):
    """The line of user code that a node comes from."""

    file: str
    line: int
    code: str


def computes(node: torch.fx.Node) -> bool:
    """Whether there is anything to compile in `node`: views and arithmetic on sizes are not."""
    if isinstance(node.target, torch._ops.OpOverload) and node.target.is_view:
        return False
    return has_own_kind(node)


def target_name(node: torch.fx.Node) -> str:
    """The node's target as it stands in file names: `aten.add.Tensor`."""
    return str(node.target)


def operator_name(node: torch.fx.Node) -> str:
    """What does the work: the operator, or Triton kernel, that the target is given to run."""
    if target_name(node) in _RUNS_TRITON_KERNEL:
        return f"triton.{_torch_private.triton_kernel_name(node.kwargs['kernel_idx'])}"
    given = given_operator(node)
    return target_name(node) if given is None else str(given[1])


def short_name(operator: torch._ops.OpOverload) -> str:
    """The name of an operator as FX names its nodes: `add` for `aten.add.Tensor`."""
    return operator._schema.name.partition("::")[2]


def is_of_forward(node: torch.fx.Node) -> bool:
    """Whether AOTAutograd traced the node in the forward; in a backward graph it runs again."""
    return node.meta.get("partitioner_tag") == "is_forward"


def is_of_backward(node: torch.fx.Node) -> bool:
    """Whether AOTAutograd traced the node in the backward."""
    return node.meta.get("partitioner_tag") == "is_backward"


def source_of(node: torch.fx.Node) -> Source | None:
    """The innermost line of code outside torch in the node's stack trace, else the innermost."""
    of_the_user, all_lines = stack_of(node), _lines_of(node)
    return (of_the_user or all_lines)[-1] if all_lines else None


def stack_of(node: torch.fx.Node) -> list[Source]:
    """The lines of code outside torch in the node's stack trace, outermost first."""
    return [line for line in _lines_of(node) if not line.file.startswith(_TORCH)]


def _lines_of(node: torch.fx.Node) -> list[Source]:
    frames = _FRAME.finditer(node.meta.get("stack_trace") or "")
    return [
        Source(frame["file"], int(frame["line"]), (frame["code"] or "").strip()) for frame in frames
    ]


def module_of(node: torch.fx.Node) -> str | None:
    """The path of the module that the node was born in, as `layers.0.mlp`; None outside."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if not stack:
        return None
    path, _ = next(reversed(stack.values()))
    steps = ["".join(filter(None, step)) for step in _MODULE_STEP.findall(path)]
    return ".".join(step for step in steps[2:] if step != "_modules") if len(steps) > 1 else None


def describe_node(node: torch.fx.Node, tag: Tag | None) -> dict[str, Any]:
    """The node's entry in the graph record of a manifest; `tag` is the scope it belongs to."""
    source = source_of(node)
    return {
        "name": node.name,
        "target": target_name(node),
        "operator": operator_name(node),
        "scope": tag.scope if tag else None,
        "opened_at": tag.opened_at if tag else None,
        "module": module_of(node),
        "source": source._asdict() if source else None,
        "output": describe_value(node.meta.get("val")),
    }


def describe_value(value: Any) -> Any:
    """A traced value as JSON: dtype, shape, stride and device of each tensor in it."""
    if isinstance(value, torch.Tensor):
        strided = value.layout is torch.strided
        return {
            "dtype": str(value.dtype),
            "shape": [_size(size) for size in value.shape],
            "stride": [_size(step) for step in value.stride()] if strided else None,
            "device": str(value.device),
        }
    if isinstance(value, (list, tuple)):
        return [describe_value(item) for item in value]
    return None if value is None else str(value)


def _size(size: Any) -> int | str:
    return str(size) if is_symbolic(size) else int(size)
