"""Steps that are saved only if something comes true of a tensor in them, and the steps before.

The values of such a step are copied to memory when they are handed over. When the graph returns,
the step is saved, or kept for a while since a later one may ask for it, or let go.
"""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_map

from torchair_scope.options import When
from torchair_scope.sizes import as_text
from torchair_scope.store.arrays import UnsavableTensorError, describe, is_strided, plain_tensor
from torchair_scope.store.budget import BUDGET
from torchair_scope.store.choice import Choice
from torchair_scope.store.device import Arrival, host_copy
from torchair_scope.store.failures import Guarded
from torchair_scope.store.files import Pace
from torchair_scope.store.identity import Known
from torchair_scope.store.measuring import measure
from torchair_scope.store.sections import section
from torchair_scope.store.stand_in import StandsFor, standing_for
from torchair_scope.store.writer import CallReport, GraphDump, Mode

Report = Callable[[CallReport], None]
_NOT_TRIGGERED = CallReport("", True, 0, 0, 0, [], is_triggered=False)


class Condition(NamedTuple):
    """When a step is saved; see the options of the same names."""

    when: When
    keep_last: int
    max_held: int


class Trigger:
    """What saves the steps of one scope, of its forward and of its backward graphs.

    Args:
        condition: when it does.
    """

    def __init__(self, condition: Condition) -> None:
        self.condition = condition
        self.known = Known()
        self._before: dict[Any, deque[HeldStep]] = defaultdict(deque)
        self._is_over = False
        self._lock = threading.RLock()  # a finaliser may end a step at any time

    def begin_step(self, graph: GraphDump, number: int, pace: Pace) -> HeldStep:
        """Begin a step of a graph that is held until it is known what becomes of it."""
        return HeldStep(self, graph, number, pace, next(_positions))

    def ends(self, step: HeldStep) -> None:
        """A step has ended: save it and those before, or keep it, or let it go."""
        fires = step.fires()
        with self._lock:
            saved: list[HeldStep] = []
            if fires and not self._is_over:
                saved = sorted(itertools.chain(*self._before.values()), key=lambda s: s.position)
                saved.append(step)
                self._before.clear()
                self._is_over = self.condition.when == "nonfinite:first"
            elif self.condition.keep_last and not self._is_over:
                before = self._before[step.graph_dump]
                before.append(step)
                if len(before) > self.condition.keep_last:
                    before.popleft().let_go()
            waits = step in self._before[step.graph_dump]
        if step not in saved:
            step.is_not_triggered()
        for each in saved:
            each.save()
        for each in saved or ([] if waits else [step]):
            each.let_go()

    def oldest(self) -> HeldStep | None:
        """The oldest step that waits."""
        with self._lock:
            first = [steps[0] for steps in self._before.values() if steps]
        return min(first, key=lambda step: step.position, default=None)

    def let_go_of(self, step: HeldStep) -> None:
        """Let go of a step that waits."""
        with self._lock:
            if step in self._before[step.graph_dump]:
                self._before[step.graph_dump].remove(step)
        step.let_go()


@dataclass
class HeldCall:
    """One call of a held step: what a `Step` and its `Call` are given when it is saved."""

    step: HeldStep
    given: tuple[Any, ...]
    order: int
    mode: Mode
    report: Report | None
    choice: Choice
    result: tuple[Any, Mapping[str, Any]] | None = None

    def finish(self, result: Any, mutated: Mapping[str, Any] = MappingProxyType({})) -> None:
        """Hold what the operator returned."""
        with section, self.step.at_work():
            kept = self.mode != "input"
            self.result = self.step.held(result, self, kept), self.step.held(mutated, self, kept)


