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
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

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
    golden: Annotated[
        str | None,
        typer.Option(metavar="DUMP", help="a dump of a right run on the same inputs; or a URL"),
    ] = None,
    module: Annotated[
        list[str] | None,
        typer.Option(metavar="PATH", help="look in this module only, as 'layers.3*'"),
    ] = None,
    source: Annotated[
        list[str] | None,
        typer.Option(metavar="LINES", help="at what comes from these lines, as model.py:40-60"),
    ] = None,
    nodes: Annotated[
        list[str] | None,
        typer.Option(metavar="NODES", help="at these nodes of a graph, as add_1..mul_3"),
    ] = None,
    steps: Annotated[
        str, typer.Option(help='which runs of each graph are judged, as "0|3-5"')
    ] = "0",
    pieces: Annotated[int, typer.Option(min=2, help="how many pieces a suspect is cut into")] = 4,
    limit: Annotated[float | None, typer.Option(help="seconds after which a run is ended")] = None,
    as_machine: Annotated[bool, typer.Option("--json", help="print JSON for machines")] = False,
) -> None:
    """Run a program again and again until the operator that is compiled wrongly is left."""
    console = rich.console.Console(highlight=False, quiet=as_machine)
    with _progress() as bar:
        task = bar.add_task("run 1: all operators", total=None)

        def told(state: State, runs: int) -> None:
            if state.decisive is not None:
                _advance(bar, task, state, runs, pieces)
                console.print(_told_of_run(state, runs), soft_wrap=True)

        found = bisect_command(
            program,
            folder=folder,
            golden=golden,
            module=module or (),
            source=source or (),
            nodes=nodes or (),
            steps=steps,
            pieces=pieces,
            limit=limit,
            progress=told,
        )
    _print(console, found)
    if as_machine:
        print(json.dumps(_plain(found)))
    raise typer.Exit(STATUS[found.outcome])


def _progress() -> Progress:
    console = rich.console.Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    return Progress(
        *columns,
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


def _advance(bar: Progress, task: TaskID, state: State, runs: int, pieces: int) -> None:
    left = _left(state)
    to_come = 0 if state.outcome else math.ceil(math.log(max(left, 2), pieces))
    text = f"run {runs}: {left} operators left"
    bar.update(task, description=text, completed=runs, total=runs + to_come)


def _left(state: State) -> int:
    return state.suspect.stop - state.suspect.start if state.suspect else 0


def _told_of_run(state: State, runs: int) -> str:
    finding = state.decisive
    if finding is None:
        return ""
    ends = dict.fromkeys(finding.nodes[index]["name"] for index in (0, -1))
    error = _figure(finding.error)
    off = f"off by {error}, in eager mode by {_figure(finding.here)}"
    if finding.judged_by == "golden":
        off = f"off by {error} from the golden dump"
    return (
        f"run {runs}: {_left(state)} of {finding.operators} operators of the {finding.direction} "
        f"graph: {off}: {escape(' … '.join(ends))}"
    )


def _figure(error: float | None) -> str:
    return "?" if error is None else f"{error:.1e}"


def _print(console: rich.console.Console, found: Bisection) -> None:
    lines = [f"[bold]{escape(str(found))}[/bold]"]
    lines += [f"  {escape(_placed(node))}" for node in found.operators]
    lines += [f"  note: {escape(note)}" for note in found.notes]
    lines += [f"{found.runs} runs; what each has found is in {escape(str(found.folder))}"]
    console.print("\n".join(lines), soft_wrap=True)


def _placed(node: Mapping[str, Any]) -> str:
    module, source = node["module"], node["source"]
    placed = f"{node['name']}: {node['target']}" + (f", module {module}" if module else "")
    return placed + (f", {source['file']}:{source['line']}: {source['code']}" if source else "")


def _plain(found: Bisection) -> dict[str, Any]:
    return {
        "outcome": found.outcome,
        "runs": found.runs,
        "decisive": asdict(found.decisive) if found.decisive else None,
        "folder": str(found.folder),
        "notes": list(found.notes),
        "text": str(found),
    }
