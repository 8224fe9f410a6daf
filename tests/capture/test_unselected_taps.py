"""The engine `tap` in steps that are not dumped: the code that runs then has no taps."""

from __future__ import annotations

import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.support.account import rows
from torchair_scope.scope import configure, data_dump
from torchair_scope.store.reader import read

inners = pytest.mark.parametrize(
    "inner", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]
)


class Compiler:
    """An inner compiler that notes how many values each of its codes returns, and which run."""

    def __init__(self):
        self.compiled = []
        self.runs = []
        self.graphs = []

    def __call__(self, gm, example_inputs):
        (outputs,) = next(iter(reversed(gm.graph.nodes))).args
        count = len(outputs)
        self.compiled.append(count)
        self.graphs.append(gm)

        def run(*args):
            self.runs.append(count)
            return gm(*args)

        return run


@pytest.fixture
def compiled(dump_path):
    def compile_tapped(function, inner, dynamic=None, **options):
        options = {"path": str(dump_path), "backend": inner, "engine": "tap", **options}
        return torch.compile(
            function, backend="torchair_scope", options=options, fullgraph=True, dynamic=dynamic
        )

    return compile_tapped


@pytest.fixture(autouse=True)
def _no_defaults():
    with configure():
        yield


def calls_of(path):
    return [call for rank in read(path).ranks for call in rank.calls]


def block(x):
    h = torch.relu(x)
    with data_dump("block"):
        y = torch.sin(h) + 1
        y = torch.nn.functional.gelu(y)
    return y * 2


def alone(x):
    return torch.nn.functional.gelu(torch.sin(torch.relu(x)) + 1) * 2


# One result, and three taps: the input of sin, and what sin and add give; gelu's is one as well.
TAPPED, PLAIN = 5, 1


def test_where_all_steps_are_selected_nothing_is_compiled_twice(compiled, dump_path):
    compiler = Compiler()
    run = compiled(block, compiler)
    for _ in range(3):
        run(torch.randn(4))
    assert (compiler.compiled, compiler.runs) == ([TAPPED], [TAPPED] * 3)


def test_steps_that_are_not_selected_run_code_without_taps(compiled, dump_path):
    compiler = Compiler()
    run = compiled(block, compiler)
    configure(steps="1|3")
    inputs = [torch.randn(4) for _ in range(5)]
    for x in inputs:
        assert torch.equal(run(x), alone(x))
    assert compiler.runs == [PLAIN, TAPPED, PLAIN, TAPPED, PLAIN]
    assert compiler.compiled == [TAPPED, PLAIN]
    sines = [call for call in calls_of(dump_path) if call.target == "aten.sin.default"]
    assert [call.step for call in sines] == [1, 3]
    for call in sines:
        assert torch.equal(call.load_args()[0][0], inputs[call.step].relu())


def test_code_without_taps_is_compiled_at_the_first_step_that_is_not_selected(compiled):
    compiler = Compiler()
    run = compiled(block, compiler)
    with configure(steps="0-1"):
        run(torch.randn(4))
        run(torch.randn(4))
        assert compiler.compiled == [TAPPED]
        run(torch.randn(4))
        assert compiler.compiled == [TAPPED, PLAIN]


def test_a_rank_that_is_not_selected_compiles_no_taps(compiled, dump_path):
    compiler = Compiler()
    run = compiled(block, compiler)
    configure(ranks=1)
    x = torch.randn(4)
    for _ in range(2):
        assert torch.equal(run(x), alone(x))
    assert (compiler.compiled, compiler.runs) == ([PLAIN], [PLAIN] * 2)
    assert not dump_path.exists()
    (row,) = rows()
    assert row.missing == {"rank not selected": 3}


def test_taps_are_compiled_when_a_rank_is_selected_after_all(compiled, dump_path):
    compiler = Compiler()
    run = compiled(block, compiler)
    x = torch.randn(4)
    with configure(ranks=1):
        run(x)
    assert torch.equal(run(x), alone(x))
    assert (compiler.compiled, compiler.runs) == ([PLAIN, TAPPED], [PLAIN, TAPPED])
    (graph,) = read(dump_path).ranks[0].graphs
    assert graph["taps"]["values"] == TAPPED - PLAIN
    assert [call.step for call in calls_of(dump_path)] == [1, 1, 1]
    (row,) = rows()
    assert row.dumped == 3


def test_the_account_knows_why_operators_of_such_steps_are_missing(compiled):
    run = compiled(block, Compiler())
    with configure(steps=7):
        run(torch.randn(4))
    (row,) = rows()
    assert row.missing == {"step not selected": 3}


def test_a_step_of_one_scope_runs_with_taps_and_saves_no_other_scope(compiled, dump_path):
    def two(x):
        with data_dump("first", steps=0):
            y = x.sin()
        with data_dump("second", steps=2):
            return y.exp() * 2

    compiler = Compiler()
    run = compiled(two, compiler)
    for _ in range(3):
        x = torch.randn(4)
        assert torch.equal(run(x), two(x))
    tapped, plain = compiler.compiled
    assert compiler.runs == [tapped, plain, tapped]
    found = {(call.step, call.scope) for call in calls_of(dump_path)}
    assert found == {(0, "first"), (2, "second")}


