"""The package as it is installed and imported."""

from __future__ import annotations

import importlib.metadata
import importlib.resources
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.fx.traceback

from torchair_scope import _torch_private

ROOT = Path(__file__).parent.parent


def run_python(code: str) -> str:
    finished = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
        env={**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


def test_torch_compile_finds_the_backend_by_name() -> None:
    (entry_point,) = importlib.metadata.entry_points(
        group="torch_dynamo_backends", name="torchair_scope"
    )
    assert callable(entry_point.load())
    listed = run_python("import torch; print(torch._dynamo.list_backends())")
    assert "'torchair_scope'" in listed


def test_type_checkers_are_told_of_the_type_hints() -> None:
    assert importlib.resources.files("torchair_scope").joinpath("py.typed").is_file()


@pytest.fixture(scope="module")
def newly_imported() -> set[str]:
    """The modules that `import torchair_scope` brings in where torch is imported already."""
    return set(
        run_python(
            "import sys, torch; before = set(sys.modules); import torchair_scope; "
            "print(*set(sys.modules) - before)"
        ).split()
    )


@pytest.mark.parametrize(
    "module", ["rich", "transformers", "torch_npu", "torchair", "torch._inductor"]
)
def test_importing_the_package_does_not_import(module: str, newly_imported: set[str]) -> None:
    assert "torchair_scope.scope" in newly_imported
    assert module not in newly_imported


def test_the_core_depends_on_torch_numpy_and_wrapt_alone() -> None:
    required = importlib.metadata.requires("torchair_scope") or []
    core = sorted(requirement for requirement in required if "extra ==" not in requirement)
    assert core == ["numpy", "torch>=2.10", "wrapt"]


def test_private_names_of_torch_are_looked_up_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    before = _torch_private.annotations_of_traced_operator()
    monkeypatch.setattr(torch.fx.traceback, "current_meta", {"custom": {"bound": "anew"}})
    assert _torch_private.annotations_of_traced_operator() == {"bound": "anew"} != before
