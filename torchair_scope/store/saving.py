"""What writers do for a step: each value becomes a file, or a link to one."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from torchair_scope import _torch_private
from torchair_scope.store.arrays import Array, UnsavableTensorError, to_numpy
from torchair_scope.store.contents import Content, Contents, Value
from torchair_scope.store.device import Arrival
from torchair_scope.store.failures import report
from torchair_scope.store.identity import checksum
from torchair_scope.store.native import SmallFile
from torchair_scope.store.npy import Folder, Npy, make_small, write_npy
from torchair_scope.store.pool import Group, pool

if TYPE_CHECKING:
    from torchair_scope.store.writer import Call, Step

_FULL = (errno.ENOSPC, errno.EDQUOT)
_INTERRUPTED = "the run was interrupted before it was written"
_NOT_WRITTEN = "not written"
# So many small values are written by one job.
_TOGETHER = 64


@dataclass(frozen=True)
class Slot:
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
                content.is_at(f"{self._folder.path}/{slot.name}", size)
                return content
        content.lose()
        return reason

    def make_small(self, few: Sequence[_Small]) -> set[_Small]:
        """Write or link small values in one go; give those that have their files then."""
        if self._stopped is not None or not self.store.links.can_link:
            return set()
        paths: dict[Content, str] = {}
        made, files = [], []
        for small in few:
            content, name = small.content, small.slot.name
            if small.is_new:
                paths[content] = f"{self._folder.path}/{name}"
                files.append(SmallFile(name, small.value.header + small.value.data.tobytes()))
                made.append(small)
            elif (source := paths.get(content) or content.path) is not None:
                files.append(SmallFile(name, source=source))
                made.append(small)
        try:
            errors = make_small(self._folder, files)
        except OSError:  # there can be no folder, which each file then says by its name
            errors = None
        if errors is None:
            return set()
        made = [small for small, error in zip(made, errors, strict=True) if not error]
        for small in made:
            size = small.value.size
            small.slot.has_file(size, size if small.is_new else 0, small.content)
            if small.is_new:
                small.content.is_at(paths[small.content], size)
        return set(made)

    def link(self, slot: Slot, content: Content, value: Npy | None = None) -> Content | str:
        """Give a slot the file of a content; `value` is written if that is gone."""
        try:
            written = self.store.links.make(content, self._folder, slot.name)
        except FileNotFoundError as error:
            content.lose()
            if value is None:
                return self._fails(slot, error)
            return self.write(slot, value, self.store.contents.unlisted())
        except OSError as error:
            return self._fails(slot, error)
        slot.has_file(content.size, written, content)
        return content

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
    """

    data: torch.Tensor | Array
    arrival: Arrival | None = None
    is_lent: bool = False
    hint: Value | None = None
    is_unwritten: Callable[[], bool] | None = None

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
        if self._source.is_hint():  # It is read now, and need not be any more.
            return
        with pool().unless_started(self) as unstarted:
            data = self._source.data
            if unstarted and isinstance(data, torch.Tensor):
                if _torch_private.owners_of_storage(data) > 1:
                    self._source.data = data.clone()
                return
        pool().wait_for_readers([address])

    def run(self) -> bool:
        """Read the value; with a hint or an equal content, link to that."""
        if self.group.is_cancelled:
            self._slot.is_missing(_INTERRUPTED)
            self._value.settle(None, _INTERRUPTED)
            return True
        try:
            hint = self._source.hint
            if hint is not None and self._source.is_hint():
                return self._is(hint)
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
            self._settle(hint.checksum, self._folder.link(self._slot, hint.content, npy))
            return True
        content, is_new = self._folder.store.contents.find(npy)
        if is_new:
            self._settle(content.checksum, self._folder.write(self._slot, npy, content))
            return True
        content.when_settled(lambda: self._link_if_same(npy, content))
        return False

    def _is(self, hint: Value) -> bool:
        hint.when_settled(lambda: self._link_as(hint))
        return False

    def _link_as(self, hint: Value) -> None:
        try:
            if hint.content is None:
                self._slot.is_missing(hint.reason or _NOT_WRITTEN)
                self._value.settle(None, hint.reason)
            else:
                self._settle(hint.checksum, self._folder.link(self._slot, hint.content))
        except Exception as error:
            self._breaks(error)
        finally:
            pool().done(self)

    def _link_if_same(self, npy: Npy, content: Content) -> None:
        folder = self._folder
        try:
            if content.is_same(npy):
                self._settle(content.checksum, folder.link(self._slot, content, npy))
            else:
                other = folder.store.contents.unlisted()
                self._settle(content.checksum, folder.write(self._slot, npy, other))
        except Exception as error:
            self._breaks(error)
        finally:
            pool().done(self)

    def _settle(self, checksum: int | None, result: Content | str) -> None:
        self._value.checksum = checksum
        if isinstance(result, str):
            self._value.settle(None, result)
        else:
            self._value.settle(result)

    def _breaks(self, error: Exception) -> None:
        self._folder.breaks(self._slot, error)
        self._value.settle(None, str(error))


