"""Each rank is compared with its rank, and each step with its step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import torchair_scope
from torchair_scope.store.run import open_run


@pytest.fixture
def write(monkeypatch: pytest.MonkeyPatch):
    """Writes the dump of one rank: two operators a step, whose values tell rank and step."""

    def dump(path: Path, rank: int, world_size: int, steps: range, wrong: object = None) -> None:
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", str(world_size))
        graph = open_run(path).graph(1, {"direction": "inference"})
        for number in range(steps.stop):
            step = graph.begin_step()
            value = torch.full((4,), 0.1 + rank + 10.0 * number)
            for node, function in (("sin", torch.sin), ("exp", torch.exp)):
                call = step.begin_call(node, f"aten.{node}.default", (value,), {}, {"scope": "m"})
                value = function(value.sin())
                if wrong == (rank, number, node):
                    value = value + 1
                call.finish(value)
            step.finish()

    return dump


def places(comparison) -> list[tuple[int, int, int, int]]:
    """For each pair the ranks and the steps of both sides."""
    return [
        (
            pair.golden.graph.rank.number,
            pair.target.graph.rank.number,
            pair.golden.step.number,
            pair.target.step.number,
        )
        for pair in (result.pair for result in comparison.results)
    ]


def test_each_rank_is_paired_with_its_rank_and_each_step_with_its_step(write, tmp_path):
    for rank in (0, 1):
        write(tmp_path / "golden", rank, 2, range(3))
        write(tmp_path / "target", rank, 2, range(3), wrong=(1, 2, "exp"))
    found = torchair_scope.compare(tmp_path / "golden", tmp_path / "target", confirm=False)
    assert sorted(places(found)) == sorted(
        (rank, rank, step, step) for rank in (0, 1) for step in range(3) for _ in range(2)
    )
    assert found.only_golden == found.only_target == found.notes == []
    made = [str(result.pair.target) for result in found.results if result.role == "made"]
    assert made == ["graph_1/2 exp (aten.exp.default)"]
    assert found.verdict.call.pair.target.graph.rank.number == 1


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_step_that_one_side_lacks_is_listed_and_shifts_no_other(write, tmp_path, lost):
    for side in ("golden", "target"):
        write(tmp_path / side, 0, 1, range(3))
    remove_step(tmp_path / "golden", lost)
    found = torchair_scope.compare(tmp_path / "golden", tmp_path / "target", confirm=False)
    assert {(golden, target) for *_, golden, target in places(found)} == {
        (step, step) for step in range(3) if step != lost
    }
    assert [call.step.number for call in found.only_target] == [lost, lost]
    assert found.verdict.kind == "agrees"
    assert found.notes == []


def test_a_rank_that_one_side_lacks_is_listed_on_the_other(write, tmp_path):
    for rank in (0, 1):
        write(tmp_path / "golden", rank, 2, range(1))
    write(tmp_path / "target", 1, 2, range(1))
    found = torchair_scope.compare(tmp_path / "golden", tmp_path / "target", confirm=False)
    assert places(found) == [(1, 1, 0, 0)] * 2
    assert found.notes == ["golden: rank 0 is not on the other side"]


def test_other_world_sizes_are_told(write, tmp_path):
    for rank in (0, 1):
        write(tmp_path / "golden", rank, 2, range(1))
    for rank in range(4):
        write(tmp_path / "target", rank, 4, range(1))
    found = torchair_scope.compare(tmp_path / "golden", tmp_path / "target", confirm=False)
    assert set(places(found)) == {(0, 0, 0, 0), (1, 1, 0, 0)}
    assert any("2 processes" in note and "4" in note for note in found.notes)


def remove_step(path: Path, number: int) -> None:
    """What a run leaves that has not dumped a step."""
    import json
    import shutil

    (rank,) = path.glob("worldsize*")
    shutil.rmtree(rank / "graph_1" / str(number))
    manifest = rank / "manifest.jsonl"
    lines = manifest.read_text().splitlines(keepends=True)
    manifest.write_text("".join(line for line in lines if json.loads(line).get("step") != number))
