"""Compare two dumps: measure every pair of tensors, then say where the error was made."""

from __future__ import annotations

import os
from collections.abc import Hashable, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from functools import partial

from torchair_scope.analysis.crossing import uncrossed
from torchair_scope.analysis.dump import Call, Dump, Rank
from torchair_scope.analysis.executors import Progress, run_tasks
from torchair_scope.analysis.judgement import TensorPair, TensorResult, compare_tensors
from torchair_scope.analysis.load import load
from torchair_scope.analysis.numerics import COMPUTED_IN, Tolerance, epsilon_of
from torchair_scope.analysis.pairing import CallPair, Pairing, pair_calls, pair_ranks
from torchair_scope.analysis.verdict import CallResult, Verdict, judge

Source = str | os.PathLike[str] | Dump


@dataclass(frozen=True)
class Comparison:
    """What the comparison of two dumps has shown.

    Args:
        verdict: where the error was made, or that there is none.
        results: one for each pair of calls, in the order in which the target ran.
        only_golden, only_target: calls that have no partner.
        notes: what is missing in the dumps, and what could not be paired at all.
    """

    verdict: Verdict
    results: list[CallResult] = field(repr=False)
    only_golden: list[Call] = field(repr=False, default_factory=list)
    only_target: list[Call] = field(repr=False, default_factory=list)
    notes: list[str] = field(repr=False, default_factory=list)


def compare(
    golden: Source,
    target: Source,
    *,
    scope: str | None = None,
    step: int | None = None,
    tolerance: Tolerance | None = None,
    confirm: bool = True,
    executor: Executor | None = None,
    progress: Progress | None = None,
) -> Comparison:
    """Compare a dump with the one that is taken to be right, and find where an error was made.

        >>> import torch, torchair_scope as torchair
        >>> from torchair_scope.analysis.compare import compare
        >>> @torchair.dump_ops
        ... def shift(x):
        ...     return x.sin() + 1
        >>> for backend in ("aot_eager", "inductor"):
        ...     torch._dynamo.reset()
        ...     options = {"path": backend, "backend": backend}
        ...     compiled = torch.compile(shift, backend="torchair_scope", options=options)
        ...     result = compiled(torch.ones(3))
        >>> compare("aot_eager", "inductor").verdict.kind
        'agrees'

    Args:
        golden: the dump that is right: by path, URL, or as `torchair_scope.load` gives it.
        target: the dump to judge, likewise.
        scope: compare the calls of this scope only.
        step: compare this step of each graph only.
        tolerance: for every element of every tensor; those of `torch.testing` by dtype, and a few
            roundings of a tensor's largest value, if None.
        confirm: run the operators that seem to have made an error again, on the target's own
            inputs. It tells an error from rounding in the inputs that the operator amplifies.
        executor: where tensors are read and measured: any `concurrent.futures.Executor`; here
            if None. The command line takes a pool of processes if there is much to read.
        progress: is called with the number of bytes that have been read since the last time.

    Raises:
        FileNotFoundError: there is no dump.
    """
    pairing, notes = _pair(_loaded(golden), _loaded(target), scope, step)
    tasks = list(_in_their_precision(pairing.pairs))
    measured = _measure(tasks, tolerance, executor, progress)
    results = [
        CallResult(pair, tensors) for pair, tensors in zip(pairing.pairs, measured, strict=True)
    ]
    again = partial(_measured_alone, tolerance, _coarsest(tasks))
    results, only_golden = uncrossed(results, pairing.only_golden, again)
    verdict, results = judge(results, confirm=confirm)
    return Comparison(verdict, results, only_golden, pairing.only_target, notes)


def _loaded(dump: Source) -> Dump:
    return dump if isinstance(dump, Dump) else load(dump)


def bytes_to_compare(
    golden: Dump, target: Dump, scope: str | None = None, step: int | None = None
) -> int:
    """The bytes that a comparison reads, for those who show its progress."""
    pairing, _ = _pair(golden, target, scope, step)
    distinct = _distinct(_in_their_precision(pairing.pairs))
    return sum(pair.size for pair in distinct.values())


