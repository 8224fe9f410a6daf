"""Results as tables, for people."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from torchair_scope.analysis.account import Row, account_of
from torchair_scope.analysis.as_json import bytes_of
from torchair_scope.analysis.compare import Comparison
from torchair_scope.analysis.dump import Call, Dump
from torchair_scope.analysis.replay import Replay, Verdict
from torchair_scope.analysis.statistics import Statistics
from torchair_scope.analysis.tensors import MissingTensorError, Tensor
from torchair_scope.analysis.verdict import CallResult

# What a terminal of fewer characters has no room for; the node's name says most of it.
_WIDE = 110
_FOR_WIDE = ("operator", "scope", "beyond", "mean", "norm")
_COLOURS = {
    "made": "bold red",
    "bug": "bold red",
    "outside": "bold red",
    "carries": "yellow",
    "amplifies": "yellow",
    "unclear": "magenta",
    "cannot": "magenta",
    "agrees": "green",
    "rounding": "green",
}


def say(console: Console, text: str) -> None:
    """A line that stays one, however long: it can be searched, and its paths can be copied."""
    console.print(text, highlight=False, soft_wrap=True)


def new_table(title: str, *columns: str) -> Table:
    """An empty table in the style of all of them."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def print_rows(console: Console, title: str, rows: Sequence[dict[str, str]]) -> None:
    """A table of rows that have a cell for each column, without some of them if it is narrow."""
    left_out = () if console.width >= _WIDE else _FOR_WIDE
    columns = [column for column in (rows[0] if rows else ()) if column not in left_out]
    table = new_table(title, *columns)
    for row in rows:
        table.add_row(*(row[column] for column in columns))
    console.print(table)


def coloured(word: str) -> str:
    """A role or a verdict in its colour."""
    colour = _COLOURS.get(word)
    return f"[{colour}]{word}[/]" if colour else word


def print_dump(console: Console, dump: Dump) -> None:
    """What is in a dump, and the account of what is missing."""
    for rank in dump.ranks:
        versions = rank.run.get("versions", {})
        told = ", ".join(f"{name} {version}" for name, version in versions.items())
        say(console, f"rank {rank.number} of {rank.world_size}: {escape(rank.folder.url)}")
        if told:
            say(console, f"  {escape(told)}")
    graphs = new_table("Graphs", "rank", "graph", "direction", "compiler", "steps", "calls", "size")
    for graph in dump.graphs:
        calls = [call for step in graph.steps for call in step.calls]
        cells = (
            graph.rank.number,
            graph.name,
            graph.direction or "?",
            graph.record.get("inner", "?"),
        )
        counts = (len(graph.steps), len(calls), size_text(bytes_of(calls)))
        graphs.add_row(*map(str, (*cells, *counts)))
    console.print(graphs)
    _print_scopes(console, [row for rank in dump.ranks for row in account_of(rank)])
    print_notes(console, dump.problems, "Nothing is missing.")


def _print_scopes(console: Console, rows: Sequence[Row]) -> None:
    """The account of each scope, then what of it is missing and why."""
    several = len({row.rank for row in rows}) > 1
    columns = ["rank"] * several + ["scope", "opened at", "tagged", "compiled", "dumped", "calls"]
    table = new_table("Scopes", *columns, "tensors", "size")
    for row in rows:
        name = escape(row.scope or "(not known)"), escape(row.opened_at or "?")
        known = ["?" if n is None else str(n) for n in (row.tagged, row.reached, row.dumped)]
        counts = str(row.calls), str(row.tensors), size_text(row.bytes)
        table.add_row(*[str(row.rank)] * several, *name, *known, *counts)
    console.print(table)
    for row in rows:
        for sentence in row.missing:
            where = f"rank {row.rank}, " * several + f"{row.scope} ({row.opened_at})"
            say(console, escape(f"{where}: {sentence}"))


def print_notes(console: Console, notes: Sequence[str], otherwise: str, most: int = 20) -> None:
    """What is missing, one line each; the rest as a number."""
    for note in notes[:most]:
        say(console, f"[magenta]![/] {escape(note)}")
    if len(notes) > most:
        say(console, f"… and {len(notes) - most} more; --json has all")
    if not notes:
        say(console, otherwise)


def print_call(console: Console, call: Call) -> None:
    """One call: where it comes from, its arguments and its tensors."""
    say(console, f"[bold]{escape(str(call))}[/]")
    source = call.source
    facts = {
        "scope": call.scope,
        "module": call.module,
        "source": f"{source['file']}:{source['line']}  {source['code']}" if source else None,
    }
    for name, fact in facts.items():
        if fact:
            say(console, f"  {name}: {escape(fact)}")
    table = new_table("", "slot", "dtype", "shape", "size", "file")
    for slot, tensor in call.tensors.items():
        file = tensor.file.url.rpartition("/")[2] if tensor.file else tensor.reason or ""
        table.add_row(slot, *kind_of(tensor), size_text(tensor.size), escape(file))
    console.print(table)


