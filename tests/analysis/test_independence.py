"""The analysis reads files: it knows nothing of compilers, and needs its packages late only."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import torchair_scope

PACKAGE = Path(torchair_scope.__file__).parent
FILES = [*sorted((PACKAGE / "analysis").glob("*.py")), PACKAGE / "cli.py"]
FORBIDDEN = (
    "torchair_scope.capture",
    "torchair_scope.backends",
    "torch._dynamo",
    "torch._inductor",
)


def imported_by(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_no_compiler_is_imported(path):
    assert [name for name in imported_by(path) if name.startswith(FORBIDDEN)] == []


def test_loading_and_comparing_need_no_package_of_the_extra(sound_dumps):
    blocked = ["typer", "rich", "pandas", "plotly", "jinja2", "fsspec", "pyarrow", "safetensors"]
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({blocked!r}))\n"
        "import torchair_scope\n"
        f"path = {str(sound_dumps['float32'])!r}\n"
        "print(torchair_scope.compare(path, path).verdict.kind)\n"
    )
    finished = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        cwd=PACKAGE.parent,
    )
    assert finished.stdout.strip() == "agrees", finished.stderr
