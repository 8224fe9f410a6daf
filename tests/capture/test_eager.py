"""Scopes in code that is not compiled: what is dumped, and what stays as it is."""

from __future__ import annotations

import contextlib
import threading
import weakref

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import torchair_scope as torchair
from tests.support.bits import difference
from tests.support.replay import assert_replays
from torchair_scope.capture.tags import scope_of
from torchair_scope.scope import data_dump
from torchair_scope.store.reader import read


@pytest.fixture
def dumped(dump_path, monkeypatch):
    """`dumped()` has all calls so far, `dumped("backward")` those of one direction."""
    monkeypatch.setenv("TORCHAIR_SCOPE_PATH", str(dump_path))

    def calls(direction=None):
        if not dump_path.exists():
            return []
        (rank,) = read(dump_path).ranks
        assert rank.problems == []
        directions = {graph["graph"]: graph["direction"] for graph in rank.graphs}
        return [call for call in rank.calls if direction in (None, directions[call.graph])]

    return calls


def nodes(calls):
    return [call.node for call in calls]


def test_operators_are_named_as_nodes_and_lie_in_folders_that_readers_take_for_steps(
    dumped, dump_path
):
    with data_dump("mine"):
        x = torch.ones(3) + 1
        x = (x + 2).sum()
    calls = dumped()
    assert nodes(calls) == ["ones", "add", "add_1", "sum_1"]
    assert [call.target for call in calls][1:] == [
        *["aten.add.Tensor"] * 2,
        "aten.sum.default",
    ]
    (folder,) = (dump_path / "worldsize1_global_rank0").glob("eager_*")
    assert [step.name for step in folder.iterdir()] == ["0"]
    assert_replays(read(dump_path))


def test_a_place_is_a_graph_each_entry_a_step_and_inner_scopes_are_part_of_it(dumped):
    for _ in range(2):
        with data_dump("outer"):
            x = torch.ones(3).sin()
            with data_dump("inner"):
                x = x.cos()
            x = x.tan()
    calls = dumped()
    assert len({call.graph for call in calls}) == 1
    assert [(call.step, call.node, call.scope) for call in calls] == [
        (step, node, scope)
        for step in (0, 1)
        for node, scope in [
            ("ones", "outer"),
            ("sin", "outer"),
            ("cos", "outer/inner"),
            ("tan", "outer"),
        ]
    ]


def test_each_call_has_its_line_of_code_and_its_module(dumped):
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Sequential(torch.nn.GELU()))
    with torch.no_grad(), data_dump():
        model(torch.ones(1, 2)).sin()
    modules = {call.node: call.record["module"] for call in dumped()}
    assert modules == {"ones": None, "t": "0", "addmm": "0", "gelu": "1.0", "sin": None}
    sources = {call.record["source"]["code"] for call in dumped()}
    assert sources == {"model(torch.ones(1, 2)).sin()"}


def train(scope, model, x):
    h = x.cos()
    with scope():
        h = model(h) + h
        h = h.sin().view(-1) * h.view(-1)
    h.exp().sum().backward()
    return h


def test_forward_and_backward_of_the_scope_are_dumped_with_results_unchanged(dumped, dump_path):
    results = []
    for scope in (contextlib.nullcontext, data_dump):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU(), torch.nn.LayerNorm(4))
        x = torch.randn(3, 4, requires_grad=True)
        h = train(scope, model, x)
        results.append([h.detach(), x.grad, *(p.grad for p in model.parameters())])
    assert difference(*results) is None
    targets = {call.target for call in dumped("backward")}
    assert {"aten.gelu_backward.default", "aten.native_layer_norm_backward.default"} <= targets
    assert "aten.exp.default" not in {call.target for call in dumped()}
    assert "aten.expand.default" not in targets
    assert_replays(read(dump_path))


def test_a_call_of_the_backward_names_its_forward_call_and_has_its_place(dumped):
    x = torch.ones(3, requires_grad=True)
    with data_dump("mine"):
        y = x.sin()
    y.sum().backward()
    (forward,) = dumped("forward")
    backward = dumped("backward")
    assert nodes(backward) == ["cos", "mul"]
    for call in backward:
        assert call.scope == "mine"
        assert call.record["source"] == forward.record["source"]
        assert call.record["forward"] == {"graph": forward.graph, "step": 0, "node": "sin"}


def test_gradients_that_are_summed_within_the_scope_are_dumped(dumped):
    x = torch.ones(3, requires_grad=True)
    with data_dump():
        y = x * 2
        z = y.sin() + y.cos()
    z.sum().backward()
    targets = [call.target for call in dumped("backward")]
    assert sum(target.startswith("aten.add") for target in targets) == 1


