"""Results as tables, for people."""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from torchair_scope.analysis.as_json import bytes_of
from torchair_scope.analysis.compare import Comparison
from torchair_scope.analysis.dump import Call, Dump
from torchair_scope.analysis.replay import Replay, Verdict
from torchair_scope.analysis.statistics import Statistics
from torchair_scope.analysis.tensors import MissingTensorError, Tensor
from torchair_scope.analysis.verdict import CallResult

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


def new_table(title: str, *columns: str) -> Table:
    """An empty table in the style of all of them."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def coloured(word: str) -> str:
    """A role or a verdict in its colour."""
    colour = _COLOURS.get(word)
    return f"[{colour}]{word}[/]" if colour else word


def print_dump(console: Console, dump: Dump) -> None:
    """What is in a dump, and the account of what is missing."""
    for rank in dump.ranks:
        versions = rank.run.get("versions", {})
        told = ", ".join(f"{name} {version}" for name, version in versions.items())
        console.print(
            f"rank {rank.number} of {rank.world_size}: {rank.folder.url}", highlight=False
        )
        if told:
            console.print(f"  {told}", highlight=False)
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
    scopes = new_table("Scopes", "scope", "calls", "size")
    by_scope: dict[str | None, list[Call]] = defaultdict(list)
    for call in dump.calls():
        by_scope[call.scope].append(call)
    for scope, calls in sorted(by_scope.items(), key=lambda item: str(item[0])):
        scopes.add_row(escape(scope or "(not known)"), str(len(calls)), size_text(bytes_of(calls)))
    console.print(scopes)
    print_notes(console, dump.problems, "Nothing is missing.")


def print_notes(console: Console, notes: Sequence[str], otherwise: str, most: int = 20) -> None:
    """What is missing, one line each; the rest as a number."""
    for note in notes[:most]:
        console.print(f"[magenta]![/] {escape(note)}", highlight=False)
    if len(notes) > most:
        console.print(f"… and {len(notes) - most} more; --json has all")
    if not notes:
        console.print(otherwise)


def print_call(console: Console, call: Call) -> None:
    """One call: where it comes from, its arguments and its tensors."""
    console.print(f"[bold]{escape(str(call))}[/]", highlight=False)
    source = call.source
    facts = {
        "scope": call.scope,
        "module": call.module,
        "source": f"{source['file']}:{source['line']}  {source['code']}" if source else None,
    }
    for name, fact in facts.items():
        if fact:
            console.print(f"  {name}: {escape(fact)}", highlight=False)
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


def add_statistics(table: Table, name: str, tensor: Tensor, statistics: Statistics) -> None:
    """A row of the table that `stats` prints."""
    numbers = (statistics.minimum, statistics.maximum, statistics.mean, statistics.norm)
    counts = (statistics.zeros, statistics.nans, statistics.infinities)
    table.add_row(
        name, *kind_of(tensor), *(f"{number:.4g}" for number in numbers), *map(str, counts)
    )


def print_comparison(console: Console, comparison: Comparison, most: int) -> None:
    """The verdict, then the calls in execution order, the first made error on top."""
    verdict = comparison.verdict
    told = f"{coloured(verdict.kind)}: {escape(verdict.text)}"
    console.print(told, highlight=False, soft_wrap=True)
    differing = [result for result in comparison.results if result.role != "agrees"]
    shown = [] if verdict.call is None else [verdict.call]
    shown += [result for result in differing if result is not verdict.call]
    if shown:
        table = new_table(
            "What does not agree, in execution order",
            *("", "call", "operator", "scope", "source", "input error", "output error", "beyond"),
        )
        for result in shown[:most]:
            table.add_row(*_cells(result))
        console.print(table)
    if len(shown) > most:
        console.print(f"… and {len(shown) - most} more; --all shows them")
    print_account(console, comparison)


def print_account(console: Console, comparison: Comparison) -> None:
    """How the pairs were found, what has no partner, and what is missing."""
    rules = Counter(result.pair.rule for result in comparison.results)
    roles = Counter(result.role for result in comparison.results)
    told = ", ".join(f"{count} {role}" for role, count in roles.items())
    how = ", ".join(f"{count} by {rule}" for rule, count in rules.items())
    console.print(f"{len(comparison.results)} pairs ({how}): {told}", highlight=False)
    for side, calls in (("golden", comparison.only_golden), ("target", comparison.only_target)):
        if calls:
            names = ", ".join(escape(str(call)) for call in calls[:3])
            console.print(f"only in {side}: {len(calls)}, as {names}", highlight=False)
    print_notes(console, comparison.notes, "Nothing is missing.")


def _cells(result: CallResult) -> tuple[str, ...]:
    call, output = result.pair.target, result.worst_output
    metrics = output.metrics if output else None
    beyond = f"{metrics.share_beyond:.1%}" if metrics else "?"
    place = f"{call.step} {call.node}"
    errors = error_text(result, inputs=True), error_text(result, inputs=False)
    return (
        coloured(result.role),
        escape(place),
        call.target,
        escape(call.scope or ""),
        escape(source_text(call)),
        *errors,
        beyond,
    )


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
    table = new_table("", "", "call", "operator", "dumped error", "error here", "why")
    for each in shown:
        dumped = f"{each.dumped.max_relative:.1e}" if each.dumped else "-"
        rerun = f"{each.rerun.max_relative:.1e}" if each.rerun else "-"
        place = f"{each.graph}/{each.step} {each.node}"
        table.add_row(
            coloured(each.verdict), escape(place), each.target, dumped, rerun, escape(each.reason)
        )
    console.print(table)
    told = ", ".join(f"{counts[verdict]} {verdict}" for verdict in order if counts[verdict])
    console.print(f"{len(replays)} calls: {told or 'none'}", highlight=False)


def size_text(size: int) -> str:
    """Bytes for people."""
    value = float(size)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"
