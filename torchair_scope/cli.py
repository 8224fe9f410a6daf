"""`torchair-scope`: from a dump to the first wrong operator, on the command line."""

from __future__ import annotations

import importlib
import itertools
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import rich.console
import typer
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)

from torchair_scope import __version__
from torchair_scope.analysis import as_json, tables
from torchair_scope.analysis.advice import no_call
from torchair_scope.analysis.compare import Comparison, bytes_to_compare
from torchair_scope.analysis.compare import compare as compare_dumps
from torchair_scope.analysis.dump import Call, Dump
from torchair_scope.analysis.executors import forks_for, pool_for
from torchair_scope.analysis.export_files import FORMATS
from torchair_scope.analysis.export_files import export as export_dump
from torchair_scope.analysis.load import load
from torchair_scope.analysis.numerics import Tolerance
from torchair_scope.analysis.operators import NotReplayableError
from torchair_scope.analysis.tensors import MissingTensorError
from torchair_scope.bisection.command import bisect
from torchair_scope.bisection.program import NothingJudgedError

if TYPE_CHECKING:
    import torch

    from torchair_scope.analysis.replay import Replay

AGREES, DIFFERS, CANNOT_TELL = 0, 1, 2
_STATUS = {
    "agrees": AGREES,
    "made": DIFFERS,
    "outside": DIFFERS,
    "unclear": CANNOT_TELL,
}

app = typer.Typer(
    name="torchair-scope",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
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
_FOR_THE_USER = (
    *(OSError, LookupError, ValueError, ImportError),
    *(NotReplayableError, NothingJudgedError),
)


def run(arguments: list[str] | None = None) -> int:
    """Run the command line; give the exit status."""
    try:
        status = app(args=arguments, prog_name="torchair-scope", standalone_mode=False)
    except typer.Abort:
        return CANNOT_TELL
    except typer.Exit as ended:
        return int(ended.exit_code)
    except BrokenPipeError:  # as `| head` does
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - until the process ends
        return CANNOT_TELL
    except Exception as error:
        _tell(error)
        return CANNOT_TELL
    return int(status or 0)


def _tell(error: Exception) -> None:
    """Say what went wrong in a line; the traceback of what no user can mend goes to a file."""
    show = getattr(error, "show", None)  # errors of the command line itself
    if show is not None:
        show()
        return
    if isinstance(error, OSError) and error.strerror:
        text = ": ".join(str(part) for part in (error.filename, error.strerror) if part)
    elif isinstance(error, _FOR_THE_USER):
        text = str(error.args[0] if isinstance(error, KeyError) and error.args else error)
    else:
        with tempfile.NamedTemporaryFile(
            "w", prefix="torchair-scope-", suffix=".txt", delete=False
        ) as file:
            file.write("".join(traceback.format_exception(error)))
        kind = type(error).__name__
        text = f"{kind}: {error}. This should not be; please report it with {file.name}"
    print(f"error: {text}", file=sys.stderr)


def _version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="print it and exit")
    ] = False,
) -> None:
    """From a dump to the first wrong operator.

    Exit status: 0 agrees, 1 differs, 2 cannot tell.
    """


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
    elif "." not in name or (step is not None and not loaded.calls(step=step)):
        raise no_call(loaded, None, name if "." not in name else None, step)
    else:
        _show_tensor(loaded.tensor(name, step=step).torch(), name, as_machine)


