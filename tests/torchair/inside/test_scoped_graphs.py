"""What reaches GE and the device of a graph with a scope: all but the scoped operators."""

from __future__ import annotations

import sys

import pytest
import torch
import torchair

from tests.torchair.inside.models import assert_same
from tests.torchair.setups.recorder import RECORDER

pytestmark = [
    pytest.mark.usefixtures("patched"),
    pytest.mark.filterwarnings("ignore:Your compiler for AOTAutograd is returning a function"),
    pytest.mark.filterwarnings("ignore:Because acl graph fixes memory addresses:UserWarning"),
]


@torch.library.custom_op("torchair_scope_inside::is_capturing", mutates_args=())
def is_capturing(x: torch.Tensor) -> torch.Tensor:
    """One where an aclgraph is being captured while the operator runs, else zero."""
    return torch.full_like(x, float(RECORDER.capturing))


is_capturing.register_fake(torch.empty_like)


def three_operators(x):
    y = torch.relu(x)
    with torchair.scope.data_dump("middle"):
        y = torch.tanh(y)
    return torch.sigmoid(y)


def captured(recorder):
    """The operators of each aclgraph that is not empty."""
    tapes = [graph.captured_ops() for graph in recorder.acl_graphs]
    return [tape for tape in tapes if tape]


def three_operators_alone(x):
    return torch.sigmoid(torch.tanh(torch.relu(x)))


def test_every_operator_outside_the_scope_reaches_ge_and_none_of_those_inside(
    compile_with, dump_config, device, recorder
):
    x = torch.randn(3, 4).to(device)
    assert_same(compile_with(dump_config(), three_operators)(x), three_operators_alone(x))
    first, second = (set(graph.op_types()) for graph in recorder.ge_graphs)
    assert "Relu" in first
    assert "Sigmoid" in second
    assert "Tanh" not in first | second


def test_every_operator_outside_the_scope_is_captured_and_none_of_those_inside(
    compile_with, dump_config, device, recorder, mode
):
    if mode == "max-autotune":
        pytest.skip("captures nothing")
    x = torch.randn(3, 4).to(device)
    assert_same(compile_with(dump_config(mode), three_operators)(x), three_operators_alone(x))
    first, second = captured(recorder)
    assert "aten.relu.default" in first
    assert "aten.sigmoid.default" in second
    assert "aten.tanh.default" not in first + second


def test_the_operators_outside_are_converted_as_they_are_without_a_scope(
    compile_with, dump_config, device, recorder
):
    def converted(function):
        recorder.clear()
        compile_with(dump_config(), function)(torch.randn(3, 4).to(device))
        ops = [op for graph in recorder.ge_graphs for op in graph.ops()]
        inner = (op for op in ops if op.type not in ("Data", "NetOutput"))
        return [(op.type, {name: str(value) for name, value in op.attr.items()}) for op in inner]

    scoped, alone = converted(three_operators), converted(three_operators_alone)
    assert [type_ for type_, _ in alone] == ["Relu", "Tanh", "Sigmoid"]
    assert scoped == [op for op in alone if op[0] != "Tanh"]


def test_each_region_is_one_graph_that_is_compiled_once_and_run_at_each_step(
    compile_with, dump_config, device, recorder, read_dump
):
    run = compile_with(dump_config(), three_operators)
    for _ in range(3):
        run(torch.randn(3, 4).to(device))
    assert [(graph.compiled, graph.runs) for graph in recorder.ge_graphs] == [(1, 3), (1, 3)]
    (rank,) = read_dump().ranks
    assert [graph["regions"] for graph in rank.graphs] == [["compiled", "dumped", "compiled"]]
    assert [step["step"] for step in rank.steps] == [0, 1, 2]


def test_each_region_is_captured_once_and_replayed_at_each_step(
    compile_with, dump_config, device, recorder, mode
):
    if mode == "max-autotune":
        pytest.skip("captures nothing")
    run = compile_with(dump_config(mode), three_operators)
    for _ in range(3):
        run(torch.randn(3, 4).to(device))
    with_operators = [graph for graph in recorder.acl_graphs if graph.captured_ops()]
    assert [(graph.captures, graph.replays) for graph in with_operators] == [(1, 3), (1, 3)]


