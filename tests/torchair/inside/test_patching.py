"""What importing `torchair_scope` changes in TorchAir, and that all of it can be taken back."""

from __future__ import annotations

import os
import subprocess
import sys

import npugraph_ex.npu_fx_compiler
import npugraph_ex.scope
import pytest
import torch
import torchair.npu_fx_compiler
import torchair.scope

import torchair_scope
from torchair_scope import _torchair_private
from torchair_scope.backends import patching

PLACES = {
    "torchair.scope": torchair.scope,
    "torchair._NpuFxCompiler": torchair.npu_fx_compiler._NpuFxCompiler,
    "torchair._CompiledFxGraph": torchair.npu_fx_compiler._CompiledFxGraph,
    "torchair.npu_fx_compiler": torchair.npu_fx_compiler,
    "npugraph_ex.scope": npugraph_ex.scope,
    "npugraph_ex._NpuFxCompiler": npugraph_ex.npu_fx_compiler._NpuFxCompiler,
    "npugraph_ex.npu_fx_compiler": npugraph_ex.npu_fx_compiler,
}


def attributes():
    """All attributes of the places above, by identity."""
    return {
        f"{place}.{name}": id(value)
        for place, owner in PLACES.items()
        for name, value in vars(owner).items()
    }


@pytest.fixture
def before():
    return attributes()


def test_four_attributes_of_torchair_are_touched_and_no_other(before, patched):
    after = attributes()
    changed = {name for name in before if after.get(name) != before[name]}
    assert changed == {
        "torchair.scope.data_dump",
        "torchair._NpuFxCompiler._get_compiled_gm",
        "npugraph_ex._NpuFxCompiler._get_compiled_gm",
    }
    assert after.keys() - before.keys() == {"torchair.scope.dump_ops"}


def test_unpatching_gives_back_what_was_there_and_patching_works_again(before):
    for _ in range(2):
        patching.patch()
        assert torchair.scope.data_dump is torchair_scope.scope.data_dump
        assert torchair.scope.dump_ops is torchair_scope.dump_ops
        torchair_scope.unpatch()
        assert attributes() == before


def test_patching_twice_is_patching_once(before):
    patching.patch()
    once = attributes()
    patching.patch()
    assert attributes() == once
    torchair_scope.unpatch()
    assert attributes() == before


@pytest.mark.parametrize("name", ["CompilerConfig", "get_npu_backend", "get_compiler"])
def test_what_torchair_has_is_taken_from_it(torchair, name):
    assert getattr(torchair_scope, name) is getattr(torchair, name)


def test_the_data_dump_of_torchair_takes_a_name_or_nothing(torchair, patched):
    named, unnamed = torchair.scope.data_dump("mlp"), torchair.scope.data_dump()
    assert hasattr(named, "__enter__")
    assert hasattr(unnamed, "__enter__")


def test_another_version_is_refused_with_both_versions(before, monkeypatch):
    monkeypatch.setattr(_torchair_private, "CHECKED_WITH", "1.9.")
    with pytest.warns(UserWarning, match="Nothing of it is changed") as caught:
        patching.patch()
    after = attributes()
    torchair_scope.unpatch()
    assert after == before
    assert len(caught) == 2, "one for each of the two packages"
    for warning in caught:
        assert "torch_npu is 2.13.0, not 1.9.x" in str(warning.message)
        assert "Install torch_npu" in str(warning.message)


def test_a_method_with_another_signature_is_refused_by_its_name(monkeypatch):
    class Compiler(torchair.npu_fx_compiler._NpuFxCompiler):
        def _get_compiled_gm(self, gm, example_inputs, options):
            raise AssertionError("not called")

    module = torchair.npu_fx_compiler
    monkeypatch.setattr(module, "_NpuFxCompiler", Compiler)
    monkeypatch.setitem(PLACES, "altered", Compiler)
    before = {name: value for name, value in attributes().items() if "npugraph_ex" not in name}
    with pytest.warns(UserWarning, match="Nothing of it is changed") as caught:
        patching.patch()
    after = {name: value for name, value in attributes().items() if "npugraph_ex" not in name}
    torchair_scope.unpatch()
    assert after == before
    (warning,) = caught
    text = str(warning.message)
    assert "_get_compiled_gm takes ['self', 'gm', 'example_inputs', 'options']" in text


def other_data_dump(level=0):
    raise AssertionError("not called")


