"""Make a module of its own from a region of a graph."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from torchair_scope.capture.partition import Region

_FACTS_OF_A_VALUE = (
    *("val", "example_value", "tensor_meta", "desc", "custom"),
    *("stack_trace", "nn_module_stack", "fwd_nn_module_stack", "source_fn_stack"),
)


@dataclass(frozen=True)
class Piece:
    """A region as a module that can be compiled or interpreted by itself.

    Attributes:
        module: takes the values of `inputs` and returns a tuple with the values of `outputs`.
        inputs: nodes of the whole graph, one for each placeholder, in order.
        outputs: nodes of the whole graph, one for each element of the returned tuple, in order.
    """

    module: fx.GraphModule
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]


def extract(gm: fx.GraphModule, region: Region) -> Piece:
    """Copy a region of a graph into a module.

        for region in partition(gm.graph, dumped):
            piece = extract(gm, region)
            values = piece.module(*(environment[node] for node in piece.inputs))
            environment.update(zip(piece.outputs, values))

    Nodes keep their names and metadata; a placeholder is named as the node whose value it takes.
    Parameters, buffers and bodies of control flow are shared with `gm`, not copied. `gm` is not
    changed.

    Args:
        gm: the module whose graph was cut.
        region: one of the regions of `partition(gm.graph, ...)`.
    """
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in region.inputs:
        copies[node] = named_copy(graph, node, "placeholder", node.name)
    for node in region.nodes:
        for source in node.all_input_nodes:
            if source.op == "get_attr" and source not in copies:
                copies[source] = named_copy(graph, source, "get_attr", source.target)
        args = fx.map_arg(node.args, copies.__getitem__)
        kwargs = fx.map_arg(node.kwargs, copies.__getitem__)
        copies[node] = named_copy(graph, node, node.op, node.target, args, kwargs)
    graph.output(tuple(copies[node] for node in region.outputs))
    return Piece(fx.GraphModule(gm, graph), region.inputs, region.outputs)


def with_outputs(
    gm: fx.GraphModule, additional: Sequence[fx.Node], left_out: Collection[fx.Node] = ()
) -> fx.GraphModule:
    """Copy a whole graph, and let it return further values after its own.

    Everything that a compiler of the graph may look at is as in `gm`: the order of placeholders,
    names, metadata, that of the output among it.

    Args:
        gm: the module of the graph; it is not changed.
        additional: nodes whose values are returned as well.
        left_out: nodes that are not copied; nothing else may use them.
    """
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in gm.graph.nodes:
        if node in left_out:
            continue
        args = fx.map_arg(node.args, copies.__getitem__)
        kwargs = fx.map_arg(node.kwargs, copies.__getitem__)
        if node.op == "output":
            args = ((*args[0], *(copies[value] for value in additional)),)
        copies[node] = named_copy(graph, node, node.op, node.target, args, kwargs)
        copies[node].meta = dict(node.meta)
    module = fx.GraphModule(gm, graph)
    module.meta = dict(gm.meta)
    return module


def named_copy(
    graph: fx.Graph, node: fx.Node, op: str, target: Any, args: Any = (), kwargs: Any = None
) -> fx.Node:
    """Copy a node as another kind of node, under its own name and with what it tells."""
    copy = graph.create_node(op, target, args, kwargs or {}, name=node.name, type_expr=node.type)
    # The new graph's namespace may find another name more fitting; dumps and logs go by this one.
    copy.name = node.name
    copy.meta = dict(node.meta)
    if op == "placeholder":
        # What a value was made with is no fact of one that is given.
        copy.meta = {key: fact for key, fact in node.meta.items() if key in _FACTS_OF_A_VALUE}
    if "custom" in copy.meta:
        copy.meta["custom"] = dict(copy.meta["custom"])
    return copy
