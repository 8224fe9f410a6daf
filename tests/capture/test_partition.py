"""Graphs are cut into the fewest regions that their dependencies allow."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from torch import fx

from tests.capture.cutting import Cut, check_invariants, cutting_backend
from tests.capture.random_graphs import PURE, RandomGraph, random_graphs
from torchair_scope.capture.effects import Effect, effect_of
from torchair_scope.capture.partition import has_own_kind, partition

aten = torch.ops.aten


def chain(kinds: str, *, target: object = aten.sin.default) -> fx.Graph:
    """A node for each letter, each using the one before; named after its place and kind."""
    graph = fx.Graph()
    value = graph.placeholder("x")
    for position, kind in enumerate(kinds):
        value = graph.create_node("call_function", target, (value,), name=f"n{position}{kind}")
    graph.output((value,))
    return graph


def is_d(node: fx.Node) -> bool:
    return node.name.endswith("d")


def kinds_of(graph: fx.Graph) -> str:
    return "".join(region.kind[0] for region in partition(graph, is_d))


@pytest.mark.parametrize(
    ("nodes", "regions"),
    [("c", "c"), ("d", "d"), ("cd", "cd"), ("dc", "dc"), ("ccddc", "cdc"), ("dcdcdd", "dcdcd")],
)
def test_chain_is_cut_where_the_kind_changes(nodes: str, regions: str) -> None:
    assert kinds_of(chain(nodes)) == regions


def test_graph_without_calls_has_no_regions() -> None:
    graph = fx.Graph()
    graph.output((graph.placeholder("x"),))
    assert partition(graph, is_d) == []


def test_independent_scopes_are_one_region() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    ends = []
    for branch in "ab":
        value = x
        for kind in "cdc":
            value = graph.create_node(
                "call_function", aten.sin.default, (value,), name=f"{branch}{len(ends)}{kind}"
            )
        ends.append(value)
    graph.output(tuple(ends))
    assert kinds_of(graph) == "cdc"


def test_of_two_smallest_cuts_the_one_with_fewer_compiled_regions_is_taken() -> None:
    # c->d and d->c side by side: cdc and dcd both do.
    graph = fx.Graph()
    x = graph.placeholder("x")
    ends = []
    for pair in ("cd", "dc"):
        value = x
        for kind in pair:
            value = graph.create_node(
                "call_function", aten.sin.default, (value,), name=f"{pair}{kind}"
            )
        ends.append(value)
    graph.output(tuple(ends))
    assert kinds_of(graph) == "dcd"


def test_of_two_equal_cuts_the_one_that_starts_compiled_is_taken() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    ends = [
        graph.create_node("call_function", aten.sin.default, (x,), name=f"n{kind}") for kind in "dc"
    ]
    graph.output(tuple(ends))
    assert kinds_of(graph) == "cd"


def test_inputs_come_in_order_of_use_and_outputs_in_program_order() -> None:
    graph = fx.Graph()
    x, y, z = map(graph.placeholder, "xyz")
    first = graph.call_function(aten.add.Tensor, (z, x))
    second = graph.call_function(aten.add.Tensor, (first, y))
    third = graph.call_function(aten.mul.Tensor, (second, x))
    graph.output((third, first))
    (region,) = partition(graph, is_d)
    assert region.nodes == (first, second, third)
    assert region.inputs == (z, x, y)
    assert region.outputs == (first, third)


def test_nodes_without_users_stay_in_their_region() -> None:
    graph = chain("cd")
    with graph.inserting_before(next(iter(reversed(graph.nodes)))):
        left_over = graph.create_node("call_function", aten.sin.default, (), name="left_over")
    regions = partition(graph, is_d)
    assert left_over in regions[0].nodes
    assert left_over not in regions[0].outputs


def test_getitem_goes_with_the_operator_that_made_the_tuple() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    parts = graph.create_node("call_function", aten.split.Tensor, (x, 2), name="split_c")
    half = graph.create_node("call_function", operator.getitem, (parts, 0), name="half_d")
    end = graph.create_node("call_function", aten.sin.default, (half,), name="sin_d")
    graph.output((end,))
    compiled, dumped = partition(graph, is_d)
    assert compiled.nodes == (parts, half)
    assert dumped.nodes == (end,)
    assert dumped.inputs == (half,)


def test_asserts_make_no_region_of_their_own_and_are_kept() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    end = graph.create_node("call_function", aten.sin.default, (x,), name="sin_d")
    check = graph.create_node("call_function", aten._assert_async.msg, (end, "no"), name="check_c")
    graph.output((end,))
    (region,) = partition(graph, is_d)
    assert region.kind == "dumped"
    assert region.nodes == (end, check)


def test_graph_is_not_changed() -> None:
    graph = chain("cdcdc")
    before = str(graph)
    partition(graph, is_d)
    assert str(graph) == before


def fewest_regions(made: RandomGraph) -> int:
    """The smallest number of regions, found by trying."""
    calls = made.calls
    pairs = {(calls.index(one), calls.index(other)) for one, other in made.pairs()}
    same = {calls.index(item): calls.index(parts) for parts, item in made.together}
    kinds = ["" if node in made.neutral else "cd"[node in made.tagged] for node in calls]
    before: list[list[int]] = [[] for _ in calls]
    for one, other in pairs:
        before[other].append(one)
    for count in range(1, len(calls) + 1):
        for order in ("cd", "dc"):
            regions = [order[index % 2] for index in range(count)]
            if _fits(kinds, before, same, regions, []):
                return count
    raise AssertionError("one region for each node always does")


def _fits(
    kinds: Sequence[str],
    before: Sequence[Sequence[int]],
    same: dict[int, int],
    regions: Sequence[str],
    placed: list[int],
) -> bool:
    position = len(placed)
    if position == len(kinds):
        return True
    earliest = max((placed[other] for other in before[position]), default=0)
    choices = [placed[same[position]]] if position in same else range(earliest, len(regions))
    return any(
        _fits(kinds, before, same, regions, [*placed, choice])
        for choice in choices
        if kinds[position] in ("", regions[choice])
    )


@settings(deadline=None, max_examples=200)
@given(random_graphs(steps=PURE, max_steps=8))
def test_number_of_regions_is_the_smallest_possible_in_pure_graphs(made: RandomGraph) -> None:
    assert len(partition(made.graph, made.tagged.__contains__)) == fewest_regions(made)


@settings(deadline=None, max_examples=200)
@given(random_graphs(max_steps=6))
def test_number_of_regions_is_the_smallest_possible_with_effects(made: RandomGraph) -> None:
    assert len(partition(made.graph, made.tagged.__contains__)) == fewest_regions(made)


@settings(deadline=None, max_examples=200)
@given(random_graphs(max_steps=20))
def test_pieces_compute_what_the_whole_graph_does(made: RandomGraph) -> None:
    gm = made.module()
    cut = Cut(gm, made.tagged.__contains__)
    check_invariants(cut)
    inputs = [torch.arange(16.0).view(4, 4) / 16, torch.ones(4, 4)]
    copies = [tensor.clone() for tensor in inputs]
    torch.manual_seed(7)
    whole = fx.Interpreter(gm).run(*inputs)
    torch.manual_seed(7)
    pieces = cut.run(*copies)
    for one, other in zip([*whole, *inputs], [*pieces, *copies], strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


@settings(deadline=None, max_examples=200)
@given(random_graphs(max_steps=20))
def test_side_effects_stay_in_program_order(made: RandomGraph) -> None:
    regions = partition(made.graph, made.tagged.__contains__)
    run_order = [node for region in regions for node in region.nodes]
    assert [node for node in run_order if effect_of(node) is not Effect.NONE] == made.ordered
    for earlier, later in made.pairs():
        assert run_order.index(earlier) < run_order.index(later)


@settings(deadline=None, max_examples=100)
@given(random_graphs(max_steps=20))
def test_regions_hold_the_kind_of_nodes_that_they_say(made: RandomGraph) -> None:
    regions = partition(made.graph, made.tagged.__contains__)
    for region in regions:
        own = [node for node in region.nodes if has_own_kind(node)]
        assert own or len(regions) == 1
        assert all((node in made.tagged) == (region.kind == "dumped") for node in own)


def test_scoped_layer_of_a_trained_model_leaves_two_compiled_regions_each_way() -> None:
    torch.manual_seed(0)
    layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(4))

    def model(x: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(layers):
            if index == 2:
                with torch.fx.traceback.annotate({"scope": "middle"}):
                    x = layer(x).relu()
            else:
                x = layer(x).relu()
        return x.sum()

    cuts: list[Cut] = []
    x = torch.randn(5, 8)
    loss = torch.compile(model, backend=cutting_backend(cuts), fullgraph=True)(x)
    loss.backward()
    gradients = [parameter.grad.clone() for parameter in layers.parameters()]
    layers.zero_grad()
    expected = model(x)
    expected.backward()
    assert [cut.kinds for cut in cuts] == ["cdc", "cdc"]
    for cut in cuts:
        check_invariants(cut)
    assert torch.equal(loss, expected)
    for one, other in zip(gradients, layers.parameters(), strict=True):
        torch.testing.assert_close(one, other.grad)


def test_mutated_buffer_is_read_before_and_after_its_update() -> None:
    def step(cache: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        before = cache[1].sin()
        with torch.fx.traceback.annotate({"scope": "update"}):
            cache[1].add_(x)
        return before + cache.sum(0)

    cuts: list[Cut] = []
    cache, x = torch.ones(3, 4), torch.arange(4.0)
    expected_cache = cache.clone()
    result = torch.compile(step, backend=cutting_backend(cuts), fullgraph=True)(cache, x)
    assert torch.equal(result, step(expected_cache, x))
    assert torch.equal(cache, expected_cache)
    check_invariants(cuts[0])


def test_dropout_inside_and_outside_a_scope_draws_the_eager_numbers() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        a = torch.nn.functional.dropout(x, 0.5)
        with torch.fx.traceback.annotate({"scope": "drop"}):
            b = torch.nn.functional.dropout(a + 1, 0.5)
        return torch.nn.functional.dropout(b + 1, 0.5) + torch.nn.functional.dropout(x, 0.5)

    cuts: list[Cut] = []
    x = torch.ones(64)
    compiled = torch.compile(model, backend=cutting_backend(cuts), fullgraph=True)
    torch.manual_seed(3)
    result = compiled(x)
    torch.manual_seed(3)
    assert torch.equal(result, model(x))
    assert cuts[0].kinds == "cdc"
