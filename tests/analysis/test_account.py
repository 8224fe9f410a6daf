"""`torchair-scope ls`: what became of each scope."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from torchair_scope import cli
from torchair_scope.analysis.account import NOT_TOLD

ROOT = str(Path(__file__).parents[2])
SCRIPT = """
import torch, torchair_scope as torchair

@torch.compile(backend="torchair_scope", options={"path": "dump", "backend": "aot_eager"})
def function(x):
    with torchair.scope.data_dump("mine"):
        x.exp()
        return x.sin() + 1

function(torch.ones(3))
with torchair.scope.data_dump("none", path="dump"):
    pass
"""


def run_script(more=""):
    environment = {**os.environ, "PYTHONPATH": ROOT}
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT + more]
    subprocess.run(command, check=True, env=environment, capture_output=True)


def rows(capsys):
    assert cli.run(["ls", "dump", "--json"]) == 0
    return json.loads(capsys.readouterr().out)["account"]


def test_ls_has_the_account_of_each_scope(capsys):
    run_script()
    mine, none = rows(capsys)
    assert (mine["scope"], mine["opened_at"]) == ("mine", "<string>:6")
    assert [mine[name] for name in ("tagged", "reached", "dumped", "calls", "tensors")] == [
        *(3, 2, 2, 2, 4)
    ]
    assert mine["bytes"] == sum(path.stat().st_size for path in Path("dump").rglob("*.npy"))
    assert mine["missing"] == ["1 not dumped: removed as dead code, since nothing uses its value"]
    assert none["tagged"] == 0
    assert "empty" in none["missing"][0]


def test_ls_prints_it_with_the_reasons(capsys):
    run_script()
    cli.run(["ls", "dump"])
    printed = capsys.readouterr().out
    (line,) = (line for line in printed.splitlines() if line.split()[:2] == ["mine", "<string>:6"])
    assert line.split()[1:7] == ["<string>:6", "3", "2", "2", "2", "4"]
    assert "mine (<string>:6): 1 not dumped: removed as dead code" in printed
    assert "none (<string>:" in printed


def test_of_a_process_that_was_killed_ls_has_what_its_calls_tell(capsys):
    run_script("torchair.store.run.complete_steps(); import os; os._exit(0)")
    (mine,) = rows(capsys)
    assert (mine["scope"], mine["opened_at"], mine["tagged"]) == ("mine", "<string>:6", None)
    assert (mine["calls"], mine["tensors"]) == (2, 4)
    assert mine["missing"] == [NOT_TOLD]


def test_of_a_process_that_goes_on_ls_has_the_last_summary(capsys):
    run_script(
        "torchair.scope.summary(); function(torch.ones(3)); torchair.scope.summary()\n"
        "import os; os._exit(0)"
    )
    mine, _ = rows(capsys)
    assert (mine["tagged"], mine["calls"]) == (3, 4)