def _show_tensor(value: torch.Tensor, name: str, as_machine: bool) -> None:
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
    from torchair_scope.analysis.statistics import statistics_of_tensor

    calls = _some_calls(load(dump), scope, op, step)
    rows: list[dict[str, Any]] = []
    shown: list[dict[str, str]] = []
    for call in calls:
        for slot, tensor in call.tensors.items():
            try:
                found = statistics_of_tensor(tensor)
            except MissingTensorError as error:
                rows.append({**as_json.json_of_call(call), "slot": slot, "problem": str(error)})
                continue
            rows.append({**as_json.json_of_call(call), "slot": slot, **as_json.plain(vars(found))})
            name = f"{call.step} {call.node}.{slot}"
            shown.append(tables.statistics_cells(name, tensor, found))
    if as_machine:
        _print_json(rows)
    else:
        tables.print_rows(_console(), "Statistics of finite values", shown)
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
    tolerance = _tolerance(rtol, atol)
    comparison = _compared(golden, target, scope, step, tolerance=tolerance, confirm=confirm)
    if output is not None:
        _write_report(comparison, output, golden, target)
    if as_machine:
        _print_json(as_json.json_of_comparison(comparison))
    else:
        rows = len(comparison.results) + 1 if everything else _ROWS
        tables.print_comparison(_console(), comparison, rows)
        if output is not None:
            print(f"report: {output}")
    raise typer.Exit(_STATUS[comparison.verdict.kind])


def _compared(
    golden: str, target: str, scope: str | None, step: int | None, **options: Any
) -> Comparison:
    dumps = load(golden), load(target)
    for dump in dumps:
        _some_calls(dump, scope, None, step)
    size = bytes_to_compare(*dumps, scope, step)
    with forks_for(size) as executor, _progress("compare") as begin:
        return compare_dumps(
            *dumps, scope=scope, step=step, executor=executor, progress=begin(size), **options
        )


def _write_report(comparison: Comparison, output: Path, golden: str, target: str) -> None:
    from torchair_scope.analysis.report import write_report

    write_report(comparison, _a_file(output, "report.html"), title=f"{target} against {golden}")


def _a_file(path: Path, example: str) -> Path:
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder; give a file, as -o {path / example}")
    return path


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
    for module in imports or ():
        importlib.import_module(module)
    loaded = load(dump)
    calls = _some_calls(loaded, scope, op, step)
    if script:
        paths = _export_scripts(calls, output, imports or [])
        _print_json(paths) if as_machine else print(*paths, sep="\n")
        return
    chosen = {"scope": scope, "node": op, "step": step, "device": device, "reference": reference}
    replays = _replayed(loaded, as_json.bytes_of(calls), imports or (), **chosen)
    if as_machine:
        _print_json([as_json.json_of_replay(each) for each in replays])
    else:
        tables.print_replays(_console(), replays, len(replays) if everything else _ROWS)
    verdicts = {each.verdict for each in replays}
    if "bug" in verdicts:
        raise typer.Exit(DIFFERS)
    raise typer.Exit(AGREES if "rounding" in verdicts else CANNOT_TELL)


def _replayed(dump: Dump, size: int, imports: Sequence[str] = (), **chosen: Any) -> list[Replay]:
    from torchair_scope.analysis.replay import replay as replay_calls

    with pool_for(_REPLAYED * size, imports) as executor, _progress("replay") as begin:
        return replay_calls(dump, **chosen, executor=executor, progress=begin(size))


def _export_scripts(calls: list[Call], folder: Path, imports: list[str]) -> list[str]:
    from torchair_scope.analysis.export_script import export_script

    several = len({call.step for call in calls}) > 1
    paths = []
    for call in calls:
        inside = folder / str(call.step).replace("/", "_") if several else folder
        paths.append(str(export_script(call, inside, imports)))
    return paths


@app.command(epilog="Example: torchair-scope export ./dump --format msprobe -o ./for_msprobe")
def export(
    dump: DumpPath,
    output: Annotated[Path, typer.Option("-o", help="the file, or for msprobe the folder")],
    file_format: Annotated[
        str, typer.Option("--format", help=f"one of {', '.join(FORMATS)}")
    ] = "msprobe",
    as_machine: AsJson = False,
) -> None:
    """Write a dump in another format."""
    loaded = load(dump)
    if file_format != "msprobe":
        _a_file(output, f"dump.{file_format}")
    written = export_dump(loaded, output, file_format)
    _print_json({"path": str(written)}) if as_machine else print(written)