def test_forward_and_backward_of_one_iteration_may_differ(compiled, dump_path):
    compiler = Compiler()
    run = compiled(block, compiler)
    configure(steps="1")
    runs = []
    for number in range(4):
        x = torch.randn(4, requires_grad=True)
        y = run(x).sum()
        if number != 1:  # so the backward is one step behind from now on
            y.backward()
            (gradient,) = torch.autograd.grad(alone(x).sum(), x)
            torch.testing.assert_close(x.grad, gradient)
        runs.append(len(compiler.runs))
    directions = {graph["graph"]: graph["direction"] for graph in read(dump_path).ranks[0].graphs}
    found = {(directions[call.graph], call.step) for call in calls_of(dump_path)}
    assert found == {("forward", 1), ("backward", 1)}
    assert len(compiler.compiled) == 4


def test_no_copy_is_left_of_those_that_taps_need(compiled, dump_path):
    def update(x, y):
        with data_dump():
            z = torch.sin(x)
            x.copy_(y)
            w = x * 2
        x.add_(1)
        return z + w

    compiler = Compiler()
    run = compiled(update, compiler)
    configure(steps=1)
    for _ in range(2):
        x, y = torch.randn(3), torch.randn(3)
        before = x.clone()
        assert torch.equal(run(x, y), before.sin() + y * 2)
        assert torch.equal(x, y + 1)
    copies = [
        sum(node.target is torch.ops.aten.clone.default for node in gm.graph.nodes)
        for gm in compiler.graphs
    ]
    assert copies[0] > 0
    assert copies[1] == 0
    (sin,) = (call for call in calls_of(dump_path) if call.target == "aten.sin.default")
    assert torch.equal(sin.load_args()[0][0], before)


def test_with_both_engines_in_a_graph_each_part_leaves_its_taps_out(compiled, dump_path):
    def both(x, y):
        with data_dump("tapped"):
            h = torch.sin(x) * 2
        with data_dump("interpreted", engine="interpret", steps="0|1"):
            h = torch.cos(h)
        with data_dump("tapped too"):
            z = h * x
        with data_dump("writes", engine="interpret"):
            x.copy_(z.cos())
        return z + y

    compiler = Compiler()
    run = compiled(both, compiler)
    configure(steps=1)
    for step in range(3):
        x, y = torch.randn(4), torch.randn(4)
        before = x.clone()
        z = torch.cos(torch.sin(x) * 2) * x
        assert torch.equal(run(x, y), z + y)
        assert torch.equal(x, z.cos())
        if step == 1:
            dumped = before
    scopes = {0: set(), 1: set()}
    for call in calls_of(dump_path):
        scopes[call.step].add(call.scope)
    assert scopes == {
        0: {"interpreted"},
        1: {"interpreted", "tapped", "tapped too", "writes"},
    }
    (mul,) = (call for call in calls_of(dump_path) if call.scope == "tapped too")
    assert torch.equal(mul.load_args()[0][1], dumped)
    half = len(compiler.runs) // 3
    first, second, third = (compiler.runs[half * n : half * (n + 1)] for n in range(3))
    assert first == third
    assert sum(second) > sum(first)


def test_code_that_would_return_other_strides_is_not_used(compiled, dump_path):
    codes = []

    def transposing(gm, example_inputs):
        """Chooses a layout for what the backward reads, another one the second time."""
        reported = torch._guards.TracingContext.get().output_strides
        (outputs,) = next(iter(reversed(gm.graph.nodes))).args
        codes.append(gm)
        if reported is not None:
            reported += [(1, 4) if len(codes) == 3 else (4, 1) for _ in outputs]
        return gm.forward

    run = compiled(block, transposing)
    configure(steps=0)
    for step in range(3):
        x = torch.randn(4, 4, requires_grad=True)
        if step == 1:
            with pytest.warns(match="its outputs are laid out in another way"):
                y = run(x)
            configure(steps=None)  # The backward is to be compiled once.
        else:
            y = run(x)
        y.sum().backward()
        assert torch.equal(y, alone(x))
        assert torch.equal(x.grad, torch.autograd.grad(alone(x).sum(), x)[0])
    assert len(codes) == 3


@inners
def test_random_numbers_of_training_are_those_of_the_model_without_a_scope(
    compiled, dump_path, inner
):
    weight = torch.randn(16, 16)

    def drop(x, scope=None):
        h = torch.nn.functional.dropout(x @ weight, 0.5)
        if scope is not None:
            with data_dump(scope):
                h = torch.nn.functional.dropout(torch.tanh(h), 0.5)
        else:
            h = torch.nn.functional.dropout(torch.tanh(h), 0.5)
        return h * torch.rand_like(h)

    def trained(run, *scope):
        torch.manual_seed(0)
        results = []
        for _ in range(4):
            x = torch.randn(8, 16, requires_grad=True)
            y = run(x, *scope)
            y.square().sum().backward()
            results += [y.detach(), x.grad]
        return results

    alone = trained(torch.compile(drop, backend=inner, fullgraph=True))
    torch._dynamo.reset()
    with configure(steps="0|2"):
        scoped = trained(compiled(drop, inner), "drop")
    for got, wanted in zip(scoped, alone, strict=True):
        torch.testing.assert_close(got, wanted)
    assert {call.step for call in calls_of(dump_path)} == {0, 2}


