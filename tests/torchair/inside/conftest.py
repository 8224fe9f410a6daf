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
import torch

_NAME = os.environ.get("TORCHAIR_SETUP")
collect_ignore_glob = [] if _NAME else ["test_*.py"]

if _NAME:
    from tests.torchair import prepare
    from tests.torchair.setups import install
    from tests.torchair.setups.recorder import RECORDER, Recorder

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what torch and torch_npu say when they are imported
        _SETUP = install.install(_NAME, stub_folder=str(prepare.STUBS))

    import npugraph_ex  # noqa: F401 - wakes the lazy package before one of its modules is imported

    import torchair_scope
    from torchair_scope.backends import patching
    from torchair_scope.store.reader import Dump, read

    torchair_scope.unpatch()  # a test that wants TorchAir with scopes takes the fixture `patched`


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


@pytest.fixture
def patched() -> Iterator[None]:
    """In this test TorchAir has scopes in it; without the fixture it is as it was installed."""
    patching.patch()
    yield
    torchair_scope.unpatch()


@pytest.fixture
def dump_path(tmp_path: Path) -> Path:
    """The folder of the dump."""
    return tmp_path / "dump"


@pytest.fixture
def read_dump(dump_path: Path) -> Callable[[], Dump]:
    """`read_dump()` is the dump as it is now."""
    return lambda: read(dump_path)


@pytest.fixture
def dump_config(compiler_config: Callable[..., Any], dump_path: Path) -> Callable[..., Any]:
    """`dump_config(mode="max-autotune")`: a config whose dump goes to `dump_path`."""

    def config(mode: str = "max-autotune") -> Any:
        made = compiler_config(mode)
        made.debug.data_dump.path = str(dump_path)
        return made

    return config


@pytest.fixture
def compile_with(torchair: Any) -> Callable[..., Any]:
    """`compile_with(config, function, dynamic=None)`: the function, compiled by TorchAir."""

    def compiled(config: Any, function: Any, **options: Any) -> Any:
        backend = torchair.get_npu_backend(compiler_config=config)
        return torch.compile(function, backend=backend, fullgraph=True, **options)

    return compiled
