"""What of the tensors of a scope is kept: files, statistics or both, whole or a part, how many."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from torchair_scope.options import Data, Limit, Options
from torchair_scope.samples import Sample
from torchair_scope.store.arrays import Array, Description, UnsavableTensorError, plain_tensor
from torchair_scope.store.budget import NOTHING_TO_SETTLE, Budget
from torchair_scope.store.stand_in import stands_for

if TYPE_CHECKING:
    from torchair_scope.store.writer import Call, Step

# A file has a header as well.
_HEADER = 128


@dataclass(frozen=True)
class Choice:
    """What a scope asks to be kept; see the options of the same names."""

    data: Data = "tensors"
    sample: Sample | None = None
    limits: tuple[Limit, ...] = ()
    min_free: int = 0

    @classmethod
    def of(cls, options: Options) -> Choice:
        """What options in force ask for."""
        return cls(options.data or "tensors", options.sample, options.limits, options.min_free or 0)


class Chosen:
    """Keeps of the tensors of one step's calls what a scope asks for; a `Keeper`."""

    def __init__(self, step: Step, choice: Choice) -> None:
        self._step = step
        self._choice = choice
        self._budget = Budget(choice.limits, choice.min_free, step.run.rank_folder)
        self._refused: dict[int, str | None] = {}
        self._is_all_kept = not (choice.data != "tensors" or choice.sample or self._budget.limits)

    def keep_tensor(self, call: Call, slot: str, tensor: Any, description: Description) -> None:
        """Save a tensor, or measure it, or both."""
        original = stands_for(tensor)
        lost = original.reason if original is not None else None
        if self._choice.data != "tensors" or lost is not None:
            self._step.statistics.keep_tensor(call, slot, tensor, description)
        if lost is not None:
            call.is_missing(slot, lost)
        if self._choice.data == "stats" or lost is not None:
            return
        part = self._part(tensor, description)
        found = self._step.files.look_up(call, slot, part)
        if found is None:
            return
        is_there = found.hint is not None
        if is_there and self._budget.limits:
            is_there = found.costs_nothing(self._step)
        size = 0 if is_there else part.numel() * _bytes_in_file(part) + _HEADER
        refused = self._make_room(call, slot, size)
        if refused is None:
            self._step.files.keep(call, slot, found, description)
            return
        description.pop("sample", None)
        if self._choice.data == "tensors":
            self._step.statistics.keep_tensor(call, slot, tensor, description)
        call.is_missing(slot, refused)
        self._say(call, refused)

    def keep_again(self, call: Call, slot: str, tensor: Any) -> Description | None:
        """Save a tensor again that costs no more than a link, where there is no limit on calls."""
        return self._step.files.keep_again(call, slot, tensor) if self._is_all_kept else None

    def keep_numbers(self, call: Call, slot: str, array: Array) -> None:
        """Save numbers, unless only statistics are wanted: the record has them."""
        if self._choice.data == "stats" or self._refuses(call):
            return
        if self._make_room(call, slot, array.nbytes + _HEADER) is None:
            self._step.files.keep_numbers(call, slot, array)

    def finish(self) -> None:
        """Leave what is to be done to those who keep."""

    def _part(self, tensor: Any, description: Description) -> Any:
        """The part of a tensor that is saved, which its description then names."""
        if self._choice.sample is None:
            return tensor
        try:
            part = self._choice.sample.of(plain_tensor(tensor))
        except (UnsavableTensorError, RuntimeError, NotImplementedError):  # it has no elements
            return tensor
        if part is None:
            return tensor
        description["sample"] = str(self._choice.sample)
        return part

    def _refuses(self, call: Call) -> str | None:
        """Why nothing of a call is saved, as was decided when its first value came."""
        if call.order not in self._refused:
            self._refused[call.order] = self._budget.begin_call()
        return self._refused[call.order]

    def _make_room(self, call: Call, slot: str, size: int) -> str | None:
        """Reserve bytes for a file; the reason if there is no room for it."""
        refused = self._refuses(call)
        if refused is not None:
            return refused
        reserved = self._budget.reserve(size)
        if isinstance(reserved, str):
            return reserved
        if reserved is not NOTHING_TO_SETTLE:
            call.when_written(slot, reserved.settle)
        return None

    def _say(self, call: Call, reason: str) -> None:
        folder = self._step.run.rank_folder
        folder.say_once(
            reason,
            f"{reason}. From {call.node} ({call.target}, scope {call.facts.get('scope')}) in "
            f"{self._step.name} on, only statistics are saved, in the stats.csv of each step of "
            f"{folder.path}",
        )


def _bytes_in_file(tensor: Any) -> int:
    """Bytes of an element in its file; the small floating point dtypes are float32 there."""
    dtype: torch.dtype = tensor.dtype
    small = dtype.is_floating_point and str(dtype) != "torch.float16"
    return max(dtype.itemsize, 4 if small else 1)
