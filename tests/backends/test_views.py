"""Outputs of a part that are views of its inputs are split off, in their places."""

from __future__ import annotations

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from torchair_scope.backends.views import split_off_views


def traced(function, *inputs):
    return make_fx(function, tracing_mode="real")(*inputs)


def targets(gm):
    return [str(node.target) for node in gm.graph.nodes if node.op == "call_function"]


def test_a_part_without_views_of_inputs_is_left_as_it_is():
    gm = traced(lambda x: (torch.relu(x).t(), x + 1), torch.randn(3, 4))
    before = targets(gm)
    assert split_off_views(gm) is None
    assert targets(gm) == before


def test_views_are_computed_apart_and_merged_in_order():
    def part(x, y):
        turned = x.t()
        return turned, torch.relu(y), x.view(-1)[2:], turned @ y

    x, y = torch.randn(3, 4), torch.randn(3, 5)
    gm = traced(part, x, y)
    split = split_off_views(gm)
    assert (split.viewed, split.computed) == ((0, 2), (1, 3))
    merged = split.merge(split.views(x, y), gm(x, y))
    for actual, expected in zip(merged, part(x, y), strict=True):
        assert torch.equal(actual, expected)
    assert merged[0].data_ptr() == x.data_ptr()


def test_a_view_that_nothing_else_uses_leaves_the_part_and_one_in_use_stays():
    gm = traced(lambda x, y: (x.t(), y.t() + 1), torch.randn(3, 4), torch.randn(3, 4))
    split_off_views(gm)
    assert targets(gm) == ["aten.t.default", "aten.add.Tensor"]


def test_members_of_a_split_input_are_views():
    def part(x):
        first, second = x.split(2)
        return first, torch.relu(second)

    x = torch.randn(4, 3)
    gm = traced(part, x)
    split = split_off_views(gm)
    assert split.viewed == (0,)
    first, second = split.merge(split.views(x), gm(x))
    assert torch.equal(first, x[:2])
    assert torch.equal(second, torch.relu(x[2:]))


def test_an_operator_with_an_effect_stays_in_the_part():
    gm = traced(lambda x, y: (x.t(), y.add_(1)), torch.randn(3, 4), torch.randn(3, 4))
    split_off_views(gm)
    assert "aten.add_.Tensor" in targets(gm)
