"""`torchair-scope bisect` runs a program, ends it when it has seen enough, and can be resumed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = """
import sys
sys.path.insert(0, {root!r})
import torch
from tests.bisection import faults
from tests.support.encoder import encoder

compiler = faults.FaultyCompiler("aten.gelu.default", 1, faults.scaled)
backend = compiler if "wrong" in sys.argv else "aot_eager"
model = torch.compile(encoder(2, 8), backend="torchair_scope", options={{"backend": backend}})
with open("started", "a") as started:
    started.write("x")
steps = 10**9 if sys.argv[1:] == ["wrong"] else 2
with torch.no_grad():
    for step in range(steps):
        model(torch.randn(2, 4, 8))
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM.format(root=str(ROOT)))
    return path


def bisect(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torchair_scope", "bisect", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.slow
def test_a_program_that_would_run_for_ever_is_bisected_and_resumed(
    tmp_path: Path, program: Path
) -> None:
    command = ["-o", tmp_path / "found", "--pieces", 16, "--", sys.executable, program, "wrong"]
    first = bisect(*command)
    assert first.returncode == 1, first.stderr
    assert "gelu_1 (aten.gelu.default) makes the error" in first.stdout
    assert "self.down(torch.nn.functional.gelu(self.up(self.norm2(x))))" in first.stdout
    started = (tmp_path / "started").read_text()

    again = bisect("--json", *command)
    assert again.returncode == 1
    assert (tmp_path / "started").read_text() == started, "the program ran again"
    told = json.loads(again.stdout)
    assert told["outcome"] == "found"
    assert [node["name"] for node in told["decisive"]["nodes"]] == ["gelu_1"]
    assert told["runs"] == len(started)


@pytest.mark.slow
def test_a_program_without_a_fault_agrees(tmp_path: Path, program: Path) -> None:
    ended = bisect("-o", tmp_path / "found", "--", sys.executable, program, "right")
    assert ended.returncode == 0, ended.stderr
    assert "no compiled graph makes an error" in ended.stdout


def test_a_program_that_fails_is_told_with_the_end_of_what_it_printed(tmp_path: Path) -> None:
    code = "print('so far so good'); raise SystemExit('out of luck')"
    ended = bisect("-o", tmp_path / "found", "--", sys.executable, "-c", code)
    assert ended.returncode == 2
    assert "failed with exit status 1" in ended.stderr
    assert "out of luck" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_command_that_there_is_not_is_an_error(tmp_path: Path) -> None:
    ended = bisect("-o", tmp_path / "found", "--", "no-such-command")
    assert ended.returncode == 2
    assert "no-such-command" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.slow
def test_a_place_is_given_to_the_program_from_outside(tmp_path: Path, program: Path) -> None:
    command = ["--", sys.executable, program, "wrong", "twice"]
    places = ["--module", "0", "--source", "encoder.py"]
    ended = bisect("-o", tmp_path / "found", *places, *command)
    assert ended.returncode == 0, ended.stderr
    nowhere = bisect("-o", tmp_path / "other", "--module", "decoder", *command)
    assert nowhere.returncode == 2
    assert "is in module decoder" in nowhere.stderr


def test_what_cannot_be_golden_or_a_place_is_an_error_before_the_program_runs(
    tmp_path: Path, program: Path
) -> None:
    for option, value in (("--golden", "no_dump"), ("--source", "model.py:9-1")):
        ended = bisect("-o", tmp_path / "found", option, value, "--", sys.executable, program)
        assert ended.returncode == 2
        assert value in ended.stderr
        assert "Traceback" not in ended.stderr
    assert not (tmp_path / "started").exists()
