"""Where a graph dump goes."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch.distributed as dist

from torchair_scope.config import CompilerConfig


@pytest.fixture(autouse=True)
def _no_rank_in_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)


def test_full_path_has_rank_process_and_time(tmp_path: Path) -> None:
    graph_dump = CompilerConfig().debug.graph_dump
    graph_dump.path = tmp_path
    folder, name = os.path.split(graph_dump.full_path("dynamo_original_graph_3"))
    assert folder == os.path.realpath(tmp_path)
    assert re.fullmatch(rf"dynamo_original_graph_3_rank_0_pid_{os.getpid()}_ts_\d{{20}}\.py", name)


def test_full_path_without_a_path_is_in_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    full_path = CompilerConfig().debug.graph_dump.full_path("graph")
    assert os.path.dirname(full_path) == os.path.realpath(tmp_path)


def test_rank_comes_from_the_environment_if_world_size_is_set_as_well(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graph_dump = CompilerConfig().debug.graph_dump
    monkeypatch.setenv("RANK", "5")
    assert "_rank_0_" in graph_dump.full_path("graph")
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert "_rank_5_" in graph_dump.full_path("graph")


def test_rank_comes_from_torch_distributed_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setenv("WORLD_SIZE", "8")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        assert "_rank_0_" in CompilerConfig().debug.graph_dump.full_path("graph")
    finally:
        dist.destroy_process_group()
