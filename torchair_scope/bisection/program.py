"""One run of what is bisected, under a plan: a program in a process of its own, or a function."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from torchair_scope import switch
from torchair_scope.bisection.plan import VARIABLE, Finding, Plan, findings_in, following

_LOOK_EVERY = 0.2  # seconds
_PATIENCE = 10.0  # seconds for a program to end when it is asked to


class NothingJudgedError(RuntimeError):
    """A run has ended, and nothing of any graph was judged; the text says why."""


class Program(Protocol):
    """What can be run under a plan."""

    def run(self, plan: Plan, folder: Path, is_enough: Callable[[list[Finding]], bool]) -> None:
        """Run it once, or until what has been found is enough.

        Raises:
            NothingJudgedError: it failed before anything was found.
        """


@dataclass(frozen=True)
class Command:
    """A program, run as a command.

    Args:
        arguments: the command, as `("python", "train.py")`.
        limit: seconds after which a run is ended; None for as long as it takes.
    """

    arguments: tuple[str, ...]
    limit: float | None = None

    def run(self, plan: Plan, folder: Path, is_enough: Callable[[list[Finding]], bool]) -> None:
        """Run it in a process group of its own, which is ended when enough is found."""
        path = folder / "plan.json"
        plan.write(path)
        environment = {**os.environ, VARIABLE: str(path), switch.VARIABLE: "0"}
        with open(folder / "output.txt", "wb") as output:
            process = subprocess.Popen(
                self.arguments,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
            try:
                self._wait(process, Path(plan.findings), is_enough)
            finally:
                _end(process)
        if process.returncode > 0 and not findings_in(Path(plan.findings)):
            raise NothingJudgedError(
                f"{' '.join(self.arguments)} failed with exit status {process.returncode} before "
                f"anything was judged; what it printed is in {folder / 'output.txt'}, at its end:\n"
                + _tail(folder / "output.txt")
            )

    def _wait(
        self,
        process: subprocess.Popen[bytes],
        findings: Path,
        is_enough: Callable[[list[Finding]], bool],
    ) -> None:
        end = math.inf if self.limit is None else time.monotonic() + self.limit
        while process.poll() is None and time.monotonic() < end:
            if is_enough(findings_in(findings)):
                return
            time.sleep(_LOOK_EVERY)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End what still runs of the program, and wait for it."""
    for how in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is not None:
            return
        os.killpg(process.pid, how)
        try:
            process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            continue


def _tail(path: Path, lines: int = 15) -> str:
    return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])


@dataclass(frozen=True)
class Function:
    """A function in this process, with what it is called with.

    Args:
        function: what runs the compiled model, and its backward where that is judged, too.
        inputs: its positional arguments.
    """

    function: Callable[..., Any]
    inputs: Sequence[Any]

    def run(self, plan: Plan, folder: Path, is_enough: Callable[[list[Finding]], bool]) -> None:
        """Call it once, compiled anew."""
        from torchair_scope.bisection.probe import forget_graphs

        plan.write(folder / "plan.json")
        forget_graphs()
        torch._dynamo.reset()
        on, switch.on = switch.on, False
        try:
            with following(plan):
                self.function(*self.inputs)
        finally:
            switch.on = on
            torch._dynamo.reset()
