"""Read a dump: records, arguments and outputs as torch objects, and what is wrong with it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from torchair_scope.store import layout, statistics_table
from torchair_scope.store.arrays import to_tensor
from torchair_scope.store.manifest import Record, decode

Device = str | torch.device | None


class MissingTensorError(LookupError):
    """A tensor of a call is not on disk; the text says why."""


@dataclass(frozen=True)
class Call:
    """One execution of one node, read from its record."""

    folder: Path
    record: Record = field(repr=False)
    kind: layout.GraphKind = "graph"

    @property
    def graph(self) -> int:
        """The number of its graph."""
        return int(self.record["graph"])

    @property
    def step(self) -> int:
        """Which run of the graph it belongs to."""
        return int(self.record["step"])

    @property
    def order(self) -> int:
        """Its position in the step."""
        return int(self.record["order"])

    @property
    def node(self) -> str:
        """`fx.Node.name`."""
        return str(self.record["node"])

    @property
    def target(self) -> str:
        """The operator, as `aten.add.Tensor`."""
        return str(self.record["target"])

    @property
    def scope(self) -> str | None:
        """The scope path, `outer/inner`, if it has one."""
        scope = self.record.get("scope")
        return None if scope is None else str(scope)

    @property
    def finished(self) -> bool:
        """Whether the operator returned."""
        return not self.record.get("unfinished", False)

    @property
    def input_files(self) -> dict[str, Path]:
        """Files of the arguments by slot, as `INPUT.0`, `INPUT.1.0` or `KWARG.weight`."""
        return self._files("INPUT.", "KWARG.")

    @property
    def output_files(self) -> dict[str, Path]:
        """Files of the results by slot, as `OUTPUT.0`; also those of changed arguments."""
        return self._files("OUTPUT.", "MUTATED.")

    def load_args(self, device: Device = None) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Give the arguments as the operator got them.

            >>> import torch, torchair_scope as torchair
            >>> from torchair_scope.store.reader import read
            >>> options = {"path": "./dump", "backend": "aot_eager"}
            >>> @torch.compile(backend="torchair_scope", options=options)
            ... @torchair.dump_ops
            ... def shift(x):
            ...     return x + 1
            >>> result = shift(torch.zeros(3))
            >>> call = read("./dump").ranks[0].calls[0]
            >>> args, kwargs = call.load_args(device="cpu")
            >>> args
            (tensor([0., 0., 0.]), 1)
            >>> torch.equal(torch.ops.aten.add.Tensor(*args, **kwargs), call.load_outputs("cpu"))
            True

        **Arguments:**

        - `device`: where to put the tensors; the device that they were on if None. Device
            arguments of the call follow.

        **Raises:** `MissingTensorError` if a tensor is not on disk.
        """
        args = decode({"tuple": self._tree("args")}, self._loader(device), device)
        kwargs = self._tree("kwargs")
        return args, {k: decode(v, self._loader(device), device) for k, v in kwargs.items()}

    def load_outputs(self, device: Device = None) -> Any:
        """Give what the operator returned; arguments and errors as for `load_args`."""
        return decode(self._tree("outputs"), self._loader(device), device)

    def load_mutated(self, device: Device = None) -> dict[str, Any]:
        """Give the arguments, by name, that the operator wrote to and did not return, after it."""
        mutated = self.record.get("mutated", {})
        return {name: decode(v, self._loader(device), device) for name, v in mutated.items()}

    def _tree(self, key: str) -> Any:
        if key not in self.record:
            raise MissingTensorError(
                f"{self.node} ({self.target}) of graph {self.graph}, step {self.step} has no "
                f"{key} in its record: the operator did not return, or its values were not read"
            )
        return self.record[key]

    def _loader(self, device: Device) -> Any:
        def load(description: Record) -> torch.Tensor:
            if "sample" in description:
                raise MissingTensorError(
                    f"{description['slot']} of {self.node} is sampled: only a part of it, "
                    f"{description['sample']}, was saved"
                )
            array = np.load(self._file(description["slot"]), allow_pickle=False)
            return to_tensor(array, description, device)

        return load

    def _file(self, slot: str) -> Path:
        name = self.record["files"].get(slot)
        if name is None:
            reasons = [lost["reason"] for lost in self.record["missing"] if lost["slot"] == slot]
            if not reasons and "mode" in self.record:
                reasons = [f"only {self.record['mode']}s are dumped (mode)"]
            if not reasons and slot in self.record.get("statistics", ()):
                reasons = ["only its statistics are saved (data)"]
            raise MissingTensorError(f"{slot} of {self.node} was not saved: {reasons}")
        path = self._step_folder / str(name)
        if not path.exists():
            raise MissingTensorError(f"{slot} of {self.node}: {path} is gone")
        return path

    def _files(self, *beginnings: str) -> dict[str, Path]:
        files = self.record["files"].items()
        return {
            slot: self._step_folder / name for slot, name in files if slot.startswith(beginnings)
        }

    @property
    def _step_folder(self) -> Path:
        return self.folder / self.step_folder

    @property
    def step_folder(self) -> str:
        """The folder of its files in the rank folder, `graph_1/0`."""
        return layout.step_folder_name(self.graph, self.step, self.kind)


