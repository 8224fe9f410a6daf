"""The account as a user gets it: on demand, and when the process ends."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import warnings
from dataclasses import replace

from torchair_scope.capture import account as accounts
from torchair_scope.capture.account import Summary, account, as_record, has_losses
from torchair_scope.store.run import DumpWarning, RankFolder, complete_steps, open_folders


def summary() -> Summary:
    """What became of each scope that was entered in this process so far.

        >>> import torch, torchair_scope as torchair
        >>> with torchair.scope.data_dump("shift", path="./dump"):
        ...     y = torch.zeros(3) + 1
        >>> row = torchair.scope.summary().rows[-1]
        >>> row.scope, row.tagged, row.dumped, row.missing
        ('shift', 2, 2, {})

    The numbers of a row add up: `tagged == dumped + sum(missing.values())`. An operator counts
    once however often a compiled graph runs it, and each time that it runs in eager code. The
    same is written to the manifest, here and when the process ends, and printed then if something
    is missing.

    Returns:
        The rows, a scope each; as text a table.

    Warns:
        DumpWarning: once for each scope that is empty or of which nothing is saved.
    """
    complete_steps()
    current = _current()
    _write_to_manifests(current)
    for row, entry in zip(current.rows, account.entries(), strict=False):
        if row.remark is not None and not entry.is_remarked_on:
            entry.is_remarked_on = True
            warnings.warn(
                f"scope {row.scope!r} opened at {row.opened_at}: {row.remark}",
                DumpWarning,
                stacklevel=2,
            )
    return current


def _current() -> Summary:
    remarks = [f"{f.path}: {f.links.remark}" for f in open_folders() if f.links.remark]
    return replace(accounts.summary(), remarks=remarks)


def _at_exit() -> None:
    with contextlib.suppress(OSError):
        complete_steps()
    entries = account.entries()
    current = _current()
    _write_to_manifests(current)
    if any(has_losses(entry, entries) for entry in entries):
        print(f"torchair_scope: not all that lies in scopes is dumped\n{current}", file=sys.stderr)


def _write_to_manifests(current: Summary) -> None:
    """Write the rows; of one scope the last counts."""
    for folder in open_folders():
        with contextlib.suppress(OSError):
            _write(folder, current)


def _write(folder: RankFolder, current: Summary) -> None:
    if folder.pid != os.getpid() or not folder.manifest.is_in_place():
        return
    for row, entry in zip(current.rows, account.entries(), strict=False):
        if not entry.folders or folder.path in entry.folders:
            folder.append(as_record(row))


atexit.register(_at_exit)
