"""The engine `tap`: the values of compiled code, as it is, and without a change to it."""

from __future__ import annotations

import warnings
import weakref

import pytest
import torch

import torchair_scope
from tests.capture.test_given_operators import add_to, announce
from torchair_scope.store.reader import read

inners = pytest.mark.parametrize(
    "inner", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]
)


@pytest.fixture
def compiled(dump_path):
    """`compiled(f)` compiles a function with taps; `inner` is the compiler, as for options."""

    def compile_tapped(function, inner="aot_eager", dynamic=None, **options):
        options = {"path": str(dump_path), "backend": inner, "engine": "tap", **options}
        return torch.compile(
            function, backend="torchair_scope", options=options, fullgraph=True, dynamic=dynamic
        )

    return compile_tapped


def calls_of(path):
    return [call for rank in read(path).ranks for call in rank.calls]


def graphs_of(path):
    return read(path).ranks[0].graphs


def shift(x):
    h = torch.relu(x)
    with torchair_scope.scope.data_dump("shift"):
        y = torch.sin(h) + 1
        y = torch.nn.functional.gelu(y)
    return y * 2


@inners
def test_the_graph_stays_whole_and_each_operator_is_dumped_as_it_was_written(
    compiled, dump_path, inner
):
    x = torch.randn(8)
    assert torch.equal(compiled(shift, inner)(x), torch.compile(shift, backend=inner)(x))
    (graph,) = graphs_of(dump_path)
    assert graph["regions"] == ["compiled"]
    sin, add, gelu = calls_of(dump_path)
    assert [sin.target, add.target, gelu.target] == [
        "aten.sin.default",
        "aten.add.Tensor",
        "aten.gelu.default",
    ]
    assert torch.equal(sin.load_args()[0][0], x.relu())
    assert torch.equal(gelu.load_args()[0][0], add.load_outputs())
    assert {call.scope for call in (sin, add, gelu)} == {"shift"}


@inners
def test_of_the_border_only_what_enters_and_what_leaves_is_taken(compiled, dump_path, inner):
    compiled(shift, inner, tap="boundary")(torch.randn(8))
    sin, gelu = calls_of(dump_path)
    assert (sorted(sin.record["files"]), sorted(gelu.record["files"])) == (
        ["INPUT.0"],
        ["OUTPUT.0"],
    )
    (row,) = torchair_scope.scope.summary().rows
    assert row.dumped == 2
    assert row.missing == {"inside its scope: tap='boundary' takes what crosses its border": 1}
    assert row.remark is None


@pytest.mark.slow
def test_the_graph_record_says_how_many_kernels_there_are_and_would_be_without_taps(
    compiled, dump_path
):
    def f(x):
        with torchair_scope.scope.data_dump():
            y = torch.sin(x).sum(-1)
        return y.exp()

    compiled(f, "inductor")(torch.randn(8, 8))
    (graph,) = graphs_of(dump_path)
    taps = graph["taps"]
    assert taps["values"] == 2
    assert taps["kernels"] >= taps["kernels_without_taps"] >= 1
    without = torch._inductor.metrics
    without.reset()
    torch._dynamo.reset()
    torch.compile(f)(torch.randn(8, 8))
    assert without.generated_kernel_count == taps["kernels_without_taps"]


@inners
def test_of_an_input_that_is_overwritten_the_value_before_is_dumped(compiled, dump_path, inner):
    def f(x, y):
        with torchair_scope.scope.data_dump():
            z = torch.sin(x) + x.t()
            x.copy_(y)
            w = x.t() * 2
        x.add_(1)
        return z + w

    x, y = torch.randn(3, 3), torch.randn(3, 3)
    before = x.clone()
    compiled(f, inner)(x, y)
    assert torch.equal(x, y + 1)
    found = {call.target: call for call in calls_of(dump_path)}
    assert torch.equal(found["aten.sin.default"].load_args()[0][0], before)
    assert torch.equal(found["aten.add.Tensor"].load_args()[0][1], before.t())
    assert torch.equal(found["aten.mul.Tensor"].load_args()[0][0], y.t())
    assert torch.equal(found["aten.mul.Tensor"].load_outputs(), y.t() * 2)


@inners
def test_sizes_of_dynamic_shapes_are_recorded_as_the_numbers_of_each_run(
    compiled, dump_path, inner
):
    def f(x):
        with torchair_scope.scope.data_dump():
            y = x.sin().reshape(x.shape[0] * x.shape[1]) * x.shape[0]
        return y + 1

    run = compiled(f, inner, dynamic=True)
    for rows in (3, 5):
        x = torch.randn(rows, 4)
        torch.testing.assert_close(run(x), x.sin().reshape(-1) * rows + 1)
    views = [call for call in calls_of(dump_path) if "view" in call.target]
    assert [call.load_args()[0][1] for call in views] == [[12], [20]]


