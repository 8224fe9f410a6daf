"""The functions in C: where they are made, where they cannot be, and what they leave alone."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from torchair_scope.store import compiled
from torchair_scope.store.measuring import statistics_of

MEASURE = """
import torch
from torchair_scope.store.compiled import kernels
from torchair_scope.store.measuring import statistics_of

found = statistics_of(torch.tensor([3.0, -4.0, float("nan"), 1e-40]))
assert (found.minimum, found.norm, found.nans, found.subnormals) == (-4.0, 5.0, 1, 1)
assert (torch.tensor([1e-40]) * 1.5).item() > 0  # denormals are still what they were
print(kernels() is not None)
"""


def measured(tmp_path, monkeypatch, **environment):
    """Whether a new process has the functions; it checks that it measures rightly in any case."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    done = subprocess.run([sys.executable, "-c", MEASURE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    return done.stdout.strip() == "True"


def test_they_are_compiled_once_for_the_processes_of_a_user(tmp_path, monkeypatch):
    assert measured(tmp_path, monkeypatch)
    (made,) = (tmp_path / "cache/torchair_scope").iterdir()
    before = made.stat()
    assert measured(tmp_path, monkeypatch)
    (again,) = (tmp_path / "cache/torchair_scope").iterdir()
    assert (again, again.stat().st_mtime_ns) == (made, before.st_mtime_ns)


def test_without_a_compiler_the_same_is_measured(tmp_path, monkeypatch):
    assert not measured(tmp_path, monkeypatch, CC="", PATH=str(tmp_path))


def test_a_compiler_that_fails_is_none(tmp_path, monkeypatch):
    assert not measured(tmp_path, monkeypatch, CC="false")
    assert not list((tmp_path / "cache/torchair_scope").iterdir())


def test_they_can_be_switched_off(tmp_path, monkeypatch):
    assert not measured(tmp_path, monkeypatch, TORCHAIR_SCOPE_NATIVE="0")
    assert not (tmp_path / "cache").exists()


def test_without_a_place_to_keep_them_they_are_compiled_for_one_process(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    assert measured(tmp_path, monkeypatch, XDG_CACHE_HOME=str(tmp_path / "file"))


def test_the_compiler_has_nothing_to_say(tmp_path):
    line = ["cc", "-O3", "-fopenmp-simd", "-Wall", "-Wextra", "-Werror", "-c", compiled.SOURCE]
    done = subprocess.run([*line, "-o", tmp_path / "kernels.o"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.usefixtures("kernels")
def test_memory_that_is_not_aligned_is_measured():
    data = torch.zeros(41, dtype=torch.uint8)
    data[1:] = torch.arange(10, dtype=torch.float32).view(torch.uint8)
    array = data.numpy()[1:].view("float32")
    assert statistics_of(torch.from_numpy(array)).maximum == 9


def test_what_others_may_write_to_is_not_loaded(tmp_path, monkeypatch):
    assert measured(tmp_path, monkeypatch)
    (made,) = (tmp_path / "cache/torchair_scope").iterdir()
    made.write_bytes(b"planted")
    made.chmod(0o777)
    assert measured(tmp_path, monkeypatch)
    made.chmod(0o755)
    made.parent.chmod(0o777)
    assert measured(tmp_path, monkeypatch)
    assert made.read_bytes() == b"planted"


def test_a_kept_file_that_cannot_be_loaded_is_not_the_end(tmp_path, monkeypatch):
    assert measured(tmp_path, monkeypatch)
    (made,) = (tmp_path / "cache/torchair_scope").iterdir()
    made.write_bytes(b"cut")
    assert measured(tmp_path, monkeypatch)


@pytest.mark.parametrize("command", ["cc 'unbalanced", "/no/such/compiler", "false"])
def test_a_wrong_compiler_is_as_good_as_none(tmp_path, monkeypatch, command):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not measured(tmp_path, monkeypatch, CC=command)


@pytest.mark.usefixtures("kernels")
def test_subnormals_are_counted_where_the_processor_takes_them_for_zero():
    tensor = torch.tensor([1e-7, 6e-8, 0.0, 1.0], dtype=torch.float16)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor has no such mode")
    try:
        found = statistics_of(tensor)
    finally:
        torch.set_flush_denormal(False)
    assert (found.zeros, found.subnormals) == (1, 2)
