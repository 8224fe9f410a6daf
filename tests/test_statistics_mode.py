"""`data=`: statistics instead of tensors, or both; `sample=`: a part of each tensor."""

from __future__ import annotations

import csv

import numpy as np
import pytest
import torch

import torchair_scope as torchair
from torchair_scope.samples import Sample, sample
from torchair_scope.scope import configure, data_dump, summary
from torchair_scope.store.reader import MissingTensorError, read
from torchair_scope.store.run import DumpWarning

COLUMNS = [
    *("order", "node", "target", "scope", "slot", "dtype", "shape", "stride", "device", "count"),
    *("minimum", "maximum", "mean", "std", "norm", "zeros", "subnormals", "nans"),
    *("positive_infinities", "negative_infinities", "hash"),
]


@pytest.fixture(autouse=True)
def _no_defaults():
    with configure():
        yield


def compiled(function, **options):
    options = {"backend": "aot_eager", **options}
    return torch.compile(function, backend="torchair_scope", options=options)


def rows_of(path):
    """The rows of every stats.csv, by step folder."""
    found = {}
    for file in sorted(path.rglob("stats.csv")):
        with open(file, newline="") as text:
            found[f"{file.parent.parent.name}/{file.parent.name}"] = list(csv.DictReader(text))
    return found


def arrays_of(path):
    return {f.name: np.load(f) for f in path.rglob("*.npy")}


def block(data, **options):
    def function(x, weight):
        with data_dump("block", data=data, **options):
            y = torch.relu(x @ weight)
            y = y / y.sum(dim=1, keepdim=True)
        return y * 2

    return function


def inputs():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(5, 8, generator=generator), torch.randn(8, 4, generator=generator)


@pytest.mark.parametrize("in_eager", [False, True])
def test_statistics_alone_leave_no_file_of_a_tensor(dump_path, in_eager):
    function = block("stats", path=str(dump_path))
    result = (function if in_eager else compiled(function))(*inputs())
    assert torch.equal(result, block("tensors", path=str(dump_path / "other"))(*inputs()))
    ((_, rows),) = rows_of(dump_path).items()
    assert list(rows[0]) == COLUMNS
    assert [(row["target"], row["slot"]) for row in rows] == [
        ("aten.mm.default", "INPUT.0"),
        ("aten.mm.default", "INPUT.1"),
        ("aten.mm.default", "OUTPUT.0"),
        ("aten.relu.default", "INPUT.0"),
        ("aten.relu.default", "OUTPUT.0"),
        ("aten.sum.dim_IntList", "INPUT.0"),
        ("aten.sum.dim_IntList", "OUTPUT.0"),
        ("aten.div.Tensor", "INPUT.0"),
        ("aten.div.Tensor", "INPUT.1"),
        ("aten.div.Tensor", "OUTPUT.0"),
    ]
    assert not [f for f in dump_path.rglob("*.npy") if "other" not in f.parts]


def test_the_rows_are_those_of_the_tensors(dump_path):
    compiled(block("both", path=str(dump_path)))(*inputs())
    ((_, rows),) = rows_of(dump_path).items()
    (rank,) = read(dump_path).ranks
    assert rank.problems == []
    files = {}
    for call in rank.calls:
        for slot, file in {**call.input_files, **call.output_files}.items():
            files[call.node, slot] = np.load(file)
        assert call.record["statistics"] == [
            row["slot"] for row in rows if row["node"] == call.node
        ]
    for row in rows:
        array = files[row["node"], row["slot"]].astype(np.float64)
        assert int(row["count"]) == array.size
        assert float(row["minimum"]) == array.min()
        assert float(row["maximum"]) == array.max()
        assert float(row["mean"]) == pytest.approx(array.mean(), rel=1e-12)
        assert float(row["std"]) == pytest.approx(array.std(), rel=1e-12)
        assert float(row["norm"]) == pytest.approx(np.linalg.norm(array), rel=1e-12)
        assert int(row["zeros"]) == np.sum(array == 0)
        assert (row["scope"], row["dtype"], row["device"]) == ("block", "float32", "cpu")
        assert row["shape"] == "x".join(map(str, array.shape))
    hashes = {(row["target"], row["slot"]): row["hash"] for row in rows}
    relu = hashes["aten.relu.default", "OUTPUT.0"]
    assert (
        relu == hashes["aten.sum.dim_IntList", "INPUT.0"] != hashes["aten.relu.default", "INPUT.0"]
    )


