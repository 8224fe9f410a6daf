"""Dumps that the tests of the analysis read; they are made once."""

from __future__ import annotations

import shutil

import pytest
import torch

from tests.analysis import faults


@pytest.fixture(scope="session")
def sound_dumps(tmp_path_factory):
    """Dumps of the block without a fault, by dtype; `aot_eager` everywhere."""
    folder = tmp_path_factory.mktemp("sound")
    paths = {"float32": folder / "float32", "bfloat16": folder / "bfloat16"}
    for name, path in paths.items():
        faults.run(path, getattr(torch, name), "aot_eager")
    return paths


@pytest.fixture(scope="session")
def faulty_dump(tmp_path_factory):
    """A dump in which `sub` makes a NaN."""
    path = tmp_path_factory.mktemp("faulty") / "dump"
    with faults.faulty_operator("sub", faults.changing_one_output(faults.with_nan), 1):
        faults.run(path, torch.float32, "aot_eager")
    return path


@pytest.fixture
def float32_dump(sound_dumps, tmp_path):
    """A copy of a sound dump, to be damaged."""
    return shutil.copytree(sound_dumps["float32"], tmp_path / "copy")


def rank_folder(path):
    (rank,) = path.glob("worldsize*")
    return rank


def without_manifest(path):
    """A dump as TorchAir itself writes it."""
    (rank_folder(path) / "manifest.jsonl").unlink()
    return path