@inners
def test_both_engines_in_one_graph(compiled, dump_path, inner):
    def f(x):
        with torchair_scope.scope.data_dump("tapped"):
            h = torch.nn.functional.silu(x)
        with torchair_scope.scope.data_dump("interpreted", engine="interpret"):
            h = torch.nn.functional.silu(h)
        with torchair_scope.scope.data_dump("tapped too"):
            return torch.nn.functional.gelu(h)

    x = torch.randn(8)
    torch.testing.assert_close(compiled(f, inner)(x), f(x))
    assert graphs_of(dump_path)[0]["regions"] == ["compiled", "dumped", "compiled"]
    assert [(call.scope, call.target) for call in calls_of(dump_path)] == [
        ("tapped", "aten.silu.default"),
        ("interpreted", "aten.silu.default"),
        ("tapped too", "aten.gelu.default"),
    ]


def test_a_value_that_a_later_part_overwrites_is_dumped_as_it_was(compiled, dump_path):
    def f(x, y):
        with torchair_scope.scope.data_dump("interpreted", engine="interpret"):
            h = y.sin()
        with torchair_scope.scope.data_dump("tapped"):
            z = h * x
        with torchair_scope.scope.data_dump("writes", engine="interpret"):
            x.copy_(z.cos())
        return z

    x, y = torch.randn(4), torch.randn(4)
    before = x.clone()
    compiled(f)(x, y)
    (mul,) = (call for call in calls_of(dump_path) if call.scope == "tapped")
    assert torch.equal(mul.load_args()[0][1], before)
    assert not torch.equal(x, before)


def test_backward_and_forward_are_tapped_in_training(compiled, dump_path):
    x = torch.randn(8, requires_grad=True)
    compiled(shift)(x).sum().backward()
    (gradient,) = torch.autograd.grad(shift(x).sum(), x)
    assert torch.equal(x.grad, gradient)
    directions = {graph["graph"]: graph["direction"] for graph in graphs_of(dump_path)}
    targets = {(directions[call.graph], call.target) for call in calls_of(dump_path)}
    assert ("backward", "aten.gelu_backward.default") in targets
    assert ("forward", "aten.gelu.default") in targets


def test_tapped_values_are_let_go_when_the_graph_has_run(compiled):
    results = []

    def watched(gm, example_inputs):
        def run(*args):
            values = gm(*args)
            results.extend(weakref.ref(value) for value in values)
            return values

        return run

    y = compiled(shift, watched)(torch.randn(100_000))
    alive = [each() for each in results if each() is not None]
    assert len(results) == 5
    assert len(alive) == 1
    assert torch.equal(alive[0], y)


def test_a_step_that_is_not_selected_gives_the_result_and_no_dump(compiled, dump_path):
    run = compiled(shift)
    with torchair_scope.scope.configure(steps=1):
        for _ in range(3):
            x = torch.randn(4)
            assert torch.equal(run(x), shift(x))
    assert {call.step for call in calls_of(dump_path)} == {1}


def test_the_operator_around_a_compiled_body_is_dumped_for_the_scope_in_it(compiled, dump_path):
    def f(x):
        def yes(x):
            with torchair_scope.scope.data_dump("branch"):
                return x.sin() + 1

        return torch.cond(x.sum() > 0, yes, torch.cos, (x,)) * 2

    x = torch.ones(3)
    with pytest.warns(match="scope 'branch' .* lies in a body of cond"):
        y = compiled(f)(x)
    assert torch.equal(y, (x.sin() + 1) * 2)
    (cond,) = calls_of(dump_path)
    assert cond.target == "cond"
    assert torch.equal(cond.load_outputs()[0], x.sin() + 1)
    (row,) = torchair_scope.scope.summary().rows
    assert row.missing == {"in the body of an operator that is dumped as one": 2}


def test_a_compiler_that_does_not_take_the_taps_compiles_without_them(compiled, dump_path):
    def takes_one_output(gm, example_inputs):
        (outputs,) = next(iter(reversed(gm.graph.nodes))).args
        if len(outputs) > 1:
            raise NotImplementedError("one output is enough")
        return gm.forward

    x = torch.randn(4)
    with pytest.warns(match="are not dumped, .*one output is enough"):
        y = compiled(shift, takes_one_output)(x)
    assert torch.equal(y, shift(x))
    assert calls_of(dump_path) == []
    (row,) = torchair_scope.scope.summary().rows
    assert row.missing == {"not handed out by the compiled code": 3}


def test_a_graph_without_a_scope_is_tapped_as_a_whole_if_the_whole_is_to_be_dumped(
    compiled, dump_path
):
    def f(x):
        return torch.relu(x).sin()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compiled(f, type="npy")(torch.randn(4))
    assert [call.target for call in calls_of(dump_path)] == [
        "aten.relu.default",
        "aten.sin.default",
    ]
    assert graphs_of(dump_path)[0]["regions"] == ["compiled"]


