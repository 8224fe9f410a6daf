"""What writers do for a step: each value becomes a file, or a link to one."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from torchair_scope import _torch_private
from torchair_scope.store.arrays import Array, UnsavableTensorError, to_numpy
from torchair_scope.store.contents import Content, Value
from torchair_scope.store.device import Arrival
from torchair_scope.store.failures import report
from torchair_scope.store.identity import checksum
from torchair_scope.store.native import SmallFile
from torchair_scope.store.npy import Folder, Npy, make_small, write_npy
from torchair_scope.store.pool import Group, pool

if TYPE_CHECKING:
    from torchair_scope.store.writer import Call, Step

_FULL = (errno.ENOSPC, errno.EDQUOT)
INTERRUPTED = "the run was interrupted before it was written"
_NOT_WRITTEN = "not written"


class Slot(NamedTuple):
    """A slot of a call that is to have a file."""

    call: Call
    slot: str
    name: str
    is_tensor: bool = True

    def is_missing(self, reason: str) -> None:
        """Tell the call that there is no file."""
        self.call.is_missing(self.slot, reason, self.name)

    def has_file(self, size: int, written: int, content: Content) -> None:
        """Tell the call that there is one, and how many bytes had to be written for it."""
        self.call.has_file(
            self.slot,
            self.name,
            size,
            is_tensor=self.is_tensor,
            written=written,
            content=content.number,
        )


class StepFolder:
    """The files of one step, and what went wrong with them; writers come here."""

    def __init__(self, step: Step) -> None:
        self._step = step
        self.store = step.run.rank_folder
        self.group = Group()
        self._folder = Folder(step.folder)
        self._stopped: str | None = None
        self._failures: list[tuple[Exception, str]] = []
        self._remarks: dict[str, str] = {}

    def write(self, slot: Slot, value: Npy, content: Content) -> Content | str:
        """Write a new content for a slot; gives it, or the reason why it is not there."""
        reason = self._stopped
        if reason is not None:
            slot.is_missing(reason)
        else:
            try:
                size = write_npy(self._folder, slot.name, value)
            except OSError as error:
                reason = self._fails(slot, error)
            except Exception as error:
                reason = self.breaks(slot, error)
            else:
                slot.has_file(size, size, content)
                content.is_at(self.path_of(slot), size)
                return content
        content.lose()
        return reason

    def write_unlisted(self, slot: Slot, value: Npy) -> Content | str:
        """As `write`, of a content that is not to be found again."""
        return self.write(slot, value, self.store.contents.unlisted())

    def make_small(self, files: Sequence[SmallFile]) -> list[int] | None:
        """Make small files in one go; give the number of the error of each, 0 for none.

        None if that cannot be done: make each alone.
        """
        if self._stopped is not None or not self.store.links.can_link:
            return None
        try:
            return make_small(self._folder, files)
        except OSError:  # There can be no folder, which each file then says by its name.
            return None

    def path_of(self, slot: Slot) -> str:
        """Where the file of a slot is, or will be."""
        return f"{self._folder.path}/{slot.name}"

    def link(
        self, slot: Slot, content: Content, read: Callable[[], Npy] | None = None
    ) -> Content | str:
        """Give a slot the file of a content; if that is gone, what `read` gives is written."""
        try:
            written = self.store.links.make(content, self._folder, slot.name)
        except FileNotFoundError as error:
            content.lose()
            if read is None:
                return self._fails(slot, error)
            return self.write_unlisted(slot, read())
        except OSError as error:
            return self._fails(slot, error)
        slot.has_file(content.size, written, content)
        return content

    def link_as(
        self, slot: Slot, value: Value, read: Callable[[], Npy] | None = None
    ) -> Content | str:
        """Give a slot the file of a settled value; if that has none, as `link`, or the reason."""
        if value.content is not None:
            return self.link(slot, value.content, read)
        if read is not None:
            return self.write_unlisted(slot, read())
        reason = value.reason or _NOT_WRITTEN
        slot.is_missing(reason)
        return reason

    def _fails(self, slot: Slot, error: OSError) -> str:
        number = error.errno or errno.EIO
        reason = os.strerror(number)
        if number in _FULL:
            self._stopped = reason
            self.store.disk_full = True
        path = os.path.join(self._folder.path, slot.name)
        self._step.problems.append(f"{self._step.name}/{slot.name}: {reason}")
        self._failures.append((OSError(number, reason, path), path))
        slot.is_missing(reason)
        return reason

    def breaks(self, slot: Slot, error: Exception) -> str:
        """Something of ours went wrong; gives the reason for the slot."""
        reason = f"{type(error).__name__}: {error}"
        self._step.problems.append(reason)
        self._failures.append((error, self._folder.path))
        slot.is_missing(reason)
        return reason

    def is_unsavable(self, slot: Slot, error: UnsavableTensorError) -> None:
        """A tensor has no value that could be written."""
        call, reason = slot.call, str(error)
        call.is_missing(slot.slot, reason)
        self._remarks[reason] = (
            f"{slot.slot} of {call.node} ({call.target}, scope {call.facts.get('scope')}) is not "
            f"saved: {error}. Later ones of this kind are listed in the manifest only"
        )

    def say(self) -> None:
        """Warn of what writers came upon, or raise it: on the model's thread and not on theirs."""
        while self._remarks:
            key = next(iter(self._remarks))
            self.store.say_once(key, self._remarks.pop(key))
        while self._failures:
            report(self._step.run, *self._failures.pop(0))

    def close(self) -> None:
        """Close the folder."""
        self._folder.close()


