"""Which call of one run is which call of the other."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from torchair_scope.analysis.alignment import align, by_ordinal
from torchair_scope.analysis.dump import Call, Rank
from torchair_scope.analysis.signature import Signature, direction_of, signature_of

Rule = Literal["name", "place", "line", "inputs", "shape"]
RULES: dict[Rule, str] = {
    "name": "the same node name, operator and shapes, in order",
    "place": "the same scope, module, source line, operator and shapes",
    "line": "the same operator, in order, between pairs that are known",
    "inputs": "the same operator on the same line, and inputs that agree",
    "shape": "the result of several operators has the shape of the other side's one operator",
}


# A step of one side may have so many times the calls of the other's: compilers take some apart.
_AS_LONG = 1.5


class CallPair(NamedTuple):
    """A golden call, the target's call that it is, and how that is known."""

    golden: Call
    target: Call
    rule: Rule


@dataclass(frozen=True)
class Pairing:
    """All pairs in the order in which the target ran, and what has no partner."""

    pairs: list[CallPair] = field(default_factory=list)
    only_golden: list[Call] = field(default_factory=list)
    only_target: list[Call] = field(default_factory=list)


def pair_calls(golden: Sequence[Call], target: Sequence[Call]) -> Pairing:
    """Pair the calls of two runs of one process each.

    Calls are laid out in lines, one for each direction and outermost scope that both sides know,
    in the order in which they ran. Graph numbers play no part: one side may have one graph for
    what the other cuts into several, or ran in eager code. Step numbers do where one side lacks
    some, and those that both have are about equally long: then no step takes another's place.
    """
    sides = [_lines(golden, target), _lines(target, golden)]
    pairing = Pairing()
    for key in sorted({*sides[0], *sides[1]}, key=str):
        for golden_row, target_row in _rows(sides[0].get(key, []), sides[1].get(key, [])):
            _pair_line(golden_row, target_row, pairing)
    for calls in (pairing.only_golden, pairing.only_target):
        calls.sort(key=execution_order)
    pairing.pairs.sort(key=lambda pair: execution_order(pair.target))
    return pairing


def pair_ranks(golden: Sequence[Rank], target: Sequence[Rank]) -> Iterator[tuple[Rank, Rank]]:
    """Pairs of ranks with the same number, or the only two."""
    if len(golden) == len(target) == 1:
        yield golden[0], target[0]
        return
    by_number = {rank.number: rank for rank in golden}
    for rank in target:
        if rank.number in by_number:
            yield by_number[rank.number], rank


def execution_order(call: Call) -> tuple[str, int, int, int]:
    """A key that sorts calls as they ran; calls of one step stay together."""
    begin = call.step.calls[0].time if call.step.calls else call.time
    return begin, call.graph.number, call.step.number, call.order


Line = tuple[str | None, str | None]


def _lines(calls: Sequence[Call], others: Sequence[Call]) -> dict[Line, list[Call]]:
    both = [*calls, *others]
    directed = all(direction_of(call) is not None for call in both)
    shared = {_outermost(call) for call in calls} & {_outermost(call) for call in others}
    lines: dict[Line, list[Call]] = defaultdict(list)
    for call in sorted(calls, key=execution_order):
        scope = _outermost(call)
        line = direction_of(call) if directed else None, scope if scope in shared else None
        lines[line].append(call)
    return lines


def _rows(golden: list[Call], target: list[Call]) -> Iterator[tuple[list[Call], list[Call]]]:
    """A line as a whole, or a step at a time if one side lacks some steps."""
    sides = _by_step(golden), _by_step(target)
    shared = sides[0].keys() & sides[1].keys()
    lengths = [sorted((len(sides[0][step]), len(sides[1][step]))) for step in shared]
    alike = all(longer < shorter * _AS_LONG for shorter, longer in lengths)
    if not shared or not alike or sides[0].keys() == sides[1].keys():
        yield golden, target
        return
    for step in sorted({*sides[0], *sides[1]}):
        yield sides[0].get(step, []), sides[1].get(step, [])


def _by_step(calls: list[Call]) -> dict[int, list[Call]]:
    steps: dict[int, list[Call]] = defaultdict(list)
    for call in calls:
        steps[call.step.number].append(call)
    return steps


def _outermost(call: Call) -> str | None:
    return None if call.scope is None else call.scope.partition("/")[0]


def _pair_line(golden: list[Call], target: list[Call], pairing: Pairing) -> None:
    signatures = [signature_of(call) for call in golden], [signature_of(call) for call in target]
    found = align(*signatures)
    matched = dict(found)
    left = _left(len(golden), matched), _left(len(target), matched.values())
    for i, j in by_ordinal(
        *([row[k] for k in rest] for row, rest in zip(signatures, left, strict=True))
    ):
        matched[left[0][i]] = left[1][j]
    rules: dict[int, Rule] = {
        i: _rule(signatures[0][i], signatures[1][j]) for i, j in matched.items()
    }
    for i, j in _by_shape(found, *signatures, matched):
        matched[i], rules[i] = j, "shape"
    pairing.pairs.extend(CallPair(golden[i], target[j], rules[i]) for i, j in matched.items())
    pairing.only_golden.extend(golden[i] for i in _left(len(golden), matched))
    pairing.only_target.extend(target[j] for j in _left(len(target), matched.values()))


def _left(count: int, taken: object) -> list[int]:
    positions = set(taken)  # type: ignore[call-overload]
    return [position for position in range(count) if position not in positions]


def _rule(golden: Signature, target: Signature) -> Rule:
    if (golden.node, golden.shapes) == (target.node, target.shapes):
        return "name"
    placed = golden.is_placed and golden.elsewhere == target.elsewhere
    return "place" if placed else "line"


def _by_shape(
    found: list[tuple[int, int]],
    golden: list[Signature],
    target: list[Signature],
    matched: dict[int, int],
) -> Iterator[tuple[int, int]]:
    """In each gap between two pairs, one operator of a side is all those of the other."""
    taken = set(matched.values())
    ends = [(-1, -1), *found, (len(golden), len(target))]
    for (i, j), (next_i, next_j) in itertools.pairwise(ends):
        ours = [k for k in range(i + 1, next_i) if k not in matched]
        theirs = [k for k in range(j + 1, next_j) if k not in taken]
        if (
            min(len(ours), len(theirs)) == 1
            and golden[ours[-1]].shapes == target[theirs[-1]].shapes
        ):
            yield ours[-1], theirs[-1]
