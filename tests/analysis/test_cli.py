"""The command line: what it prints, how it ends, and what it says of mistakes."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from torchair_scope import cli

COMMANDS = ["ls", "show", "stats", "compare", "replay", "export", "report"]


def run(capsys, *arguments):
    """The exit status, what was printed, and what was said of errors."""
    status = cli.run([str(argument) for argument in arguments])
    return status, *capsys.readouterr()


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example(capsys, command):
    status, printed, _ = run(capsys, command, "--help")
    assert status == 0
    assert f"Example: torchair-scope {command} " in printed


def test_compare_ends_with_0_where_all_agrees(capsys, sound_dumps):
    status, printed, _ = run(capsys, "compare", sound_dumps["float32"], sound_dumps["float32"])
    assert (status, printed.startswith("agrees: ")) == (0, True)


def test_compare_ends_with_1_and_the_first_wrong_operator_on_top(capsys, sound_dumps, faulty_dump):
    status, printed, _ = run(capsys, "compare", sound_dumps["float32"], faulty_dump)
    assert status == 1
    first, *rest = printed.splitlines()
    assert first.startswith("made: graph_")
    assert "sub (aten.sub.Tensor) makes the error" in first
    row = next(line for line in rest if "graph_" in line)
    assert row.split()[0] == "made"
    assert "\x1b" not in printed


def test_compare_ends_with_2_where_it_cannot_tell(capsys, sound_dumps, float32_dump):
    from tests.analysis.conftest import rank_folder

    for path in rank_folder(float32_dump).glob("graph_*/*/*.OUTPUT.*"):
        path.unlink()
    status, printed, _ = run(capsys, "compare", sound_dumps["float32"], float32_dump)
    assert (status, printed.startswith("unclear: ")) == (2, True)


def test_compare_as_json_has_all_of_it(capsys, sound_dumps, faulty_dump):
    status, printed, _ = run(capsys, "compare", sound_dumps["float32"], faulty_dump, "--json")
    content = json.loads(printed)
    assert (status, content["verdict"], content["call"]["node"]) == (1, "made", "sub")
    assert content["call"]["source"]["code"].startswith("gated = ")
    made = next(call for call in content["calls"] if call["role"] == "made")
    (output,) = [each for each in made["tensors"] if each["slot"] == "OUTPUT.0"]
    assert output["metrics"]["nan_mismatches"] == 1
    assert output["metrics"]["worst"]["target"] == "nan"


def test_a_tolerance_can_be_given(capsys, sound_dumps):
    paths = sound_dumps["float32"], sound_dumps["bfloat16"]
    assert run(capsys, "compare", *paths)[0] == 0
    assert run(capsys, "compare", *paths, "--rtol", "1e-6", "--no-confirm")[0] == 1


def test_replay_ends_with_1_for_a_bug(capsys, sound_dumps, faulty_dump):
    assert run(capsys, "replay", sound_dumps["float32"])[0] == 0
    status, printed, _ = run(capsys, "replay", faulty_dump, "--op", "sub", "--json")
    assert (status, {each["verdict"] for each in json.loads(printed)}) == (1, {"bug"})


def test_replay_exports_scripts(capsys, faulty_dump, tmp_path):
    arguments = ["replay", faulty_dump, "--op", "tanh", "--step", 0, "--export", "-o", tmp_path]
    status, printed, _ = run(capsys, *arguments)
    assert (status, printed.strip()) == (0, str(tmp_path / "tanh.py"))


def test_ls_shows_graphs_scopes_and_what_is_missing(capsys, float32_dump):
    from tests.analysis.conftest import rank_folder

    next(rank_folder(float32_dump).glob("graph_*/0/tanh-*OUTPUT*")).unlink()
    status, printed, _ = run(capsys, "ls", float32_dump)
    assert status == 0
    for text in ("forward", "backward", "aot_eager", "block", "OUTPUT.0 is not on disk"):
        assert text in printed
    content = json.loads(run(capsys, "ls", float32_dump, "--json")[1])
    assert content["scopes"] == ["block"]
    assert len(content["problems"]) == 1


def test_show_prints_a_call_or_a_tensor(capsys, sound_dumps):
    path = sound_dumps["bfloat16"]
    assert "mixed - h.tanh()" in run(capsys, "show", path, "tanh")[1]
    name = json.loads(run(capsys, "show", path, "tanh", "--step", 0, "--json")[1])[0]["graph"]
    printed = run(capsys, "show", path, f"{name}/0/tanh.OUTPUT.0")[1]
    assert "torch.bfloat16, shape (16, 16), strides (16, 1)" in printed


def test_stats_prints_a_row_for_each_tensor(capsys, sound_dumps):
    arguments = ["stats", sound_dumps["float32"], "--op", "tanh", "--step", 0, "--json"]
    rows = json.loads(run(capsys, *arguments)[1])
    assert [row["slot"] for row in rows] == ["INPUT.0", "OUTPUT.0"]
    assert rows[1]["maximum"] <= 1


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["ls", "/nowhere"], "/nowhere is no dump: expected a folder with manifest.jsonl"),
        (["show", "{dump}", "nothing"], "has no tensor 'nothing'; ls shows what it has"),
        (["stats", "{dump}", "--scope", "nothing"], "its scopes: block"),
        (["export", "{dump}", "--format", "hdf5", "-o", "x"], "one of msprobe, npz"),
        (["replay", "{dump}", "--import", "no_such_module"], "No module named 'no_such_module'"),
        (["compare", "{dump}"], "Missing argument 'TARGET'"),
        (["compare", "{dump}", "{dump}", "--step", "x"], "Invalid value for '--step'"),
    ],
)
def test_a_mistake_is_one_line_and_no_traceback(capsys, sound_dumps, arguments, told):
    filled = [argument.format(dump=sound_dumps["float32"]) for argument in arguments]
    status, _, said = run(capsys, *filled)
    assert status == 2
    assert told in said
    assert "Traceback" not in said


def test_it_runs_as_a_module_and_a_missing_package_is_named(sound_dumps, tmp_path):
    without = tmp_path / "without"
    without.mkdir()
    (without / "typer.py").write_text("raise ModuleNotFoundError('no', name='typer')")
    for path, status in ((None, 0), (without, 2)):
        environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
        root = os.path.dirname(os.path.dirname(cli.__file__))
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [path and str(path), root]))
        command = [sys.executable, "-m", "torchair_scope", "ls", str(sound_dumps["float32"])]
        finished = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False
        )
        assert finished.returncode == status, finished.stderr
    assert "pip install 'torchair_scope[analysis]'" in finished.stderr
    assert "Traceback" not in finished.stderr