def test_a_later_compile_draws_none_of_the_models_random_numbers(compiled):
    def noisy(gm, example_inputs):
        torch.rand(3)
        return gm.forward

    def noise(x):
        with data_dump():
            return torch.rand_like(x) + x.sin()

    run = compiled(noise, noisy)
    x = torch.zeros(4)
    run(x)
    torch.manual_seed(0)
    with configure(steps=0):
        got = [run(x), run(x)]
    torch.manual_seed(0)
    assert torch.equal(got[0], torch.rand(4))
    assert torch.equal(got[1], torch.rand(4))


@inners
def test_shapes_of_steps_that_are_not_selected_may_be_new(compiled, dump_path, inner):
    def f(x):
        with data_dump():
            y = x.sin().reshape(x.shape[0] * x.shape[1]) * x.shape[0]
            y = torch.nn.functional.gelu(y)
        return y + 1

    run = compiled(f, inner, dynamic=True)
    configure(steps="1|3")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for rows in (3, 5, 4, 9):
            x = torch.randn(rows, 4)
            torch.testing.assert_close(run(x), f(x))
    views = [call for call in calls_of(dump_path) if "view" in call.target]
    assert [call.load_args()[0][1] for call in views] == [[20], [36]]


def test_code_that_would_need_a_guard_more_is_not_used(compiled, dump_path):
    codes = []

    def picky(gm, example_inputs):
        """The second time it makes code for one size only, and knows that for a guard."""
        codes.append(gm)
        (size,) = (each for each in example_inputs if isinstance(each, torch.SymInt))
        if len(codes) == 2 and size == 4:
            return lambda *args: [torch.zeros(4)]
        return gm.forward

    run = compiled(block, picky, dynamic=True)
    configure(steps=0)
    run(torch.randn(4))
    with pytest.warns(match="returns its tapped values in steps that are not selected"):
        run(torch.randn(4))
    for size in (4, 6):
        x = torch.randn(size)
        assert torch.equal(run(x), alone(x))
    assert {call.step for call in calls_of(dump_path)} == {0}


def test_what_cannot_be_compiled_without_taps_any_more_stays_as_it_is(compiled, dump_path):
    class Broken(Compiler):
        def __call__(self, gm, example_inputs):
            if self.compiled:
                raise RuntimeError("out of ideas")
            return super().__call__(gm, example_inputs)

    compiler = Broken()
    run = compiled(block, compiler)
    configure(steps=0)
    x = torch.randn(4)
    run(x)
    with pytest.warns(match="from relu to mul .* in steps that are not selected, .*out of ideas"):
        assert torch.equal(run(x), alone(x))
    assert torch.equal(run(x), alone(x))
    assert {call.step for call in calls_of(dump_path)} == {0}


def test_threads_that_come_to_their_first_such_step_at_once_compile_once(compiled):
    compiler = Compiler()
    run = compiled(block, compiler)
    run(torch.randn(4))
    start = threading.Barrier(8)

    def one(seed):
        x = torch.full((4,), float(seed))
        start.wait()
        return torch.equal(run(x), alone(x))

    configure(steps=0)
    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(one, range(8)))
    assert compiler.compiled == [TAPPED, PLAIN]


@pytest.mark.slow
def test_inductor_makes_the_kernels_of_the_graph_without_a_scope(compiled):
    def reduced(x):
        with data_dump():
            y = torch.sin(x).sum(-1)
        return y.exp()

    def kernels(run, x):
        before = torch._inductor.metrics.generated_kernel_count
        run(x)
        return torch._inductor.metrics.generated_kernel_count - before

    x = torch.randn(8, 8)
    alone = kernels(torch.compile(reduced), x)
    torch._dynamo.reset()
    run = compiled(reduced, "inductor")
    configure(steps=0)
    assert kernels(run, x) > alone
    assert kernels(run, x) == alone
    assert kernels(run, x) == 0


@pytest.mark.slow
def test_options_of_inductor_hold_for_what_is_compiled_later(compiled, dump_path):
    def noise(x):
        h = torch.rand_like(x)
        with data_dump():
            h = h.sin() * x
        return h

    run = compiled(noise, "inductor")
    x = torch.ones(5)
    with torch._inductor.config.patch(fallback_random=True):
        run(x)
    torch.manual_seed(0)
    configure(steps=0)
    got = run(x)
    torch.manual_seed(0)
    torch.testing.assert_close(got, torch.rand(5).sin())
