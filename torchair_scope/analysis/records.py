"""Read a rank folder: from its manifest, and from the names of the files that no record has."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any, NamedTuple

from torchair_scope.analysis.dump import Call, Graph, Rank, Record, Step
from torchair_scope.analysis.names import natural, parse_file_name, parse_graph_name
from torchair_scope.analysis.source import Entry, Folder
from torchair_scope.analysis.tensors import Tensor, descriptions
from torchair_scope.store import layout, statistics_table
from torchair_scope.store.statistics import Statistics


class StepKey(NamedTuple):
    """Which step of which graph."""

    kind: str
    graph: int
    step: int


def holds_calls(folder: Folder) -> bool:
    """Whether a folder is a rank folder: it has a manifest, or graphs."""
    return any(
        entry.name == layout.MANIFEST if not entry.is_folder else parse_graph_name(entry.name)
        for entry in folder.entries()
    )


def read_rank(folder: Folder) -> Rank:
    """Read a rank folder as far as that is possible."""
    lines, unreadable = _manifest(folder)
    position = layout.parse_rank_folder_name(folder.name.partition(".")[0])
    run = lines["run"][0] if lines["run"] else {}
    number, world_size = position or (int(run.get("rank", 0)), int(run.get("world_size", 1)))
    # A run may tell of a scope more than once; the last time counts.
    rows = {(str(row["scope"]), str(row["opened_at"])): row for row in lines["account"]}
    rank = Rank(folder, number, world_size, run, unreadable=unreadable, account=list(rows.values()))
    graph_records = {int(record["graph"]): record for record in lines["graph"]}
    files = _files(folder)
    records = _call_records(lines["call"], graph_records, files)
    step_records = _step_records(lines["step"])
    graphs: dict[tuple[str, int], Graph] = {}
    for key in sorted({*files, *records}, key=lambda key: (key.graph, key.kind, key.step)):
        graph = graphs.setdefault(
            key[:2], Graph(rank, key.kind, key.graph, graph_records.get(key.graph, {}))
        )
        inside = folder.folder(f"{key.kind}_{key.graph}/{key.step}")
        step = Step(graph, key.step, inside, record=step_records.get(key[1:]))
        step.calls.extend(_calls(step, records.get(key, []), files.get(key, {})))
        graph.steps.append(step)
    rank.graphs.extend(graphs.values())
    return rank


def _step_records(lines: list[Record]) -> dict[tuple[int, int], Record]:
    """One record for each step: scopes with a trigger of their own have written theirs."""
    found: dict[tuple[int, int], Record] = {}
    for line in lines:
        key = int(line["graph"]), int(line["step"])
        other = found.get(key)
        if other is None:
            found[key] = line
            continue
        complete = bool(line.get("complete", True) and other.get("complete", True))
        problems = [*other.get("problems", ()), *line.get("problems", ())]
        calls = int(line.get("calls", 0)) + int(other.get("calls", 0))
        found[key] = {**line, "complete": complete, "problems": problems, "calls": calls}
    return found


def _rows(step: Step, records: list[Record]) -> dict[tuple[int, str], Statistics]:
    """The statistics of a step's tensors, by the call's order and the slot."""
    if not any(record.get("statistics") for record in records):
        return {}
    found = {}
    try:
        text = step.folder.file(statistics_table.FILE).read().decode()
        for row in statistics_table.parse_rows(text):
            key = int(row["order"]), row["slot"]
            found[key] = statistics_table.statistics_in(row)
    except (OSError, ValueError, KeyError, TypeError) as error:
        step.graph.rank.unreadable.append(f"{step}/{statistics_table.FILE}: {error}")
    return found


def _manifest(folder: Folder) -> tuple[dict[str, list[Record]], list[str]]:
    """The records by kind, and what of the manifest cannot be read."""
    found: dict[str, list[Record]] = defaultdict(list)
    unreadable: list[str] = []
    try:
        lines = folder.file(layout.MANIFEST).read().split(b"\n")
    except OSError as error:
        gone = isinstance(error, FileNotFoundError)
        what = f"there is no {layout.MANIFEST}" if gone else f"{layout.MANIFEST}: {error.strerror}"
        return found, [f"{what}: what the file names tell is all there is"]
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            found[_checked(record)].append(record)
        except (ValueError, TypeError, KeyError):
            what = "the last line is cut" if number == len(lines) else f"line {number} is no record"
            unreadable.append(f"{layout.MANIFEST}: {what}")
    if not found["run"]:
        unreadable.append(f"{layout.MANIFEST}: the run record is missing")
    return found, unreadable


_NEEDED: dict[str, dict[str, type]] = {
    "graph": {"graph": int},
    "step": {"graph": int, "step": int},
    "account": {
        **{"scope": str, "opened_at": str, "tagged": int, "reached": int, "dumped": int},
        **{"calls": int, "tensors": int, "bytes": int, "missing": dict, "missing_tensors": dict},
    },
    "call": {"graph": int, "step": int, "order": int, "node": str, "target": str},
}
_IF_THERE: dict[str, dict[str, type]] = {
    "graph": {"nodes": list},
    "step": {"problems": list},
    "call": {"args": list, "kwargs": dict, "files": dict, "missing": list},
}


def _checked(record: Any) -> str:
    """The kind of a record; an error if what its kind needs is not there, or something else."""
    kind = str(record["record"])
    for name, wanted in _NEEDED.get(kind, {}).items():
        if not isinstance(record[name], wanted):
            raise TypeError(name)
    for name, wanted in _IF_THERE.get(kind, {}).items():
        if name in record and not isinstance(record[name], wanted):
            raise TypeError(name)
    return kind


def _files(folder: Folder) -> dict[StepKey, dict[str, Entry]]:
    """The `.npy` files of each step by name."""
    found: dict[StepKey, dict[str, Entry]] = {}
    for graph in folder.entries():
        name = parse_graph_name(graph.name) if graph.is_folder else None
        if name is None:
            continue
        inside = folder.folder(graph.name)
        for step in inside.entries():
            if step.is_folder and step.name.isdecimal():
                entries = inside.folder(step.name).entries()
                found[StepKey(*name, int(step.name))] = {
                    entry.name: entry for entry in entries if entry.name.endswith(".npy")
                }
    return found


def _call_records(
    lines: list[Record], graphs: dict[int, Record], files: dict[StepKey, dict[str, Entry]]
) -> dict[StepKey, list[Record]]:
    found: dict[StepKey, list[Record]] = defaultdict(list)
    for line in lines:
        graph, step = int(line["graph"]), int(line["step"])
        kind = graphs.get(graph, {}).get("kind")
        if kind is None:  # the graph's record is lost, or of a version that has one kind only
            kind = "eager" if StepKey("eager", graph, step) in files else "graph"
        found[StepKey(str(kind), graph, step)].append(line)
    return found


def _calls(step: Step, records: list[Record], files: dict[str, Entry]) -> list[Call]:
    """The calls of a step: those of records, then those that only files tell of."""
    left = dict(files)
    rows = _rows(step, records)
    calls = []
    for record in sorted(records, key=lambda record: int(record["order"])):
        tensors = _tensors_of(step, record, files, rows)
        for name in record.get("files", {}).values():
            left.pop(name, None)
        names = str(record["node"]), str(record["target"])
        time = str(record.get("time", ""))
        calls.append(Call(step, int(record["order"]), *names, time, tensors, record))
    return calls + _calls_of_files(step, left, first=len(calls))


def _tensors_of(
    step: Step,
    record: Record,
    files: dict[str, Entry],
    rows: dict[tuple[int, str], Statistics],
) -> dict[str, Tensor]:
    described: dict[str, dict[str, Any]] = {}
    for part in ("args", "kwargs", "outputs"):
        described.update(descriptions(record.get(part)))
    named = {str(slot): str(name) for slot, name in record.get("files", {}).items()}
    reasons = {str(lost["slot"]): str(lost["reason"]) for lost in record.get("missing", ())}
    tensors = []
    for slot in {**named, **described, **reasons}:
        entry = files.get(named.get(slot, ""))
        file = step.folder.file(entry.name) if entry else None
        gone = f"the file {named[slot]} is gone" if slot in named else "it was not saved"
        row = rows.get((int(record["order"]), slot))
        gone = "only its statistics were saved" if row and slot not in named else gone
        reason = None if entry else reasons.get(slot, gone)
        size, identity = (entry.size, entry.identity) if entry else (0, None)
        described_as = described.get(slot, {})
        tensors.append(Tensor(slot, file, size, described_as, reason, identity, row))
    return in_slot_order(tensors)


def _calls_of_files(step: Step, files: dict[str, Entry], first: int) -> list[Call]:
    """Calls from file names: what belongs to one call has one node, target and time."""
    found: dict[tuple[str, str, str], list[Tensor]] = defaultdict(list)
    for name, entry in files.items():
        parsed = parse_file_name(name)
        if parsed is not None:
            file = step.folder.file(name)
            tensor = Tensor(parsed.slot, file, entry.size, identity=entry.identity)
            found[parsed.time, parsed.node, parsed.target].append(tensor)
    return [
        Call(step, first + position, node, target, time, in_slot_order(tensors))
        for position, ((time, node, target), tensors) in enumerate(sorted(found.items(), key=_key))
    ]


def _key(item: tuple[tuple[str, str, str], list[Tensor]]) -> Any:
    (time, node, target), _ = item
    return time, natural(node), target


def in_slot_order(tensors: list[Tensor]) -> dict[str, Tensor]:
    """Tensors by slot, INPUT.2 before INPUT.10."""
    return {tensor.slot: tensor for tensor in sorted(tensors, key=lambda each: natural(each.slot))}
