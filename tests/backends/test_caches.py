"""Compiled artifacts: unscoped ones are Inductor's own, and a scope never gets one of these."""

import json
import os
import subprocess
import sys

import pytest

PROGRAM = """
import contextlib, json, sys
import torch
import torchair_scope as torchair

kind, path, train = sys.argv[1], sys.argv[2], sys.argv[3] == "train"
scope = torchair.scope.data_dump if kind == "scoped" else contextlib.nullcontext
backend = {"inductor": "inductor"}.get(kind) or torchair.get_npu_backend()
if kind == "scoped":
    config = torchair.CompilerConfig()
    config.debug.data_dump.path = path
    backend = torchair.get_npu_backend(compiler_config=config)


def function(x, w):
    h = x @ w
    with scope():
        h = torch.tanh(h) + 1
    return torch.nn.functional.layer_norm(h, (4,)).sum()


x, w = torch.ones(3, 4, requires_grad=train), torch.ones(4, 4)
value = torch.compile(function, backend=backend)(x, w)
if train:
    value.backward()
counters = torch._dynamo.utils.counters
print(json.dumps({
    "value": value.item(),
    "hit": counters["aot_autograd"]["autograd_cache_hit"],
    "miss": counters["aot_autograd"]["autograd_cache_miss"],
    "piece_hit": counters["inductor"]["fxgraph_cache_hit"],
}))
"""


@pytest.fixture
def run(tmp_path):
    """Run the program in a process of its own; all processes of a test share the caches."""
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    environment = {
        **os.environ,
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "TORCHINDUCTOR_FX_GRAPH_CACHE": "1",
        "TORCHINDUCTOR_AUTOGRAD_CACHE": "1",
    }

    def run(kind, mode, path):
        command = [sys.executable, str(script), kind, str(path), mode]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    return run


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["train", "inference"])
def test_a_warm_cache_of_the_unscoped_function_does_not_swallow_the_dump(run, mode, tmp_path):
    cold = run("inductor", mode, tmp_path)
    assert cold["miss"] == 1
    scoped = run("scoped", mode, tmp_path / "dump")
    assert (scoped["hit"], scoped["miss"]) == (0, 0)
    assert scoped["value"] == pytest.approx(cold["value"])
    first = _dumped(tmp_path / "dump")
    assert "tanh-aten.tanh.default" in first
    assert "add-aten.add.Tensor" in first
    again = run("scoped", mode, tmp_path / "again")
    assert _dumped(tmp_path / "again") == first
    assert again["value"] == scoped["value"]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["train", "inference"])
def test_a_warm_cache_of_the_scoped_function_does_not_slow_or_dump_the_unscoped_one(
    run, mode, tmp_path
):
    run("scoped", mode, tmp_path / "dump")
    unscoped = run("unscoped", mode, tmp_path / "none")
    assert unscoped["miss"] == 1
    assert not (tmp_path / "none").exists()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["train", "inference"])
def test_an_unscoped_function_hits_the_cache_entries_that_inductor_alone_made(run, mode, tmp_path):
    alone = run("inductor", mode, tmp_path)
    unscoped = run("unscoped", mode, tmp_path)
    assert (unscoped["hit"], unscoped["miss"]) == (1, 0)
    assert unscoped["value"] == alone["value"]


def _dumped(path):
    files = sorted(path.glob("*/graph_*/*/*.npy"))
    return {file.name.split(".INPUT.")[0].split(".OUTPUT.")[0] for file in files}
