"""Dumps without tensors, or with parts of them: what the analysis makes of their statistics."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import torchair_scope as torchair
from torchair_scope.analysis.compare import compare
from torchair_scope.analysis.replay import replay
from torchair_scope.analysis.statistics import statistics_of_tensor
from torchair_scope.analysis.tensors import MissingTensorError
from torchair_scope.cli import run
from torchair_scope.scope import data_dump

ROWS = torch.arange(60.0).view(3, 20)


def dumped(path, factor=2.0, **options):
    with data_dump("mine", path=path, **options):
        (ROWS * factor).bfloat16().sin()
    return torchair.load(path)


def test_statistics_are_read_where_there_are_no_tensors(dump_path):
    dump = dumped(dump_path, data="stats")
    assert dump.problems == []
    tensor = dump.calls(target="aten.mul.Tensor")[0].outputs["OUTPUT.0"]
    assert (tensor.dtype, tensor.shape) == ("float32", (3, 20))
    assert tensor.statistics.maximum == 118
    with pytest.raises(MissingTensorError, match="only its statistics were saved"):
        tensor.numpy()


def test_a_frame_has_the_same_numbers_with_tensors_and_without(dump_path):
    frames = [
        dumped(dump_path / data, data=data)
        .frame()
        .drop(columns=["bytes", "problem", "graph", "line"])
        for data in ("stats", "tensors", "both")
    ]
    tensors = [frame[frame["slot"] != "INPUT.1"].reset_index(drop=True) for frame in frames]
    assert list(tensors[0]["subnormals"]) == [0] * len(tensors[0])
    for other in tensors[1:]:
        both = [each.drop(columns=["file", "dtype"]) for each in (tensors[0], other)]
        assert both[0].equals(both[1])


def test_the_command_line_prints_saved_statistics(dump_path, capsys):
    dumped(dump_path, data="stats")
    assert run(["stats", str(dump_path)]) == 0
    printed = capsys.readouterr().out
    assert "mul.OUTPUT.0" in printed
    assert "118" in printed


def test_statistics_of_a_file_are_those_that_were_saved(dump_path):
    dump = dumped(dump_path, data="both")
    for call in dump.calls():
        for tensor in call.tensors.values():
            if tensor.description:
                assert statistics_of_tensor(tensor) == tensor.statistics


@pytest.mark.parametrize("target", ["stats", "tensors"])
def test_equal_bits_are_equal_without_tensors(dump_path, target):
    dumped(dump_path / "golden", data="stats")
    dumped(dump_path / "target", data=target)
    comparison = compare(dump_path / "golden", dump_path / "target")
    assert comparison.verdict.kind == "agrees"
    reasons = {each.reason for result in comparison.results for each in result.tensors}
    assert "by the hash of their bits: only statistics are there" in reasons


def test_other_bits_are_told_with_the_numbers_and_not_judged(dump_path):
    dumped(dump_path / "golden", data="stats")
    dumped(dump_path / "target", factor=3.0, data="stats")
    comparison = compare(dump_path / "golden", dump_path / "target")
    tensors = {
        (result.pair.target.target, each.slot): each
        for result in comparison.results
        for each in result.tensors
    }
    output = tensors["aten.mul.Tensor", "OUTPUT.0"]
    assert output.agreement == "unknown"
    assert "the bits differ; maximum 118 and 177, mean 59 and 88.5" in output.reason
    assert comparison.verdict.kind != "agrees"


def test_parts_are_compared_with_the_same_parts(dump_path):
    for name, sample in (("golden", "head=7"), ("target", "head=7"), ("other", ":2")):
        dumped(dump_path / name, sample=sample)
    same = compare(dump_path / "golden", dump_path / "target")
    assert same.verdict.kind == "agrees"
    assert same.results[0].tensors[-1].metrics.count == 7
    other = compare(dump_path / "golden", dump_path / "other")
    assert {each.agreement for each in other.results[0].tensors if each.slot == "OUTPUT.0"} == {
        "unknown"
    }


def test_what_is_sampled_cannot_be_replayed_and_says_so(dump_path):
    dump = dumped(dump_path, sample="head=7")
    tensor = dump.calls()[0].outputs["OUTPUT.0"]
    assert (tensor.shape, tensor.sample) == ((3, 20), "head=7")
    assert np.array_equal(tensor.numpy(), np.arange(7) * 2)
    assert torch.equal(tensor.torch(), torch.arange(7.0) * 2)
    verdicts = {(each.verdict, each.reason) for each in replay(dump)}
    assert ("cannot", "INPUT.0 is sampled: only head=7 of it was saved") in verdicts


def test_statistics_alone_cannot_be_replayed(dump_path):
    found = replay(dumped(dump_path, data="stats"))
    assert {each.verdict for each in found} == {"cannot"}
    assert all("only its statistics were saved" in each.reason for each in found)


def test_a_cut_table_is_named(dump_path):
    dumped(dump_path, data="stats")
    (file,) = dump_path.rglob("stats.csv")
    file.write_text(file.read_text()[:-40])
    problems = torchair.load(dump_path).problems
    assert any("stats.csv" in problem for problem in problems)
