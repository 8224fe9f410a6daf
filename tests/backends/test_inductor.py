"""Scopes under Inductor: what stays its own code, and what operators look like in a scope."""

import contextlib

import pytest
import torch
from torch._inductor.utils import fresh_cache, run_and_get_code

import torchair_scope as torchair
from tests.support.replay import assert_replays
from torchair_scope.store.reader import read


def compiled(function, path, **options):
    options = {"path": str(path), **options}
    return torch.compile(function, backend="torchair_scope", options=options, fullgraph=True)


def targets(path):
    return [call.target for rank in read(path).ranks for call in rank.calls]


@pytest.mark.parametrize("train", [False, True])
def test_a_function_without_a_scope_has_the_same_generated_code_as_with_inductor_alone(
    train, dump_path
):
    def function(x, w):
        return torch.nn.functional.layer_norm(torch.tanh(x @ w), (8,)).sum()

    def code_of(backend):
        torch._dynamo.reset()
        x = torch.ones(4, 8, requires_grad=train)
        step = torch.compile(function, backend=backend)

        def run():
            value = step(x, torch.ones(8, 8))
            if train:
                value.backward()

        with fresh_cache():
            codes = run_and_get_code(run)[1]
        # The process counts its graphs, and each file's first line has the number.
        return [code.partition("\n")[2] for code in codes]

    alone = code_of("inductor")
    assert len(alone) == 1 + train
    assert code_of("torchair_scope") == alone
    assert not dump_path.exists()


def test_operators_in_a_scope_stay_whole_forward_and_backward(dump_path):
    norm = torch.nn.LayerNorm(4)

    def function(x):
        with torchair.scope.data_dump("norms"):
            h = torch.nn.functional.gelu(norm(x))
            return torch.nn.functional.batch_norm(h, None, None, training=True)

    x = torch.randn(3, 4, requires_grad=True)
    compiled(function, dump_path)(x).sum().backward()
    dumped = targets(dump_path)
    for whole in (
        "aten.native_layer_norm.default",
        "aten.gelu.default",
        "aten.native_layer_norm_backward.default",
        "aten.gelu_backward.default",
        "aten.native_batch_norm_backward.default",
    ):
        assert whole in dumped
    assert any("batch_norm" in target for target in dumped)
    assert_replays(read(dump_path))


def test_no_pass_of_inductor_replaces_folds_or_removes_what_stands_in_a_scope(dump_path):
    def function(query, key, value):
        with torchair.scope.data_dump("attention"):
            scores = (query @ key.transpose(-1, -2)) / 2.0
            weighted = torch.softmax(scores * 1.0, -1) @ value
            constant = torch.full((4,), 2.0) + 0
        return weighted + constant

    query, key, value = torch.randn(3, 1, 2, 5, 4).unbind()
    result = compiled(function, dump_path)(query, key, value)
    torch.testing.assert_close(
        result, (query @ key.transpose(-1, -2) / 2.0).softmax(-1) @ value + 2.0
    )
    dumped = targets(dump_path)
    assert dumped.count("aten.bmm.default") == 2
    assert {"aten.div.Tensor", "aten.mul.Tensor", "aten._softmax.default"} <= set(dumped)
    assert {"aten.full.default", "aten.add.Tensor"} <= set(dumped)


def test_outside_a_scope_inductor_decomposes_as_ever(dump_path):
    def function(x):
        x = torch.nn.functional.gelu(x)
        with torchair.scope.data_dump():
            x = x + 1
        return torch.nn.functional.layer_norm(x, (4,))

    compiled(function, dump_path)(torch.randn(3, 4))
    (rank,) = read(dump_path).ranks
    (graph,) = rank.graphs
    outside = {node["target"] for node in graph["nodes"] if node["scope"] is None}
    assert "aten.erf.default" in outside
    assert not outside & {"aten.gelu.default", "aten.native_layer_norm.default"}


