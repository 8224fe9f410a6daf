"""TorchAir's documentation of its dumps, example by example, in our words."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import torchair
import torchair.npu_fx_compiler

import torchair_scope
from tests.support.replay import assert_replays
from torchair_scope.backends import patching

pytestmark = pytest.mark.usefixtures("patched")
FALLS_BACK = "FALLBACK to EAGER execution"
STAMP = re.compile(r"\.\d{20}\.npy$")


def add_outside_and_sub_inside(x, y):
    z = torch.add(x, y)
    with torchair.scope.data_dump():
        return torch.sub(z, y)


def two_adds_and_a_sub(x, y):
    first = torch.add(x, y)
    second = torch.add(first, y)
    return torch.sub(second, x)


def files(dump_path, graph="*", step="*"):
    """The names of the files of a dump, without their time stamps."""
    found = dump_path.glob(f"worldsize1_global_rank0/graph_{graph}/{step}/*.npy")
    return sorted(STAMP.sub("", path.name) for path in found)


@pytest.fixture
def inputs(device):
    return torch.tensor([1.0, 2.0]).to(device), torch.tensor([10.0, 20.0]).to(device)


@pytest.fixture
def whole(dump_config):
    """A config with `data_dump.type = "npy"`."""
    config = dump_config()
    config.debug.data_dump.type = "npy"
    return config


def test_of_add_outside_and_sub_inside_the_scope_sub_alone_is_dumped(
    compile_with, dump_config, dump_path, inputs, mode, recorder
):
    run = compile_with(dump_config(mode), add_outside_and_sub_inside)
    assert run(*inputs).tolist() == [1.0, 2.0]
    assert files(dump_path) == [
        "sub-aten.sub.Tensor.INPUT.0",
        "sub-aten.sub.Tensor.INPUT.1",
        "sub-aten.sub.Tensor.OUTPUT.0",
    ]
    assert sum("Add" in graph.op_types() for graph in recorder.ge_graphs) == (
        mode == "max-autotune"
    )


def test_two_inputs_and_an_output_make_three_files_with_their_values(
    compile_with, dump_config, dump_path, inputs
):
    compile_with(dump_config(), add_outside_and_sub_inside)(*inputs)
    values = {
        STAMP.sub("", path.name).split("Tensor.")[-1]: np.load(path).tolist()
        for path in dump_path.rglob("*.npy")
    }
    assert values == {"INPUT.0": [11.0, 22.0], "INPUT.1": [10.0, 20.0], "OUTPUT.0": [1.0, 2.0]}


def test_three_runs_are_the_steps_0_1_and_2(compile_with, dump_config, dump_path, inputs):
    run = compile_with(dump_config(), add_outside_and_sub_inside)
    for _ in range(3):
        run(*inputs)
    (graph,) = dump_path.glob("worldsize1_global_rank0/graph_*")
    assert sorted(step.name for step in graph.iterdir()) == ["0", "1", "2"]
    assert len(files(dump_path)) == 9


def test_a_path_that_is_a_file_raises_not_a_directory_error(
    compile_with, dump_config, tmp_path, inputs
):
    taken = tmp_path / "taken"
    taken.write_text("mine")
    config = dump_config()
    config.debug.data_dump.path = str(taken)
    run = compile_with(config, add_outside_and_sub_inside)
    with pytest.raises(NotADirectoryError, match="taken"):
        run(*inputs)
    assert taken.read_text() == "mine"


def test_without_a_path_the_dump_goes_to_the_current_folder(
    compile_with, compiler_config, tmp_path, inputs
):
    compile_with(compiler_config(), add_outside_and_sub_inside)(*inputs)
    assert len(files(tmp_path)) == 3


def test_a_filter_picks_add_1_and_sub_of_a_graph_without_a_scope(
    compile_with, whole, dump_path, inputs
):
    whole.debug.data_dump.filter = lambda node: node if node.name in ("add_1", "sub") else None
    with pytest.warns(UserWarning, match=FALLS_BACK):
        compile_with(whole, two_adds_and_a_sub)(*inputs)
    assert {name.split("-")[0] for name in files(dump_path)} == {"add_1", "sub"}
    assert len(files(dump_path)) == 6


def test_a_filter_narrows_a_scope_and_the_rest_of_it_is_compiled(
    compile_with, dump_config, dump_path, inputs, recorder
):
    config = dump_config()
    config.debug.data_dump.filter = lambda node: node if node.name == "sub" else None
    compile_with(config, torchair_scope.dump_ops(two_adds_and_a_sub))(*inputs)
    assert {name.split("-")[0] for name in files(dump_path)} == {"sub"}
    (graph,) = recorder.ge_graphs
    assert graph.op_types().count("Add") == 2


def test_the_type_npy_without_a_scope_dumps_all_and_compiles_nothing(
    compile_with, whole, dump_path, inputs, recorder
):
    with pytest.warns(UserWarning, match=FALLS_BACK):
        result = compile_with(whole, two_adds_and_a_sub)(*inputs)
    assert result.tolist() == [20.0, 40.0]
    assert {name.split("-")[0] for name in files(dump_path)} == {"add", "add_1", "sub"}
    assert recorder.ge_graphs == []


def test_the_type_npy_in_a_graph_with_a_scope_dumps_the_scope_and_compiles_the_rest(
    compile_with, whole, dump_path, inputs, recorder
):
    compile_with(whole, add_outside_and_sub_inside)(*inputs)
    assert {name.split("-")[0] for name in files(dump_path)} == {"sub"}
    assert [graph.op_types().count("Add") for graph in recorder.ge_graphs] == [1]


@pytest.mark.parametrize("function", [two_adds_and_a_sub, add_outside_and_sub_inside])
def test_the_graph_dump_names_what_the_filter_gets(compile_with, whole, tmp_path, inputs, function):
    got = set()

    def keep(node):
        got.add(node.name)
        return node

    whole.debug.data_dump.filter = keep
    whole.debug.graph_dump.type = "py"
    whole.debug.graph_dump.path = str(tmp_path)
    warns = pytest.warns(UserWarning, match=FALLS_BACK)
    with warns if function is two_adds_and_a_sub else contextlib.nullcontext():
        compile_with(whole, function)(*inputs)
    texts = [path.read_text() for path in tmp_path.glob("dynamo_original_graph_*.py")]
    assert got >= {"sub"}
    assert any(all(f"{name}:" in text for name in got) for text in texts), texts


@pytest.mark.filterwarnings("ignore:config.debug.data_dump.type is 'npy':UserWarning")
def test_a_whole_graph_has_the_folders_names_and_numbers_of_torchairs_own_dump(
    compile_with, compiler_config, tmp_path, device
):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU()).to(device)
    x = torch.randn(3, 4).to(device)

    def dump_to(path):
        torch._dynamo.reset()
        config = compiler_config()
        config.debug.data_dump.type = "npy"
        config.debug.data_dump.path = str(path)
        next_number = torchair.npu_fx_compiler._GLOBAL_GRAPH_ID + 1
        run = compile_with(config, net)
        for _ in range(2):
            run(x).sum().backward()
        return {
            (int(step.parent.name.removeprefix("graph_")) - next_number, step.name, name)
            for step in Path(path).glob("worldsize1_global_rank0/graph_*/*")
            for name in files(Path(path), step.parent.name.removeprefix("graph_"), step.name)
        }

    ours = dump_to(tmp_path / "ours")
    torchair_scope.unpatch()
    torchairs = dump_to(tmp_path / "torchairs")
    patching.patch()
    assert {graph for graph, _, _ in torchairs} == {0, 1}
    assert torchairs <= ours


@pytest.mark.filterwarnings("ignore:config.debug.data_dump.type is 'npy':UserWarning")
def test_a_whole_graph_is_dumped_without_the_faults_of_torchairs_own_dump(
    compile_with, whole, read_dump, device
):
    def model(x, index):
        scaled = torch.add(x, x, alpha=2)
        spread = torch.std(scaled, dim=1, correction=0)
        low = scaled.to(torch.bfloat16).to(torch.float8_e4m3fn).to(torch.float32)
        return spread, low, scaled[:, index]

    x, index = torch.randn(3, 4).to(device), torch.tensor([0, 2]).to(device)
    with torch.no_grad():
        compile_with(whole, model)(x, index)
    dump = read_dump()
    assert dump.problems == []
    calls = {call.target: call for call in dump.ranks[0].calls}
    assert calls["aten.add.Tensor"].record["kwargs"] == {"alpha": 2}
    assert "correction" in str(calls["aten.std.correction"].record["kwargs"])
    (picked,) = [call for target, call in calls.items() if target.startswith("aten.index")]
    assert "INPUT.1.1" in picked.input_files
    args, _ = picked.load_args("cpu")
    assert args[1][0] is None
    copies = (call for call in dump.ranks[0].calls if "_to_copy" in call.target)
    dtypes = [call.load_outputs("cpu").dtype for call in copies]
    assert dtypes == [torch.bfloat16, torch.float8_e4m3fn, torch.float32]
    assert_replays(dump)
