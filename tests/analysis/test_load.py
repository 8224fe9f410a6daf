"""Dumps are loaded: whole, without a manifest, damaged, and from URLs."""

from __future__ import annotations

import json
import mmap

import fsspec
import numpy as np
import pytest
import torch

import torchair_scope
from tests.analysis.conftest import rank_folder, without_manifest
from torchair_scope.store.reader import read
from torchair_scope.store.run import open_run


def test_a_dump_has_what_its_manifest_says(sound_dumps):
    dump = torchair_scope.load(sound_dumps["float32"])
    calls = read(sound_dumps["float32"]).ranks[0].calls
    assert [(c.graph.number, c.step.number, c.order, c.node, c.scope) for c in dump.calls()] == [
        (c.graph, c.step, c.order, c.node, c.scope) for c in calls
    ]
    assert [graph.direction for graph in dump.graphs] == ["forward", "backward"]
    assert [str(step) for step in dump.steps] == [f"graph_{g}/{s}" for g, s in steps_of(calls)]
    assert dump.scopes == ["block"]
    assert dump.problems == []
    assert dump.runs[0]["world_size"] == 1


def steps_of(calls):
    return sorted({(call.graph, call.step) for call in calls})


def test_calls_are_found_by_scope_operator_and_step(sound_dumps):
    dump = torchair_scope.load(sound_dumps["float32"])
    assert {call.target for call in dump.calls(target="aten.mm*")} == {"aten.mm.default"}
    assert {call.step.number for call in dump.calls(step=1)} == {1}
    assert dump.calls(scope="block") == dump.calls(scope="bl*") == dump.calls()
    assert dump.calls(scope="blo") == dump.calls(node="nothing") == []


def test_a_call_knows_its_place_in_the_users_code(sound_dumps):
    (call,) = torchair_scope.load(sound_dumps["float32"]).calls(node="_softmax", step=0)
    assert call.source["code"] == "mixed = torch.softmax(q @ h, dim=-1) @ q"
    assert call.source["file"].endswith("faults.py")


@pytest.mark.parametrize("name", ["float32", "bfloat16"])
def test_tensors_have_their_true_dtype_and_are_mapped_not_read(sound_dumps, name):
    dump = torchair_scope.load(sound_dumps[name])
    for call, recorded in zip(dump.calls(), read(sound_dumps[name]).ranks[0].calls, strict=True):
        args, _ = recorded.load_args("cpu")
        tensor = call.tensors["INPUT.0"]
        if isinstance(args[0], torch.Tensor):
            assert tensor.torch().dtype == args[0].dtype == getattr(torch, tensor.dtype)
            assert tensor.torch().stride() == args[0].stride()
            assert torch.equal(tensor.torch(), args[0])
            assert isinstance(owner_of(tensor.numpy()), mmap.mmap)


def owner_of(array):
    """What an array's memory belongs to."""
    while isinstance(array, np.ndarray):
        array = array.base
    return array


def test_a_tensor_is_found_by_its_name(sound_dumps):
    dump = torchair_scope.load(sound_dumps["float32"])
    graph = dump.graphs[0].name
    tensor = dump.tensor(f"{graph}/1/tanh.OUTPUT.0")
    assert dump.tensor(tensor.file.url.rpartition("/")[2]) is tensor
    with pytest.raises(LookupError, match=r"name of 2 tensors; say which: graph_\d+/0/tanh\.OUTP"):
        dump.tensor("tanh.OUTPUT.0")
    with pytest.raises(LookupError, match="has no tensor 'nothing'"):
        dump.tensor("nothing")


def test_without_a_manifest_the_file_names_tell(float32_dump):
    whole = torchair_scope.load(float32_dump).calls()
    whole_names = [(c.graph.name, c.step.number, c.node, c.target, *c.tensors) for c in whole]
    loaded = torchair_scope.load(without_manifest(float32_dump))
    names = [(c.graph.name, c.step.number, c.node, c.target, *c.tensors) for c in loaded.calls()]
    assert names == whole_names
    assert all(call.scope is None for call in loaded.calls())
    assert "there is no manifest.jsonl" in loaded.problems[0]


