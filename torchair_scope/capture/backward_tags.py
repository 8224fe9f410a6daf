"""Tags for gradients that AOTAutograd does not annotate: of bodies, and of `torch.func`.

AOTAutograd copies annotations from forward nodes to the backward nodes that come of them, in the
graphs that it traces itself. The backward of a body is traced by the operator around it, which
runs the body and differentiates it, and there annotations are lost. So a body with tags runs node
by node while it is traced, with the annotations in force, and puts them on the autograd nodes that
come to be: they are in force again when these run. What AOTAutograd then copies within bodies, by
numbers that count in each of them anew, is taken away again.

Gradients that `torch.func.grad` and its like take are operators of the forward graph. They get the
tags of the operators that they are gradients of, unless they are taken in a scope themselves.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Mapping
from typing import Any, TypeGuard

import torch
from torch.utils._pytree import tree_leaves

from torchair_scope import _torch_private
from torchair_scope.capture.bodies import called_bodies, tags_in_bodies
from torchair_scope.capture.nodes import is_of_backward
from torchair_scope.capture.tags import (
    KEY_IN_BACKWARD,
    KEY_OF_BODIES,
    KEY_OF_GRADIENTS,
    annotate_node,
    own_annotations,
    put_tag,
    tag_in,
    tag_of,
    with_tag,
)


def keep_tags_in_backward(gm: torch.fx.GraphModule) -> None:
    """Prepare the bodies in a Dynamo graph, so that their tags reach their backward graphs.

    Operators that do more with a body than call it (`flex_attention`) lose its tags even so, and
    remember that it had some.
    """
    for module in filter(_is_graph, gm.modules()):
        for node in module.graph.nodes:
            tag = next(tags_in_bodies(node), None)
            if tag is not None and tag_of(node) is None and not called_bodies(node):
                annotate_node(node, KEY_OF_BODIES, tuple(tag))
        if module is not gm and any(map(_has_tag, module.graph.nodes)):
            # On the instance: the graph's generated code, a method of the class, is not touched.
            module.forward = _AnnotatedRun(module)


def forget_copied_tags(gm: torch.fx.GraphModule) -> None:
    """Take tags off those backward operators in bodies that no autograd node with tags has run.

    These are sums, such as those of the gradients of what all runs of a body of `scan` are given.
    """
    for graph in (module.graph for module in filter(_is_graph, gm.modules())):
        if any(map(_has_own_annotations, graph.nodes)):
            for node in graph.nodes:
                if is_of_backward(node) and not _has_own_annotations(node):
                    put_tag(node, None)


def keep_tags_in_gradients(gm: torch.fx.GraphModule) -> None:
    """Have what `torch.func` computes for gradients tagged when a Dynamo graph is traced."""
    own = _torch_private.gradients_of_transforms()
    for module in filter(_is_graph, gm.modules()):
        calls = [node for node in module.graph.nodes if node.target is own]
        for node in calls:
            node.target = _tagged_gradients
        if calls:
            module.recompile()


def _is_graph(module: torch.nn.Module) -> TypeGuard[torch.fx.GraphModule]:
    return isinstance(module, torch.fx.GraphModule)


def _tagged_gradients(outputs: Any, *args: Any, **kwargs: Any) -> Any:
    if tag_in(_torch_private.enclosing_annotations()) is None:
        known = _torch_private.annotations_by_sequence_number()
        numbers = sorted(known)
        for autograd_node in _made_since(0, outputs):
            # Of the nodes that nested transforms make for one operator it knows the last one.
            position = bisect.bisect_left(numbers, autograd_node._sequence_nr())
            annotations = known[numbers[position]] if position < len(numbers) else {}
            if tag_in(annotations) is not None:
                _annotate_runs(autograd_node, annotations)
    # Also in force for sums of gradients, which no autograd node makes.
    annotations = {**_torch_private.enclosing_annotations(), KEY_OF_GRADIENTS: True}
    with _torch_private.annotations_in_force(annotations):
        return _torch_private.gradients_of_transforms()(outputs, *args, **kwargs)


def _has_own_annotations(node: torch.fx.Node) -> bool:
    return KEY_IN_BACKWARD in (node.meta.get("custom") or {})


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
            _annotate_runs(autograd_node, n.meta.get("custom") or {})
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


def _annotate_runs(autograd_node: Any, of_forward: Mapping[str, Any]) -> None:
    """Have the annotations of a node in force whenever an autograd node runs."""
    own = dict(own_annotations(of_forward))
    annotations = {**with_tag(of_forward, None), KEY_IN_BACKWARD: own}
    in_force: list[Any] = []

    def before(gradients: Any) -> None:
        in_force.append(_torch_private.annotations_in_force(annotations))
        in_force[-1].__enter__()

    def after(inputs: Any, gradients: Any) -> None:
        in_force.pop().__exit__(None, None, None)

    autograd_node.register_prehook(before)
    autograd_node.register_hook(after)
