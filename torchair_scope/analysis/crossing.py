"""Pairs that were taken crosswise: what one line computes twice is told apart by its inputs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence

from torchair_scope.analysis.dump import Call
from torchair_scope.analysis.judgement import TensorResult
from torchair_scope.analysis.pairing import CallPair
from torchair_scope.analysis.signature import signature_of
from torchair_scope.analysis.verdict import CallResult

Measure = Callable[[CallPair], list[TensorResult]]

# Calls of one place that are tried with each other, and pairs that are tried at all: behind an
# error nothing agrees, and there is nothing to be found.
_NEAR = 8
_MOST_TRIED = 128


def uncrossed(
    results: Sequence[CallResult], only_golden: Sequence[Call], measure: Measure
) -> tuple[list[CallResult], list[Call]]:
    """Give a call whose inputs differ another golden call, if the inputs of that one agree.

    Operators of one kind, shape and line are paired in their order, which another compiler may
    have changed. An exchange cannot hide an error: what makes one has inputs that agree.

    Args:
        results: of all pairs, in execution order.
        only_golden: golden calls without a partner.
        measure: the results for the tensors of a pair.

    Returns:
        The results, and the golden calls that have no partner now.
    """
    changed, spare, tried = list(results), list(only_golden), 0
    for places in _alike(results):
        pool = [results[place].pair.golden for place in places]
        key = _key(pool[0])
        pool += [call for call in spare if _key(call) == key][:_NEAR]
        exchanged: dict[int, CallResult] = {}
        for place in places:
            for golden in [call for call in pool if call is not results[place].pair.golden]:
                if tried == _MOST_TRIED:
                    break
                tried += 1
                found = _paired(results[place], golden, measure)
                if all(each.agrees for each in found.inputs):
                    exchanged[place] = found
                    pool.remove(golden)
                    break
        if exchanged:
            left = _others(results, places, exchanged, pool, measure)
            for place, result in {**exchanged, **left}.items():
                changed[place] = result
            kept = [result.pair.golden for result in (*exchanged.values(), *left.values())]
            ours = [*spare, *(results[place].pair.golden for place in places)]
            spare = [call for call in ours if not any(call is each for each in kept)]
    return changed, spare


def _alike(results: Sequence[CallResult]) -> list[list[int]]:
    """The places of pairs that may be crossed: what they are paired by does not tell them apart."""
    groups: dict[Hashable, list[int]] = defaultdict(list)
    for place, result in enumerate(results):
        if any(each.agreement == "differs" for each in result.inputs):
            key = _key(result.pair.golden), _key(result.pair.target)
            if len(groups[key]) < _NEAR:
                groups[key].append(place)
    return list(groups.values())


def _key(call: Call) -> Hashable:
    return call.graph.rank.number, call.step.number, signature_of(call).elsewhere


def _paired(result: CallResult, golden: Call, measure: Measure) -> CallResult:
    pair = CallPair(golden, result.pair.target, "inputs")
    return CallResult(pair, measure(pair))


def _others(
    results: Sequence[CallResult],
    places: Sequence[int],
    exchanged: dict[int, CallResult],
    pool: list[Call],
    measure: Measure,
) -> dict[int, CallResult]:
    """What is left of both sides: in order, where a call has lost its golden one."""
    left: dict[int, CallResult] = {}
    rest = [place for place in places if place not in exchanged]
    losers = []
    for place in rest:
        own = results[place].pair.golden
        if any(own is call for call in pool):
            left[place] = results[place]
            pool.remove(own)
        else:
            losers.append(place)
    for place, golden in zip(losers, pool, strict=False):
        left[place] = _paired(results[place], golden, measure)
    return left