class HeldStep:
    """One run of one graph in memory; it is used as a `Step` is.

    Attributes:
        graph: the graph's number.
        number: of the step.
        graph_dump: the graph.
        position: of the step among all that were held.
    """

    def __init__(
        self, trigger: Trigger, graph: GraphDump, number: int, pace: Pace, position: int
    ) -> None:
        self.graph = graph.number
        self.graph_dump = graph
        self.number = number
        self.position = position
        self._trigger = trigger
        self._pace = pace
        self._calls: list[HeldCall] = []
        self._signs: list[Any] = []
        self._arrivals: list[Arrival] = []
        self._orders = itertools.count()

    def at_work(self) -> Any:
        """A block in which failures of ours stay out of the model."""
        return Guarded(self.graph_dump.run, self.graph_dump.run.folder)

    def begin_call(
        self,
        node: str,
        target: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        facts: Mapping[str, Any],
        mode: Mode = "all",
        report: Report | None = None,
        choice: Choice = Choice(),  # noqa: B008
        order: int | None = None,
    ) -> HeldCall:
        """Hold the arguments of one call; see `Step.begin_call`."""
        order = next(self._orders) if order is None else order
        call = HeldCall(self, (), order, mode, report, choice)
        with section, self.at_work():
            kept = mode != "output"
            call.given = (
                node,
                target,
                self.held(args, call, kept),
                self.held(kwargs, call, kept),
                facts,
            )
            self._calls.append(call)
        return call

    def finish(self) -> None:
        """The graph has returned."""
        with self.at_work():
            self._trigger.ends(self)

    def fires(self) -> bool:
        """Whether the condition came true of a tensor; waits for each device once."""
        signs, self._signs = self._signs, []
        by_device: dict[torch.device, list[torch.Tensor]] = defaultdict(list)
        for sign in signs:
            if isinstance(sign, torch.Tensor):
                by_device[sign.device].append(sign.reshape(-1).any())
        there = [bool(torch.stack(together).any()) for together in by_device.values()]
        return any(there) or any(bool(s) for s in signs if not isinstance(s, torch.Tensor))

    def is_not_triggered(self) -> None:
        """Tell of each call that nothing is saved of it, unless a later step brings that about."""
        for call in self._calls:
            if call.report is not None:
                call.report(_NOT_TRIGGERED)

    def save(self) -> None:
        """Give everything to a step that is written."""
        for arrival in self._arrivals:
            arrival.wait()
        # Nothing writes to copies.
        pace = replace(self._pace, announced=True, lag=0)
        step = self.graph_dump.begin_step(self.number, pace)
        for held in self._calls:
            asked: Any = (held.mode, held.report, held.choice, held.order)
            call = step.begin_call(*(*held.given, *asked))
            if held.result is not None:
                call.finish(*held.result)
        step.finish()

    def let_go(self) -> None:
        """Hold nothing any more: calls and step know each other, and would not go by themselves."""
        self._calls.clear()
        self._arrivals.clear()

    # Values

    def held(self, tree: Any, call: HeldCall, kept: bool) -> Any:
        """A tree of values with what stands for its tensors in their places."""

        def stand_in(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            return self._stand_in(value, call.choice.data != "stats") if kept else _described(value)

        return tree_map(stand_in, dict(tree) if isinstance(tree, Mapping) else tree)

    def _stand_in(self, tensor: torch.Tensor, is_copied: bool) -> torch.Tensor:
        with torch.no_grad():
            try:
                plain = plain_tensor(tensor)
            except UnsavableTensorError:
                return tensor
            description = describe(tensor)
            copy = self._earlier_copy(plain)
            if copy is not None:
                return standing_for(copy.detach(), StandsFor(description, part_of=copy))
            sign = self._comes_true(plain)
            self._signs.append(sign)
            copy = self._copy(plain) if is_copied else None
            if copy is None:
                reason = self._reason() if is_copied else None
                return _described(tensor, StandsFor(description, measure(plain), reason))
            if is_strided(plain):
                self._trigger.known.add(plain, self, (weakref.ref(copy), sign))
            return standing_for(copy, StandsFor(description))

    def _earlier_copy(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """A copy of the same value that is held already."""
        sighting = self._trigger.known.find(tensor, self) if is_strided(tensor) else None
        if sighting is None:
            return None
        reference, sign = sighting.value
        copy: torch.Tensor | None = reference()
        known = sighting.step is self and self._pace.announced
        if copy is None or not (known or (tensor.is_cpu and _same_bits(copy, tensor))):
            return None
        if sighting.step is not self:
            self._signs.append(sign)
            self._trigger.known.add(tensor, self, sighting.value)
        return copy

    def _comes_true(self, tensor: torch.Tensor) -> Any:
        when = self._trigger.condition.when
        if not callable(when):
            return is_nonfinite(tensor)
        try:
            return when(tensor)
        except Exception as error:
            run = self.graph_dump.run
            if run.on_error == "raise":
                raise
            run.rank_folder.say_once(
                f"when {when!r}",
                f"when={when!r} raised {error!r} for a tensor of {tensor.dtype}, shape "
                f"{tuple(tensor.shape)}: it is taken for false there",
            )
            return False

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """A copy on the host; None if there may be no more of them."""
        size = tensor.numel() * tensor.dtype.itemsize
        while not _memory.takes(size, self._trigger.condition.max_held):
            if not _let_go_of_oldest():
                return None
        if is_strided(tensor) and not tensor.is_cpu:
            copy, arrival = host_copy(tensor, beside=False)
            self._arrivals.append(arrival)
        else:
            copy = tensor.clone()
        _memory.holds(copy, size)
        return copy

    def _reason(self) -> str:
        most = as_text(self._trigger.condition.max_held)
        reason = f"{BUDGET}: max_held={most} of the process is reached"
        self.graph_dump.run.rank_folder.say_once(
            reason,
            f"{reason}: of some tensors in steps that wait for their trigger, only statistics are "
            "kept. Raise max_held, or lower keep_last",
        )
        return reason


def _described(tensor: torch.Tensor, original: StandsFor | None = None) -> torch.Tensor:
    """A tensor without a value that stands for one."""
    empty = torch.empty(0, device="cpu")
    return standing_for(empty, original or StandsFor(describe(tensor)))


def is_nonfinite(tensor: torch.Tensor) -> bool | torch.Tensor:
    """Whether a tensor holds NaN or Inf; on a device, a scalar there."""
    dtype = tensor.dtype
    if not (dtype.is_floating_point or dtype.is_complex) or dtype is torch.float4_e2m1fn_x2:
        return False
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    if dtype.itemsize == 1 or dtype is torch.complex32:
        tensor = tensor.to(torch.complex64 if dtype.is_complex else torch.float32)
    if not tensor.is_cpu:
        return tensor.isfinite().all().logical_not()
    # A sum is finite only if its terms are, and much faster than a look at each.
    total = tensor.sum(dtype=torch.float32 if dtype is torch.float16 else None)
    return not bool(total.isfinite()) and not bool(tensor.isfinite().all())


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.is_complex():
        one, other = torch.view_as_real(one), torch.view_as_real(other)
    bits = _BITS[one.dtype.itemsize]
    return torch.equal(one.view(bits), other.view(bits))


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class _Memory:
    """The bytes of this process that are held."""

    def __init__(self) -> None:
        self._bytes = 0
        self._lock = threading.RLock()

    def takes(self, size: int, most: int) -> bool:
        """Whether so many more bytes may be held."""
        return self._bytes + size <= most

    def holds(self, copy: torch.Tensor, size: int) -> None:
        """Count a copy until it is gone."""
        self._add(size)
        weakref.finalize(copy, self._add, -size)

    def _add(self, size: int) -> None:
        with self._lock:
            self._bytes += size


_memory = _Memory()
_positions = itertools.count()
_triggers: dict[Any, Trigger] = {}
_lock = threading.Lock()


def _let_go_of_oldest() -> bool:
    """Let go of the oldest step that waits in this process; False if there is none."""
    with _lock:
        waiting = [(step, t) for t in _triggers.values() if (step := t.oldest()) is not None]
    if not waiting:
        return False
    step, trigger = min(waiting, key=lambda each: each[0].position)
    trigger.let_go_of(step)
    return True


def trigger_of(scope: str, dump: Any, condition: Condition) -> Trigger:
    """The trigger of an outermost scope in one dump."""
    with _lock:
        key = scope, dump, condition
        if key not in _triggers:
            _triggers[key] = Trigger(condition)
        return _triggers[key]


def _forget() -> None:
    """What a forked child's parent holds is the parent's to save."""
    global _lock, _memory
    _lock, _memory = threading.Lock(), _Memory()
    _triggers.clear()


os.register_at_fork(after_in_child=_forget)
