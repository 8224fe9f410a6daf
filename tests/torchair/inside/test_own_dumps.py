"""What TorchAir's own dumps do, and do not do, with a scope."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.torchair.inside.models import ScopedNet

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
