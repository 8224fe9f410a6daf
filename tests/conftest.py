"""Fixtures of all tests: each starts with no compiled code, in an empty folder of its own."""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

# Read when Inductor is imported: kernels are compiled in this process, not by a pool of workers.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")


@pytest.fixture(scope="session", autouse=True)
def _compiler_caches(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep the caches of compilers, ours as well, out of the user's folders, and cold."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session", autouse=True)
def _warnings_of_torch_itself() -> None:
    """Inductor's first import warns of a deprecation within torch; let it not fail a test."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"`torch\.jit\.script_method` is deprecated")
        importlib.import_module("torch.utils.mkldnn")


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    yield
    if "torch._dynamo" in sys.modules:
        sys.modules["torch._dynamo"].reset()


@pytest.fixture(autouse=True)
def _fresh_account() -> Iterator[None]:
    yield
    if "torchair_scope.capture.account" in sys.modules:
        sys.modules["torchair_scope.capture.account"].account.forget()


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dump without a path goes to the current folder: let that be a temporary one."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def without_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Do in Python what else is done in C, so that a test can put something in its place."""
    kernels = importlib.import_module("torchair_scope.store.compiled").kernels
    kernels.cache_clear()
    monkeypatch.setenv("TORCHAIR_SCOPE_NATIVE", "0")
    assert kernels() is None
    yield
    kernels.cache_clear()


@pytest.fixture
def dump_path(tmp_path: Path) -> Path:
    """A folder for a dump; it does not exist yet."""
    return tmp_path / "dump"
