"""What only the Dynamo graph knows, before AOTAutograd makes ATen graphs of it."""

from __future__ import annotations

import inspect
import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from torchair_scope.capture.nodes import source_of
from torchair_scope.capture.tags import Tag, tag_of

_UPDATE_STATISTICS = ("batch_norm", "instance_norm")


def facts_of(gm: torch.fx.GraphModule) -> dict[str, Any]:
    """Facts for the graph records of all ATen graphs that come from this Dynamo graph."""
    tensors = list(_dtensors(gm))
    return {"dtensors": tensors} if tensors else {}


def warn_of_dead_code(gm: torch.fx.GraphModule) -> None:
    """Say which operators of a scope no compiler will see, because nothing uses their values."""
    for tag, nodes in _dead_by_scope(gm).items():
        sources = [source for source in map(source_of, nodes) if source is not None]
        lines = ", ".join(dict.fromkeys(f"{source.line}: {source.code}" for source in sources))
        warnings.warn(
            f"scope {tag.scope!r} opened at {tag.opened_at}: {len(nodes)} of its operators are "
            f"removed as dead code, since nothing uses their values, and are not dumped "
            f"(line {lines}). Return such a value, or use it, to have it dumped.",
            stacklevel=2,
        )


def _dead_by_scope(gm: torch.fx.GraphModule) -> dict[Tag, list[torch.fx.Node]]:
    dead: dict[Tag, list[torch.fx.Node]] = defaultdict(list)
    for node in dead_nodes(gm):
        tag = tag_of(node)
        if tag is not None:
            dead[tag].append(node)
    return dead


def dead_nodes(gm: torch.fx.GraphModule) -> list[torch.fx.Node]:
    """The operators in no body that nothing uses the values of."""
    alive: set[torch.fx.Node] = set()
    dead: list[torch.fx.Node] = []
    for node in reversed(gm.graph.nodes):
        if node.op == "output" or _has_effect(node) or any(user in alive for user in node.users):
            alive.add(node)
        elif node.op.startswith("call_") and computes_tensors(node):
            dead.append(node)
    return dead[::-1]


def computes_tensors(node: torch.fx.Node) -> bool:
    """Whether a node is an operator of the user's, and not bookkeeping of sizes or transforms."""
    values = tree_leaves(node.meta.get("example_value"))
    return not _name(node.target).startswith("_") and any(
        isinstance(value, torch.Tensor) for value in values
    )


def gives_what_it_is_given(node: torch.fx.Node) -> bool:
    """Whether a node of a Dynamo graph returns nothing but inputs of it, as they are."""
    results = tree_leaves(node.meta.get("example_value"))
    given = [source.meta.get("example_value") for source in node.all_input_nodes]
    return all(
        isinstance(result, torch.Tensor) and any(_is_same(result, value) for value in given)
        for result in results
    )


def _is_same(one: torch.Tensor, other: Any) -> bool:
    if one is other:
        return True
    if not isinstance(other, torch.Tensor) or one.dtype is not other.dtype:
        return False
    try:
        return (
            one.untyped_storage()._cdata == other.untyped_storage()._cdata
            and one.shape == other.shape
            and one.stride() == other.stride()
            and one.storage_offset() == other.storage_offset()
        )
    except (NotImplementedError, RuntimeError):  # of a sparse tensor, or one in torch.func
        return False


def equal_operators(graph: torch.fx.Graph) -> list[list[torch.fx.Node]]:
    """Operators that compute the same value as others, with these; what could differ is left out.

    Two are equal if they are the same operator with equal arguments, and nothing stands between
    them that may write to memory, switch a mode or draw random numbers.
    """
    first: dict[tuple[Any, ...], torch.fx.Node] = {}
    equal: dict[torch.fx.Node, list[torch.fx.Node]] = defaultdict(list)
    same_as: dict[torch.fx.Node, torch.fx.Node] = {}
    effects = 0
    for node in graph.nodes:
        if node.op == "get_attr":
            same_as[node] = first.setdefault((node.target,), node)
        elif node.op.startswith("call_") and _is_pure(node):
            arguments = torch.fx.node.map_arg((node.args, node.kwargs), same_as.__getitem__)
            # A node is written as its name, and a string in quotes.
            key = (_name(node.target), repr(arguments), effects)
            same_as[node] = first.setdefault(key, node)
            equal[same_as[node]].append(node)
        else:
            same_as[node] = node
            effects += node.op.startswith("call_")
    return [nodes for nodes in equal.values() if len(nodes) > 1]


def _is_pure(node: torch.fx.Node) -> bool:
    """Whether a node of a Dynamo graph is known to give the same value for the same arguments."""
    if _has_effect(node):
        return False
    if getattr(node.target, "__module__", None) == "_operator":
        return True
    packet = getattr(torch.ops.aten, _name(node.target), None)
    random = torch.Tag.nondeterministic_seeded
    return packet is not None and not any(
        random in getattr(packet, overload).tags for overload in packet.overloads()
    )


def is_constant(node: torch.fx.Node) -> bool:
    """Whether a node of a Dynamo graph computes nothing of any input of the graph."""
    waiting, seen = [node], {node}
    while waiting:
        sources = waiting.pop().all_input_nodes
        if any(source.op in ("placeholder", "get_attr") for source in sources):
            return False
        waiting.extend(source for source in sources if source not in seen)
        seen.update(sources)
    return True


def _has_effect(node: torch.fx.Node) -> bool:
    """Whether a node of a Dynamo graph may do more than return a value."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.is_mutable
    if isinstance(target, torch._ops.OpOverloadPacket):
        names: Sequence[str] = target.overloads()  # type: ignore[no-untyped-call]
        return any(getattr(target, name)._schema.is_mutable for name in names)
    name = _name(target)
    if name in _UPDATE_STATISTICS or (name.endswith("_") and not name.endswith("__")):
        return True
    if "out" in node.kwargs or _is_asked_to_work_in_place(node) or node.is_impure():
        return True
    return not _is_known(target, name)


def _name(target: Any) -> str:
    return target if isinstance(target, str) else getattr(target, "__name__", "")


def _is_asked_to_work_in_place(node: torch.fx.Node) -> bool:
    try:
        bound = inspect.signature(node.target).bind(*node.args, **node.kwargs)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return bool(node.kwargs.get("inplace"))
    return bool(bound.arguments.get("inplace"))


def _is_known(target: Any, name: str) -> bool:
    """Whether a target is one of torch's functions, of which the name tells if they mutate."""
    module = str(getattr(target, "__module__", ""))
    if module == "_operator":
        in_place = name.startswith("i") and hasattr(torch.Tensor, f"__{name}__")
        return not in_place and name not in ("setitem", "delitem")
    return isinstance(target, str) or module.startswith(("torch", "math")) or hasattr(torch, name)


def _dtensors(gm: torch.fx.GraphModule) -> Iterator[dict[str, Any]]:
    """Where the local tensors of the graph's DTensors lie in the whole ones."""
    for node in gm.graph.nodes:
        value = node.meta.get("example_value")
        if hasattr(value, "placements") and hasattr(value, "device_mesh"):
            yield {
                "node": node.name,
                "shape": [str(size) for size in value.shape],
                "placements": [str(placement) for placement in value.placements],
                "mesh": str(value.device_mesh),
            }
