"""What a user can set, by name or by config, and what is refused."""

import pytest
import torch

import torchair_scope as torchair
from torchair_scope.store.reader import read


def scoped(x):
    x = x.sin()
    with torchair.scope.data_dump("shift"):
        x = x + 1
        x = x * 3
    return x.cos()


def unscoped(x):
    return (x.sin() + 1).cos()


def nodes(path):
    return [call.node for rank in read(path).ranks for call in rank.calls]


def config_for(path, **data_dump):
    config = torchair.CompilerConfig()
    config.debug.data_dump.path = str(path)
    for name, value in data_dump.items():
        setattr(config.debug.data_dump, name, value)
    return config


def test_a_config_and_the_options_by_name_do_the_same(dump_path, tmp_path):
    backend = torchair.get_npu_backend(compiler_config=config_for(dump_path), inner="aot_eager")
    torch.compile(scoped, backend=backend)(torch.ones(2))
    torch._dynamo.reset()
    options = {"path": str(tmp_path / "named"), "backend": "aot_eager"}
    torch.compile(scoped, backend="torchair_scope", options=options)(torch.ones(2))
    assert nodes(dump_path) == nodes(tmp_path / "named") == ["add", "mul"]


def test_without_a_path_the_dump_goes_to_the_current_folder(tmp_path):
    torch.compile(scoped, backend=torchair.get_npu_backend(inner="aot_eager"))(torch.ones(2))
    assert (tmp_path / "worldsize1_global_rank0").is_dir()


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_a_filter_narrows_a_scope_and_the_rest_of_it_is_compiled(dump_path, inner):
    config = config_for(dump_path, filter=lambda node: node if "mul" in node.name else None)
    backend = torchair.get_npu_backend(compiler_config=config, inner=inner)
    result = torch.compile(scoped, backend=backend)(torch.ones(2))
    torch.testing.assert_close(result, ((torch.ones(2).sin() + 1) * 3).cos())
    assert nodes(dump_path) == ["mul"]


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_type_npy_dumps_a_graph_without_scopes_as_a_whole_and_warns(dump_path, inner):
    backend = torchair.get_npu_backend(
        compiler_config=config_for(dump_path, type="npy"), inner=inner
    )
    with pytest.warns(UserWarning, match="FALLBACK to EAGER"):
        result = torch.compile(unscoped, backend=backend)(torch.ones(2))
    assert torch.equal(result, unscoped(torch.ones(2)))
    assert nodes(dump_path) == ["sin", "add", "cos"]


def test_type_npy_dumps_forward_and_backward_of_a_graph_without_scopes(dump_path):
    backend = torchair.get_npu_backend(compiler_config=config_for(dump_path, type="npy"))
    x = torch.ones(2, requires_grad=True)
    with pytest.warns(UserWarning, match="FALLBACK to EAGER"):
        torch.compile(unscoped, backend=backend)(x).sum().backward()
    (rank,) = read(dump_path).ranks
    assert [graph["direction"] for graph in rank.graphs] == ["forward", "backward"]
    torch.testing.assert_close(x.grad, -(x.sin() + 1).sin() * x.cos())


def test_a_filter_picks_from_a_graph_that_is_dumped_as_a_whole(dump_path):
    config = config_for(
        dump_path, type="npy", filter=lambda node: node if node.name == "add" else None
    )
    with pytest.warns(UserWarning, match="FALLBACK to EAGER"):
        torch.compile(unscoped, backend=torchair.get_npu_backend(compiler_config=config))(
            torch.ones(2)
        )
    assert nodes(dump_path) == ["add"]


def test_with_type_npy_a_scope_narrows_the_dump_to_itself(dump_path):
    backend = torchair.get_npu_backend(
        compiler_config=config_for(dump_path, type="npy"), inner="aot_eager"
    )
    torch.compile(scoped, backend=backend)(torch.ones(2))
    assert nodes(dump_path) == ["add", "mul"]


