"""What became of each scope: as the run has told, or as far as its calls tell."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchair_scope.analysis.dump import Call, Rank

NOT_TOLD = (
    "the run has told no account of it: it goes on, or was killed. What is missing is not known"
)


@dataclass(frozen=True)
class Row:
    """One scope of one rank; None is what is not known.

    Attributes:
        rank: of the process.
        scope: its path; None for calls of no known scope.
        opened_at: file and line.
        tagged: operators that the scope was around.
        reached: those of them that reached the compiler, as ATen operators.
        dumped: how many of the tagged ones are dumped.
        calls: calls in the dump.
        tensors: tensors in files.
        bytes: size of the files.
        missing: one sentence each.
    """

    rank: int
    scope: str | None
    opened_at: str | None
    tagged: int | None
    reached: int | None
    dumped: int | None
    calls: int
    tensors: int
    bytes: int
    missing: tuple[str, ...]


def account_of(rank: Rank) -> Iterator[Row]:
    """A row for each scope that was entered, in that order, and for each that has calls."""
    told = {record["scope"] for record in rank.account}
    for record in rank.account:
        yield _told(rank, record)
    untold: dict[tuple[str | None, str | None], list[Call]] = defaultdict(list)
    for call in rank.calls:
        if call.scope not in told and not (call.scope is None and told):
            untold[call.scope, (call.record or {}).get("opened_at")].append(call)
    for (scope, opened_at), calls in sorted(untold.items(), key=str):
        yield _counted(rank, scope, opened_at, calls)


def _told(rank: Rank, record: dict[str, Any]) -> Row:
    names = ("scope", "opened_at", "tagged", "reached", "dumped", "calls", "tensors", "bytes")
    known = {name: record[name] for name in names}
    return Row(rank=rank.number, **known, missing=tuple(_sentences(record)))


def _sentences(record: dict[str, Any]) -> Iterator[str]:
    if record.get("remark"):
        yield str(record["remark"])
    if record.get("uncompiled"):
        yield f"ran uncompiled: {record['uncompiled']}"
    for reason, count in record["missing"].items():
        yield f"{count} not dumped: {reason}"
    for reason, count in record["missing_tensors"].items():
        yield f"{count} tensors not saved: {reason}"


def _counted(rank: Rank, scope: str | None, opened_at: str | None, calls: list[Call]) -> Row:
    files = [tensor for call in calls for tensor in call.tensors.values() if tensor.file]
    return Row(
        rank=rank.number,
        scope=scope,
        opened_at=opened_at,
        tagged=None,
        reached=None,
        dumped=None,
        calls=len(calls),
        tensors=sum(bool(file.description) for file in files),  # Others are numbers.
        bytes=sum(file.size for file in files),
        missing=(NOT_TOLD,),
    )
