"""Programs that others read dumps with, on our dumps and exports: msprobe and msit themselves."""

from __future__ import annotations

import csv
import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

import torchair_scope
from tests.analysis import faults
from tests.readers import prepare
from torchair_scope.analysis.export_files import export

pytestmark = pytest.mark.slow
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@pytest.fixture(scope="module", autouse=True)
def readers():
    reason = prepare.unavailable()
    if reason is not None:
        pytest.skip(reason)


@pytest.fixture(scope="module", params=DTYPES)
def dumps(request, tmp_path_factory):
    """A golden dump, and one in which `sub` makes a NaN."""
    folder = tmp_path_factory.mktemp(request.param)
    faults.run(folder / "golden", DTYPES[request.param], "aot_eager")
    with faults.faulty_operator("sub", faults.changing_one_output(faults.with_nan), 1):
        faults.run(folder / "target", DTYPES[request.param], "aot_eager")
    return folder


@pytest.fixture(scope="module")
def exports(dumps):
    """The same for msprobe."""
    for side in ("golden", "target"):
        export(torchair_scope.load(dumps / side), dumps / f"{side}_exported", "msprobe")
    return dumps


def run(*command):
    finished = subprocess.run(
        [prepare.PYTHON, *command],
        env=prepare.environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout


def msprobe(*arguments):
    run(prepare.VENV / "bin" / "msprobe", *arguments)


def test_msprobe_compares_two_exports_and_the_nan_is_the_first_that_fails(exports, tmp_path):
    golden, target = exports / "golden_exported" / "step1", exports / "target_exported" / "step1"
    msprobe("compare", "-m", "auto", "-gp", golden, "-tp", target, "-o", tmp_path)
    (result,) = tmp_path.glob("compare_result_*.csv")
    with result.open(newline="", encoding="utf-8-sig") as file:
        rows = list(csv.DictReader(file))
    dump = torchair_scope.load(exports / "target")
    outputs = sum(len(call.outputs) for call in dump.calls(step=1))
    # Each is found on both sides, and nothing else is made of it.
    named = [row for row in rows if ".output." in row["NPU Name"]]
    assert len(named) == outputs
    assert {row["Bench Name"] == row["NPU Name"] for row in rows} == {True}
    wrong = [row["NPU Name"] for row in rows if row["Result"] != "pass"]
    assert wrong[0] == "Aten.sub.0.forward.output.0"
    assert rows[[row["NPU Name"] for row in rows].index(wrong[0])]["NPU max"].lower() == "nan"


def test_msprobe_finds_the_operator_that_makes_the_nan(exports, tmp_path):
    msprobe("overflow_check", "-i", exports / "target_exported" / "step0", "-o", tmp_path)
    (result,) = tmp_path.glob("anomaly_analyze_*.json")
    (first, *_) = json.loads(result.read_text())["rank_0"]
    assert first["op_name"] == "Aten.sub.0.forward"
    assert first["data_info"]["output"][0]["Max"] == "nan"
    assert "gated = (mixed - h.tanh())" in first["stack_info"][0]


def test_msprobe_finds_no_overflow_where_there_is_none(exports, tmp_path):
    msprobe("overflow_check", "-i", exports / "golden_exported" / "step0", "-o", tmp_path)
    assert not any(json.loads(path.read_text()) for path in tmp_path.glob("anomaly_analyze_*.json"))


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_msit_reads_a_dump_as_it_is_and_sees_the_nan(dumps, direction):
    graphs = [
        next(
            graph
            for graph in torchair_scope.load(dumps / side).graphs
            if graph.direction == direction
        )
        for side in ("golden", "target")
    ]
    folders = [Path(graph.steps[0].folder.url).parent for graph in graphs]
    read = json.loads(run(Path(__file__).with_name("read_with_msit.py"), *folders))
    calls = {
        (call.step.number, f"{call.node}-{call.target}"): call
        for step in graphs[0].steps
        for call in step.calls
    }
    assert {(each["step"], each["operator"]) for each in read} == set(calls)
    for each in read:
        call = calls[each["step"], each["operator"]]
        for kind, tensors in (("input", call.inputs), ("output", call.outputs)):
            ours = {tensor.file.url for tensor in tensors.values() if tensor.file}
            assert set(each["files"].get(kind, ())) == ours
    failed = {(each["step"], each["operator"]) for each in read if any(each["failures"])}
    holding_nan = {
        (step.number, f"{call.node}-{call.target}")
        for step in graphs[1].steps
        for call in step.calls
        if any(np.isnan(tensor.numpy()).any() for tensor in call.outputs.values())
    }
    assert failed == holding_nan
    assert failed