@app.command(epilog="Example: torchair-scope report ./eager ./npu -o report.html")
def report(
    dumps: Annotated[list[str], typer.Argument(metavar="[GOLDEN] DUMP", help="one dump, or two")],
    output: Annotated[Path, typer.Option("-o", help="the file")] = Path("report.html"),
    scope: Scope = None,
    step: StepNumber = None,
    as_machine: AsJson = False,
) -> None:
    """Write one HTML file, for a comparison or for a single dump."""
    if len(dumps) > 2:
        raise ValueError(f"report takes one dump or two, golden first; got {len(dumps)}")
    if len(dumps) == 1:
        from torchair_scope.analysis.report import write_dump_report

        write_dump_report(load(dumps[0]), _a_file(output, "report.html"))
        _print_json({"path": str(output)}) if as_machine else print(output)
        return
    golden, target = dumps
    comparison = _compared(golden, target, scope, step)
    _write_report(comparison, output, golden, target)
    verdict = comparison.verdict
    if as_machine:
        _print_json({"path": str(output), "verdict": verdict.kind, "text": verdict.text})
    else:
        print(output)
    raise typer.Exit(_STATUS[verdict.kind])


@app.command(epilog="Example: torchair-scope demo -o ./demo")
def demo(
    output: Annotated[
        Path | None, typer.Option("-o", help="the folder; a new torchair_scope_demo if not given")
    ] = None,
    as_machine: AsJson = False,
) -> None:
    """See it find a wrong kernel in a small compiled model. Takes some seconds."""
    from torchair_scope.demo import run as run_demo

    folder = _new_folder("torchair_scope_demo") if output is None else output
    with rich.console.Console(stderr=True).status("running a small model, eager and compiled"):
        runs = run_demo(folder)
    golden, target = str(runs.golden), str(runs.target)
    report_file = folder / "report.html"
    comparison = _compared(golden, target, None, None)
    _write_report(comparison, report_file, golden, target)
    wrong = comparison.verdict.call
    node = wrong.pair.target.node if wrong is not None else None
    loaded = load(target)
    replays = _replayed(loaded, as_json.bytes_of(loaded.calls(node=node)), node=node)
    if as_machine:
        found = as_json.json_of_comparison(comparison), map(as_json.json_of_replay, replays)
        paths = {"golden": golden, "target": target, "report": str(report_file)}
        _print_json({**paths, "comparison": found[0], "replay": list(found[1])})
        return
    print(f"The model in {folder / 'model.py'}, compiled with {runs.compiler}, gives results")
    print(
        f"that are {runs.difference:.1%} off from those of eager mode. Both runs dumped its scope."
    )
    print()
    print(f"$ torchair-scope compare {golden} {target}")
    tables.print_comparison(_console(), comparison, _ROWS)
    print(f"\n$ torchair-scope replay {target} --op {node}")
    tables.print_replays(_console(), replays, _ROWS)
    print("\nTry next:")
    for command in (
        f"ls {target}",
        f"show {target} {node}",
        f"stats {target} --scope block",
        f"replay {target} --op {node} --export -o {folder / 'bug'}",
    ):
        print(f"  torchair-scope {command}")
    print(f"The report, for a browser: {report_file}")


def _new_folder(name: str) -> Path:
    """A folder that is not there yet, in the current one."""
    numbered = (Path(f"{name}_{number}") for number in itertools.count(2))
    return next(path for path in itertools.chain([Path(name)], numbered) if not path.exists())


app.command(epilog="Example: torchair-scope bisect -- python train.py")(bisect)


def _some_calls(dump: Dump, scope: str | None, node: str | None, step: int | None) -> list[Call]:
    calls = dump.calls(scope=scope, node=node, step=step)
    if not calls:
        raise no_call(dump, scope, node, step)
    return calls


def _tolerance(relative: float | None, absolute: float | None) -> Tolerance | None:
    if relative is None and absolute is None:
        return None
    return Tolerance(relative or 0.0, absolute or 0.0)


def _console() -> rich.console.Console:
    """A terminal, or a file that is wide enough for a table, if the environment has no width."""
    told = sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdecimal()
    return rich.console.Console(width=None if told else 160)


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
