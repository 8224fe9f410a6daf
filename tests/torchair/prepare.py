"""Prepare the virtual environment and the stub libraries that the TorchAir tests run in.

    python tests/torchair/prepare.py

Makes `.venv-torchair` beside `pyproject.toml`, and does nothing where it is up to date. Where this
machine lacks the torch_npu wheel or a C compiler, the reason goes to `.venv-torchair/setups.json`,
and `test_setups.py` skips with it. Any other failure ends the script.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
VENV = ROOT / ".venv-torchair"
PYTHON = VENV / "bin" / "python"
STUBS = VENV / "cann-stubs"
STATE = VENV / "setups.json"
SETUPS = ("A", "B", "C")

_CONSTRAINTS = ROOT / "constraints.txt"
_PACKAGES = ("torch", "numpy", "pyyaml", "packaging", "protobuf", "wrapt", "pytest")
_TORCH_NPU = "torch_npu==2.13.0"
_STUB_TOOLS = ("gcc", "nm", "readelf", "/sbin/ldconfig")


def environment() -> dict[str, str]:
    """The environment for a process in the virtual environment.

    torch_npu must not load itself with torch; the tests' modules are found from the project's root.
    """
    return os.environ | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "PYTHONPATH": str(ROOT)}


def unavailable(setup: str) -> str | None:
    """Why a set-up cannot be used here, or None if it is ready."""
    state = _state()
    if state is None:
        return f"not prepared; run: python {Path(__file__).relative_to(ROOT)}"
    return state["unavailable"][setup]


def prepare() -> dict[str, str | None]:
    """Make the environment; returns for each set-up why it is unavailable, or None."""
    before, now = _state(), {"python": sys.version, "sources": _fingerprint()}
    if before == now | {"unavailable": dict.fromkeys(SETUPS)}:
        return before["unavailable"]
    STATE.unlink(missing_ok=True)
    _install_packages(anew=before is None or before.get("python") != sys.version)
    problem = _install_torch_npu()
    reasons = dict.fromkeys(SETUPS, problem)
    if problem is None:
        reasons["C"] = _build_stubs()
    STATE.write_text(json.dumps(now | {"unavailable": reasons}, indent=2))
    return reasons


def _state() -> dict[str, Any] | None:
    """What the last complete preparation left, or None."""
    return json.loads(STATE.read_text()) if STATE.exists() else None


def _fingerprint() -> str:
    """Changes whenever there is something new to install or to build."""
    setups = Path(__file__).parent / "setups"
    sources = (
        _CONSTRAINTS,
        ROOT / "pyproject.toml",
        Path(__file__),
        setups / "stub_libraries.py",
        setups / "acl_overrides.c",
    )
    contents = b"".join(source.read_bytes() for source in sources)
    return hashlib.sha256(contents).hexdigest()


def _run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, env=environment(), cwd=ROOT, text=True, capture_output=True)


def _require(done: subprocess.CompletedProcess[str]) -> None:
    if done.returncode:
        command = " ".join(map(str, done.args))
        raise SystemExit(f"{command}\n{done.stdout}{done.stderr}\nfailed with {done.returncode}")


def _pip_install(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    quiet = ("--quiet", "--disable-pip-version-check")
    return _run(PYTHON, "-m", "pip", "install", *quiet, *arguments)


def _install_packages(anew: bool) -> None:
    _require(_run(sys.executable, "-m", "venv", *(["--clear"] if anew else []), VENV))
    _require(_pip_install("-c", _CONSTRAINTS, *_PACKAGES))
    _require(_pip_install("--no-deps", "--editable", ROOT))


def _install_torch_npu() -> str | None:
    done = _pip_install("--no-deps", _TORCH_NPU)
    if done.returncode == 0:
        return None
    errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR: ")]
    return f"pip cannot install {_TORCH_NPU}: {errors[-1] if errors else done.stderr}"


def _build_stubs() -> str | None:
    if platform.machine() != "x86_64":
        return f"the stub libraries are written for x86_64, this machine is {platform.machine()}"
    missing = [tool for tool in _STUB_TOOLS if shutil.which(tool) is None]
    if missing:
        return f"building the stub libraries needs {', '.join(missing)}"
    _require(_run(PYTHON, "-m", "tests.torchair.setups.stub_libraries", STUBS))
    return None


if __name__ == "__main__":
    for setup_name, reason in prepare().items():
        print(f"set-up {setup_name}: {reason or 'ready'}")
