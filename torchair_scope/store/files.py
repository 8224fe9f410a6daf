"""The keeper that saves each value as a file, each different one once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from torchair_scope.store import layout
from torchair_scope.store.arrays import (
    Array,
    Description,
    UnsavableTensorError,
    is_strided,
    plain_tensor,
    to_numpy,
)
from torchair_scope.store.contents import SMALL, Value
from torchair_scope.store.device import host_copy, wait_for_copies
from torchair_scope.store.identity import checksum
from torchair_scope.store.npy import Npy
from torchair_scope.store.pool import pool
from torchair_scope.store.saving import Linking, Saving, Slot, Source, StepFolder

if TYPE_CHECKING:
    from torchair_scope.store.writer import Call, Step


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


class Files:
    """Saves the values of one step's calls as files in the step's folder; a `Keeper`."""

    def __init__(self, step: Step, pace: Pace) -> None:
        self._step = step
        self._pace = pace
        self._folder = StepFolder(step)
        self._store = step.run.rank_folder
        self._lent: list[Saving] = []
        self._devices: set[torch.device] = set()

    def keep_tensor(self, call: Call, slot: str, tensor: Any, description: Description) -> None:
        """Save a tensor, unless it is known to be on disk."""
        self._folder.say()
        self._store.check_owner()
        place = self._slot(call, slot)
        try:
            plain = plain_tensor(tensor)
            if plain.is_cpu and plain.nbytes <= SMALL:
                self._keep_small(place, np.array(to_numpy(plain), order="C"))
            elif is_strided(plain):
                self._store.known.add(plain, self._step, self._keep(place, plain))
            else:
                self._save(place, Source(_copied(to_numpy(plain), plain)))
        except UnsavableTensorError as error:
            self._folder.is_unsavable(place, error)
            self._folder.say()

    def seem_to_have(self, tensor: Any) -> bool:
        """Whether a tensor is known as a value that has a file, unless it was written to unseen."""
        try:
            plain = plain_tensor(tensor)
        except UnsavableTensorError:
            return False
        sighting = self._store.known.find(plain, self._step) if is_strided(plain) else None
        return sighting is not None and sighting.value.may_be_linked_to()

    def keep_numbers(self, call: Call, slot: str, array: Array) -> None:
        """Save numbers."""
        self._folder.say()
        self._store.check_owner()
        self._keep_small(self._slot(call, slot, is_tensor=False), array)

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
            self._folder.close()
            self._store.known.forget_freed()
        self._folder.say()

    def _slot(self, call: Call, slot: str, *, is_tensor: bool = True) -> Slot:
        return Slot(call, slot, layout.file_name(call.stem, slot, call.stamp), is_tensor)

    def _keep(self, slot: Slot, tensor: torch.Tensor) -> Value:
        sighting = self._store.known.find(tensor, self._step)
        hint = sighting.value if sighting and sighting.value.may_be_linked_to() else None
        seen_now = sighting is not None and sighting.step is self._step
        is_sure = sighting is not None and sighting.is_sure
        if hint is not None and (is_sure or (self._pace.announced and seen_now)):
            return self._link(slot, hint)
        if not tensor.is_cpu:
            copy, arrival = host_copy(tensor, beside=self._pace.announced)
            self._devices.add(tensor.device)
            return self._save(slot, Source(copy, arrival))
        if self._pace.announced:
            return self._save(slot, Source(tensor, is_lent=True, hint=hint))
        array = to_numpy(tensor)
        total = checksum(Npy(array).data)
        if hint is not None and hint.checksum == total:
            return self._link(slot, hint)
        return self._save(slot, Source(_copied(array, tensor)), total)

    def _keep_small(self, slot: Slot, array: Array) -> None:
        if array.nbytes > SMALL:  # a long list
            self._save(slot, Source(array))
            return
        value = Npy(array)
        content, is_new = self._store.contents.find(value)
        # To hand a few bytes to another thread costs more than to write them here. With a lag the
        # model is not to wait for the disk at all.
        here = not self._pace.lag and (is_new or content.is_settled)
        try:
            if not here:
                self._save(slot, Source(array, found=(content, is_new)))
            elif is_new:
                self._folder.write(slot, value, content)
            else:
                self._folder.link(slot, content, value)
        except BaseException:  # an interrupt: no writer will come to settle it
            if is_new:
                content.lose()
            raise

    def _save(self, slot: Slot, source: Source, total: int | None = None) -> Value:
        value = Value(total)
        saving = Saving(self._folder, slot, value, source)
        if source.is_lent:
            self._lent.append(saving)
        slot.call.promise(slot.slot)
        pool().submit(saving, self._pace.max_inflight)
        return value

    def _link(self, slot: Slot, value: Value) -> Value:
        slot.call.promise(slot.slot)
        pool().submit(Linking(self._folder, slot, value), self._pace.max_inflight)
        return value


def _copied(array: Array, tensor: torch.Tensor) -> Array:
    """The array, or a copy of it if it lies in the memory of the tensor."""
    if array.nbytes and is_strided(tensor) and tensor.is_cpu:
        storage = tensor.untyped_storage()
        start = array.__array_interface__["data"][0] - storage.data_ptr()
        if not 0 <= start < storage.nbytes():
            return array
    return np.array(array, order="C")
