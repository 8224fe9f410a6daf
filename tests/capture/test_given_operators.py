"""Operators that are given another one to run: it is dumped as well, as what it is."""

import pytest
import torch
from torch._higher_order_ops.effects import _EffectType, _register_effectful_op
from torch._higher_order_ops.triton_kernel_wrap import (
    kernel_side_table,
    triton_kernel_wrapper_functional,
)
from torch.utils.checkpoint import checkpoint

import torchair_scope as torchair
from tests.support.bits import difference
from tests.support.bodies import calls_of, dump
from torchair_scope.capture.nodes import operator_name

every_inner = pytest.mark.parametrize(
    "inner", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]
)
data_dump = torchair.scope.data_dump


@torch.library.custom_op("scope_tests::add_to", mutates_args={"total"})
def add_to(x: torch.Tensor, total: torch.Tensor) -> None:
    total.add_(x)


@torch.library.custom_op("scope_tests::announce", mutates_args=())
def announce(x: torch.Tensor) -> torch.Tensor:
    return x * 3


add_to.register_fake(lambda x, total: None)
announce.register_fake(torch.empty_like)
_register_effectful_op(torch.ops.scope_tests.announce.default, _EffectType.ORDERED)


@every_inner
def test_of_an_operator_that_changes_an_argument_the_value_is_saved_before_and_after(
    dump_path, inner
):
    def function(x):
        total = torch.zeros(3)
        with data_dump("sum"):
            torch.ops.scope_tests.add_to(x, total)
        return total * 2

    rank = dump(function, (torch.ones(3),), inner, dump_path)
    around, inside = rank.calls
    assert around.record["operator"] == "scope_tests.add_to.default"
    assert inside.node == "auto_functionalized_v2_0__add_to"
    assert (inside.target, inside.scope) == ("scope_tests.add_to.default", "sum")
    (x, total), _ = inside.load_args()
    assert difference((x, total), (torch.ones(3), torch.zeros(3))) is None
    assert inside.load_outputs() is None
    assert difference(inside.load_mutated(), {"total": torch.ones(3)}) is None


@every_inner
def test_an_operator_with_an_effect_is_dumped_without_its_token(dump_path, inner):
    def function(x):
        with data_dump():
            y = torch.ops.scope_tests.announce(x)
        return y.sin()

    rank = dump(function, (torch.ones(3),), inner, dump_path)
    around, inside = rank.calls
    assert (around.node, inside.node) == ("with_effects", "with_effects_0__announce")
    assert difference(inside.load_args()[0], (torch.ones(3),)) is None
    assert difference(inside.load_outputs(), torch.full((3,), 3.0)) is None


@every_inner
@pytest.mark.parametrize(
    ("noise", "target"),
    [
        (lambda x: torch.nn.functional.dropout(x, 0.5), "aten.native_dropout.default"),
        (lambda x: x * torch.rand_like(x), "aten.rand_like.default"),
    ],
    ids=["several outputs", "one output"],
)
def test_random_operators_that_run_again_in_the_backward_are_dumped_with_the_same_values(
    dump_path, inner, noise, target
):
    def block(x):
        with data_dump("noisy"):
            x = noise(x.sigmoid())
        return x.sin()

    def function(x):
        return checkpoint(block, x, use_reentrant=False)

    with torch._inductor.config.patch(fallback_random=True):
        rank = dump(function, (torch.ones(4, 4),), inner, dump_path, backward=True)
    calls = [call for call in rank.calls if call.target == target]
    (forward,), (again,) = (
        [call for call in calls_of(rank, direction) if call in calls]
        for direction in ("forward", "backward")
    )
    assert (forward.record.get("recompute"), again.record["recompute"]) == (None, True)
    assert (forward.node, again.node) == (
        f"run_and_save_rng_state_0__{target.split('.')[1]}",
        f"run_with_rng_state_0__{target.split('.')[1]}",
    )
    assert difference(again.load_outputs(), forward.load_outputs()) is None
    assert {call.scope for call in rank.calls} == {"noisy"}


@every_inner
def test_checkpointed_operators_are_marked_where_they_run_again_and_nowhere_else(dump_path, inner):
    def block(x):
        with data_dump():
            x = x.sigmoid()
        return x.sin()

    def function(x):
        return checkpoint(block, x, use_reentrant=False)

    rank = dump(function, (torch.ones(4),), inner, dump_path, backward=True)
    marked = {
        (call.target, direction)
        for direction in ("forward", "backward")
        for call in calls_of(rank, direction)
        if call.record.get("recompute") and "detach" not in call.target
    }
    assert marked == {("aten.sigmoid.default", "backward")}


def test_a_triton_kernel_is_known_by_its_name():
    def add_kernel():
        pass

    class Autotuned:
        fn = add_kernel

    index = kernel_side_table.add_kernel(Autotuned())
    graph = torch.fx.Graph()
    node = graph.call_function(triton_kernel_wrapper_functional, (), {"kernel_idx": index})
    assert operator_name(node) == "triton.add_kernel"
