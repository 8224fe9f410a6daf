"""`torchair-scope bisect`: narrow down what a program's compiled graphs compute wrongly."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import rich.console
import typer
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from torchair_scope.bisection.bisect import Bisection, bisect_command
from torchair_scope.bisection.narrowing import Outcome, State

STATUS: dict[Outcome, int] = {"agrees": 0, "found": 1, "hidden": 1, "unknown": 2}


def bisect(
    program: Annotated[
        list[str], typer.Argument(metavar="-- PROGRAM…", help="the program and its arguments")
    ],
    folder: Annotated[
        Path, typer.Option("-o", help="the runs' findings; an interrupted bisection is resumed")
    ] = Path("bisect"),
    steps: Annotated[
        str, typer.Option(help='which runs of each graph are judged, as "0|3-5"')
    ] = "0",
    pieces: Annotated[int, typer.Option(min=2, help="how many pieces a suspect is cut into")] = 4,
    limit: Annotated[float | None, typer.Option(help="seconds after which a run is ended")] = None,
    as_machine: Annotated[bool, typer.Option("--json", help="print JSON for machines")] = False,
) -> None:
    """Run a program again and again until the operator that is compiled wrongly is left."""
    console = rich.console.Console(highlight=False)
    with _progress(stderr=as_machine) as shown:
        task = shown.add_task("run 1: all operators", total=None)

        def told(state: State, runs: int) -> None:
            _show(shown, task, state, runs, pieces)

        found = bisect_command(
            program, folder=folder, steps=steps, pieces=pieces, limit=limit, progress=told
        )
    if as_machine:
        print(json.dumps(_plain(found)))
    else:
        _print(console, found)
    raise typer.Exit(STATUS[found.outcome])


def _progress(stderr: bool) -> Progress:
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    console = rich.console.Console(stderr=stderr, highlight=False)
    return Progress(*columns, TimeElapsedColumn(), console=console)


def _show(shown: Progress, task: Any, state: State, runs: int, pieces: int) -> None:
    suspect = state.suspect
    if suspect is None or state.decisive is None:
        return
    left = suspect.stop - suspect.start
    to_come = 0 if state.outcome else math.ceil(math.log(max(left, 2), pieces))
    shown.update(
        task,
        description=f"run {runs}: {left} of {state.decisive.operators} operators left",
        completed=runs,
        total=runs + to_come,
    )
    ends = dict.fromkeys(state.decisive.nodes[index]["name"] for index in (0, -1))
    shown.console.print(
        f"run {runs}: {left} of {state.decisive.operators} operators of a "
        f"{state.decisive.direction} graph: off by {_figure(state.decisive.error)}, in eager mode "
        f"by {_figure(state.decisive.here)}: {escape(' … '.join(ends))}",
        soft_wrap=True,
    )


def _figure(error: float | None) -> str:
    return "?" if error is None else f"{error:.1e}"


def _print(console: rich.console.Console, found: Bisection) -> None:
    lines = [f"[bold]{escape(str(found))}[/bold]"]
    lines += [f"  {escape(_placed(node))}" for node in found.operators]
    lines += [f"{found.runs} runs; what each has found is in {escape(str(found.folder))}"]
    console.print("\n".join(lines), soft_wrap=True)


def _placed(node: Mapping[str, Any]) -> str:
    source = node["source"]
    line = f", {source['file']}:{source['line']}: {source['code']}" if source else ""
    return f"{node['name']}: {node['target']}, module {node['module'] or '-'}{line}"


def _plain(found: Bisection) -> dict[str, Any]:
    return {
        "outcome": found.outcome,
        "runs": found.runs,
        "decisive": asdict(found.decisive) if found.decisive else None,
        "folder": str(found.folder),
        "text": str(found),
    }