@pytest.mark.parametrize(
    ("owner", "name", "value", "said"),
    [
        (torchair.npu_fx_compiler, "_next_unique_graph_id", None, "_next_unique_graph_id takes"),
        (torchair.scope, "data_dump", other_data_dump, "data_dump is not as expected"),
        (torchair.npu_fx_compiler, "CompilerConfig", object, "CompilerConfig has no mode.value"),
    ],
)
def test_another_shape_is_refused_with_what_differs(monkeypatch, owner, name, value, said):
    monkeypatch.setattr(owner, name, value)
    with pytest.warns(UserWarning, match=said):
        patching.patch()
    refused = torchair.scope.data_dump is not torchair_scope.scope.data_dump
    torchair_scope.unpatch()
    assert refused


SCOPES_FIRST = """
import sys, warnings
import torch
import torchair_scope
assert not {"torchair", "torch_npu"} & set(sys.modules), "it imported TorchAir"

from tests.torchair import prepare
from tests.torchair.setups import install
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    setup = install.install(sys.argv[1], stub_folder=str(prepare.STUBS))
print([str(w.message) for w in caught if "torchair_scope" in str(w.message)])
torchair = setup.torchair

def model(x):
    with torchair.scope.data_dump("tanh"):
        y = torch.tanh(x)
    return y * 2

print(torchair.scope.data_dump is torchair_scope.scope.data_dump)
print(torchair_scope.CompilerConfig is torchair.CompilerConfig)
backend = torchair.get_npu_backend(compiler_config=setup.compiler_config("max-autotune"))
with torch.no_grad():
    torch.compile(model, backend=backend, fullgraph=True)(torch.ones(3).to(setup.device))
from torchair_scope.store.reader import read
print([(call.scope, call.target) for call in read(".").ranks[0].calls])
sys.stdout.flush()
import os
os._exit(0)  # the stub libraries have nothing to finalise
"""


def test_torchair_may_be_imported_after_torchair_scope(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", SCOPES_FIRST, os.environ["TORCHAIR_SETUP"]],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-4:] == [
        "[]",
        "True",
        "True",
        "[('tanh', 'aten.tanh.default')]",
    ], done.stderr


FIRST_OF_ALL = """
import ctypes, glob, os, sys
import torch
import torchair_scope
from tests.torchair import prepare
from tests.torchair.setups.extensions import install_extensions

install_extensions()
stubs = glob.glob(str(prepare.STUBS / "*.so"))
for stub in sorted(stubs, key=lambda path: "libcann_stub.so" not in path):
    ctypes.CDLL(stub, mode=ctypes.RTLD_GLOBAL)
import torch_npu
from torchair.scope import data_dump
import torchair
ours = torchair_scope.scope.data_dump
print(data_dump is ours, torchair.scope.data_dump is ours, hasattr(torchair.scope, "dump_ops"))
torchair_scope.unpatch()
print(torchair.scope.data_dump is ours, hasattr(torchair.scope, "dump_ops"))
sys.stdout.flush()
os._exit(0)
"""


@pytest.mark.only_in("C")
def test_a_data_dump_that_is_the_first_import_of_a_lazy_torchair_is_ours(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", FIRST_OF_ALL], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.stdout.splitlines()[-2:] == ["True True True", "False False"], done.stderr


def told_to_ge(recorder):
    """All that reached GE and the device, in order."""
    graphs = [(graph.proto, graph.options, graph.runs) for graph in recorder.ge_graphs]
    tapes = [(graph.captures, graph.replays, graph.captured_ops()) for graph in recorder.acl_graphs]
    calls = [(name, repr(arguments)) for name, arguments in recorder.calls]
    return graphs, tapes, calls


class Unscoped(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Linear(4, 8), torch.nn.Linear(8, 4)

    def forward(self, x):
        with torchair.scope.limit_core_num(2, 4):
            h = torch.relu(self.a(x))
        return torch.tanh(self.b(h)) * 2


@pytest.fixture
def run_and_tell(compile_with, compiler_config, device, recorder, monkeypatch):
    """Runs a training step as the first in a process; returns what reached the device."""
    from tests.torchair.setups import install

    def run(mode, dynamic):
        install.reset()
        monkeypatch.setattr(torchair.npu_fx_compiler, "_GLOBAL_GRAPH_ID", 0)
        torch.manual_seed(0)
        net = Unscoped().to(device)
        x = torch.randn(3, 4).to(device)
        compile_with(compiler_config(mode), net, dynamic=dynamic)(x).sum().backward()
        return told_to_ge(recorder)

    return run


@pytest.mark.filterwarnings("ignore:Your compiler for AOTAutograd is returning a function")
def test_without_a_scope_all_that_reaches_the_device_is_the_same(run_and_tell, mode, dynamic):
    alone = run_and_tell(mode, dynamic)
    patching.patch()
    with_us = run_and_tell(mode, dynamic)
    torchair_scope.unpatch()
    graphs, tapes, _ = alone
    assert graphs if mode == "max-autotune" else tapes
    assert with_us == alone
