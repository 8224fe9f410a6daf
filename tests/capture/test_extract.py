"""A region becomes a module of its own, with the names and the metadata of the whole graph."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_symbols

from tests.capture.cutting import Cut, check_invariants, cutting_backend
from tests.capture.random_graphs import RandomGraph, random_graphs
from torchair_scope.capture.extract import extract
from torchair_scope.capture.partition import partition

aten = torch.ops.aten


def compiled(function: Callable[..., Any], **options: Any) -> tuple[Callable[..., Any], list[Cut]]:
    """The function compiled into pieces, and the list of cuts that fills when it is called."""
    cuts: list[Cut] = []
    return torch.compile(function, backend=cutting_backend(cuts), fullgraph=True, **options), cuts


@settings(deadline=None, max_examples=100)
@given(random_graphs(max_steps=20))
def test_nodes_keep_their_names_in_graph_and_pieces(made: RandomGraph) -> None:
    cut = Cut(made.module(), made.tagged.__contains__)
    assert [node.name for node in cut.gm.graph.nodes] == cut.names
    for region, piece in zip(cut.regions, cut.pieces, strict=True):
        nodes = list(piece.module.graph.nodes)
        inputs = [node.name for node in nodes if node.op == "placeholder"]
        assert inputs == [node.name for node in region.inputs]
        assert [node.target for node in nodes if node.op == "placeholder"] == inputs
        calls = [(node.name, node.target) for node in nodes if node.op.startswith("call_")]
        assert calls == [(node.name, node.target) for node in region.nodes]
        assert [node.name for node in nodes[-1].args[0]] == [node.name for node in region.outputs]


def test_names_that_torch_would_change_are_kept() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    node = graph.call_function(aten.sum.default, (x,))
    node.name = "sum"
    graph.output((node,))
    gm = fx.GraphModule(torch.nn.Module(), graph)
    (region,) = partition(gm.graph, lambda node: True)
    piece = extract(gm, region)
    assert [node.name for node in piece.module.graph.nodes] == ["x", "sum", "output"]
    assert torch.equal(piece.module(torch.ones(3))[0], torch.tensor(3.0))


def test_placeholders_come_first_and_the_output_is_a_flat_tuple() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        with torch.fx.traceback.annotate({"scope": "one"}):
            y = x.sin()
        return y + x

    run, cuts = compiled(model)
    run(torch.ones(2))
    for piece in cuts[0].pieces:
        ops = [node.op for node in piece.module.graph.nodes]
        assert ops == sorted(ops, key=["placeholder", "call_function", "output"].index)
        assert isinstance(piece.module.graph.find_nodes(op="output")[0].args[0], tuple)
        assert len(piece.outputs) == 1


def test_region_without_outputs_returns_an_empty_tuple() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.call_function(aten.add_.Scalar, (x, 1))
    graph.output(())
    gm = fx.GraphModule(torch.nn.Module(), graph)
    (region,) = partition(gm.graph, lambda node: False)
    value = torch.zeros(2)
    assert extract(gm, region).module(value) == ()
    assert value.tolist() == [1, 1]


def test_metadata_is_copied_and_custom_metadata_is_not_shared() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        with torch.fx.traceback.annotate({"scope": "one"}):
            return x.sin().cos()

    run, cuts = compiled(model)
    run(torch.ones(2))
    (piece,) = cuts[0].pieces
    for node in piece.module.graph.find_nodes(op="call_function", target=aten.sin.default):
        original = cuts[0].node(node.name)
        assert node.meta == original.meta
        assert node.meta["custom"] is not original.meta["custom"]
        node.meta["custom"]["scope"] = "other"
        assert original.meta["custom"]["scope"] == "one"


def test_constants_of_nested_modules_are_carried_over() -> None:
    root = torch.nn.Module()
    root.inner = torch.nn.Module()
    root.inner.register_buffer("scale", torch.tensor(3.0))
    root.offset = torch.nn.Parameter(torch.tensor(1.0))
    graph = fx.Graph()
    x = graph.placeholder("x")
    scale, offset = graph.get_attr("inner.scale"), graph.get_attr("offset")
    scaled = graph.call_function(aten.mul.Tensor, (x, scale))
    graph.output((graph.call_function(aten.add.Tensor, (scaled, offset)),))
    gm = fx.GraphModule(root, graph)
    cut = Cut(gm, lambda node: node.target is aten.mul.Tensor)
    check_invariants(cut)
    dumped, rest = cut.pieces
    assert dumped.module.inner.scale is gm.inner.scale
    assert not hasattr(dumped.module, "offset")
    assert rest.module.offset is gm.offset
    assert cut.run(torch.tensor(2.0))[0].item() == 7.0


def test_bodies_of_control_flow_are_carried_over() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        with torch.fx.traceback.annotate({"scope": "branch"}):
            z = torch.cond(y.sum() > 0, torch.sin, torch.cos, (y,))
        return z * 2

    run, cuts = compiled(model)
    x = torch.ones(3)
    assert torch.equal(run(x), model(x))
    assert torch.equal(run(-3 * x), model(-3 * x))
    check_invariants(cuts[0])
    holders = [piece for piece in cuts[0].pieces if piece.module.graph.find_nodes(op="get_attr")]
    assert len(holders) == 1


def symbols_in(value: Any) -> set[str]:
    return {str(symbol) for symbol in free_symbols(value)}


def assert_symbols_are_inputs(cut: Cut) -> None:
    """Each symbol of a piece is a number among its inputs, or made by one of its own nodes."""
    for piece in cut.pieces:
        nodes = [node for node in piece.module.graph.nodes if "val" in node.meta]
        needed = set().union(*(symbols_in(node.meta["val"]) for node in nodes))
        bound = {
            str(node.meta["val"])
            for node in nodes
            if isinstance(node.meta["val"], torch.SymInt)
            and (node.op == "placeholder" or str(node.meta["val"]).startswith("u"))
        }
        assert needed <= bound


def test_sizes_that_are_expressions_come_with_their_symbols() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        a = x.sin()
        with torch.fx.traceback.annotate({"scope": "flat"}):
            b = a.reshape(x.shape[0] * x.shape[1]) + x.shape[0]
        return b * x.shape[1]

    run, cuts = compiled(model, dynamic=True)
    for shape in ((3, 5), (4, 6), (7, 2)):
        x = torch.randn(shape)
        assert torch.equal(run(x), model(x))
    assert len(cuts) == 1
    assert cuts[0].kinds == "cdc"
    check_invariants(cuts[0])
    assert_symbols_are_inputs(cuts[0])


@pytest.mark.parametrize("scoped", ["nonzero", "after", "both"])
@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_sizes_that_data_decides_reach_the_pieces_that_need_them(scoped: str) -> None:
    def annotate(part: str) -> Any:
        value = {"scope": "data"} if scoped in (part, "both") else {"other": part}
        return torch.fx.traceback.annotate(value)

    def model(x: torch.Tensor) -> torch.Tensor:
        with annotate("nonzero"):
            found = torch.nonzero(x)
        with annotate("after"):
            squares = found * found
        return squares.sum(1).float().sin()

    run, cuts = compiled(model)
    x = torch.tensor([0.0, 1.0, 0.0, 2.0])
    assert torch.equal(run(x), model(x))
    check_invariants(cuts[0])
    assert_symbols_are_inputs(cuts[0])


@torch._dynamo.config.patch(capture_scalar_outputs=True)
def test_number_taken_from_a_tensor_reaches_later_pieces() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        count = x[0].item()
        torch._check(count >= 0)
        with torch.fx.traceback.annotate({"scope": "made"}):
            made = torch.ones(count, dtype=torch.int64)
        return made.cumsum(0) + x[1]

    run, cuts = compiled(model)
    x = torch.tensor([4, 2])
    assert torch.equal(run(x), model(x))
    check_invariants(cuts[0])
    assert_symbols_are_inputs(cuts[0])
    assert operator.ge in {node.target for node in cuts[0].gm.graph.nodes}