def test_runs_of_a_graph_are_steps_and_each_compile_is_a_graph(dump_path):
    options = {"path": str(dump_path), "backend": "aot_eager"}
    step = torch.compile(scoped, backend="torchair_scope", options=options, dynamic=False)
    for size in (2, 2, 2, 3):
        step(torch.ones(size))
    (rank,) = read(dump_path).ranks
    first, second = sorted({call.graph for call in rank.calls})
    assert second == first + 1
    steps = [(call.graph, call.step) for call in rank.calls if call.node == "add"]
    assert steps == [(first, 0), (first, 1), (first, 2), (second, 0)]


def test_graph_dump_writes_what_a_filter_gets_and_the_scope(dump_path, tmp_path):
    config = config_for(dump_path)
    config.debug.graph_dump.type = "py"
    config.debug.graph_dump.path = str(tmp_path / "graphs")
    backend = torchair.get_npu_backend(compiler_config=config, inner="aot_eager")
    torch.compile(scoped, backend=backend)(torch.ones(2))
    torch.compile(unscoped, backend=backend)(torch.ones(2))
    first, second = sorted((tmp_path / "graphs").glob("dynamo_original_graph_*_rank_0_pid_*.py"))
    assert "## FX Code: add: torch.float32[2]cpu = torch.ops.aten.add.Tensor(sin, 1)" in (
        first.read_text()
    )
    assert "# Scope shift" in first.read_text()
    assert "# Scope" not in second.read_text()


def test_a_callable_compiles_what_is_not_dumped(dump_path):
    compiled_graphs = []

    def inner(gm, example_inputs):
        compiled_graphs.append([node.name for node in gm.graph.nodes if node.op != "output"])
        return gm.forward

    backend = torchair.get_npu_backend(compiler_config=config_for(dump_path), inner=inner)
    result = torch.compile(scoped, backend=backend)(torch.ones(2))
    torch.testing.assert_close(result, ((torch.ones(2).sin() + 1) * 3).cos())
    assert compiled_graphs == [["arg0_1", "sin"], ["mul", "cos"]]
    assert nodes(dump_path) == ["add", "mul"]


@pytest.mark.parametrize("train", [False, True])
def test_get_compiler_compiles_aten_graphs_for_ones_own_call_of_aot_autograd(dump_path, train):
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    compiler = torchair.get_compiler(config_for(dump_path))
    backend = aot_autograd(fw_compiler=lambda gm, inputs: make_boxed_func(compiler(gm, inputs)))
    x = torch.ones(2, requires_grad=train)
    result = torch.compile(scoped, backend=backend)(x)
    torch.testing.assert_close(result, ((x.sin() + 1) * 3).cos())
    assert nodes(dump_path) == ["add", "mul"]
    if train:
        result.sum().backward()
        (rank,) = read(dump_path).ranks
        assert [graph["direction"] for graph in rank.graphs] == ["forward", "backward"]


@pytest.mark.parametrize("inner", ["cudagraphs", 3, None])
def test_an_inner_compiler_that_there_is_not_is_refused_at_once(inner):
    with pytest.raises(ValueError, match="inductor, aot_eager, or a callable"):
        torchair.get_npu_backend(inner=inner)


def test_other_wrong_arguments_are_refused_at_once():
    with pytest.raises(ValueError, match=r"on_error is 'ignore'.*warn, raise"):
        torchair.get_npu_backend(on_error="ignore")
    with pytest.raises(TypeError, match="compiler_config takes a CompilerConfig"):
        torchair.get_npu_backend(compiler_config={"path": "."})
    with pytest.raises(TypeError, match="compiler_config takes a CompilerConfig"):
        torchair.get_compiler("dump")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"options": {"paht": "."}}, "did you mean 'path'"),
        ({"options": {"backend": "eager"}}, "inductor, aot_eager"),
        ({"options": {"type": "txt"}}, "npy"),
        ({"mode": "max-autotune"}, "leave mode out"),
    ],
)
def test_a_wrong_option_by_name_stops_the_compile_and_names_the_right_ones(arguments, message):
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=message):
        torch.compile(scoped, backend="torchair_scope", **arguments)(torch.ones(2))


def test_options_for_a_backend_made_from_a_config_are_refused(dump_path):
    backend = torchair.get_npu_backend(compiler_config=config_for(dump_path))
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="takes its options from"):
        torch.compile(scoped, backend=backend, options={"path": "."})(torch.ones(2))
