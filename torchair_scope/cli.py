"""`torchair-scope`: from a dump to the first wrong operator, on the command line."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import rich.console
import typer
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)

from torchair_scope.analysis import as_json, tables
from torchair_scope.analysis.compare import bytes_to_compare
from torchair_scope.analysis.compare import compare as compare_dumps
from torchair_scope.analysis.dump import Call, Dump
from torchair_scope.analysis.executors import forks_for, pool_for
from torchair_scope.analysis.export_files import FORMATS
from torchair_scope.analysis.export_files import export as export_dump
from torchair_scope.analysis.load import load
from torchair_scope.analysis.numerics import Tolerance
from torchair_scope.analysis.operators import NotReplayableError
from torchair_scope.analysis.tensors import MissingTensorError

AGREES, DIFFERS, CANNOT_TELL = 0, 1, 2
_STATUS = {
    "agrees": AGREES,
    "made": DIFFERS,
    "outside": DIFFERS,
    "unclear": CANNOT_TELL,
}

app = typer.Typer(
    name="torchair-scope",
    help="From a dump to the first wrong operator. "
    "Exit status: 0 agrees, 1 differs, 2 cannot tell.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
DumpPath = Annotated[str, typer.Argument(metavar="DUMP", help="a dump folder, or an fsspec URL")]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON for machines")]
Scope = Annotated[str | None, typer.Option(help="a scope path or pattern")]
Node = Annotated[str | None, typer.Option("--op", help="a node name or pattern, as add_1")]
StepNumber = Annotated[int | None, typer.Option("--step", help="which run of each graph")]
Everything = Annotated[bool, typer.Option("--all", help="show every row")]

_ROWS = 20
# How many times longer a replay takes than a comparison, for each byte.
_REPLAYED = 16


def run(arguments: list[str] | None = None) -> int:
    """Run the command line; give the exit status."""
    try:
        status = app(args=arguments, standalone_mode=False)
    except typer.Abort:
        return CANNOT_TELL
    except typer.Exit as ended:
        return int(ended.exit_code)
    except Exception as error:
        return _told(error)
    return int(status or 0)


def _told(error: Exception) -> int:
    """Say what went wrong; only what no user can mend keeps its traceback."""
    show = getattr(error, "show", None)  # errors of the command line itself
    if show is not None:
        show()
    elif isinstance(error, OSError | LookupError | ValueError | ImportError | NotReplayableError):
        text = error.args[0] if isinstance(error, KeyError) and error.args else error
        print(f"error: {text}", file=sys.stderr)
    else:
        raise error
    return CANNOT_TELL


@app.command(epilog="Example: torchair-scope ls ./dump")
def ls(dump: DumpPath, as_machine: AsJson = False) -> None:
    """Runs, graphs, steps, scopes, sizes, and what is missing."""
    loaded = load(dump)
    if as_machine:
        _print_json(as_json.json_of_dump(loaded))
    else:
        tables.print_dump(_console(), loaded)


@app.command(epilog="Example: torchair-scope show ./dump add_1.OUTPUT.0")
def show(
    dump: DumpPath,
    name: Annotated[str, typer.Argument(help="a node, as add_1, or a tensor, as add_1.OUTPUT.0")],
    step: StepNumber = None,
    as_machine: AsJson = False,
) -> None:
    """A call, or the values of a tensor."""
    loaded = load(dump)
    calls = loaded.calls(node=name, step=step)
    if calls and as_machine:
        _print_json([as_json.json_of_call(call) for call in calls])
    elif calls:
        for call in calls:
            tables.print_call(_console(), call)
    else:
        _show_tensor(loaded, name, as_machine)


def _show_tensor(dump: Dump, name: str, as_machine: bool) -> None:
    value = dump.tensor(name).torch()
    if as_machine:
        facts = {"name": name, "dtype": str(value.dtype), "shape": list(value.shape)}
        _print_json({**facts, "values": as_json.plain(value.tolist())})
    else:
        print(f"{name}: {value.dtype}, shape {tuple(value.shape)}, strides {value.stride()}")
        print(value)


@app.command(epilog="Example: torchair-scope stats ./dump --scope mlp --step 0")
def stats(
    dump: DumpPath,
    scope: Scope = None,
    op: Node = None,
    step: StepNumber = None,
    as_machine: AsJson = False,
) -> None:
    """Minimum, maximum, mean, norm, zeros, NaN and Inf of each tensor."""
    from torchair_scope.analysis.statistics import statistics_of

    calls = _some_calls(load(dump), scope, op, step)
    columns = ["tensor", "dtype", "shape", "min", "max", "mean", "norm", "zeros", "NaN", "Inf"]
    table = tables.new_table("Statistics of finite values", *columns)
    rows: list[dict[str, Any]] = []
    for call in calls:
        for slot, tensor in call.tensors.items():
            try:
                found = statistics_of(tensor.numpy())
            except MissingTensorError as error:
                rows.append({**as_json.json_of_call(call), "slot": slot, "problem": str(error)})
                continue
            rows.append({**as_json.json_of_call(call), "slot": slot, **as_json.plain(vars(found))})
            tables.add_statistics(table, f"{call.step} {call.node}.{slot}", tensor, found)
    if as_machine:
        _print_json(rows)
    else:
        _console().print(table)
        problems = [f"{row['node']}: {row['problem']}" for row in rows if "problem" in row]
        tables.print_notes(_console(), problems, "")


@app.command(epilog="Example: torchair-scope compare ./eager ./npu --scope mlp")
def compare(
    golden: Annotated[str, typer.Argument(metavar="GOLDEN", help="the dump that is right")],
    target: Annotated[str, typer.Argument(metavar="TARGET", help="the dump to judge")],
    scope: Scope = None,
    step: StepNumber = None,
    rtol: Annotated[float | None, typer.Option(help="relative tolerance of every element")] = None,
    atol: Annotated[float | None, typer.Option(help="absolute tolerance of every element")] = None,
    confirm: Annotated[bool, typer.Option(help="replay what seems to make an error")] = True,
    output: Annotated[Path | None, typer.Option("-o", help="write an HTML report as well")] = None,
    everything: Everything = False,
    as_machine: AsJson = False,
) -> None:
    """Which operator is the first wrong one."""
    dumps = load(golden), load(target)
    size = bytes_to_compare(*dumps, scope, step)
    with forks_for(size) as executor, _progress("compare") as begin:
        comparison = compare_dumps(
            *dumps,
            scope=scope,
            step=step,
            tolerance=_tolerance(rtol, atol),
            confirm=confirm,
            executor=executor,
            progress=begin(size),
        )
    if output is not None:
        from torchair_scope.analysis.report import write_report

        write_report(comparison, output, title=f"{target} against {golden}")
    if as_machine:
        _print_json(as_json.json_of_comparison(comparison))
    else:
        rows = len(comparison.results) + 1 if everything else _ROWS
        tables.print_comparison(_console(), comparison, rows)
    raise typer.Exit(_STATUS[comparison.verdict.kind])


@app.command(epilog="Example: torchair-scope replay ./dump --scope mlp")
def replay(
    dump: DumpPath,
    scope: Scope = None,
    op: Node = None,
    step: StepNumber = None,
    device: Annotated[str, typer.Option(help="where to run, as cpu or npu")] = "cpu",
    reference: Annotated[
        Literal["float64", "float32"], typer.Option(help="dtype of the exact run")
    ] = "float64",
    imports: Annotated[
        list[str] | None, typer.Option("--import", help="a module that defines operators")
    ] = None,
    script: Annotated[
        bool, typer.Option("--export", help="write the calls as scripts for a bug report")
    ] = False,
    output: Annotated[Path, typer.Option("-o", help="the folder of --export")] = Path("replay"),
    everything: Everything = False,
    as_machine: AsJson = False,
) -> None:
    """Run dumped calls again: a bug, or rounding?"""
    from torchair_scope.analysis.replay import replay as replay_calls

    for module in imports or ():
        importlib.import_module(module)
    loaded = load(dump)
    calls = _some_calls(loaded, scope, op, step)
    if script:
        _export_scripts(calls, output, imports or [])
        return
    chosen: dict[str, Any] = {"scope": scope, "node": op, "step": step, "device": device}
    size = as_json.bytes_of(calls)
    with pool_for(_REPLAYED * size, imports or ()) as executor, _progress("replay") as begin:
        replays = replay_calls(
            loaded, **chosen, reference=reference, executor=executor, progress=begin(size)
        )
    if as_machine:
        _print_json([as_json.json_of_replay(each) for each in replays])
    else:
        tables.print_replays(_console(), replays, len(replays) if everything else _ROWS)
    verdicts = {each.verdict for each in replays}
    if "bug" in verdicts:
        raise typer.Exit(DIFFERS)
    raise typer.Exit(AGREES if "rounding" in verdicts else CANNOT_TELL)


def _export_scripts(calls: list[Call], folder: Path, imports: list[str]) -> None:
    from torchair_scope.analysis.export_script import export_script

    several = len({call.step for call in calls}) > 1
    for call in calls:
        inside = folder / str(call.step).replace("/", "_") if several else folder
        print(export_script(call, inside, imports))


@app.command(epilog="Example: torchair-scope export ./dump --format msprobe -o ./for_msprobe")
def export(
    dump: DumpPath,
    output: Annotated[Path, typer.Option("-o", help="the file, or for msprobe the folder")],
    file_format: Annotated[
        str, typer.Option("--format", help=f"one of {', '.join(FORMATS)}")
    ] = "msprobe",
) -> None:
    """Write a dump in another format."""
    print(export_dump(load(dump), output, file_format))


@app.command(epilog="Example: torchair-scope report ./eager ./npu -o report.html")
def report(
    dumps: Annotated[list[str], typer.Argument(metavar="[GOLDEN] DUMP", help="one dump, or two")],
    output: Annotated[Path, typer.Option("-o", help="the file")] = Path("report.html"),
    scope: Scope = None,
    step: StepNumber = None,
) -> None:
    """Write one HTML file, for a comparison or for a single dump."""
    from torchair_scope.analysis.report import write_dump_report, write_report

    if len(dumps) > 2:
        raise ValueError(f"report takes one dump or two, golden first; got {len(dumps)}")
    if len(dumps) == 1:
        print(write_dump_report(load(dumps[0]), output))
        return
    golden, target = dumps
    comparison = compare_dumps(golden, target, scope=scope, step=step)
    print(write_report(comparison, output, title=f"{target} against {golden}"))
    raise typer.Exit(_STATUS[comparison.verdict.kind])


def _some_calls(dump: Dump, scope: str | None, node: str | None, step: int | None) -> list[Call]:
    calls = dump.calls(scope=scope, node=node, step=step)
    if not calls:
        raise LookupError(
            f"{dump.folder.url} has no such call; its scopes: {', '.join(dump.scopes) or 'none'}. "
            "torchair-scope ls shows what it has"
        )
    return calls


def _tolerance(relative: float | None, absolute: float | None) -> Tolerance | None:
    if relative is None and absolute is None:
        return None
    return Tolerance(relative or 0.0, absolute or 0.0)


def _console() -> rich.console.Console:
    """A terminal, or a file that is wide enough for a table."""
    return rich.console.Console(width=None if sys.stdout.isatty() else 160)


def _print_json(content: Any) -> None:
    print(json.dumps(content, indent=1, allow_nan=False))


@contextmanager
def _progress(title: str) -> Iterator[Callable[[int], Callable[[int], None]]]:
    """A bar with bytes and the time left, on a terminal only; yields what begins it."""
    console = rich.console.Console(stderr=True)
    columns = TextColumn(title), BarColumn(), DownloadColumn(), TimeRemainingColumn()
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:

        def begin(total: int) -> Callable[[int], None]:
            task = bar.add_task(title, total=total)
            return lambda size: bar.advance(task, size)

        yield begin