def test_a_layout_that_inductor_would_choose_itself_does_not_reach_the_next_region(dump_path):
    convolution = torch.nn.Conv2d(3, 8, 3)

    def function(x, scope):
        h = convolution(x).relu()
        with scope():
            h = h.transpose(1, 2) + 1
        return (h * 2).contiguous().view(2, -1)

    x = torch.randn(2, 3, 8, 8)
    with torch.no_grad(), torch._inductor.config.patch(force_layout_optimization=True):
        expected = function(x, contextlib.nullcontext)
        result = compiled(lambda x: function(x, torchair.scope.data_dump), dump_path)(x)
    torch.testing.assert_close(result, expected)
    assert_replays(read(dump_path))


def test_a_piece_that_does_not_compile_runs_uncompiled_and_says_so(dump_path, monkeypatch):
    from torchair_scope import _torch_private

    def fails(*args, **kwargs):
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(_torch_private, "compile_piece_with_inductor", fails)

    def function(x):
        x = x.sin()
        with torchair.scope.data_dump():
            x = x + 1
        return x.cos()

    with pytest.warns(UserWarning, match="runs uncompiled") as warned:
        result = compiled(function, dump_path)(torch.ones(3))
    messages = [str(warning.message) for warning in warned]
    assert len(messages) == 2
    assert "part of the graph from sin to sin" in messages[0]
    assert "inductor does not compile it, saying RuntimeError: no such kernel" in messages[0]
    torch.testing.assert_close(result, (torch.ones(3).sin() + 1).cos())
    assert targets(dump_path) == ["aten.add.Tensor"]


def test_the_users_own_joint_passes_run_as_without_a_scope(dump_path):
    seen = []

    def before(graph):
        seen.append("before")

    def after(graph):
        seen.append("after")

    def function(x):
        with torchair.scope.data_dump():
            x = x + 1
        return x.cos()

    with torch._inductor.config.patch(joint_custom_pre_pass=before, joint_custom_post_pass=after):
        compiled(function, dump_path)(torch.ones(3))
    assert seen == ["before", "after"]


def test_with_fallback_random_the_random_numbers_are_those_of_an_eager_run(dump_path):
    def function(x, scope):
        x = torch.nn.functional.dropout(x, 0.5) + 1
        with scope():
            x = torch.nn.functional.dropout(x, 0.5) + 1
        return torch.nn.functional.dropout(x, 0.5)

    with torch._inductor.config.patch(fallback_random=True):
        torch.manual_seed(7)
        expected = function(torch.ones(64), contextlib.nullcontext)
        torch.manual_seed(7)
        result = compiled(lambda x: function(x, torchair.scope.data_dump), dump_path)(
            torch.ones(64)
        )
    assert torch.equal(result, expected)


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_arithmetic_with_a_dynamic_float_keeps_its_scope(dump_path, inner):
    def function(x, eps):
        x = x * eps
        with torchair.scope.data_dump("norm"):
            x = torch.rsqrt(x.pow(2) + eps) * eps
        return x + eps

    step = torch.compile(
        function,
        backend="torchair_scope",
        options={"path": str(dump_path), "backend": inner},
        dynamic=True,
    )
    for eps in (0.25, 0.5):
        x = torch.rand(3, 4)
        torch.testing.assert_close(step(x, eps), function_of_eager(x, eps))
    (rank,) = read(dump_path).ranks
    assert {tuple(graph["regions"]) for graph in rank.graphs} == {
        ("compiled", "dumped", "compiled")
    }
    first = [call.target for call in rank.calls if call.graph == rank.calls[0].graph]
    assert [target for target in first if "convert" not in target][:4] == [
        "aten.pow.Tensor_Scalar",
        "aten.add.Tensor",
        "aten.rsqrt.default",
        "aten.mul.Tensor",
    ]
    assert_replays(read(dump_path))


def function_of_eager(x, eps):
    x = x * eps
    return torch.rsqrt(x.pow(2) + eps) * eps + eps


def test_a_size_that_only_the_scope_knows_reaches_the_compiled_part_behind_it(dump_path):
    def function(x):
        with torchair.scope.data_dump("mask"):
            chosen = x[x > 0]
        return chosen * 2

    x = torch.tensor([1.0, -1.0, 3.0])
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        result = compiled(function, dump_path)(x)
    assert result.tolist() == [2, 6]
    (rank,) = read(dump_path).ranks
    assert rank.graphs[0]["regions"][-1] == "compiled"
    assert_replays(read(dump_path))
