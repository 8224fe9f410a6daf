from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.store.support import RANK_0, one_step
from torchair_scope.store.reader import MissingTensorError, read
from torchair_scope.store.run import open_run


@pytest.fixture
def dump(dump_path: Path) -> Path:
    """Two steps of two calls."""
    graph = open_run(dump_path).graph(1, {"direction": "inference"})
    one_step(graph, torch.ones(2), torch.ones(3).bfloat16())
    one_step(graph, torch.ones(2), torch.ones(3).bfloat16())
    return dump_path


def manifest(dump: Path) -> Path:
    return dump / RANK_0 / "manifest.jsonl"


def test_a_dump_and_its_rank_folder_read_alike(dump: Path):
    (rank,) = read(dump).ranks
    (same,) = read(str(dump / RANK_0)).ranks
    assert rank == same
    assert rank.folder == dump / RANK_0
    assert rank.run["record"] == "run"
    assert [record["direction"] for record in rank.graphs] == ["inference"]
    assert [record["step"] for record in rank.steps] == [0, 1]
    assert read(dump).problems == []


def test_a_call_gives_its_facts_files_and_values(dump: Path):
    call = read(dump).ranks[0].calls[3]
    facts = (call.graph, call.step, call.order, call.node, call.target, call.scope)
    assert facts == (1, 1, 1, "add_1", "aten.add.Tensor", "block")
    assert list(call.input_files) == ["INPUT.0", "INPUT.1"]
    assert np.load(call.input_files["INPUT.0"]).tolist() == [1, 1, 1]
    assert np.load(call.output_files["OUTPUT.0"]).tolist() == [2, 2, 2]
    (tensor, number), kwargs = call.load_args()
    assert (tensor.dtype, number, kwargs) == (torch.bfloat16, 1, {})
    assert call.load_outputs().dtype == torch.bfloat16


def test_values_can_be_put_on_another_device(dump: Path):
    call = read(dump).ranks[0].calls[0]
    assert call.load_args(device="meta")[0][0].is_meta
    assert call.load_outputs(device=torch.device("meta")).is_meta


def test_ranks_come_in_the_order_of_their_numbers(dump_path: Path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "12")
    for rank in (10, 2, 0):
        monkeypatch.setenv("RANK", str(rank))
        open_run(dump_path)
    assert [rank.run["rank"] for rank in read(dump_path).ranks] == [0, 2, 10]


def test_a_folder_that_is_no_dump_is_refused_with_what_is_expected(tmp_path: Path):
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(FileNotFoundError, match=r"is no dump.*worldsize1_global_rank0"):
            read(path)


def test_a_cut_last_line_costs_that_record_only(dump: Path):
    whole = manifest(dump).read_bytes()
    manifest(dump).write_bytes(whole[:-20])
    (rank,) = read(dump).ranks
    assert len(rank.calls) == 4
    assert rank.problems == [
        "manifest.jsonl: the last line is cut",
        "graph 1, step 1 did not end: it has no step record",
    ]


def test_an_unreadable_line_is_listed_with_its_number(dump: Path):
    lines = manifest(dump).read_text().splitlines()
    lines[2:2] = ["{broken", "[1]"]
    manifest(dump).write_text("\n".join(lines) + "\n")
    (rank,) = read(dump).ranks
    assert len(rank.calls) == 4
    assert rank.problems == [
        "manifest.jsonl: line 3 is not JSON",
        "manifest.jsonl: line 4 is not a record",
    ]


def test_a_missing_file_is_listed_and_named_when_it_is_loaded(dump: Path):
    call = read(dump).ranks[0].calls[0]
    path = call.input_files["INPUT.0"]
    path.unlink()
    assert read(dump).problems == [f"{RANK_0}: graph_1/0/{path.name} is missing"]
    with pytest.raises(MissingTensorError, match=r"INPUT\.0 of add_0.*is gone"):
        call.load_args()
    assert call.load_outputs().tolist() == [2, 2]


def test_a_file_that_no_record_knows_is_listed(dump: Path):
    (dump / RANK_0 / "graph_1" / "0" / ".12-3.part").touch()
    (problem,) = read(dump).problems
    assert "graph_1/0/.12-3.part is in no call record" in problem


def test_a_manifest_without_a_run_record_can_be_read(dump: Path):
    lines = manifest(dump).read_text().splitlines()
    manifest(dump).write_text("\n".join(lines[1:]) + "\n")
    (rank,) = read(dump).ranks
    assert rank.run == {}
    assert rank.problems == ["manifest.jsonl: the run record is missing"]


def test_an_operator_argument_is_found_and_text_is_marked_as_such(dump_path: Path):
    step = open_run(dump_path).graph(1, {}).begin_step()
    args = (torch.ops.aten.relu.default, print)
    step.begin_call("node", "higher_order", args, {}, {}).finish(None)
    step.finish()
    (call,) = read(dump_path).ranks[0].calls
    operator, text = call.load_args()[0]
    assert operator is torch.ops.aten.relu.default
    assert text.text == repr(print)


def test_records_of_a_later_format_are_passed_over(dump: Path):
    with manifest(dump).open("a") as file:
        file.write(json.dumps({"record": "stats"}) + "\n")
    assert read(dump).problems == []