def test_each_backward_is_a_step_and_a_second_derivative_is_dumped_too(dumped):
    x = torch.ones(3, requires_grad=True)
    with data_dump():
        y = x.sin()
    for _ in range(2):
        y.sum().backward(retain_graph=True)
    assert [(call.step, call.node) for call in dumped("backward")] == [
        (step, node) for step in (0, 1) for node in ("cos", "mul")
    ]
    (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(gradient.sum(), x)
    torch.testing.assert_close(second, -torch.ones(3).sin())
    assert "neg" in nodes(dumped("backward"))


def test_functions_with_their_own_backward_views_and_many_outputs_are_followed(dumped, dump_path):
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            return gradient.mul(2)

    x = torch.ones(4, 3, requires_grad=True)
    with data_dump():
        first, second = Twice.apply(x).split(2)
        y = (first * second).t()
    y.sum().backward()
    torch.testing.assert_close(x.grad, torch.full((4, 3), 4.0))
    targets = [call.target for call in dumped("backward")]
    assert targets.count("aten.mul.Tensor") == 3
    assert {"aten.t.default", "aten.cat.default"} <= set(targets)
    assert_replays(read(dump_path))


def test_an_in_place_operator_is_saved_with_what_it_was_given(dumped, dump_path):
    x = torch.zeros(3)
    with data_dump():
        x[1:].add_(1)
        x.mul_(2)
    assert x.tolist() == [0, 2, 2]
    assert nodes(dumped()) == ["slice_1", "add_", "mul_"]
    (before, factor), _ = dumped()[2].load_args()
    assert (before.tolist(), factor) == ([0, 1, 1], 2)
    assert_replays(read(dump_path))


def test_random_operators_and_uninitialised_memory_are_marked(dumped):
    with data_dump():
        torch.nn.functional.dropout(torch.ones(8), 0.5)
    marked = [call.node for call in dumped() if call.record.get("nondeterministic")]
    assert marked == ["empty_like", "bernoulli_"]


def test_in_inference_mode_operators_are_those_of_any_other_mode(dumped):
    linear = torch.nn.Linear(2, 2)
    with torch.inference_mode(), data_dump():
        linear(torch.ones(1, 2))
    assert nodes(dumped()) == ["ones", "t", "addmm"]


def test_bfloat16_is_converted_without_the_conversion_being_dumped(dumped, dump_path):
    with data_dump():
        torch.ones(2, dtype=torch.bfloat16).sin()
    assert nodes(dumped()) == ["ones", "sin"]
    assert_replays(read(dump_path))


class Log(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("outside", [True, False])
def test_a_mode_of_the_users_sees_what_it_sees_without_a_scope(dumped, outside):
    log = Log()
    first, second = (log, data_dump()) if outside else (data_dump(), log)
    with first, second:
        torch.ones(2, dtype=torch.bfloat16).sin()
    assert log.seen == ["aten.ones.default", "aten.sin.default"]
    assert nodes(dumped()) == ["ones", "sin"]


def test_scopes_that_are_left_in_another_order_leave_no_mode_behind(dumped):
    first, second = data_dump("first"), data_dump("second")
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    torch.ones(2)
    second.__exit__(None, None, None)
    torch.zeros(2)
    assert nodes(dumped()) == ["ones"]
    assert torch.utils._python_dispatch._len_torch_dispatch_stack() == 0


def test_an_operator_that_raises_is_recorded_and_the_error_is_the_users_own(dumped, dump_path):
    with pytest.raises(RuntimeError, match="must match the size"), data_dump():
        torch.ones(2) + torch.ones(3)
    (rank,) = read(dump_path).ranks
    assert [call.node for call in rank.calls if not call.finished] == ["add"]
    with data_dump():
        torch.zeros(1)
    assert rank.calls[-1].node == "add"


def test_a_backward_that_raises_leaves_scopes_and_further_backwards_as_they_are(dumped, dump_path):
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise ValueError("the user's own")

    x = torch.ones(3, requires_grad=True)
    with data_dump():
        y = Fails.apply(x.sin())
    with pytest.raises(ValueError, match="the user's own"):
        y.sum().backward()
    torch.zeros(3)
    with data_dump("next"):
        z = x.cos()
    z.sum().backward()
    scopes = [call.scope for call in read(dump_path).ranks[0].calls]
    assert scopes.count("next") == 4
    assert "zeros" not in nodes(read(dump_path).ranks[0].calls)


def test_a_backward_inside_the_scope_is_dumped_once(dumped):
    x = torch.ones(3, requires_grad=True)
    with data_dump():
        x.sin().sum().backward()
    assert nodes(dumped("forward")) == ["sin", "sum_1", "ones_like"]
    assert nodes(dumped("backward"))[:3] == ["expand", "cos", "mul"]


def test_checkpointed_operators_are_dumped_again_and_marked(dumped):
    def block(x):
        with data_dump("block"):
            return x.sin().cos()

    x = torch.ones(3, requires_grad=True)
    checkpoint(block, x, use_reentrant=False).sum().backward()
    again = [call.node for call in dumped() if call.record.get("recompute")]
    assert "sin" in again
    assert "cos" not in again  # Checkpointing stops when it has what the backward needs.
    torch.testing.assert_close(x.grad, -x.sin().sin().detach() * x.cos().detach())


def test_each_thread_has_its_own_scopes(dumped):
    opened, done = threading.Event(), threading.Event()

    def outside():
        opened.wait()
        torch.zeros(3)
        with data_dump("other"):
            torch.full((3,), 2.0)
        done.set()

    thread = threading.Thread(target=outside)
    thread.start()
    with data_dump("mine"):
        opened.set()
        done.wait()
        torch.ones(3)
    thread.join()
    assert {(call.node, call.scope) for call in dumped()} == {("ones", "mine"), ("full", "other")}


def test_code_that_is_traced_by_make_fx_keeps_the_tag_and_dumps_nothing(dumped):
    def function(x):
        with data_dump("mine"):
            y = x.sin()
        return y.cos()

    for mode in ("real", "fake", "symbolic"):
        graph = make_fx(function, tracing_mode=mode)(torch.ones(3)).graph
        scopes = {node.name: scope_of(node) for node in graph.nodes if node.op == "call_function"}
        assert scopes == {"sin": "mine", "cos": None}
    assert dumped() == []


@pytest.mark.parametrize("strict", [True, False])
def test_exported_code_keeps_the_tag_and_dumps_nothing(dumped, strict):
    class Model(torch.nn.Module):
        def forward(self, x):
            with data_dump("mine"):
                y = x.sin()
            return y.cos()

    graph = torch.export.export(Model(), (torch.ones(3),), strict=strict).graph
    scopes = {node.name: scope_of(node) for node in graph.nodes if node.op == "call_function"}
    assert scopes == {"sin": "mine", "cos": None}
    assert dumped() == []


def test_tracing_within_a_scope_dumps_nothing_and_does_not_fail(dumped):
    with data_dump():
        make_fx(torch.sin)(torch.ones(3))
        with FakeTensorMode():
            torch.ones(3).sin()
    assert nodes(dumped()) == ["ones"]


def test_operators_on_fake_tensors_are_not_dumped(dumped):
    with FakeTensorMode() as mode:
        fake = torch.ones(3)
        with data_dump():
            fake.sin()
    with data_dump():
        mode.from_tensor(torch.ones(3)).cos()
    assert nodes(dumped()) == ["ones"]


def test_transforms_dump_the_plain_operators_below_them(dumped, dump_path):
    with data_dump():
        torch.vmap(torch.sin)(torch.ones(2, 3))
        torch.func.grad(lambda x: x.cos().sum())(torch.ones(3))
    assert {"sin", "cos", "neg"} <= set(nodes(dumped()))
    assert_replays(read(dump_path))


def test_a_scope_that_is_switched_off_while_it_is_open_dumps_no_more(dumped):
    with data_dump():
        torch.ones(2)
        with torchair.scope.disabled():
            torch.zeros(2)
    assert nodes(dumped()) == ["ones"]


def test_a_dump_folder_that_is_a_file_is_refused(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("TORCHAIR_SCOPE_PATH", str(tmp_path / "file"))
    with pytest.raises(NotADirectoryError, match="cannot dump to"), data_dump():
        torch.ones(2)


def test_nothing_of_a_scope_is_kept_alive(dumped):
    x = torch.ones(3, requires_grad=True)
    with data_dump():
        y = x.sin()
        middle = weakref.ref(y)
        y = y.detach()
    assert middle() is None


@pytest.fixture
def one_process():
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


def test_the_forward_of_dtensors_is_dumped_and_that_the_backward_is_not_is_said(
    dumped, one_process
):
    from torch.distributed.tensor import Replicate, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (1,))
    x = distribute_tensor(torch.ones(2, 2), mesh, [Replicate()]).requires_grad_()
    warns = pytest.warns(torchair.store.run.DumpWarning, match="'mine'.*DTensor.*backward are not")
    with warns, data_dump("mine"):
        y = x.sin() @ x
    y.sum().backward()
    with data_dump("inference"), torch.no_grad():
        x.sin()  # Warnings are errors: nothing is said of what is not differentiated.
    assert [call.target for call in dumped()] == [
        *("aten.sin.default", "aten.mm.default", "aten.sin.default")
    ]
    (row, _) = torchair.scope.summary().rows
    assert "DTensor" in row.remark
