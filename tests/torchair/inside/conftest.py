"""Installs the TorchAir set-up that TORCHAIR_SETUP names; without it, nothing here is collected.

`tests/torchair/test_setups.py` runs this folder once for each set-up. By hand:

    TORCHAIR_SETUP=B TORCH_DEVICE_BACKEND_AUTOLOAD=0 PYTHONPATH=. \\
        .venv-torchair/bin/python -m pytest tests/torchair/inside
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

_NAME = os.environ.get("TORCHAIR_SETUP")
collect_ignore_glob = [] if _NAME else ["test_*.py"]

if _NAME:
    from tests.torchair import prepare
    from tests.torchair.setups import install
    from tests.torchair.setups.recorder import RECORDER, Recorder

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what torch and torch_npu say when they are imported
        _SETUP = install.install(_NAME, stub_folder=str(prepare.STUBS))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that takes `mode` runs in each mode of the set-up; `dynamic` makes it two each."""
    if "mode" in metafunc.fixturenames:
        metafunc.parametrize("mode", _SETUP.modes)
    if "dynamic" in metafunc.fixturenames:
        metafunc.parametrize("dynamic", [False, True], ids=["static", "dynamic"])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        mark = item.get_closest_marker("only_in")
        if mark is not None and mark.args[0] != _NAME:
            item.add_marker(pytest.mark.skip(reason=f"holds in set-up {mark.args[0]} alone"))


@pytest.fixture(autouse=True)
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test has empty caches and records, and a folder of its own, where TorchAir writes."""
    install.reset()
    monkeypatch.chdir(tmp_path)
    yield
    install.reset()


@pytest.fixture
def torchair() -> Any:
    """The real TorchAir module."""
    return _SETUP.torchair


@pytest.fixture
def device() -> str:
    """Where models and inputs belong: "cpu" or "npu"."""
    return _SETUP.device


@pytest.fixture
def modes() -> tuple[str, ...]:
    """The modes of `CompilerConfig` that work in this set-up."""
    return _SETUP.modes


@pytest.fixture
def recorder() -> Recorder:
    """What reached GE and the device since the test began."""
    return RECORDER


@pytest.fixture
def compiler_config() -> Callable[..., Any]:
    """`compiler_config(mode="max-autotune")`: a fresh TorchAir `CompilerConfig` for this set-up."""
    return lambda mode="max-autotune": _SETUP.compiler_config(mode)
