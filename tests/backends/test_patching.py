"""Without TorchAir, or with one that is broken, nothing is patched and everything works."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import torchair_scope
from torchair_scope.backends import get_compiler, get_npu_backend
from torchair_scope.config import CompilerConfig

ROOT = Path(__file__).resolve().parents[2]
BROKEN = 'raise OSError("libhccl.so: cannot open shared object file")\n'

RUN = """
import warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import torchair_scope
    print(len(caught))
    from torchair_scope.config import CompilerConfig
    print(torchair_scope.CompilerConfig is CompilerConfig)
    print(*[str(warning.message) for warning in caught if "TorchAir" in str(warning.message)])
import torch
options = {"backend": "aot_eager", "path": "dump"}
@torch.compile(backend="torchair_scope", options=options)
def shift(x):
    with torchair_scope.scope.data_dump("shift"):
        return x + 1
print(shift(torch.zeros(2)).tolist())
torchair_scope.unpatch()
"""


@pytest.fixture
def run_beside(tmp_path):
    """Runs a script where packages with this text can be imported; returns what it printed."""

    def run(**packages):
        for name, text in packages.items():
            (tmp_path / name).mkdir()
            if text is not None:
                (tmp_path / name / "__init__.py").write_text(text)
        done = subprocess.run(
            [sys.executable, "-c", RUN],
            cwd=tmp_path,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)]),
                "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
            },
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    return run


def test_a_broken_torchair_is_said_and_ours_is_used(run_beside):
    count, is_ours, said, result = run_beside(torchair=BROKEN, torch_npu=BROKEN)
    assert (count, is_ours, result) == ("0", "True", "[1.0, 1.0]")
    assert "TorchAir is installed and cannot be imported" in said
    assert "libhccl.so" in said


def test_a_folder_that_is_called_torchair_is_not_taken_for_it(run_beside):
    count, is_ours, said, result = run_beside(torchair=None)
    assert (count, is_ours, said, result) == ("0", "True", "", "[1.0, 1.0]")


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("CompilerConfig", CompilerConfig),
        ("get_npu_backend", get_npu_backend),
        ("get_compiler", get_compiler),
    ],
)
def test_without_torchair_its_names_are_ours(name, ours):
    assert getattr(torchair_scope, name) is ours


def test_a_name_that_there_is_not_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'get_gpu_backend'"):
        _ = torchair_scope.get_gpu_backend
