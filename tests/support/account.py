"""The account of what a test ran: its numbers add up, and are those of the dump."""

from __future__ import annotations

from torchair_scope.capture import account
from torchair_scope.capture.account import Row
from torchair_scope.store.reader import Dump
from torchair_scope.store.run import complete_steps


def rows() -> list[Row]:
    """The account as it stands, without the warnings that `summary` gives."""
    complete_steps()
    return account.summary().rows


def assert_adds_up(rows: list[Row], dump: Dump) -> None:
    """Each operator is dumped or has a reason; calls and bytes are those of the manifest."""
    for row in rows:
        assert row.tagged == row.dumped + sum(row.missing.values()), row
        assert row.dumped <= row.tagged, row
    calls = [call for rank in dump.ranks for call in rank.calls]
    assert sum(row.calls for row in rows) == len(calls)
    for row in rows:
        own = [call for call in calls if call.scope == row.scope]
        own = [call for call in own if call.record["opened_at"] in (row.opened_at, "unknown")]
        files = [
            p for call in own for p in (*call.input_files.values(), *call.output_files.values())
        ]
        assert row.calls == len(own), row
        assert row.bytes == sum(path.stat().st_size for path in files), row
