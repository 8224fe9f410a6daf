"""The keeper that saves each value as a file."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING, Any

from torchair_scope.store import layout
from torchair_scope.store.arrays import Array, Description, UnsavableTensorError, to_numpy
from torchair_scope.store.device import Transfers
from torchair_scope.store.failures import report
from torchair_scope.store.npy import write_npy

if TYPE_CHECKING:
    from torchair_scope.store.writer import Call, Step

_FULL = (errno.ENOSPC, errno.EDQUOT)


class Files:
    """Saves the values of one step's calls as files in the step's folder; a `Keeper`."""

    def __init__(self, step: Step) -> None:
        self._step = step
        self._transfers = Transfers()
        self._stopped: str | None = None

    def keep_tensor(self, call: Call, slot: str, tensor: Any, description: Description) -> None:
        """Write a tensor; one on a device once its copy has arrived."""
        copy = self._transfers.start(tensor)
        if copy is None:
            self._write_tensor(call, slot, tensor)
        else:
            call.promise(slot)
            self._transfers.then(lambda: self._write_tensor(call, slot, copy))

    def keep_numbers(self, call: Call, slot: str, array: Array) -> None:
        """Write numbers."""
        self._write(call, slot, array, is_tensor=False)

    def finish(self) -> None:
        """Wait for the devices."""
        self._transfers.wait()

    def _write_tensor(self, call: Call, slot: str, tensor: Any) -> None:
        try:
            array = to_numpy(tensor)
        except UnsavableTensorError as error:
            call.is_missing(slot, str(error))
            self._step.run.rank_folder.say_once(
                str(error),
                f"{slot} of {call.node} ({call.target}, scope {call.facts.get('scope')}) is not "
                f"saved: {error}. Later ones of this kind are listed in the manifest only",
            )
        else:
            self._write(call, slot, array, is_tensor=True)

    def _write(self, call: Call, slot: str, array: Array, *, is_tensor: bool) -> None:
        name = layout.file_name(call.stem, slot, call.stamp)
        written = self._write_file(name, array)
        if isinstance(written, int):
            call.has_file(slot, name, written, is_tensor=is_tensor)
        else:
            call.is_missing(slot, written, name)

    def _write_file(self, name: str, array: Array) -> int | str:
        """Write one file and give its size; the reason if it is not there afterwards."""
        if self._stopped is not None:
            return self._stopped
        step = self._step
        path = os.path.join(step.folder, name)
        try:
            step.run.rank_folder.check_owner()
            return write_npy(step.folder, name, array)
        except OSError as error:
            number = error.errno or errno.EIO
            reason = os.strerror(number)
            if number in _FULL:
                self._stopped = reason
                step.run.rank_folder.disk_full = True
            step.problems.append(f"{step.name}/{name}: {reason}")
            report(step.run, OSError(number, reason, path), path)
            return reason