@dataclass
class Source:
    """Where a value is read from.

    Args:
        data: an array, or a tensor that keeps its value until it is read.
        arrival: of a copy from a device, which has to be waited for.
        is_lent: whether it is the model's own tensor, and may be written to later.
        hint: the value that it most likely is.
        is_unwritten: whether the memory is as it was when it had that value, if that can be told.
        is_readable: whether the data is still what was handed over.
    """

    data: torch.Tensor | Array
    arrival: Arrival | None = None
    is_lent: bool = False
    hint: Value | None = None
    is_unwritten: Callable[[], bool] | None = None
    is_readable: bool = True

    def is_hint(self) -> bool:
        """Whether it is known, by no more than a reading of memory, to be that value."""
        return self.hint is not None and self.is_unwritten is not None and self.is_unwritten()

    def npy(self) -> Npy:
        """The value as its file has it."""
        if self.arrival is not None:
            self.arrival.wait()
        return Npy(to_numpy(self.data) if isinstance(self.data, torch.Tensor) else self.data)


_READ = Source(np.empty(0))


class Saving:
    """A `Job`: read a value, and write it unless the dump has it."""

    def __init__(self, folder: StepFolder, slot: Slot, value: Value, source: Source) -> None:
        self.group = folder.group
        self.started = False
        # What is on disk most likely is never copied.
        self.nbytes = 0 if source.hint is not None else source.data.nbytes
        self.parts: list[Any] = []
        self.storage: int | None = None
        if source.is_lent and isinstance(source.data, torch.Tensor):
            self.storage = _torch_private.storage_address(source.data)
        self._folder = folder
        self._slot = slot
        self._value = value
        self._source = source

    def give_back(self) -> None:
        """Copy what was lent, unless it is read already: then wait for that."""
        address = self.storage
        if address is None:
            return
        is_hint = self._is_on_disk()
        with pool().unless_started(self) as unstarted:
            data = self._source.data
            if unstarted and isinstance(data, torch.Tensor):
                if is_hint:  # It need not be read any more.
                    self._source.is_readable = False
                elif _torch_private.owners_of_storage(data) > 1:
                    self._source.data = data.detach().clone()
                return
        pool().wait_for_readers([address])

    def _is_on_disk(self) -> bool:
        hint, step = self._source.hint, self._slot.call.step
        return hint is not None and hint.may_be_linked_to(step) and self._source.is_hint()

    def run(self) -> bool:
        """Read the value; with a hint or an equal content, link to that."""
        if self.group.is_cancelled:
            self._slot.is_missing(INTERRUPTED)
            self._value.settle(None, INTERRUPTED)
            return True
        try:
            if self._source.hint is not None and self._source.is_hint():
                return self._is(self._source.hint, self._source)
            return self._save(self._source.npy())
        except UnsavableTensorError as error:
            self._folder.is_unsavable(self._slot, error)
            self._value.settle(None, str(error))
        except Exception as error:
            self._breaks(error)
        finally:
            self._source = _READ  # The step knows this job until its end; the memory may go now.
        return True

    def _save(self, npy: Npy) -> bool:
        hint = self._source.hint
        if hint is not None and hint.content is not None and hint.checksum == checksum(npy.data):
            self._settle(hint.checksum, self._folder.link(self._slot, hint.content, lambda: npy))
            return True
        content, is_new = self._folder.store.contents.find(npy)
        if is_new:
            self._settle(content.checksum, self._folder.write(self._slot, npy, content))
            return True
        content.when_settled(lambda: self._link_if_same(npy, content))
        return False

    def _is(self, hint: Value, source: Source) -> bool:
        hint.when_settled(lambda: self._link_as(hint, source))
        return False

    def _link_as(self, hint: Value, source: Source) -> None:
        try:
            read = source.npy if source.is_readable else None
            self._settle(hint.checksum, self._folder.link_as(self._slot, hint, read))
        except Exception as error:
            self._breaks(error)
        finally:
            pool().done(self)

    def _link_if_same(self, npy: Npy, content: Content) -> None:
        folder = self._folder
        try:
            if content.is_same(npy):
                self._settle(content.checksum, folder.link(self._slot, content, lambda: npy))
            else:
                self._settle(content.checksum, folder.write_unlisted(self._slot, npy))
        except Exception as error:
            self._breaks(error)
        finally:
            pool().done(self)

    def _settle(self, checksum: int | None, result: Content | str) -> None:
        self._value.checksum = checksum
        self._value.settle_as(result)

    def _breaks(self, error: Exception) -> None:
        self._folder.breaks(self._slot, error)
        self._value.settle(None, str(error))
