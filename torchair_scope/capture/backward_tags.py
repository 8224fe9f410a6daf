"""Tags for the backward of bodies: of a branch of `cond`, of the body of a loop.

AOTAutograd copies annotations from forward nodes to the backward nodes that come of them, in the
graphs that it traces itself. The backward of a body is traced by the operator around it, which
runs the body and differentiates it, and there annotations are lost. So a body with tags runs node
by node while it is traced, with the annotations in force, and puts them on the autograd nodes that
come to be: they are in force again when these run.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from torchair_scope import _torch_private
from torchair_scope.capture.bodies import tags_in_bodies
from torchair_scope.capture.tags import KEY_IN_BACKWARD, KEY_OF_BODIES, tag_of, with_tag


def keep_tags_in_backward(gm: torch.fx.GraphModule) -> None:
    """Prepare the bodies in a Dynamo graph, so that their tags reach their backward graphs.

    The operators around them remember that they had tags: those of `scan` trace their bodies more
    than once, and lose them even so.
    """
    for module in gm.modules():
        if not isinstance(module, torch.fx.GraphModule):
            continue
        for node in module.graph.nodes:
            tag = next(tags_in_bodies(node), None)
            if tag is not None and tag_of(node) is None:
                annotations = node.meta.get("custom") or {}
                node.meta["custom"] = {**annotations, KEY_OF_BODIES: tuple(tag)}
        if module is not gm and any(map(_has_tag, module.graph.nodes)):
            # On the instance: the graph's generated code, a method of the class, is not touched.
            module.forward = _AnnotatedRun(module)


def _has_tag(node: torch.fx.Node) -> bool:
    return tag_of(node) is not None or next(tags_in_bodies(node), None) is not None


class _AnnotatedRun:
    """Stands in a body's `__dict__` as its `forward`."""

    def __init__(self, body: torch.fx.GraphModule) -> None:
        self.body = body

    def __call__(self, *args: Any) -> Any:
        if not (torch.is_grad_enabled() and _torch_private.annotations_are_traced()):
            return type(self.body).forward(self.body, *args)
        return _AnnotatingInterpreter(self.body).run(*args)


class _AnnotatingInterpreter(torch.fx.Interpreter):
    def run_node(self, n: torch.fx.Node) -> Any:
        if n.op in ("placeholder", "get_attr", "output"):
            return super().run_node(n)
        first = _torch_private.next_sequence_number()
        with _torch_private.annotations_in_force(n.meta.get("custom") or {}):
            result = super().run_node(n)
        for autograd_node in _made_since(first, result):
            _annotate_runs(autograd_node, n)
        return result


def _made_since(first: int, result: Any) -> Iterator[Any]:
    """The autograd nodes behind a result whose sequence numbers begin with `first`."""
    tensors = (leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor))
    waiting = [tensor.grad_fn for tensor in tensors]
    seen = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen or not node._sequence_nr() >= first:
            continue
        seen.add(node)
        if node.name() != "torch::autograd::AccumulateGrad":
            waiting.extend(source for source, _ in node.next_functions)
            yield node


def _annotate_runs(autograd_node: Any, node: torch.fx.Node) -> None:
    """Have the annotations of a node in force whenever an autograd node runs."""
    annotations = with_tag(node.meta.get("custom"), None)
    annotations[KEY_IN_BACKWARD] = tuple(tag_of(node) or ())
    in_force: list[Any] = []

    def before(gradients: Any) -> None:
        in_force.append(_torch_private.annotations_in_force(annotations))
        in_force[-1].__enter__()

    def after(inputs: Any, gradients: Any) -> None:
        in_force.pop().__exit__(None, None, None)

    autograd_node.register_prehook(before)
    autograd_node.register_hook(after)
