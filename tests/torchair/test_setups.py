"""The tests in `inside/`, once in each of the three TorchAir set-ups, each in a process of its own.

They cannot run in this process: a set-up replaces C++ modules and NPU kernels for good.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.torchair import prepare

_INSIDE = Path(__file__).parent / "inside"


@pytest.mark.slow
@pytest.mark.parametrize("setup", prepare.SETUPS)
def test_what_holds_in_setup(setup: str) -> None:
    reason = prepare.unavailable(setup)
    if reason is not None:
        pytest.skip(f"TorchAir set-up {setup}: {reason}")
    run = subprocess.run(
        [prepare.PYTHON, "-m", "pytest", _INSIDE, "-q"],
        env=prepare.environment() | {"TORCHAIR_SETUP": setup},
        cwd=_INSIDE,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    print(run.stdout)
    assert run.returncode == 0, f"set-up {setup} exited with {run.returncode}\n{run.stdout}"
