"""The keeper that saves each value as a file, each different one once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from torchair_scope.store import layout
from torchair_scope.store.arrays import (
    Array,
    Description,
    UnsavableTensorError,
    data_tensor,
    is_strided,
    to_numpy,
)
from torchair_scope.store.contents import SMALL, Value
from torchair_scope.store.device import host_copy, wait_for_copies
from torchair_scope.store.identity import Seen, checksum
from torchair_scope.store.npy import Npy
from torchair_scope.store.pool import pool
from torchair_scope.store.saving import Saving, Slot, Source, StepFolder
from torchair_scope.store.saving_few import Few, KnownValue, SavingFew, SmallValue

if TYPE_CHECKING:
    from torchair_scope.store.writer import Call, Step


# So many different numbers of a step are remembered.
_MOST_NUMBERS = 1 << 12


@dataclass(frozen=True)
class Pace:
    """How the writing of a step goes along with its run.

    Args:
        announced: whether all that is written to until the step is finished is announced, by
            `identity.writing`. Values are then read later, where they are; else they are copied.
        lag: 1 if the files may come after the end of the step, until the next one ends.
        max_inflight: bytes that may wait to be written; past it, the step waits.
    """

    announced: bool = False
    lag: int = 0
    max_inflight: int = 1 << 30


class Found(NamedTuple):
    """A tensor, and what is known of it before it is read.

    Attributes:
        tensor: the one that was handed over, or the part of it that is saved.
        data: the tensor that holds its data.
        is_strided: whether its memory is its elements.
        hint: the value that it most likely is, if that is on disk.
        is_unwritten: whether its memory is as it was when it had that value; reads it.
        is_sure: whether it certainly is that value.
    """

    tensor: torch.Tensor
    data: torch.Tensor
    is_strided: bool = False
    hint: Value | None = None
    is_unwritten: Callable[[], bool] | None = None
    is_sure: bool = False

    def costs_nothing(self, step: Step) -> bool:
        """Whether it is on disk; its memory is read if that can tell."""
        if self.hint is None or not self.hint.may_be_linked_to(step):
            return False
        return self.is_sure or self.is_unwritten is None or self.is_unwritten()


class Kept(NamedTuple):
    """What became of a tensor in this step."""

    value: Value
    description: Description


class Files:
    """Saves the values of one step's calls as files in the step's folder; a `Keeper`."""

    def __init__(self, step: Step, pace: Pace) -> None:
        self._step = step
        self._pace = pace
        self._folder = StepFolder(step)
        self._store = step.run.rank_folder
        self._lent: list[Saving] = []
        self._few: SavingFew | None = None
        self._seen = Seen()  # not looked into by writers
        self._numbers: dict[Any, Value] = {}
        self._devices: set[torch.device] = set()

    def keep_tensor(self, call: Call, slot: str, tensor: Any, description: Description) -> None:
        """Save a tensor, unless it is known to be on disk."""
        found = self.look_up(call, slot, tensor)
        if found is not None:
            self.keep(call, slot, found, description)

    def keep_again(self, call: Call, slot: str, tensor: Any) -> Description | None:
        """Link to the file that a tensor has in this step, if it is known to be the same."""
        known: Kept | None = self._seen.find(tensor)
        if known is None or not self._store.links.can_link:
            return None
        self._link(self._slot(call, slot), known.value)
        return known.description

    def look_up(self, call: Call, slot: str, tensor: Any) -> Found | None:
        """Say what is known of a tensor; None if it cannot be saved, which the call then knows."""
        try:
            data = data_tensor(tensor)
        except UnsavableTensorError as error:
            self._is_unsavable(self._slot(call, slot), error)
            return None
        if not is_strided(data):
            return Found(tensor, data)
        if data.is_cpu and data.nbytes <= SMALL:
            return Found(tensor, data, is_strided=True)
        sighting = self._store.known.find(data, self._step)
        hint: Value | None = sighting.value if sighting is not None else None
        if sighting is None or hint is None or hint.is_lost():
            return Found(tensor, data, is_strided=True)
        announced = self._pace.announced
        if data.is_cpu and announced and sighting.step is not self._step:
            reading = self._store.known.reading(data, self._step)
            is_unwritten = functools.partial(reading.is_as, sighting.reading, data)
            return Found(tensor, data, True, hint, is_unwritten)
        if not hint.may_be_linked_to(self._step):
            return Found(tensor, data, is_strided=True)
        return Found(tensor, data, True, hint, is_sure=announced or not data.is_cpu)

    def keep(self, call: Call, slot: str, found: Found, description: Description) -> None:
        """Save a tensor that was looked up."""
        place, data = self._slot(call, slot), found.data
        try:
            if not found.is_strided:
                self._save(place, Source(_copied(to_numpy(data), data)))
                return
            if data.is_cpu and data.nbytes <= SMALL:
                value = self._keep_few(place, np.array(to_numpy(data), order="C"))
            else:
                value = self._keep(place, found)
                self._store.known.add(data, self._step, value)
        except UnsavableTensorError as error:
            self._is_unsavable(place, error)
        else:
            if self._pace.announced:
                self._seen.add(found.tensor, Kept(value, description))

    def _is_unsavable(self, slot: Slot, error: UnsavableTensorError) -> None:
        self._folder.is_unsavable(slot, error)
        self._folder.say()

    def keep_numbers(self, call: Call, slot: str, array: Array) -> None:
        """Save numbers; the same ones come often."""
        place = self._slot(call, slot, is_tensor=False)
        if array.nbytes > SMALL:  # a long list
            self._save(place, Source(array))
            return
        key = array.dtype, array.shape, array.tobytes()
        known = self._numbers.get(key)
        if known is not None:
            self._link(place, known)
            return
        if len(self._numbers) >= _MOST_NUMBERS:
            self._numbers.clear()
        self._numbers[key] = self._keep_few(place, array)

    def check(self) -> None:
        """Say what writers came upon; raise `OSError` in a forked child."""
        self._folder.say()
        self._store.check_owner()

    def let_go(self) -> None:
        """What is still to be read may be written to from now on: keep copies."""
        for saving in self._lent:
            saving.give_back()
        self._lent.clear()
        for device in self._devices:
            wait_for_copies(device)

    def finish(self) -> None:
        """Wait until everything is on disk, or known not to be."""
        self._store.check_owner()
        for device in self._devices:
            wait_for_copies(device)
        try:
            pool().wait(self._folder.group)
        finally:
            self._lent.clear()
            self._seen.clear()
            self._numbers.clear()
            self._folder.close()
            self._store.known.forget_freed()
        self._folder.say()

    def _slot(self, call: Call, slot: str, *, is_tensor: bool = True) -> Slot:
        return Slot(call, slot, layout.file_name(call.stem, slot, call.stamp), is_tensor)

    def _keep(self, slot: Slot, found: Found) -> Value:
        data, hint = found.data, found.hint
        if hint is not None and found.is_sure:
            return self._link(slot, hint)
        if not data.is_cpu:
            copy, arrival = host_copy(data.detach(), beside=self._pace.announced)
            self._devices.add(data.device)
            return self._save(slot, Source(copy, arrival))
        if self._pace.announced:
            return self._save(slot, Source(data, None, True, hint, found.is_unwritten))
        # Anything may have written to it since its memory was read, for another value even.
        array = to_numpy(data)
        total = checksum(Npy(array).data)
        if hint is not None and hint.checksum == total:
            return self._link(slot, hint)
        return self._save(slot, Source(_copied(array, data)), total)

    def _keep_few(self, slot: Slot, array: Array) -> Value:
        if array.nbytes > SMALL:  # what takes more bytes as float32
            return self._save(slot, Source(array))
        small = SmallValue(slot, array)
        self._make_with_others(small)
        return small.value

    def _save(self, slot: Slot, source: Source, total: int | None = None) -> Value:
        value = Value(total)
        saving = Saving(self._folder, slot, value, source)
        if source.is_lent:
            self._lent.append(saving)
        slot.call.promise(slot.slot)
        pool().submit(saving, self._pace.max_inflight)
        return value

    def _link(self, slot: Slot, value: Value) -> Value:
        self._make_with_others(KnownValue(slot, value))
        return value

    def _make_with_others(self, one: Few) -> None:
        one.slot.call.promise(one.slot.slot)
        few = self._few
        if few is None or not few.takes(one):
            few = SavingFew(self._folder, one)
            pool().collect(few, self._pace.max_inflight)
            self._few = few


def _copied(array: Array, tensor: torch.Tensor) -> Array:
    """The array, or a copy of it if it lies in the memory of the tensor."""
    if array.nbytes and is_strided(tensor) and tensor.is_cpu:
        storage = tensor.untyped_storage()
        start = array.__array_interface__["data"][0] - storage.data_ptr()
        if not 0 <= start < storage.nbytes():
            return array
    return np.array(array, order="C")