def kind_of(tensor: Tensor) -> tuple[str, str]:
    """The dtype and the shape of a tensor."""
    try:
        return tensor.dtype, "x".join(map(str, tensor.shape)) or "scalar"
    except MissingTensorError:
        return "?", "?"


def statistics_cells(name: str, tensor: Tensor, statistics: Statistics) -> dict[str, str]:
    """A row of the table that `stats` prints."""
    dtype, shape = kind_of(tensor)
    numbers = {
        "min": statistics.minimum,
        "max": statistics.maximum,
        "mean": statistics.mean,
        "norm": statistics.norm,
    }
    counts = {"zeros": statistics.zeros, "NaN": statistics.nans, "Inf": statistics.infinities}
    return {
        "tensor": escape(name),
        "dtype": dtype,
        "shape": shape,
        **{column: f"{number:.4g}" for column, number in numbers.items()},
        **{column: str(count) for column, count in counts.items()},
    }


def print_comparison(console: Console, comparison: Comparison, most: int) -> None:
    """The verdict, then the calls in execution order, the first made error on top."""
    verdict = comparison.verdict
    say(console, f"{coloured(verdict.kind)}: {escape(verdict.text)}")
    differing = [result for result in comparison.results if result.role != "agrees"]
    shown = [] if verdict.call is None else [verdict.call]
    shown += [result for result in differing if result is not verdict.call]
    if shown:
        rows = [_cells(result) for result in shown[:most]]
        print_rows(console, "What does not agree, in execution order", rows)
    if len(shown) > most:
        say(console, f"… and {len(shown) - most} more; --all shows them")
    print_account(console, comparison)


def print_account(console: Console, comparison: Comparison) -> None:
    """How the pairs were found, what has no partner, and what is missing."""
    rules = Counter(result.pair.rule for result in comparison.results)
    roles = Counter(result.role for result in comparison.results)
    told = ", ".join(f"{count} {role}" for role, count in roles.items())
    how = ", ".join(f"{count} by {rule}" for rule, count in rules.items())
    say(console, f"{len(comparison.results)} pairs ({how}): {told}")
    for side, calls in (("golden", comparison.only_golden), ("target", comparison.only_target)):
        if calls:
            names = ", ".join(escape(str(call)) for call in calls[:3])
            say(console, f"only in {side}: {len(calls)}, as {names}")
    print_notes(console, comparison.notes, "Nothing is missing.")


def _cells(result: CallResult) -> dict[str, str]:
    call, output = result.pair.target, result.worst_output
    metrics = output.metrics if output else None
    return {
        "": coloured(result.role),
        "call": escape(f"{call.step} {call.node}"),
        "operator": call.target,
        "scope": escape(call.scope or ""),
        "source": escape(source_text(call)),
        "input error": error_text(result, inputs=True),
        "output error": error_text(result, inputs=False),
        "beyond": f"{metrics.share_beyond:.1%}" if metrics else "?",
    }


def source_text(call: Call) -> str:
    """The line of user code, short."""
    source = call.source
    return f"{os.path.basename(str(source['file']))}:{source['line']}" if source else ""


def error_text(result: CallResult, inputs: bool) -> str:
    """The largest error among a call's inputs, or its outputs."""
    worst = result.worst_input if inputs else result.worst_output
    if worst is None:
        return "-"
    if worst.metrics is None:
        return worst.agreement
    if worst.metrics.nan_mismatches:
        return "NaN"
    if worst.metrics.infinity_mismatches:
        return "Inf"
    return "0" if worst.metrics.equal else f"{worst.metrics.max_relative:.1e}"


def print_replays(console: Console, replays: Sequence[Replay], most: int) -> None:
    """Bugs first, then what cannot be told; the rest as a number."""
    order: tuple[Verdict, ...] = ("bug", "cannot", "rounding")
    counts = Counter(replayed.verdict for replayed in replays)
    shown = [each for verdict in order for each in replays if each.verdict == verdict]
    shown = shown[:most]
    rows = [
        {
            "": coloured(each.verdict),
            "call": escape(f"{each.graph}/{each.step} {each.node}"),
            "operator": each.target,
            "dumped error": f"{each.dumped.max_relative:.1e}" if each.dumped else "-",
            "error here": f"{each.rerun.max_relative:.1e}" if each.rerun else "-",
            "why": escape(each.reason),
        }
        for each in shown
    ]
    print_rows(console, "", rows)
    told = ", ".join(f"{counts[verdict]} {verdict}" for verdict in order if counts[verdict])
    calls = "1 call" if len(replays) == 1 else f"{len(replays)} calls"
    say(console, f"{calls}: {told or 'none'}")


def size_text(size: int) -> str:
    """Bytes for people."""
    value = float(size)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"
