"""Replay: a bug or rounding, without a golden run."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

import torchair_scope
from tests.analysis.test_compare import X, write_dump
from tests.support.running import run_case
from torchair_scope.analysis.export_script import export_script
from torchair_scope.analysis.replay import replay_call


def verdict_of(path, target, args, result, facts=None):
    write_dump(path, [("node", target, args, result, facts or {})])
    (replayed,) = torchair_scope.replay(path)
    return replayed.verdict, replayed.reason


@pytest.mark.parametrize("name", ["float32", "bfloat16"])
def test_no_sound_call_is_accused(sound_dumps, name):
    replays = torchair_scope.replay(sound_dumps[name])
    assert len(replays) == len(torchair_scope.load(sound_dumps[name]).calls())
    assert {each.verdict for each in replays} == {"rounding"}


def test_a_faulty_call_is_a_bug_and_no_other_is(faulty_dump):
    replays = torchair_scope.replay(faulty_dump)
    assert {each.node for each in replays if each.verdict == "bug"} == {"sub"}
    assert "NaN" in next(each.reason for each in replays if each.verdict == "bug")


def test_both_errors_against_float64_are_given(tmp_path):
    x = torch.randn(100, generator=torch.Generator().manual_seed(5))
    wrong = x.sin() + 1e-2
    write_dump(tmp_path / "dump", [("sin", "aten.sin.default", (x,), wrong, {})])
    (replayed,) = torchair_scope.replay(tmp_path / "dump")
    exact = x.double().sin().float().double()
    assert replayed.dumped.max_absolute == (wrong.double() - exact).abs().max().item()
    assert replayed.rerun.max_absolute == (x.sin().double() - exact).abs().max().item()
    assert replayed.verdict == "bug"


def test_cancellation_is_rounding(tmp_path):
    x = torch.tensor([1e4, 1.0, -1e4, 1e-3] * 1000)
    result = x.cumsum(0)[-1]
    assert verdict_of(tmp_path / "dump", "aten.sum.default", (x,), result)[0] == "rounding"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e5m2])
def test_scalars_of_every_dtype_are_judged(tmp_path, dtype):
    x = torch.tensor(1.5, dtype=dtype)
    assert verdict_of(tmp_path / "dump", "aten.clone.default", (x,), x)[0] == "rounding"


def test_integers_have_to_be_equal(tmp_path):
    x = torch.arange(5)
    assert verdict_of(tmp_path / "a", "aten.neg.default", (x,), -x)[0] == "rounding"
    assert verdict_of(tmp_path / "b", "aten.neg.default", (x,), x)[0] == "bug"


def test_other_indices_cannot_be_judged(tmp_path):
    x = torch.tensor([1.0, 1.0])
    verdict, reason = verdict_of(tmp_path / "a", "aten.argmax.default", (x,), torch.tensor(1))
    assert (verdict, "ties" in reason) == ("cannot", True)


def test_bits_that_are_cast_are_compared_in_their_dtype(tmp_path):
    result = X.view(torch.int32)
    assert verdict_of(tmp_path / "a", "aten.view.dtype", (X, torch.int32), result)[0] == "rounding"


@pytest.mark.parametrize(
    ("target", "facts", "reason"),
    [
        ("aten.rand_like.default", {}, "draws random numbers"),
        ("aten.sin.default", {"nondeterministic": True}, "draws random numbers"),
        ("_c10d_functional.all_reduce.default", {}, "collective"),
        ("aten.empty_like.default", {}, "not defined"),
        ("nowhere.nothing.default", {}, "import what defines it"),
        ("aten.mm.default", {}, "it fails here: RuntimeError: aten::mm() is missing"),
    ],
)
def test_what_cannot_be_replayed_has_a_reason(tmp_path, target, facts, reason):
    verdict, told = verdict_of(tmp_path / "dump", target, (X,), X, facts)
    assert verdict == "cannot"
    assert reason in told


def test_without_a_manifest_nothing_is_replayed_and_that_is_said(faulty_dump, tmp_path):
    import shutil

    from tests.analysis.conftest import without_manifest

    copy = without_manifest(shutil.copytree(faulty_dump, tmp_path / "copy"))
    replays = torchair_scope.replay(copy)
    assert {(each.verdict, each.reason) for each in replays} == {
        ("cannot", "without a manifest its arguments are not all known")
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        "case_02_sdpa_kwargs_mask",
        "case_05_namedtuple_results",
        "case_08_kv_cache_buffer",
        "case_10_mutating_custom_op",
        "case_24_low_precision_dtypes",
        "case_28_rng_in_and_out_of_scope",
        "case_43_degenerate_shapes",
        "case_44_batchnorm_train",
    ],
)
def test_every_call_of_the_cases_has_a_verdict_or_a_reason(case, tmp_path):
    import importlib

    module = importlib.import_module(f"tests.cases.{case}")
    run_case(module, {"backend": "aot_eager"}, tmp_path / "dump")
    replays = torchair_scope.replay(tmp_path / "dump")
    assert replays
    assert [each for each in replays if each.verdict == "bug"] == []
    assert all(each.reason for each in replays)


def test_an_exported_script_shows_the_error_by_itself(faulty_dump, tmp_path):
    call = torchair_scope.load(faulty_dump).calls(node="sub", step=1)[0]
    script = export_script(call, tmp_path / "report")
    assert sorted(path.name for path in script.parent.iterdir()) == ["sub.pt", "sub.py"]
    finished = subprocess.run(
        [sys.executable, "-W", "error", str(script)],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
    )
    lines = finished.stdout.splitlines()
    assert lines[0] == "OUTPUT.0 torch.float32, against float64"
    assert lines[1].endswith("nan")
    assert float(lines[2].split()[-1]) == pytest.approx(
        replay_call(call).rerun.max_relative, rel=2, abs=1e-6
    )
    assert "torchair_scope" not in script.read_text()
    assert json.dumps(str(faulty_dump)) not in script.read_text()