def test_training_compiles_and_dumps_in_both_directions(
    compile_with, dump_config, device, recorder, read_dump, mode
):
    x = torch.randn(3, 4).to(device).requires_grad_()
    compile_with(dump_config(mode), three_operators)(x).sum().backward()
    other = x.detach().clone().requires_grad_()
    three_operators_alone(other).sum().backward()
    assert_same(x.grad, other.grad)
    (rank,) = read_dump().ranks
    assert [(graph["direction"], graph["regions"]) for graph in rank.graphs] == [
        ("forward", ["compiled", "dumped", "compiled"]),
        ("backward", ["compiled", "dumped", "compiled"]),
    ]
    dumped = [call.target for call in rank.calls if "detach" not in call.target]
    assert dumped == ["aten.tanh.default", "aten.tanh_backward.default"]
    if mode == "max-autotune":
        types = {type_ for graph in recorder.ge_graphs for type_ in graph.op_types()}
        assert "TanhGrad" not in types
        assert "SigmoidGrad" in types


def test_a_dynamic_graph_serves_all_sizes(compile_with, dump_config, device, read_dump, mode):
    run = compile_with(dump_config(mode), three_operators, dynamic=True)
    for size in (3, 5, 7):
        x = torch.randn(size, 4).to(device)
        assert_same(run(x), three_operators_alone(x))
    (rank,) = read_dump().ranks
    assert len(rank.graphs) == 1
    assert [call.load_outputs("cpu").shape[0] for call in rank.calls] == [3, 5, 7]


def test_no_call_is_saved_while_a_graph_is_captured(
    compile_with, dump_config, device, recorder, read_dump, mode
):
    def model(x):
        y = torch.relu(x)
        with torchair.scope.data_dump():
            y = is_capturing(y)
        return torch.sigmoid(y), y

    run = compile_with(dump_config(mode), model)
    for _ in range(3):
        _, captures = run(torch.randn(3, 4).to(device))
        assert captures.cpu().max() == 0
    (rank,) = read_dump().ranks
    assert len(rank.calls) == 3
    assert not any("is_capturing" in op for tape in captured(recorder) for op in tape)
    assert (recorder.captures > 0) == (mode != "max-autotune")


def test_a_call_that_the_user_captures_runs_undumped_and_says_so_once(
    compile_with, dump_config, device, read_dump
):
    if "torch_npu" not in sys.modules:
        pytest.skip("captures nothing")
    run = compile_with(dump_config(), three_operators)
    x = torch.randn(3, 4).to(device)
    run(x)

    def run_twice_while_capturing():
        for _ in range(2):
            with torch.npu.graph(torch.npu.NPUGraph()):
                run(x)

    with pytest.warns(UserWarning, match="this run is not dumped") as caught:
        run_twice_while_capturing()
    assert len(caught) == 1
    run(x)
    (rank,) = read_dump().ranks
    assert [step["step"] for step in rank.steps] == [0, 1]


def test_options_are_those_of_the_users_config_in_every_part(
    compile_with, dump_config, device, recorder
):
    config = dump_config()
    config.experimental_config.cc_parallel_enable = True
    config.ge_config.enable_single_stream = True
    compile_with(config, three_operators)(torch.randn(3, 4).to(device))
    compile_with(config, three_operators_alone)(torch.randn(3, 4).to(device))
    first, second, whole = (graph.options for graph in recorder.ge_graphs)
    assert first == second == whole


def test_a_graph_without_a_scope_takes_no_part_in_the_dump(
    compile_with, dump_config, device, dump_path, mode
):
    compile_with(dump_config(mode), three_operators_alone)(torch.randn(3, 4).to(device))
    assert not dump_path.exists()


def test_a_compiled_scope_is_not_put_into_the_compile_cache(
    dump_config, device, tmp_path, read_dump
):
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.cached = torchair.inference.cache_compile(
                self.body, config=dump_config(), cache_dir=str(tmp_path / "cache")
            )

        def forward(self, x):
            return self.cached(x)

        def body(self, x):
            return three_operators(x)

    x = torch.randn(3, 4).to(device)
    with torch.no_grad(), pytest.warns(UserWarning, match="compile cache"):
        assert_same(Model()(x), three_operators_alone(x))
    assert [call.scope for call in read_dump().ranks[0].calls] == ["middle"]


def test_a_graph_given_to_get_compiler_is_cut_as_well(dump_config, device, read_dump, recorder):
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.traceback import preserve_node_meta

    from torchair_scope.capture.tags import Tag, put_tag

    x = torch.randn(3, 4).to(device)
    with preserve_node_meta():
        gm = make_fx(lambda x: (torch.sigmoid(torch.tanh(torch.relu(x))),), tracing_mode="fake")(x)
    for node in gm.graph.nodes:
        if node.name == "tanh":
            put_tag(node, Tag("middle", "here"))
    inputs = [node.meta["val"] for node in gm.graph.nodes if node.op == "placeholder"]
    (result,) = torchair.get_compiler(dump_config())(gm, inputs)(x)
    assert_same(result, three_operators_alone(x))
    assert [call.scope for call in read_dump().ranks[0].calls] == ["middle"]
    assert len(recorder.ge_graphs) == 2
