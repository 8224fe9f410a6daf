"""The command line: what it prints, how it ends, and what it says of mistakes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import torchair_scope
from torchair_scope import cli

# And bisect, which has tests of its own.
COMMANDS = ["ls", "show", "stats", "compare", "replay", "export", "report", "demo"]
SCRIPT = Path(sys.executable).with_name("torchair-scope")


def run(capsys, *arguments):
    """The exit status, what was printed, and what was said of errors."""
    status = cli.run([str(argument) for argument in arguments])
    return status, *capsys.readouterr()


@pytest.fixture
def some_dumps(tmp_path, monkeypatch):
    """The folders that the examples of the helps name, in the current one."""

    def two_sums(x):
        with torchair_scope.scope.data_dump("mlp"):
            return x + 1 + x

    for name in ("dump", "eager", "npu"):
        with torchair_scope.scope.configure(path=str(tmp_path / name)):
            two_sums(torch.ones(3))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def example_of(capsys, command):
    """The arguments of the example that the help of a command ends with."""
    printed = run(capsys, command, "--help")[1]
    (example,) = re.findall(rf"Example: torchair-scope ({command} .*)", printed)
    return example.split()


@pytest.mark.parametrize("command", [command for command in COMMANDS if command != "demo"])
def test_the_example_of_a_help_runs(capsys, some_dumps, command):
    status, printed, said = run(capsys, *example_of(capsys, command))
    assert (status, said) == (0, "")
    assert printed


@pytest.mark.parametrize("command", [command for command in COMMANDS if command != "demo"])
def test_every_command_has_json_for_machines(capsys, some_dumps, command):
    status, printed, _ = run(capsys, *example_of(capsys, command), "--json")
    assert status == 0
    assert json.loads(printed)


def test_all_commands_are_tested(capsys):
    listed = re.findall(r"^│ (\w+) ", run(capsys, "--help")[1], re.MULTILINE)
    assert listed == [*COMMANDS, "bisect"]


@pytest.mark.slow
def test_the_demo_finds_its_fault_and_says_what_to_try_next(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")  # aot_eager: it takes less time
    monkeypatch.chdir(tmp_path)
    status, printed, _ = run(capsys, *example_of(capsys, "demo"))
    assert status == 0
    assert "made: graph_" in printed
    assert "(aten.native_layer_norm.default) makes the error" in printed
    assert "1 call: 1 bug" in printed
    assert "normed = self.norm(h)" in run(capsys, "show", "demo/golden", "native_layer_norm")[1]
    assert "native_layer_norm" in Path("demo/report.html").read_text()
    commands = re.findall(r"^  torchair-scope (.+)$", printed, re.MULTILINE)
    assert len(commands) >= 4
    for command in commands:
        status, _, said = run(capsys, *command.split())
        assert (status, said) == (0, ""), command
    status, _, said = run(capsys, *example_of(capsys, "demo"))
    assert (status, "demo/golden is there already" in said) == (2, True)
    content = json.loads(run(capsys, "demo", "--json")[1])
    assert content["comparison"]["call"]["node"] == "native_layer_norm"
    assert Path("torchair_scope_demo/report.html").is_file()
    assert content["report"] == "torchair_scope_demo/report.html"


def test_the_shell_completes_commands(tmp_path):
    environment = {
        **os.environ,
        "_TORCHAIR_SCOPE_COMPLETE": "complete_bash",
        "COMP_WORDS": "torchair-scope co",
        "COMP_CWORD": "1",
    }
    finished = subprocess.run(
        [SCRIPT], env=environment, capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert (finished.returncode, finished.stdout.split()) == (0, ["compare"]), finished.stderr


def test_a_narrow_terminal_shows_whole_names(capsys, monkeypatch, sound_dumps, faulty_dump):
    import rich.console

    monkeypatch.setattr(cli, "_console", lambda: rich.console.Console(width=80))
    printed = run(capsys, "compare", sound_dumps["float32"], faulty_dump)[1]
    rows = [line for line in printed.splitlines() if line.lstrip().startswith("carries")]
    assert rows
    assert any(re.search(r"/0 \w+ +test|/0 \w+ +faults\.py:\d+", row) for row in rows), printed
    assert max(map(len, rows)) <= 80


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
    printed = run(capsys, "show", path, "tanh.OUTPUT.0", "--step", 1)[1]
    assert printed == run(capsys, "show", path, f"{name}/1/tanh.OUTPUT.0")[1].replace(
        f"{name}/1/", "", 1
    )
    assert "say which" in run(capsys, "show", path, "tanh.OUTPUT.0")[2]
    printed = run(capsys, "show", path, f"{name}/0/tanh.OUTPUT.0")[1]
    assert "torch.bfloat16, shape (16, 16), strides (16, 1)" in printed


def test_a_line_stays_one_on_the_narrowest_terminal(capsys, monkeypatch, sound_dumps, faulty_dump):
    monkeypatch.setenv("COLUMNS", "20")
    dump = sound_dumps["float32"]
    assert re.search(
        r"source: .*faults\.py:\d+  gated = .*\n", run(capsys, "show", dump, "tanh")[1]
    )
    assert re.search(rf"rank 0 of 1: .*{dump}.*\n", run(capsys, "ls", dump)[1])
    assert re.search(r"\d+ pairs \(.*\): \d+ .*\n", run(capsys, "compare", dump, faulty_dump)[1])
    assert re.search(r"\d+ calls: .* rounding\n", run(capsys, "replay", dump)[1])


def test_stats_prints_a_row_for_each_tensor(capsys, sound_dumps):
    arguments = ["stats", sound_dumps["float32"], "--op", "tanh", "--step", 0, "--json"]
    rows = json.loads(run(capsys, *arguments)[1])
    assert [row["slot"] for row in rows] == ["INPUT.0", "OUTPUT.0"]
    assert rows[1]["maximum"] <= 1


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["ls", "nothing/here"], "nothing/here is no dump: it does not exist, and neither does n"),
        (["ls", "dumb"], "dumb is no dump: it does not exist; there is dump"),
        (["ls", "."], ". is no dump: it holds 3 of them; try dump, eager or npu"),
        (["ls", "empty"], "it is empty. Where a scope was entered and nothing was dumped, print("),
        (["ls", "a_file"], "a_file is no dump: it is a file; give the folder that was set as"),
        (
            ["ls", "other"],
            "expected a folder with manifest.jsonl or with folders such as graph_1/0",
        ),
        (["ls", "dump/worldsize1_global_rank0/eager_1"], "it is a part of one; try dump"),
        (["ls", "dump/worldsize1_global_rank0/manifest.jsonl"], "a part of one; try dump"),
        (["ls", "nosuch://x"], "cannot read nosuch://x: ValueError: Protocol not known: nosuch"),
        (["compare", "dump", "eagre"], "eagre is no dump: it does not exist; there is eager"),
        (["report", "dump", "eagre"], "eagre is no dump: it does not exist; there is eager"),
        (["show", "dump", "ad_1"], "dump has no node 'ad_1'; did you mean add_1"),
        (["show", "dump", "add_1.INPUT.7"], "it has add_1.INPUT.0, add_1.INPUT.1 or add_1.OUTPUT"),
        (["show", "dump", "add", "--step", "4"], "dump has no step 4; it has 0"),
        (["show", "dump", "add.OUTPUT.0", "--step", "4"], "dump has no step 4; it has 0"),
        (["stats", "dump", "--op", "aten.add.Tensor"], "did you mean add"),
        (["stats", "dump", "--op", "mul"], "has no node 'mul'; it has add or add_1; `torchair-s"),
        (["stats", "dump", "--scope", "mpl"], "dump has no scope 'mpl'; it has mlp"),
        (["replay", "dump", "--scope", "mpl"], "dump has no scope 'mpl'; it has mlp"),
        (["compare", "dump", "npu", "--scope", "mpl"], "dump has no scope 'mpl'; it has mlp"),
        (["compare", "dump", "npu", "--step", "7"], "dump has no step 7; it has 0"),
        (["replay", "dump", "--device", "tpu"], "device is 'tpu', which cannot be used here: "),
        (["replay", "dump", "--import", "no_such_module"], "No module named 'no_such_module'"),
        (["export", "dump", "--format", "hdf5", "-o", "x"], "one of msprobe, npz"),
        (["export", "dump", "--format", "npz", "-o", "other"], "as -o other/dump.npz"),
        (["report", "dump", "-o", "other"], "other is a folder; give a file, as -o other/report.h"),
        (["report", "dump", "-o", "a_file/report.html"], "a_file: "),
        (["compare", "dump", "npu", "-o", "other"], "other is a folder; give a file"),
        (["compare", "dump"], "Missing argument 'TARGET'"),
        (["compare", "dump", "npu", "--step", "x"], "Invalid value for '--step'"),
        (["lss", "dump"], "No such command 'lss'. Did you mean 'ls'?"),
    ],
)
def test_a_mistake_is_told_with_the_next_thing_to_try(capsys, some_dumps, arguments, told):
    for folder in ("empty", "other/thing"):
        (some_dumps / folder).mkdir(parents=True)
    (some_dumps / "a_file").touch()
    status, _, said = run(capsys, *arguments)
    assert status == 2
    assert told in said
    assert "Traceback" not in said


def test_a_folder_that_cannot_be_read_is_named(capsys, some_dumps, monkeypatch):
    scan = os.scandir

    def refuse(path):
        if str(path) == "dump":
            raise PermissionError(13, "Permission denied", path)
        return scan(path)

    monkeypatch.setattr(os, "scandir", refuse)  # root may read everything
    assert run(capsys, "ls", "dump") == (2, "", "error: dump: Permission denied\n")


def test_a_manifest_that_cannot_be_read_is_not_said_to_be_gone(capsys, some_dumps):
    (manifest,) = some_dumps.glob("dump/*/manifest.jsonl")
    manifest.unlink()
    manifest.mkdir()
    assert "manifest.jsonl: Is a directory" in run(capsys, "ls", "dump")[1]


def test_a_fault_of_its_own_leaves_its_traceback_in_a_file(capsys, some_dumps, monkeypatch):
    def fail(path):
        raise ZeroDivisionError("no reason")

    monkeypatch.setattr(cli, "load", fail)
    status, _, said = run(capsys, "ls", "dump")
    assert (status, said.startswith("error: ZeroDivisionError: no reason. ")) == (2, True)
    assert "Traceback" not in said
    file = Path(said.split()[-1])
    assert "in fail" in file.read_text()
    file.unlink()


@pytest.mark.parametrize(
    ("package", "extra"), [("jinja2", "analysis"), ("plotly", "analysis"), ("pyarrow", "export")]
)
def test_a_missing_package_is_told_with_its_extra(capsys, some_dumps, monkeypatch, package, extra):
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)

    class Missing:
        @staticmethod
        def find_spec(name, path=None, target=None):
            if name.partition(".")[0] == package:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(sys, "meta_path", [Missing, *sys.meta_path])
    export = ["export", "dump", "--format", "parquet", "-o", "x.parquet"]
    status, _, said = run(capsys, *(export if extra == "export" else ["report", "dump"]))
    assert status == 2
    assert f"pip install 'torchair_scope[{extra}]'" in said
    assert package in said


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
