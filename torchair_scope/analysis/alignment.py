"""Align two rows of calls: the pairs that keep the order of both and have the most in common."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence

import numpy as np

from torchair_scope.analysis.signature import Signature
from torchair_scope.analysis.source import Array

Pairs = list[tuple[int, int]]

# Cells of the table that is kept in memory: two rows of 5,000 calls each fit.
_LARGEST_TABLE = 30_000_000
_WEIGHTS = {
    "shapes": 8,
    "source": 8,
    "module": 4,
    "scope": 4,
    "direction": 4,
    "node": 2,
    # A backward that computes a saved transpose again has two that differ in nothing else.
    "layouts": 1,
}


def align(golden: Sequence[Signature], target: Sequence[Signature]) -> Pairs:
    """Pairs of positions, increasing on both sides, of calls with the same operator.

    Of all such alignments it is the one whose pairs have the most in common: shapes, source line,
    module, scope, direction, name, strides. Rows that are too long for that are paired by place.
    """
    first = _common_beginning(golden, target)
    last = _common_beginning(golden[first:][::-1], target[first:][::-1])
    inner_golden = golden[first : len(golden) - last]
    inner_target = target[first : len(target) - last]
    pairs = [(position, position) for position in range(first)]
    if len(inner_golden) * len(inner_target) <= _LARGEST_TABLE:
        inner = _best(inner_golden, inner_target)
    else:
        inner = by_ordinal(inner_golden, inner_target)
    pairs += [(first + i, first + j) for i, j in inner]
    ends = zip(
        range(len(golden) - last, len(golden)), range(len(target) - last, len(target)), strict=True
    )
    return pairs + list(ends)


def by_ordinal(golden: Sequence[Signature], target: Sequence[Signature]) -> Pairs:
    """Pairs of the k-th with the k-th call of one operator, shape and place, in whatever order.

    Where the two sides have different numbers of them, it is not known which is which.
    """
    sides: list[dict[Hashable, list[int]]] = []
    for row in (golden, target):
        groups: dict[Hashable, list[int]] = defaultdict(list)
        for position, signature in enumerate(row):
            groups[signature.elsewhere].append(position)
        sides.append(groups)
    pairs: Pairs = []
    for key, positions in sides[0].items():
        others = sides[1].get(key, [])
        if len(positions) == len(others):
            pairs += zip(positions, others, strict=True)
    return sorted(pairs)


def _common_beginning(golden: Sequence[Signature], target: Sequence[Signature]) -> int:
    count = 0
    for one, other in zip(golden, target, strict=False):
        if _certain(one) != _certain(other):
            break
        count += 1
    return count


def _certain(signature: Signature) -> Signature:
    """What has to be equal for two calls to be the same beyond doubt."""
    return signature.elsewhere if signature.is_placed else signature._replace(layouts=())


def _best(golden: Sequence[Signature], target: Sequence[Signature]) -> Pairs:
    """Longest common subsequence, weighted."""
    if not golden or not target:
        return []
    score = _Score(golden, target)
    table = np.zeros((len(golden) + 1, len(target) + 1), np.int32)
    for row in range(len(golden)):
        gain = score.row(row)
        above = table[row]
        best = np.where(gain > 0, np.maximum(above[1:], above[:-1] + gain), above[1:])
        np.maximum.accumulate(best, out=table[row + 1, 1:])
    return _trace_back(table, score)


def _trace_back(table: Array, score: _Score) -> Pairs:
    pairs: Pairs = []
    i, j = table.shape[0] - 1, table.shape[1] - 1
    while i and j:
        if table[i, j] == table[i, j - 1]:
            j -= 1
        elif table[i, j] == table[i - 1, j]:
            i -= 1
        else:
            i, j = i - 1, j - 1
            pairs.append((i, j))
    return pairs[::-1]


class _Score:
    """What two calls have in common, as a number; 0 for different operators."""

    def __init__(self, golden: Sequence[Signature], target: Sequence[Signature]) -> None:
        self._columns: dict[str, tuple[Array, Array]] = {}
        for name in ("operator", *_WEIGHTS):
            codes: dict[Hashable, int] = {None: -1}
            self._columns[name] = (_coded(golden, name, codes), _coded(target, name, codes))

    def row(self, position: int) -> Array:
        """The scores of one golden call with all target calls."""
        gain = np.ones(len(self._columns["operator"][1]), np.int32)
        for name, weight in _WEIGHTS.items():
            golden, target = self._columns[name]
            gain += weight * ((target == golden[position]) & (target >= 0))
        golden, target = self._columns["operator"]
        return np.where(target == golden[position], gain, 0)


def _coded(row: Sequence[Signature], name: str, codes: dict[Hashable, int]) -> Array:
    values = (getattr(signature, name) for signature in row)
    return np.array([codes.setdefault(value, len(codes)) for value in values], np.int32)
