"""What TorchAir's own dumps do, and do not do, with a scope."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
import torch

import torchair_scope
from tests.torchair.inside.models import ScopedNet, assert_same
from tests.torchair.setups import install
from torchair_scope.backends import patching

ENTER, EXIT = "air.scope_enter.default", "air.scope_exit.default"


def in_scope(node):
    """A filter for TorchAir's npy dump that keeps the nodes between the scope's markers."""
    depth, earlier = 0, node.prev
    while earlier.op != "root":
        depth += {ENTER: 1, EXIT: -1}.get(str(earlier.target), 0)
        earlier = earlier.prev
    return node if depth > 0 else None


@pytest.fixture
def npy_dump(torchair, device, compiler_config, tmp_path):
    """Runs the model with `debug.data_dump.type = "npy"`; returns the dumped nodes' names."""

    def run(keep):
        net = ScopedNet(torchair).eval().to(device)
        config = compiler_config()
        config.debug.data_dump.type = "npy"
        config.debug.data_dump.path = str(tmp_path)
        config.debug.data_dump.filter = keep
        backend = torchair.get_npu_backend(compiler_config=config)
        with torch.no_grad():
            torch.compile(net, backend=backend, fullgraph=True)(torch.randn(3, 4).to(device))
        files = Path(tmp_path).glob("worldsize1_global_rank0/*/0/*.npy")
        return {file.name.split("-")[0] for file in files}

    return run


def test_an_npy_dump_ignores_the_scope(npy_dump):
    assert {"relu", "tanh"} <= npy_dump(None)


def test_an_npy_dump_keeps_to_the_scope_with_a_filter_that_reads_the_markers(npy_dump):
    nodes = npy_dump(in_scope)
    assert "tanh" in nodes
    assert "relu" not in nodes


@pytest.mark.parametrize("keep", [None, in_scope], ids=["all", "in_scope"])
def test_an_npy_dump_builds_no_ge_graph(npy_dump, recorder, keep):
    npy_dump(keep)
    assert recorder.ge_graphs == []


def test_the_ge_dump_lists_the_types_of_the_scoped_operators(
    torchair, device, compiler_config, recorder, tmp_path
):
    net = ScopedNet(torchair).eval().to(device)
    config = compiler_config()
    config.dump_config.enable_dump = True
    config.dump_config.dump_path = str(tmp_path)
    backend = torchair.get_npu_backend(compiler_config=config)
    with torch.no_grad():
        torch.compile(net, backend=backend, fullgraph=True)(torch.randn(3, 4).to(device))
    options = Path(recorder.acl_dump_configs[0]).read_text()
    assert '"layer"' in options
    assert "Tanh" in options
    assert "Relu" not in options


def scoped_operators(torchair):
    """A function whose scope is whatever `torchair.scope.data_dump` is when it is traced."""

    def function(x):
        y = torch.relu(x)
        with torchair.scope.data_dump():
            y = torch.tanh(y) * 3
        return torch.sigmoid(y)

    return function


def said_by(action):
    """The texts of the warnings of an action."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        action()
    return [str(warning.message) for warning in caught]


@pytest.fixture
def ge_dump(torchair, device, compiler_config, compile_with, recorder, tmp_path, monkeypatch):
    """Runs a training step with GE's dump on; returns its graphs, its JSON and how it was set."""

    def run(dump_layer):
        install.reset()
        monkeypatch.setattr("torchair.npu_fx_compiler._GLOBAL_GRAPH_ID", 0)
        config = compiler_config()
        config.dump_config.enable_dump = True
        config.dump_config.dump_path = str(tmp_path)
        config.dump_config.dump_layer = dump_layer
        x = torch.ones(3, 4).to(device).requires_grad_()
        compile_with(config, scoped_operators(torchair))(x).sum().backward()
        options = json.loads(Path(recorder.acl_dump_configs[0]).read_text())
        for entry in options["dump"]["dump_list"]:
            entry["layer"] = sorted(entry.get("layer", []))
        graphs = [(graph.proto, graph.options, graph.runs) for graph in recorder.ge_graphs]
        return graphs, options, list(recorder.acl_dump_configs)

    return run


@pytest.mark.filterwarnings("ignore:Your compiler for AOTAutograd is returning a function")
@pytest.mark.parametrize("dump_layer", ["", "Relu_1 Sigmoid_2"])
def test_with_the_ge_dump_on_a_scope_of_ours_means_what_it_means_to_torchair(
    ge_dump, dump_layer, tmp_path
):
    torchairs = ge_dump(dump_layer)
    patching.patch()
    ours = ge_dump(dump_layer)
    torchair_scope.unpatch()
    graphs, options, _ = torchairs
    assert len(graphs) == 2
    layers = set(options["dump"]["dump_list"][0]["layer"])
    assert layers >= {*dump_layer.split(), "Mul", "Tanh"}
    assert not layers & {"Relu", "Sigmoid"}
    assert ours == torchairs
    assert not list(tmp_path.rglob("*.npy"))


def test_with_the_dump_of_acl_graphs_on_the_scope_is_ignored_and_that_is_said(
    torchair, device, compiler_config, compile_with, patched, tmp_path, mode
):
    if mode == "max-autotune":
        pytest.skip("is not an aclgraph mode")
    config = compiler_config(mode)
    config.dump_config.enable_dump = True
    config.dump_config.dump_path = str(tmp_path)
    x = torch.ones(3, 4).to(device)
    run = compile_with(config, scoped_operators(torchair))
    said = said_by(lambda: run(x))
    assert any("saves every operator, in a scope or not" in text for text in said), said
    assert not list(tmp_path.rglob("*.npy"))


def test_the_scopes_are_dumped_when_the_ge_dump_is_off_again(
    torchair, device, dump_config, compile_with, patched, read_dump
):
    x = torch.ones(3, 4).to(device)
    result = compile_with(dump_config(), scoped_operators(torchair))(x)
    assert_same(result, torch.sigmoid(torch.tanh(torch.relu(x)) * 3))
    assert len(read_dump().ranks[0].calls) == 2


def test_a_summary_in_place_of_a_compile_leaves_scopes_alone_and_says_so(
    torchair, device, dump_config, compile_with, patched, dump_path
):
    config = dump_config()
    config.debug.fx_summary.type = "csv"
    run = compile_with(config, scoped_operators(torchair))
    said = said_by(lambda: run(torch.ones(3, 4).to(device)))
    assert any("fx_summary has TorchAir summarise" in text for text in said), said
    assert not dump_path.exists()


def test_an_exported_graph_has_its_scoped_operators_in_it_and_that_is_said(
    torchair, device, compiler_config, patched, dump_path, tmp_path, recorder
):
    class Model(torch.nn.Module):
        def forward(self, x):
            return scoped_operators(torchair)(x)

    def export():
        x = torch.ones(3, 4).to(device)
        path = str(tmp_path / "exported")
        torchair.dynamo_export(x, model=Model(), export_path=path, config=compiler_config())

    said = said_by(export)
    assert any("an exported graph runs without torchair_scope" in text for text in said), said
    assert "export" in {name for name, _ in recorder.calls}
    assert not dump_path.exists()
