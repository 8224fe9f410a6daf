"""What has a side effect keeps its place."""

from __future__ import annotations

import operator

import pytest
import torch
from torch import fx

from tests.capture.cutting import Cut, check_invariants
from torchair_scope.capture.effects import Effect, effect_of, is_random, order_dependencies
from torchair_scope.capture.partition import partition

aten = torch.ops.aten


def call(target: object, *args: object, **kwargs: object) -> fx.Node:
    """A node in a graph of its own; each "x" among the arguments becomes a placeholder."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    return graph.call_function(target, tuple(x if arg == "x" else arg for arg in args), kwargs)


@pytest.mark.parametrize(
    ("target", "args"),
    [
        (aten.add.Tensor, ("x", "x")),
        (aten.view.default, ("x", [-1])),
        (aten.split.Tensor, ("x", 2)),
        (aten.native_batch_norm.default, ("x", None, None, None, None, True, 0.1, 1e-5)),
        (aten._assert_async.msg, ("x", "no")),
        (aten._assert_scalar.default, (True, "no")),
        (aten.sym_constrain_range_for_size.default, (3,)),
        (aten.sym_size.int, ("x", 0)),
        (aten._local_scalar_dense.default, ("x",)),
        (operator.mul, (2, 3)),
        (operator.getitem, ("x", 0)),
        (torch.sym_max, (2, 3)),
        (torch.ops.higher_order.auto_functionalized_v2, (aten.add_.Tensor,)),
    ],
)
def test_has_no_effect(target: object, args: tuple[object, ...]) -> None:
    assert effect_of(call(target, *args)) is Effect.NONE


@pytest.mark.parametrize(
    ("target", "args"),
    [
        (aten.add_.Tensor, ("x", "x")),
        (aten.copy_.default, ("x", "x")),
        (aten.add.out, ("x", "x")),
        (aten._foreach_add_.Scalar, (["x"], 1)),
        (aten.rand.default, ([2],)),
        (aten.native_dropout.default, ("x", 0.5, True)),
        (torch.ops._c10d_functional.wait_tensor.default, ("x",)),
        (torch.ops._c10d_functional.all_reduce.default, ("x", "sum", "0")),
        (torch.ops.prims._sink_tokens.default, (["x"],)),
        (torch.ops.higher_order.with_effects, ("x", aten.sin.default, "x")),
        (torch.ops.higher_order.run_and_save_rng_state, (aten.rand.default, [2])),
        (torch.ops.higher_order.triton_kernel_wrapper_mutation, ()),
        (torch.ops.higher_order.auto_functionalized_v2, (aten.normal_.default,)),
        (torch.nn.functional.relu, ("x",)),
        (operator.setitem, ("x", 0, 1)),
        (operator.iadd, ("x", 1)),
    ],
)
def test_is_ordered(target: object, args: tuple[object, ...]) -> None:
    assert effect_of(call(target, *args)) is Effect.ORDERED


@pytest.mark.parametrize(
    "target",
    [
        torch._C._set_grad_enabled,
        torch.amp.autocast_mode._enter_autocast,
        torch.amp.autocast_mode._exit_autocast,
        torch._C._functorch._vmap_increment_nesting,
        torch._C._functorch._vmap_decrement_nesting,
        torch.ops.profiler._record_function_enter_new.default,
        torch.ops.profiler._record_function_exit._RecordFunction,
    ],
)
def test_is_a_barrier(target: object) -> None:
    assert effect_of(call(target)) is Effect.BARRIER


def test_methods_and_modules_are_ordered() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    assert effect_of(graph.call_method("relu", (x,))) is Effect.ORDERED
    assert effect_of(graph.call_module("layer", (x,))) is Effect.ORDERED


@pytest.mark.parametrize(
    ("node", "random"),
    [
        (call(aten.rand.default, [2]), True),
        (call(aten.bernoulli.p, "x", 0.5), True),
        (call(aten.normal_.default, "x"), True),
        (call(torch.ops.higher_order.run_and_save_rng_state, aten.rand.default, [2]), True),
        (call(torch.ops.higher_order.auto_functionalized_v2, aten.normal_.default), True),
        (call(torch.ops.higher_order.auto_functionalized_v2, aten.add_.Tensor), False),
        (call(aten.add_.Tensor, "x", "x"), False),
        (call(aten._scaled_dot_product_flash_attention.default, "x", "x", "x"), False),
        (call(aten._scaled_dot_product_flash_attention.default, "x", "x", "x", 0.1), True),
        (
            call(aten._scaled_dot_product_flash_attention.default, "x", "x", "x", dropout_p=0.1),
            True,
        ),
    ],
    ids=str,
)
def test_random_nodes_are_known(node: fx.Node, random: bool) -> None:
    assert is_random(node) == random


def test_inductors_random_primitives_are_random() -> None:
    from torch._inductor import inductor_prims

    assert is_random(call(inductor_prims.seeds, 2, torch.device("cpu")))
    assert is_random(call(inductor_prims.random, [2], "x", "rand"))


def with_body(target: object) -> fx.Node:
    """A `cond` node, one branch of which calls `target` on the operand."""
    body = fx.Graph()
    body.output((body.call_function(target, (body.placeholder("x"),)),))
    pure = fx.Graph()
    pure.output((pure.call_function(aten.sin.default, (pure.placeholder("x"),)),))
    root = torch.nn.Module()
    root.true = fx.GraphModule(torch.nn.Module(), body)
    root.false = fx.GraphModule(torch.nn.Module(), pure)
    graph = fx.Graph()
    x, flag = graph.placeholder("x"), graph.placeholder("flag")
    branches = graph.get_attr("true"), graph.get_attr("false")
    node = graph.call_function(torch.ops.higher_order.cond, (flag, *branches, (x,)))
    graph.output((node,))
    return fx.GraphModule(root, graph).graph.find_nodes(op="call_function", target=node.target)[0]


def test_control_flow_has_the_effects_of_its_bodies() -> None:
    assert effect_of(with_body(aten.cos.default)) is Effect.NONE
    assert effect_of(with_body(aten.rand_like.default)) is Effect.ORDERED
    assert effect_of(with_body(aten.sin_.default)) is Effect.ORDERED
    assert is_random(with_body(aten.rand_like.default))
    assert not is_random(with_body(aten.sin_.default))


def must_precede(graph: fx.Graph, earlier: fx.Node, later: fx.Node) -> bool:
    """Whether the dependencies, arguments included, lead from one node to another."""
    before = order_dependencies(graph)
    reached, todo = set(), [later]
    while todo:
        node = todo.pop()
        for other in [*node.all_input_nodes, *before.get(node, ())]:
            if other not in reached:
                reached.add(other)
                todo.append(other)
    return earlier in reached


def test_nothing_crosses_a_mode_switch() -> None:
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    inside = graph.call_function(aten.sin.default, (x,))
    graph.call_function(torch._C._set_grad_enabled, (True,))
    outside = graph.call_function(aten.cos.default, (y,))
    graph.call_function(torch._C._set_grad_enabled, (False,))
    graph.output((inside, outside))
    assert must_precede(graph, inside, outside)
    regions = partition(graph, lambda node: node is outside)
    assert [region.kind for region in regions] == ["compiled", "dumped"]
    assert sum(len(region.nodes) for region in regions) == 4


@pytest.mark.parametrize(
    ("view", "args"),
    [
        (aten.view.default, ([-1],)),
        (aten.t.default, ()),
        (aten.slice.Tensor, (0, 0, 2)),
        (aten.alias.default, ()),
        (aten.as_strided.default, ([2], [1])),
    ],
)
def test_write_to_a_view_waits_for_readers_of_its_base_and_holds_up_later_ones(
    view: object, args: tuple[object, ...]
) -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    early = graph.call_function(aten.sin.default, (x,))
    looking = graph.call_function(view, (x, *args))
    write = graph.call_function(aten.add_.Scalar, (looking, 1))
    late = graph.call_function(aten.cos.default, (x,))
    graph.output((early, late))
    assert must_precede(graph, early, write)
    assert must_precede(graph, write, late)
    assert not must_precede(graph, early, looking)


def test_write_through_a_part_of_a_split_is_seen() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    parts = graph.call_function(aten.split.Tensor, (x, 2))
    half = graph.call_function(operator.getitem, (parts, 0))
    write = graph.call_function(aten.zero_.default, (half,))
    late = graph.call_function(aten.cos.default, (x,))
    graph.output((late,))
    assert must_precede(graph, write, late)


def test_write_to_other_memory_orders_nothing() -> None:
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    early = graph.call_function(aten.sin.default, (x,))
    copy = graph.call_function(aten.clone.default, (x,))
    write = graph.call_function(aten.add_.Tensor, (copy, y))
    late = graph.call_function(aten.cos.default, (y,))
    graph.output((early, write, late))
    assert not must_precede(graph, early, write)
    assert not must_precede(graph, write, late)


def test_two_attribute_nodes_of_one_name_are_one_memory() -> None:
    graph = fx.Graph()
    root = torch.nn.Module()
    root.register_buffer("state", torch.zeros(2))
    graph.owning_module = root
    write = graph.call_function(aten.add_.Scalar, (graph.get_attr("state"), 1))
    read = graph.call_function(aten.sin.default, (graph.get_attr("state"),))
    graph.output((read,))
    assert must_precede(graph, write, read)


def test_set_joins_the_memory_of_its_arguments() -> None:
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    graph.call_function(aten.set_.source_Tensor, (x, y))
    write = graph.call_function(aten.add_.Scalar, (x, 1))
    read = graph.call_function(aten.sin.default, (y,))
    graph.output((read,))
    assert must_precede(graph, write, read)


def test_functions_that_cannot_be_looked_into_keep_the_order_of_the_program() -> None:
    def model(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        z = torch.sin(x)
        x.add_(y)
        w = torch.nn.functional.relu(x[0])
        x.view(-1)[1:3].mul_(2)
        return z + w + x.sum()

    gm = fx.symbolic_trace(model)
    inputs = torch.arange(4.0).view(2, 2), torch.ones(2, 2)
    copies = [tensor.clone() for tensor in inputs]
    expected = model(*copies)
    calls = gm.graph.find_nodes(op="call_method")
    cut = Cut(gm, lambda node: node in calls)
    check_invariants(cut)
    assert torch.equal(cut.run(*inputs), expected)
    assert torch.equal(inputs[0], copies[0])