class Linking:
    """A `Job`: a slot with a value that is known without reading it."""

    def __init__(self, folder: StepFolder, slot: Slot, value: Value) -> None:
        self.group = folder.group
        self.started = False
        self.nbytes = 0
        self.storage: int | None = None
        self._folder = folder
        self._slot = slot
        self._value = value

    def run(self) -> bool:
        """Link once the value has a file."""
        self._value.when_settled(self._link)
        return False

    def _link(self) -> None:
        try:
            if self._value.content is None:
                self._slot.is_missing(self._value.reason or _NOT_WRITTEN)
            else:
                self._folder.link(self._slot, self._value.content)
        except Exception as error:
            self._folder.breaks(self._slot, error)
        finally:
            pool().done(self)


class _Small:
    """A small value on its way to a file.

    Attributes:
        content: what it is.
        is_new: whether no other value is that, or was: it has to be written.
    """

    content: Content
    is_new: bool

    def __init__(self, slot: Slot, value: Npy) -> None:
        self.slot = slot
        self.value = value

    def look_up(self, contents: Contents) -> None:
        """Say what it is."""
        self.content, self.is_new = contents.find(self.value)


class SavingFew:
    """A `Job`: small values, collected until a thread takes it up. Each alone would cost too much.

    Args:
        folder: the step's.
        slot: the first one.
        array: its value; it is not written to any more.
    """

    def __init__(self, folder: StepFolder, slot: Slot, array: Array) -> None:
        self.group = folder.group
        self.started = False
        self.nbytes = 0
        self.storage: int | None = None
        self._folder = folder
        self._values = [(slot, array)]
        self._lock = threading.Lock()
        self._open = 1

    def takes(self, slot: Slot, array: Array) -> bool:
        """Take one more value, unless that is too late."""
        with pool().unless_started(self) as unstarted:
            if unstarted and len(self._values) < _TOGETHER:
                self._values.append((slot, array))
                return True
        pool().wake()
        return False

    def run(self) -> bool:
        """Write what is new, and link to what is there."""
        few = [_Small(slot, Npy(array)) for slot, array in self._values]
        for small in few:
            small.look_up(self._folder.store.contents)
        try:
            together = set() if self.group.is_cancelled else self._folder.make_small(few)
        except Exception as error:
            self._break(few, error)
        else:
            for small in few:
                if small not in together:
                    self._alone(small)
        return self._ends()

    def _break(self, few: Sequence[_Small], error: Exception) -> None:
        for small in few:
            self._folder.breaks(small.slot, error)
            if small.is_new:
                small.content.lose()

    def _alone(self, small: _Small) -> None:
        if self.group.is_cancelled:
            small.slot.is_missing(_INTERRUPTED)
            if small.is_new:
                small.content.lose()
        elif small.is_new:
            self._folder.write(small.slot, small.value, small.content)
        else:  # Another thread may be writing it.
            with self._lock:
                self._open += 1
            small.content.when_settled(lambda: self._link(small))

    def _link(self, small: _Small) -> None:
        try:
            self._folder.link(small.slot, small.content, small.value)
        except Exception as error:
            self._folder.breaks(small.slot, error)
        finally:
            if self._ends():
                pool().done(self)

    def _ends(self) -> bool:
        with self._lock:
            self._open -= 1
            return not self._open
