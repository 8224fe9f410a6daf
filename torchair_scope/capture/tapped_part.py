"""A part with taps, in two codes: with them for steps that want their values, else without."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from torchair_scope.capture.cut import TapFacts
from torchair_scope.capture.hand_over import HandOver
from torchair_scope.capture.interpreter import StepSink
from torchair_scope.capture.layouts import layout_restorer
from torchair_scope.capture.on_demand import OnDemand
from torchair_scope.capture.tags import Tag
from torchair_scope.capture.tapped_code import CannotTapError, Code, TappedRegion
from torchair_scope.capture.written import NotHandedOut
from torchair_scope.store.identity import writing

_UNTAPPED = NotHandedOut("the part of the graph that makes it ran without taps")


@dataclass(frozen=True)
class _Runner:
    """Runs one of the codes; the step is None if it wants no values of it."""

    run: Callable[[list[Any], StepSink | None], Sequence[Any]]
    facts: TapFacts | None = None


class TappedPart:
    """A region that is compiled with taps, without, or both, each when it is first needed.

    Begin with one of `compile_with_taps` and `compile_without_taps`, while the graph is compiled.

    Args:
        region: compiles it.
        hand_over: gives the values of one run to the store.
        tags: of the scopes that are tapped in the graph: what one part of it hands over may have
            been made by another one.
        give_up: is told, once, why it cannot be tapped.
    """

    def __init__(
        self,
        region: TappedRegion,
        hand_over: HandOver,
        tags: Sequence[Tag | None],
        give_up: Callable[[Exception], None],
    ) -> None:
        self.inputs = region.inputs
        self.outputs = region.region.outputs
        self._region = region
        self._hand_over = hand_over
        self._tags = tags
        self._give_up = give_up
        later = region.for_later()
        self._tapped = OnDemand(lambda: self._with_taps(later.with_taps()), give_up)
        self._plain = OnDemand(lambda: self._without_taps(later.without_taps()), self._stay_tapped)

    def compile_with_taps(self) -> None:
        """Compile it for steps that want its values."""
        try:
            code = self._region.with_taps()
        except CannotTapError as error:
            self._give_up(error)
            self._tapped.give(None)
            self.compile_without_taps()
            return
        runner = self._with_taps(code)
        self._tapped.give(runner)
        if not self._region.taps:
            self._plain.give(runner)

    def compile_without_taps(self) -> None:
        """Compile it for steps that do not."""
        self._plain.give(self._without_taps(self._region.without_taps_in_any_case()))

    def facts(self) -> TapFacts | None:
        """What the taps have made of the code; None if it cannot be tapped."""
        runner = self._tapped.get()
        return None if runner is None else runner.facts

    def run(self, args: list[Any], step: StepSink) -> Sequence[Any]:
        """Run it once."""
        if any(map(step.saves, self._tags)):
            return _either(self._tapped, self._plain).run(args, step)
        return _either(self._plain, self._tapped).run(args, None)

    def _with_taps(self, code: Code) -> _Runner:
        sources = (*code.outputs, *self._region.taps)
        given = _picker(self.inputs, code.inputs)
        count = len(code.outputs)
        read = [
            (node, self.inputs.index(node))
            for node in self._hand_over.inputs
            if node in self.inputs
        ]
        # Views are made of the layouts that were traced.
        restore = layout_restorer([node.meta.get("val") for node in sources])

        def run(args: list[Any], step: StepSink | None) -> Sequence[Any]:
            values = {} if step is None else {node: args[position] for node, position in read}
            outputs: Sequence[Any] = code.run(given(args))
            if step is None:
                return outputs[:count]
            with writing(outputs):
                pass  # Code that has buffers of its own has just written to them once more.
            values.update(zip(sources, restore(outputs), strict=True))
            self._hand_over(values, step)
            return outputs[:count]

        return _Runner(run, code.facts)

    def _without_taps(self, code: Code) -> _Runner:
        given = _picker(self.inputs, code.inputs)
        places = {node: position for position, node in enumerate(code.outputs)}
        made = [places.get(node) for node in self.outputs]

        def run(args: list[Any], step: StepSink | None) -> Sequence[Any]:
            outputs = code.run(given(args))
            return [_UNTAPPED if place is None else outputs[place] for place in made]

        return _Runner(run)

    def _stay_tapped(self, error: Exception) -> None:
        nodes = self._region.region.nodes
        warnings.warn(
            f"the part of the graph from {nodes[0].name} to {nodes[-1].name} returns its tapped "
            "values in steps that are not selected, too, where they are dropped, since it cannot "
            f"be compiled without taps any more, {type(error).__name__}: {error}",
            stacklevel=2,
        )


def _either(wanted: OnDemand[_Runner], other: OnDemand[_Runner]) -> _Runner:
    runner = wanted.get() or other.get()
    assert runner is not None  # One of them was compiled with the graph.
    return runner


def _picker(given: Sequence[fx.Node], taken: Sequence[fx.Node]) -> Callable[[list[Any]], list[Any]]:
    """What takes from the values of some nodes those that code is called with."""
    if tuple(given) == tuple(taken):
        return lambda args: args
    positions = [given.index(node) for node in taken]

    def pick(args: list[Any]) -> list[Any]:
        picked = [args[position] for position in positions]
        args.clear()
        return picked

    return pick