def test_the_model_is_what_it_is_without_a_dump(dump_path):
    plain = torch.compile(block("stats"), backend="aot_eager")
    with torchair.scope.disabled():
        wanted = plain(*inputs())
    for data in ("tensors", "stats", "both"):
        torch._dynamo.reset()
        assert torch.equal(compiled(block(data, path=str(dump_path / data)))(*inputs()), wanted)


def test_a_value_that_is_written_to_between_steps_is_measured_anew(dump_path):
    weight = torch.nn.Parameter(torch.ones(200, 300))

    def scale(x):
        with data_dump("scale", path=str(dump_path), data="stats"):
            return x * weight

    function = compiled(scale)
    with torch.no_grad():
        function(torch.ones(300))
        function(torch.ones(300))
        weight.data.mul_(3)  # which the version of the tensor does not tell
        function(torch.ones(300))
        weight.neg_()
        function(torch.ones(300))
    means = [
        float(row["mean"])
        for rows in rows_of(dump_path).values()
        for row in rows
        if row["slot"].startswith("INPUT") and row["shape"] == "200x300"
    ]
    assert means == [1, 1, 3, -3]


def test_an_operator_in_place_has_other_numbers_before_and_after(dump_path):
    with data_dump("mine", path=dump_path, data="stats"):
        torch.ones(100).add_(1).mul_(torch.full((100,), 4.0))
    ((_, rows),) = rows_of(dump_path).items()
    means = {(row["target"], row["slot"]): float(row["mean"]) for row in rows}
    assert means["aten.add_.Tensor", "INPUT.0"] == 1
    assert means["aten.add_.Tensor", "OUTPUT.0"] == 2
    assert means["aten.mul_.Tensor", "INPUT.0"] == 2
    assert means["aten.mul_.Tensor", "OUTPUT.0"] == 8


def test_every_step_has_its_own_rows_and_the_backward_too(dump_path):
    function = compiled(block("stats", path=str(dump_path)))
    for _ in range(2):
        x, weight = inputs()
        function(x, weight.requires_grad_()).sum().backward()
    found = rows_of(dump_path)
    assert [name.partition("/")[2] for name in found] == ["0", "1", "0", "1"]
    first, second, backward, _ = found.values()
    assert first == second
    assert any("backward" in row["target"] for row in backward)


def test_two_scopes_of_a_graph_share_a_file(dump_path):
    def function(x):
        with data_dump("one", path=str(dump_path), data="stats"):
            x = x.sin()
        with data_dump("two", path=str(dump_path), data="both"):
            return x.cos()

    compiled(function)(torch.ones(3))
    ((_, rows),) = rows_of(dump_path).items()
    assert [row["scope"] for row in rows] == ["one", "one", "two", "two"]
    assert len(list(dump_path.rglob("*.npy"))) == 2


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int64", "bool", "complex64"])
def test_each_dtype_has_its_name_in_the_row(dump_path, dtype):
    with data_dump("mine", path=dump_path, data="stats"):
        torch.ones(3).to(getattr(torch, dtype)).reshape(1, 3)
    ((_, rows),) = rows_of(dump_path).items()
    last = rows[-1]
    assert (last["dtype"], last["shape"], last["stride"]) == (dtype, "1x3", "3x1")
    assert int(last["count"]) == (6 if dtype == "complex64" else 3)


def test_of_no_values_there_is_no_minimum(dump_path):
    with data_dump("mine", path=dump_path, data="stats"):
        torch.ones(0, 3).sin()
    ((_, rows),) = rows_of(dump_path).items()
    assert {(row["count"], row["minimum"], row["mean"], row["norm"]) for row in rows} == {
        ("0", "", "", "0.0")
    }


