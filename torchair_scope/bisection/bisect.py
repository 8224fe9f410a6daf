"""`torchair_scope.bisect`: run what is wrong again and again, until one operator is left."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchair_scope.bisection.narrowing import Outcome, State, after
from torchair_scope.bisection.plan import Finding, Plan, findings_in
from torchair_scope.bisection.program import Command, Function, NothingJudgedError, Program
from torchair_scope.numbers import numbers

_TRANSCRIPT = "transcript.json"
Progress = Callable[[State, int], None]


@dataclass(frozen=True)
class Bisection:
    """What a bisection has found.

    Args:
        outcome: "found": one operator is left. "hidden": a few are left, and cutting between them
            makes the error go away. "agrees": no graph makes an error. "unknown": that could not
            be told.
        runs: how often the program ran, earlier runs that were resumed among them.
        decisive: the finding that says so: the piece that makes the error, with both errors;
            None if there is none.
        folder: where the plan, the findings and the output of each run are.
    """

    outcome: Outcome
    runs: int
    decisive: Finding | None
    folder: Path

    @property
    def operators(self) -> tuple[Mapping[str, Any], ...]:
        """The name, target, module and source of what makes the error; the ends of a long piece."""
        return self.decisive.nodes if self.decisive else ()

    def __str__(self) -> str:
        if self.decisive is None:
            told = {
                "agrees": "no compiled graph makes an error that its dtypes do not explain",
                "unknown": "it cannot be told: no piece of any graph could be judged",
            }
            return told.get(self.outcome, self.outcome)
        names = " … ".join(f"{node['name']} ({node['target']})" for node in self.operators)
        count = self.decisive.stop - self.decisive.start
        if self.outcome == "found":
            return f"{names} makes the error: {self.decisive.reason}"
        return (
            f"one of {count} operators makes the error, {names}: {self.decisive.reason}. It goes "
            "away when the compiled code has to give the values between them"
        )


def bisect(
    fn: Callable[..., Any],
    inputs: Sequence[Any] = (),
    *,
    steps: str = "0",
    pieces: int = 4,
    folder: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> Bisection:
    """Find the operator that compiled code computes wrongly, in a model too large to dump.

        >>> import torch, torchair_scope as torchair
        >>> options = {"backend": "aot_eager"}
        >>> model = torch.compile(torch.nn.Linear(4, 4), backend="torchair_scope", options=options)
        >>> print(torchair.bisect(model, [torch.ones(2, 4)]))
        no compiled graph makes an error that its dtypes do not explain

    Each run taps the values at a few borders in the graph under suspicion. Each piece between
    borders is run again on its tapped inputs, in eager mode and in float64: the golden run. What
    is off by more than its dtype explains is cut further. Scopes are off meanwhile.

    Args:
        fn: what calls the compiled model, and its backward where that is to be judged. It is
            called once in each run, compiled anew; so it should do the same each time.
        inputs: its positional arguments.
        steps: which runs of each graph are judged, as "0|3-5".
        pieces: how many pieces a suspicious one is cut into: more make fewer runs, and tap more.
        folder: for the plan and findings of each run; a temporary one if None. A folder with the
            runs of an earlier bisection is resumed.
        progress: is called after each run with the state and the number of runs.

    Raises:
        ValueError: `pieces` is less than 2, or `folder` is that of another bisection.
        NothingJudgedError: no graph of `fn` was compiled with a backend of ours.
    """
    place = Path(tempfile.mkdtemp(prefix="bisect-") if folder is None else folder)
    what = {"function": getattr(fn, "__qualname__", type(fn).__name__)}
    return _bisect(Function(fn, inputs), what, steps, pieces, place, progress)


def bisect_command(
    arguments: Sequence[str],
    *,
    folder: str | os.PathLike[str],
    steps: str = "0",
    pieces: int = 4,
    limit: float | None = None,
    progress: Progress | None = None,
) -> Bisection:
    """The same for a program; see `bisect`.

    Args:
        arguments: the command, as `["python", "train.py"]`.
        folder: as for `bisect`.
        steps: as for `bisect`.
        pieces: as for `bisect`.
        limit: seconds after which a run is ended; None for as long as it takes. One in which a
            piece is found to differ is ended at once.
        progress: as for `bisect`.

    Raises:
        ValueError: as `bisect`.
        NothingJudgedError: the program fails, or compiles no graph with a backend of ours.
    """
    what = {"command": list(arguments)}
    return _bisect(Command(tuple(arguments), limit), what, steps, pieces, Path(folder), progress)


def _bisect(
    program: Program,
    what: Mapping[str, Any],
    steps: str,
    pieces: int,
    folder: Path,
    progress: Progress | None,
) -> Bisection:
    if pieces < 2:
        raise ValueError(f"pieces is {pieces}; it can be 2 or more")
    selected = numbers(steps, option="steps")
    done = _begin(folder, {**what, "steps": str(selected), "pieces": pieces})
    state, runs = State(), 0
    while state.outcome is None:
        runs += 1
        inside = folder / f"run_{runs}"
        if runs > done:
            _run(program, state, inside, str(selected), pieces)
            _note_done(folder, runs)
        findings = findings_in(inside / "findings.jsonl")
        if runs == 1 and not findings:
            raise NothingJudgedError(
                "nothing was judged: no graph was compiled with backend='torchair_scope' or a "
                f"backend from get_npu_backend and ran in the steps {selected}. Compile the model "
                "with one of these; where TorchAir compiles, import torchair_scope."
            )
        state = after(state, findings)
        if progress is not None:
            progress(state, runs)
    return Bisection(state.outcome, runs, state.decisive, folder)


def _run(program: Program, state: State, folder: Path, steps: str, pieces: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    findings = folder / "findings.jsonl"
    findings.unlink(missing_ok=True)
    suspect = state.suspect
    if suspect is None:
        plan = Plan(str(findings.absolute()), {}, steps)
    else:
        cuts = {suspect.graph: suspect.cuts(pieces)}
        plan = Plan(str(findings.absolute()), cuts, steps, suspect.graph)

    def is_enough(found: list[Finding]) -> bool:
        return after(state, found).decisive is not state.decisive

    program.run(plan, folder, is_enough)


def _begin(folder: Path, what: Mapping[str, Any]) -> int:
    """How many runs of the same bisection are done already."""
    path = folder / _TRANSCRIPT
    if path.exists():
        known = json.loads(path.read_text())
        if known["what"] != what:
            raise ValueError(
                f"{folder} is the folder of another bisection, of {known['what']}: give another "
                "folder, or delete it"
            )
        return int(known["runs"])
    folder.mkdir(parents=True, exist_ok=True)
    _write(path, {"what": what, "runs": 0})
    return 0


def _note_done(folder: Path, runs: int) -> None:
    path = folder / _TRANSCRIPT
    _write(path, {**json.loads(path.read_text()), "runs": runs})


def _write(path: Path, told: Mapping[str, Any]) -> None:
    whole = path.with_suffix(".part")
    whole.write_text(json.dumps(told))
    whole.replace(path)