def _pair(
    golden: Dump, target: Dump, scope: str | None, step: int | None
) -> tuple[Pairing, list[str]]:
    whole = Pairing()
    ranks = list(pair_ranks(golden.ranks, target.ranks))
    for golden_rank, target_rank in ranks:
        pairing = pair_calls(
            golden.calls(scope=scope, step=step, rank=golden_rank.number),
            target.calls(scope=scope, step=step, rank=target_rank.number),
        )
        whole.pairs.extend(pairing.pairs)
        whole.only_golden.extend(pairing.only_golden)
        whole.only_target.extend(pairing.only_target)
    golden_ranks, target_ranks = ([pair[side] for pair in ranks] for side in (0, 1))
    notes = [*_other_world_sizes(golden, target)]
    notes += [*_notes("golden", golden, golden_ranks), *_notes("target", target, target_ranks)]
    return whole, notes


def _other_world_sizes(golden: Dump, target: Dump) -> Iterator[str]:
    sizes = [sorted({rank.world_size for rank in dump.ranks}) for dump in (golden, target)]
    if sizes[0] != sizes[1]:
        told = [" and ".join(map(str, each)) for each in sizes]
        yield (
            f"golden is of a run of {told[0]} processes, target of one of {told[1]}: ranks are "
            "paired by number, and may have had other parts of the model or of its inputs"
        )


def _notes(side: str, dump: Dump, paired: Sequence[Rank]) -> Iterator[str]:
    for text in dump.problems:
        yield f"{side}: {text}"
    for rank in dump.ranks:
        if not any(rank is each for each in paired):
            yield f"{side}: rank {rank.number} is not on the other side"


def _tensor_pairs(pair: CallPair) -> list[TensorPair]:
    golden, target = pair.golden.tensors, pair.target.tensors
    if pair.rule == "shape":  # other operators: only what comes out in the end is the same
        golden = {slot: tensor for slot, tensor in golden.items() if slot == "OUTPUT.0"}
    return [
        TensorPair(slot, tensor, target[slot]) for slot, tensor in golden.items() if slot in target
    ]


def _in_their_precision(pairs: Sequence[CallPair]) -> Iterator[list[TensorPair]]:
    """The tensors of each pair, with the coarsest dtype that its rank has computed in so far.

    What bfloat16 has rounded stays rounded in the float32 that is computed from it.
    """
    coarsest: dict[int, str] = {}
    for pair in pairs:
        rank = pair.target.graph.rank.number
        tensors = _tensor_pairs(pair)
        dtypes = {
            each.dtype
            for both in tensors
            for each in (both.golden, both.target)
            if each.description
        }
        computed_in = dtypes & COMPUTED_IN
        if rank in coarsest:
            computed_in.add(coarsest[rank])
        if computed_in:
            coarsest[rank] = max(sorted(computed_in), key=epsilon_of)
        yield [replace(each, computed_in=coarsest.get(rank)) for each in tensors]


def _measure(
    tasks: Sequence[list[TensorPair]],
    tolerance: Tolerance | None,
    executor: Executor | None,
    progress: Progress | None,
) -> list[list[TensorResult]]:
    """The results for each pair of each task; what is on disk once is read once."""
    distinct = _distinct(tasks)
    function = partial(compare_tensors, tolerance=tolerance)
    sizes = [pair.size for pair in distinct.values()]
    measured = run_tasks(function, list(distinct.values()), sizes, executor, progress)
    results = dict(zip(distinct, measured, strict=True))
    return [[replace(results[pair.key], slot=pair.slot) for pair in task] for task in tasks]


def _coarsest(tasks: Iterable[list[TensorPair]]) -> str | None:
    """The coarsest dtype that any call was computed in."""
    found = {pair.computed_in for task in tasks for pair in task} - {None}
    return max(sorted(map(str, found)), key=epsilon_of, default=None)


def _measured_alone(
    tolerance: Tolerance | None, computed_in: str | None, pair: CallPair
) -> list[TensorResult]:
    tensors = (replace(each, computed_in=computed_in) for each in _tensor_pairs(pair))
    return [compare_tensors(each, tolerance) for each in tensors]


def _distinct(tasks: Iterable[list[TensorPair]]) -> dict[Hashable, TensorPair]:
    return {pair.key: pair for task in tasks for pair in task}