def test_what_cannot_be_measured_is_named_as_missing(dump_path):
    with (
        pytest.warns(DumpWarning, match="is not measured: a tensor on the meta device"),
        data_dump("mine", path=dump_path, data="stats"),
    ):
        torch.ones(3, device="meta").sin()
    (rank,) = read(dump_path).ranks
    assert {lost["reason"] for call in rank.calls for lost in call.record["missing"]} == {
        "a tensor on the meta device has no data"
    }


def test_the_account_counts_rows(dump_path):
    torchair.capture.account.account.forget()
    with data_dump("mine", path=dump_path, data="stats"):
        torch.ones(3) + 1
    (row,) = summary().rows
    assert (row.tagged, row.dumped, row.missing) == (2, 2, {})
    assert (row.calls, row.tensors, row.bytes, row.statistics) == (2, 0, 0, 3)


def test_the_whole_process_and_the_environment_can_ask_for_it(dump_path, monkeypatch):
    monkeypatch.setenv("TORCHAIR_SCOPE_DATA", "stats")
    with data_dump("mine", path=dump_path):
        torch.ones(3) + 1
    with configure(data="tensors"), data_dump("mine", path=dump_path):
        torch.ones(3) + 1
    (statistics,) = rows_of(dump_path)
    assert {f.parent.parent.name for f in dump_path.rglob("*.npy")}.isdisjoint([statistics[:-2]])


# --- samples -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "meant"),
    [
        (1000, "head=1000"),
        ({"head": 7}, "head=7"),
        ("head=7", "head=7"),
        ("7", "head=7"),
        (slice(2), ":2"),
        ((slice(2), slice(None, None, 4)), ":2, ::4"),
        ("1:3,::2", "1:3, ::2"),
        (Sample(head=3), "head=3"),
    ],
)
def test_a_sample_is_written_in_these_ways(value, meant):
    assert str(sample(value)) == meant
    assert sample(str(sample(value))) == sample(value)


@pytest.mark.parametrize(
    ("value", "error"),
    [
        (0, ValueError),
        (-1, ValueError),
        ("a", ValueError),
        ("1:2:3:4", ValueError),
        (slice(None, None, -1), ValueError),
        (True, TypeError),
        (1.5, TypeError),
        ({"tail": 3}, TypeError),
        ((), TypeError),
        ((slice(2), 3), TypeError),
        (slice("a"), TypeError),
    ],
)
def test_what_is_no_sample_is_refused(value, error):
    with pytest.raises(error, match="sample"):
        data_dump("mine", sample=value)


@pytest.mark.parametrize(
    ("asked", "part", "whole"),
    [
        ({"head": 5}, np.s_[0, :5], np.s_[:4]),
        ((slice(2), slice(None, None, 4)), np.s_[:2, ::4], np.s_[:]),
    ],
)
def test_a_part_of_each_tensor_is_saved_and_the_record_says_which(dump_path, asked, part, whole):
    big, small = torch.arange(60.0).view(3, 20), torch.arange(4.0)
    with data_dump("mine", path=dump_path, sample=asked, data="both"):
        big * 2
        small * 2
    (rank,) = read(dump_path).ranks
    assert rank.problems == []
    first, second = rank.calls
    with pytest.raises(MissingTensorError, match="is sampled: only a part of it"):
        first.load_outputs()
    described = first.record["outputs"]["tensor"]
    assert described["sample"] == str(sample(asked))
    assert described["shape"] == [3, 20]
    assert np.array_equal(np.load(first.output_files["OUTPUT.0"]), (big * 2).numpy()[part])
    assert "sample" not in second.record["outputs"]["tensor"]
    assert np.array_equal(np.load(second.output_files["OUTPUT.0"]), (small * 2).numpy()[whole])
    rows = next(iter(rows_of(dump_path).values()))
    assert {row["count"] for row in rows} == {"60", "4"}
