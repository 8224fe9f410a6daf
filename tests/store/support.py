"""Small dumps, and other processes that dump."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from torchair_scope.store.writer import GraphDump, Step

ROOT = Path(__file__).parents[2]
RANK_0 = "worldsize1_global_rank0"


def add_call(step: Step, tensor: torch.Tensor, node: str = "add") -> None:
    """Dump `tensor + 1` as the lead's interpreter does."""
    call = step.begin_call(node, "aten.add.Tensor", (tensor, 1), {}, {"scope": "block"})
    call.finish(tensor + 1)


def one_step(graph: GraphDump, *tensors: torch.Tensor) -> None:
    step = graph.begin_step()
    for position, tensor in enumerate(tensors):
        add_call(step, tensor, f"add_{position}")
    step.finish()


def steps(graph: GraphDump, count: int, *tensors: torch.Tensor) -> None:
    for _ in range(count):
        one_step(graph, *tensors)


def start(script: str, *arguments: Any, **options: Any) -> subprocess.Popen[str]:
    """Run a script in another process, with `open_run`, `one_step` and the like at hand."""
    prelude = """
        import os, sys, time, warnings
        from pathlib import Path
        import torch
        from tests.store.support import *
        from torchair_scope.store.reader import read
        from torchair_scope.store.run import open_run
    """
    code = textwrap.dedent(prelude) + textwrap.dedent(script)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def run(script: str, *arguments: Any) -> str:
    """Run a script to its end, which must be a good one; give what it printed."""
    with start(script, *arguments) as process:
        printed, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    return printed


@contextlib.contextmanager
def running(script: str, *arguments: Any) -> Iterator[subprocess.Popen[str]]:
    """A process that has printed its first line, and is killed in the end."""
    with start(script, *arguments) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line, process.communicate()[1]
            yield process
        finally:
            process.kill()


def files(folder: Path) -> dict[str, bytes]:
    """Each file below a folder, with its bytes."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
