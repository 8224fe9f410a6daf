"""The statistics of a step's tensors: a row each in the step's `stats.csv`."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from torchair_scope.store.arrays import (
    Array,
    Description,
    UnsavableTensorError,
    is_strided,
    named_as_unsavable,
    plain_tensor,
)
from torchair_scope.store.identity import Known
from torchair_scope.store.measuring import (
    Measured,
    in_memory_order,
    measure,
    rearranged,
    results,
)
from torchair_scope.store.npy import Folder, write_bytes
from torchair_scope.store.stand_in import stands_for
from torchair_scope.store.statistics import STATISTICS, Statistics

if TYPE_CHECKING:
    from torchair_scope.store.files import Pace
    from torchair_scope.store.writer import Call, Step

FILE = "stats.csv"
_CALL = ("order", "node", "target", "scope")
_TENSOR = ("slot", "dtype", "shape", "stride", "device")
COLUMNS = (*_CALL, *_TENSOR, *STATISTICS)

Row = dict[str, str]


class StatisticsTable:
    """Measures the tensors of one step's calls; a `Keeper`. Numbers are in the call's record."""

    def __init__(self, step: Step, pace: Pace) -> None:
        self._step = step
        self._announced = pace.announced
        self._known: Known = step.run.rank_folder.measured
        self._rows: list[tuple[Row, Measured]] = []

    def keep_tensor(self, call: Call, slot: str, tensor: Any, description: Description) -> None:
        """Measure a tensor, where it is."""
        try:
            found = self._measured(tensor)
        except UnsavableTensorError as error:
            call.is_missing(slot, str(error))
            self._step.run.rank_folder.say_once(
                str(error),
                f"{slot} of {call.node} ({call.target}, scope {call.facts.get('scope')}) is not "
                f"measured: {error}. Later ones of this kind are listed in the manifest only",
            )
            return
        call.has_statistics(slot)
        self._rows.append((_facts(call, slot, description), found))

    def keep_again(self, call: Call, slot: str, tensor: Any) -> Description | None:
        """Measure it as any other."""
        return None

    def keep_numbers(self, call: Call, slot: str, array: Array) -> None:
        """Leave numbers to the record."""

    def finish(self) -> None:
        """Write the rows, after those that the step's file has.

        **Raises:** `OSError` if that fails.
        """
        rows, self._rows = self._rows, []
        if not rows:
            return
        self._known.forget_freed()
        self._step.run.rank_folder.check_owner()
        found = results([measured for _, measured in rows])
        folder = Folder(self._step.folder)
        path = os.path.join(folder.path, FILE)
        written = [
            {**facts, **_texts(statistics)}
            for (facts, _), statistics in zip(rows, found, strict=True)
        ]
        earlier = read_rows(path) if os.path.exists(path) else []
        try:
            write_bytes(folder, FILE, _as_csv([*earlier, *written]))
        finally:
            folder.close()

    def _measured(self, tensor: Any) -> Measured:
        """Measure a tensor, unless that was done, and nothing has written to it since."""
        original = stands_for(tensor)
        if original is not None and original.measured is not None:
            return original.measured
        with named_as_unsavable(tensor):
            plain = plain_tensor(tensor)
        in_row = in_memory_order(plain) if is_strided(plain) and plain.numel() else None
        if in_row is None:
            return measure(plain)
        found = self._of_memory(in_row)
        return found if plain.is_contiguous() else self._rearranged(plain, found)

    def _of_memory(self, in_row: torch.Tensor) -> Measured:
        """Measure a stretch of memory: views of the same elements in the same order are one."""
        sighting = self._known.find(in_row, self._step)
        hint: Measured | None = sighting.value if sighting is not None else None
        if hint and self._announced and sighting and sighting.step is self._step:
            return hint
        found = measure(in_row, hint)
        self._known.add(in_row, self._step, found)
        return found

    def _rearranged(self, plain: torch.Tensor, in_row: Measured) -> Measured:
        """What is in a view with another order, given what is in its memory."""
        sighting = self._known.find(plain, self._step)
        if sighting is not None:
            earlier: Measured = sighting.value[0]
            known: Measured = sighting.value[1]
            if earlier.is_certainly(in_row):
                return known
        found = rearranged(in_row, plain)
        self._known.add(plain, self._step, (in_row, found))
        return found


def _facts(call: Call, slot: str, description: Description) -> Row:
    return {
        "order": str(call.order),
        "node": call.node,
        "target": call.target,
        "scope": call.facts.get("scope") or "",
        "slot": slot,
        "dtype": str(description.get("dtype", "")).removeprefix("torch."),
        "shape": "x".join(map(str, description.get("shape", ()))),
        "stride": "x".join(map(str, description.get("stride", ()))),
        "device": str(description.get("device", "")),
    }


def _texts(statistics: Statistics) -> Row:
    """Numbers as they are read back exactly; an undefined one is empty."""
    return {name: _text(getattr(statistics, name)) for name in STATISTICS}


def _text(value: Any) -> str:
    return "" if value != value else str(value)


def _as_csv(rows: Iterable[Mapping[str, str]]) -> bytes:
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(sorted(rows, key=lambda row: int(row["order"])))
    return text.getvalue().encode()


def read_rows(path: str) -> list[Row]:
    """Read the rows of a `stats.csv`."""
    with open(path, newline="", encoding="utf-8") as file:
        return parse_rows(file.read())


def parse_rows(text: str) -> list[Row]:
    """Give the rows of the text of a `stats.csv`."""
    return list(csv.DictReader(io.StringIO(text)))


def statistics_in(row: Row) -> Statistics:
    """Give the statistics that a row has.

    **Raises:** `KeyError` or `ValueError` if the row is cut.
    """
    values: dict[str, Any] = {}
    for name, kind in Statistics.__annotations__.items():
        text = row[name]
        values[name] = (
            text if kind == "str" else int(text) if kind == "int" else float(text or "nan")
        )
    return Statistics(**values)
