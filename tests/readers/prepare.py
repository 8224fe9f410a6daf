"""Prepare the virtual environment of the programs that read our dumps: msprobe and msit.

    python tests/readers/prepare.py

Makes `.venv-readers` beside `pyproject.toml`, and does nothing where it is up to date. Where pip
cannot install them, its error goes to `.venv-readers/state.json`, and the tests skip with it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
VENV = ROOT / ".venv-readers"
PYTHON = VENV / "bin" / "python"
# The versions whose rules the layout of our files follows. The constraints keep pip from a torch
# of several GB.
PACKAGES = ("torch", "mindstudio-probe==26.2.0", "msit==8.2.0")
_CONSTRAINTS = ROOT / "constraints.txt"
_STATE = VENV / "state.json"


def unavailable() -> str | None:
    """Why the readers cannot be used here, or None if they can."""
    if not _STATE.exists():
        return f"not prepared; run: python {Path(__file__).relative_to(ROOT)}"
    problem = json.loads(_STATE.read_text())["problem"]
    return None if problem is None else str(problem)


def prepare() -> str | None:
    """Make the environment; give what is in the way, or None."""
    wanted = {"python": sys.version, "packages": PACKAGES, "constraints": _CONSTRAINTS.read_text()}
    done = {**json.loads(json.dumps(wanted)), "problem": None}
    if _STATE.exists() and json.loads(_STATE.read_text()) == done:
        return None
    subprocess.run([sys.executable, "-m", "venv", "--clear", VENV], check=True)
    quiet = ("--quiet", "--disable-pip-version-check")
    install = [PYTHON, "-m", "pip", "install", *quiet, "-c", _CONSTRAINTS, *PACKAGES]
    finished = subprocess.run(install, capture_output=True, text=True, check=False)
    errors = [line for line in finished.stderr.splitlines() if line.startswith("ERROR: ")]
    problem = None
    if finished.returncode:
        problem = f"pip cannot install the readers: {errors[-1] if errors else finished.stderr}"
    _STATE.write_text(json.dumps(wanted | {"problem": problem}, indent=1))
    return problem


def environment() -> dict[str, str]:
    """The environment for a process in the virtual environment: nothing of this one in it."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    # msit imports its own parts by names that are packages on its path only.
    components = [str(path) for path in VENV.glob("lib/python*/site-packages/components/llm")]
    return kept | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "PYTHONPATH": os.pathsep.join(components)}


if __name__ == "__main__":
    print(f"readers: {prepare() or 'ready'}")