def test_results_that_are_views_of_each_other_come_out_right(compiled, dump_path):
    def f(x):
        with torchair_scope.scope.data_dump():
            first, second = (x * 2).split(2)
            y = first.t() @ second
        return first, y, second.view(-1)

    x = torch.randn(4, 3)
    for got, wanted in zip(compiled(f)(x), f(x), strict=True):
        assert torch.equal(got, wanted)
    (split,) = (call for call in calls_of(dump_path) if "split" in call.target)
    assert torch.equal(split.load_outputs()[1], (x * 2)[2:])


def test_the_variable_and_configure_choose_the_engine(dump_path, monkeypatch):
    options = {"path": str(dump_path), "backend": "aot_eager"}
    monkeypatch.setenv("TORCHAIR_SCOPE_ENGINE", "tap")
    torch.compile(shift, backend="torchair_scope", options=options)(torch.ones(3))
    torch._dynamo.reset()
    with torchair_scope.scope.configure(engine="interpret"):
        torch.compile(shift, backend="torchair_scope", options=options)(torch.ones(3))
    regions = [graph["regions"] for graph in graphs_of(dump_path)]
    assert regions == [["compiled"], ["compiled", "dumped", "compiled"]]


def test_an_unknown_engine_is_refused_with_those_there_are():
    with pytest.raises(ValueError, match="engine is 'tab'; it can be one of interpret, tap"):
        torchair_scope.scope.configure(engine="tab")
    with pytest.raises(ValueError, match="tap is 'border'; it can be one of all, boundary"):
        torchair_scope.get_npu_backend(tap="border")


def test_a_scope_around_a_compiled_call_says_that_it_cannot_tap(compiled, dump_path):
    run = compiled(torch.sin)
    x = torch.randn(3)
    with (
        pytest.warns(match="runs uncompiled"),
        torchair_scope.scope.data_dump("around", engine="tap", path=dump_path),
    ):
        y = run(x)
    assert torch.equal(y, x.sin())
    assert [call.target for call in calls_of(dump_path)] == ["aten.sin.default"]


@inners
def test_of_an_operator_with_an_effect_all_but_its_token_is_dumped(compiled, dump_path, inner):
    def f(x):
        with torchair_scope.scope.data_dump():
            y = announce(x.sin())
        return y.cos()

    x = torch.randn(3)
    torch.testing.assert_close(compiled(f, inner)(x), f(x))
    assert graphs_of(dump_path)[0]["regions"] == ["compiled"]
    (call,) = (call for call in calls_of(dump_path) if "effects" in call.target)
    assert call.record["operator"] == "scope_tests.announce.default"
    torch.testing.assert_close(call.load_outputs()[1], x.sin() * 3)


@inners
def test_of_an_operator_that_changes_an_argument_both_values_are_dumped(compiled, dump_path, inner):
    def f(x):
        total = torch.zeros(3)
        with torchair_scope.scope.data_dump():
            add_to(x.sin(), total)
        return total * 2

    x = torch.randn(3)
    torch.testing.assert_close(compiled(f, inner)(x), x.sin() * 2)
    (call,) = (call for call in calls_of(dump_path) if "functionalized" in call.target)
    assert call.record["operator"] == "scope_tests.add_to.default"
    torch.testing.assert_close(call.load_outputs()[1], x.sin())
    assert torch.equal(call.load_args()[1]["_all_bases"][0], torch.zeros(3))


@pytest.mark.parametrize("engine", ["tap", "interpret"])
def test_of_a_compiler_that_tells_strides_of_its_outputs_only_those_of_the_graph_count(
    compiled, dump_path, engine
):
    """The backward is compiled for what the forward has told of what it saves."""

    def telling(gm, example_inputs):
        told = torch._guards.TracingContext.get().output_strides
        if told is not None:
            assert told == []  # Inductor, too, expects to be asked for a whole graph.
            (outputs,) = next(iter(reversed(gm.graph.nodes))).args
            told += [node.meta["val"].stride() for node in outputs]

        def run(*args):
            for value, traced in zip(args, example_inputs, strict=True):
                assert value.stride() == traced.stride()
            return gm(*args)

        return run

    def project(x, weight):
        h = torch.tanh(x @ weight)
        with torchair_scope.scope.data_dump():
            y = torch.sin(h).t() @ h
        return (y * torch.exp(h.t() @ h)).t().sum(-1)

    x, weight = torch.randn(6, 4), torch.randn(4, 3, requires_grad=True)
    y = compiled(project, telling, engine=engine)(x, weight)
    y.sum().backward()
    assert torch.equal(y, project(x, weight))
    gradient = torch.autograd.grad(project(x, weight).sum(), weight)[0]
    torch.testing.assert_close(weight.grad, gradient)
    assert calls_of(dump_path)