@dataclass(frozen=True)
class Rank:
    """The dump of one process."""

    folder: Path
    run: Record
    graphs: list[Record] = field(repr=False)
    steps: list[Record] = field(repr=False)
    calls: list[Call] = field(repr=False)
    _unreadable: list[str] = field(repr=False)
    account: list[Record] = field(repr=False, default_factory=list)
    """What became of each scope, as it was last told: at the end of the process, or on demand."""

    @cached_property
    def problems(self) -> list[str]:
        """What is cut, missing or left over, one sentence each; empty for a sound dump."""
        return [*self._unreadable, *_record_problems(self), *_file_problems(self)]


@dataclass(frozen=True)
class Dump:
    """A dump folder: one `Rank` for each process."""

    folder: Path
    ranks: list[Rank]

    @property
    def problems(self) -> list[str]:
        """The problems of all ranks, each with its folder's name."""
        return [f"{rank.folder.name}: {text}" for rank in self.ranks for text in rank.problems]


def read(path: str | os.PathLike[str]) -> Dump:
    """Read a dump folder, or one rank folder of it.

        >>> import torch, torchair_scope as torchair
        >>> from torchair_scope.store.reader import read
        >>> options = {"path": "./dump", "backend": "aot_eager"}
        >>> @torch.compile(backend="torchair_scope", options=options)
        ... @torchair.dump_ops
        ... def shift(x):
        ...     return x.sin() + 1
        >>> result = shift(torch.zeros(3))
        >>> for call in read("./dump").ranks[0].calls:
        ...     print(call.scope, call.node, call.target, [*call.input_files, *call.output_files])
        shift sin aten.sin.default ['INPUT.0', 'OUTPUT.0']
        shift add aten.add.Tensor ['INPUT.0', 'INPUT.1', 'OUTPUT.0']

    Of a dump folder, the ranks of the last run are read; a folder that was moved aside, or that
    another process wrote beside it, is read when its own path is given. A dump of a killed process
    can be read; see `Rank.problems`.

    **Raises:** `FileNotFoundError` if there is no rank folder with a manifest.
    """
    folder = Path(path)
    if (folder / layout.MANIFEST).is_file():
        return Dump(folder, [_read_rank(folder)])
    found = {
        position[::-1]: child
        for child in (folder.iterdir() if folder.is_dir() else ())
        if (position := layout.parse_rank_folder_name(child.name)) is not None
        and (child / layout.MANIFEST).is_file()
    }
    if not found:
        raise FileNotFoundError(
            f"{folder} is no dump: expected a folder with {layout.MANIFEST}, or one that holds "
            f"folders such as {layout.rank_folder_name(0, 1)} with it"
        )
    return Dump(folder, [_read_rank(found[position]) for position in sorted(found)])


def _read_rank(folder: Path) -> Rank:
    unreadable: list[str] = []
    records: dict[str, list[Record]] = {"run": [], "graph": [], "step": [], "call": []}
    for record in _records(folder / layout.MANIFEST, unreadable):
        records.setdefault(str(record.get("record")), []).append(record)
    kinds = {graph["graph"]: graph.get("kind", "graph") for graph in records["graph"]}
    calls = [Call(folder, call, kinds.get(call["graph"], "graph")) for call in records["call"]]
    calls.sort(key=lambda call: (call.graph, call.step, call.order))
    run = records["run"][0] if records["run"] else {}
    rows = records.get("account", [])
    account = list({(row["scope"], row["opened_at"]): row for row in rows}.values())
    return Rank(folder, run, records["graph"], records["step"], calls, unreadable, account)


def _records(manifest: Path, unreadable: list[str]) -> Iterator[Record]:
    lines = manifest.read_bytes().split(b"\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError:
            cut = "the last line is cut" if number == len(lines) else f"line {number} is not JSON"
            unreadable.append(f"{layout.MANIFEST}: {cut}")
            continue
        if isinstance(record, dict):
            yield record
        else:
            unreadable.append(f"{layout.MANIFEST}: line {number} is not a record")


def _record_problems(rank: Rank) -> Iterator[str]:
    if not rank.run:
        yield f"{layout.MANIFEST}: the run record is missing"
    for call in rank.calls:
        where = f"graph {call.graph}, step {call.step}, {call.node}"
        if not call.finished:
            yield f"{where}: the operator did not return"
        for lost in call.record.get("missing", ()):
            yield f"{where}: {lost['slot']} was not saved: {lost['reason']}"
    ended = {(step["graph"], step["step"]) for step in rank.steps}
    for graph, step in sorted({(call.graph, call.step) for call in rank.calls} - ended):
        yield f"graph {graph}, step {step} did not end: it has no step record"
    for record in rank.steps:
        if not record["complete"]:
            reasons = "; ".join(record["problems"]) or "see its calls"
            yield f"graph {record['graph']}, step {record['step']} is incomplete: {reasons}"


def _file_problems(rank: Rank) -> Iterator[str]:
    claimed: set[str] = set()
    for call in rank.calls:
        files = call.record.get("files", {}).values()
        claimed.update(f"{call.step_folder}/{name}" for name in files)
        if call.record.get("statistics"):
            claimed.add(f"{call.step_folder}/{statistics_table.FILE}")
    present = {
        f"{step.parent.name}/{step.name}/{entry}"
        for step in (*rank.folder.glob("graph_*/*"), *rank.folder.glob("eager_*/*"))
        if step.is_dir()
        for entry in os.listdir(step)
    }
    for name in sorted(claimed - present):
        yield f"{name} is missing"
    for name in sorted(present - claimed):
        yield f"{name} is in no call record: the call did not end, or the file is not ours"