def test_slots_and_graphs_sort_as_numbers(tmp_path):
    run = open_run(tmp_path / "dump")
    for number in (2, 10, 9):
        step = run.graph(number, {"direction": "inference", "nodes": []}).begin_step()
        tensors = [torch.full((2,), float(position)) for position in range(12)]
        call = step.begin_call("cat", "many.op.default", tuple(tensors), {}, {})
        call.finish(torch.cat(tensors))
        step.finish()
    for path in (tmp_path / "dump", without_manifest(tmp_path / "dump")):
        dump = torchair_scope.load(path)
        assert [graph.number for graph in dump.graphs] == [2, 9, 10]
        assert list(dump.calls()[0].inputs) == [f"INPUT.{position}" for position in range(12)]


def test_a_damaged_dump_loads_and_says_what_is_missing(float32_dump):
    folder = rank_folder(float32_dump)
    calls = torchair_scope.load(float32_dump).calls(step=0)
    gone, cut = (call.tensors["OUTPUT.0"].file.url for call in calls[1:3])
    (folder / gone).unlink()
    data = (folder / cut).read_bytes()
    (folder / cut).write_bytes(data[:-5])
    manifest = folder / "manifest.jsonl"
    lines = manifest.read_bytes().splitlines(keepends=True)
    manifest.write_bytes(b"".join(lines)[:-20])
    dump = torchair_scope.load(float32_dump)
    assert len(dump.calls()) == len(torchair_scope.load(float32_dump).calls())
    problems = "\n".join(dump.problems)
    assert "the last line is cut" in problems
    assert f"{calls[1]}: OUTPUT.0 is not on disk" in problems
    assert "is cut: its array has 256 elements" in problems
    assert "did not end: it has no step record" in problems
    frame = dump.frame()
    assert len(frame) == sum(len(call.tensors) for call in dump.calls())
    assert frame.problem.notna().sum() == 2


def test_calls_whose_records_are_lost_are_loaded_from_their_files(float32_dump):
    manifest = rank_folder(float32_dump) / "manifest.jsonl"
    lines = manifest.read_text().splitlines(keepends=True)
    kept = [line for line in lines if json.loads(line).get("node") != "tanh"]
    manifest.write_text("".join(kept))
    dump = torchair_scope.load(float32_dump)
    lost = dump.calls(node="tanh")
    assert [call.record for call in lost] == [None, None]
    assert any("files and no record" in problem for problem in dump.problems)


def test_a_dump_is_read_through_fsspec(sound_dumps):
    memory = fsspec.filesystem("memory")
    memory.put(str(sound_dumps["float32"]), "/dump", recursive=True)
    here = torchair_scope.load(sound_dumps["float32"])
    there = torchair_scope.load("memory://dump")
    assert [str(call) for call in there.calls()] == [str(call) for call in here.calls()]
    assert there.problems == []
    comparison = torchair_scope.compare(here, there)
    assert comparison.verdict.kind == "agrees"
    assert all(each.metrics.equal for result in comparison.results for each in result.tensors)


def test_eager_graphs_stand_beside_compiled_ones(float32_dump):
    folder = rank_folder(float32_dump)
    manifest = folder / "manifest.jsonl"
    records = [json.loads(line) for line in manifest.read_text().splitlines()]
    first = min(record["graph"] for record in records if record["record"] == "graph")
    for record in records:
        if record["record"] == "graph" and record["graph"] == first:
            record.update(kind="eager", inner="eager", nodes=[])
    manifest.write_text("".join(json.dumps(record) + "\n" for record in records))
    (folder / f"graph_{first}").rename(folder / f"eager_{first}")
    dump = torchair_scope.load(float32_dump)
    assert [graph.name for graph in dump.graphs] == [f"eager_{first}", f"graph_{first + 1}"]
    assert dump.problems == []


def test_what_is_no_dump_is_an_error_that_says_what_to_give(tmp_path):
    (tmp_path / "something").mkdir()
    with pytest.raises(FileNotFoundError, match="expected a folder with manifest"):
        torchair_scope.load(tmp_path)


def test_a_frame_has_a_row_for_each_tensor_with_statistics(sound_dumps):
    dump = torchair_scope.load(sound_dumps["bfloat16"])
    frame = dump.frame()
    tensors = [tensor for call in dump.calls() for tensor in call.tensors.values()]
    assert len(frame) == len(tensors)
    for row, tensor in zip(frame.itertuples(), tensors, strict=True):
        value = tensor.torch().double()
        assert row.dtype == tensor.dtype
        assert row.maximum == value.max()
        assert row.norm == pytest.approx(value.norm().item())
    assert "maximum" not in dump.frame(statistics=False)
