"""`torchair_scope.bisect`: run what is wrong again and again, until one operator is left."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torchair_scope.analysis.dump import Dump
from torchair_scope.analysis.load import load
from torchair_scope.bisection.golden import checked
from torchair_scope.bisection.narrowing import Outcome, State, after
from torchair_scope.bisection.notes import no_such_place, notes_of
from torchair_scope.bisection.places import Patterns, Places
from torchair_scope.bisection.plan import Finding, Plan, findings_in, places_beside
from torchair_scope.bisection.program import Command, Function, NothingJudgedError, Program
from torchair_scope.numbers import numbers

_TRANSCRIPT = "transcript.json"
Progress = Callable[[State, int], None]


@dataclass(frozen=True)
class Bisection:
    """What a bisection has found.

    Args:
        outcome: "found": one operator is left. "hidden": a few are left, and cutting between them
            makes the error go away, or the golden dump has no values between them. "agrees": no
            graph makes an error. "unknown": that could not be told.
        runs: how often the program ran, earlier runs that were resumed among them.
        decisive: the finding that says so: the piece that makes the error, with both errors;
            None if there is none.
        folder: where the plan, the findings and the output of each run are.
        notes: what the golden dump did not have, and where the program began with other values.
    """

    outcome: Outcome
    runs: int
    decisive: Finding | None
    folder: Path
    notes: tuple[str, ...] = ()

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
        text = f"one of {count} operators makes the error, {names}: {self.decisive.reason}"
        if self.decisive.judged_by == "golden":
            return f"{text}. The golden dump does not have the values between them"
        return f"{text}. It goes away when the compiled code has to give the values between them"


def bisect(
    fn: Callable[..., Any],
    inputs: Sequence[Any] = (),
    golden: str | os.PathLike[str] | Dump | None = None,
    *,
    module: Patterns = (),
    source: Patterns = (),
    nodes: Patterns = (),
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
    borders is run again on its tapped inputs, in eager mode and in float64. What is off by more
    than its dtype explains is cut further. Scopes are off meanwhile.

    With a golden dump, tapped values are compared with it first. So an error is found as well that
    is not in the compiled code but in the graph: a wrong decomposition, say. Pieces for which the
    dump lacks values are judged without it, and `Bisection.notes` has them.

    Args:
        fn: what calls the compiled model, and its backward where that is to be judged. It is
            called once in each run, compiled anew; so it should do the same each time.
        inputs: its positional arguments.
        golden: a dump of a run that is right, on the same inputs: by path, URL, or as
            `torchair_scope.load` gives it. Its steps are counted as those of each graph.
        module: look at the operators of these modules only: paths, which stand for the modules
            inside as well, or patterns such as "layers.3*".
        source: only at those from these lines: "model.py:40-60", "model.py:40|52" or "model.py".
        nodes: only at these nodes of the compiled graphs: "mul_3", or all from one to another,
            "add_1..mul_3".
        steps: which runs of each graph are judged, as "0|3-5".
        pieces: how many pieces a suspicious one is cut into: more make fewer runs, and tap more.
        folder: for the plan and findings of each run; a temporary one if None. A folder with the
            runs of an earlier bisection is resumed.
        progress: is called after each run with the state and the number of runs.

    Raises:
        FileNotFoundError: `golden` is no dump.
        ValueError: `golden` has no tensor, `module`, `source` or `nodes` can be none, `pieces` is
            less than 2, or `folder` is that of another bisection.
        NothingJudgedError: no graph of `fn` was compiled with a backend of ours, or none has a
            place that was named.
    """
    request = _Request.of(golden, Places.of(module, source, nodes), steps, pieces)
    place = Path(tempfile.mkdtemp(prefix="bisect-") if folder is None else folder)
    what = {"function": getattr(fn, "__qualname__", type(fn).__name__)}
    return _bisect(Function(fn, inputs), what, request, place, progress)


def bisect_command(
    arguments: Sequence[str],
    *,
    folder: str | os.PathLike[str],
    golden: str | os.PathLike[str] | Dump | None = None,
    module: Patterns = (),
    source: Patterns = (),
    nodes: Patterns = (),
    steps: str = "0",
    pieces: int = 4,
    limit: float | None = None,
    progress: Progress | None = None,
) -> Bisection:
    """The same for a program; see `bisect`.

    Args:
        arguments: the command, as `["python", "train.py"]`.
        folder: as for `bisect`.
        golden: as for `bisect`.
        module: as for `bisect`.
        source: as for `bisect`.
        nodes: as for `bisect`.
        steps: as for `bisect`.
        pieces: as for `bisect`.
        limit: seconds after which a run is ended; None for as long as it takes. One in which a
            piece is found to differ is ended at once.
        progress: as for `bisect`.

    Raises:
        FileNotFoundError: as `bisect`.
        ValueError: as `bisect`.
        NothingJudgedError: as `bisect`, or the program fails.
    """
    request = _Request.of(golden, Places.of(module, source, nodes), steps, pieces)
    what = {"command": list(arguments)}
    return _bisect(Command(tuple(arguments), limit), what, request, Path(folder), progress)


@dataclass(frozen=True)
class _Request:
    """What all runs of a bisection are told."""

    golden: str | None
    places: Places
    steps: str
    pieces: int

    @classmethod
    def of(
        cls, golden: str | os.PathLike[str] | Dump | None, places: Places, steps: str, pieces: int
    ) -> _Request:
        """What a user has asked for, looked at before anything runs."""
        if pieces < 2:
            raise ValueError(f"pieces is {pieces}; it can be 2 or more")
        selected = str(numbers(steps, option="steps"))
        if golden is None:
            return cls(None, places, selected, pieces)
        dump = checked(golden if isinstance(golden, Dump) else load(golden))
        return cls(dump.folder.absolute().url, places, selected, pieces)

    def plan(self, state: State, findings: Path) -> Plan:
        """What the next run is told."""
        common = Plan(
            str(findings.absolute()), {}, self.steps, places=self.places, golden=self.golden
        )
        if state.suspect is None:
            return common
        return replace(
            common,
            cuts={state.suspect.graph: state.suspect.cuts(self.pieces)},
            only=state.suspect.graph,
            between_golden=state.decisive is not None and state.decisive.judged_by == "golden",
        )


def _bisect(
    program: Program,
    what: Mapping[str, Any],
    request: _Request,
    folder: Path,
    progress: Progress | None,
) -> Bisection:
    done = _begin(folder, {**what, **asdict(request)})
    state, runs = State(), 0
    all_findings: list[Finding] = []
    while state.outcome is None:
        runs += 1
        inside = folder / f"run_{runs}"
        if runs > done:
            _run(program, state, inside, request)
        findings = findings_in(inside / "findings.jsonl")
        if runs == 1 and not findings:
            raise NothingJudgedError(_why_nothing(request, inside))
        if runs > done:
            _note_done(folder, runs)
        all_findings += findings
        state = after(state, findings)
        if progress is not None:
            progress(state, runs)
    return Bisection(state.outcome, runs, state.decisive, folder, tuple(notes_of(all_findings)))


def _why_nothing(request: _Request, folder: Path) -> str:
    graphs = places_beside(folder / "findings.jsonl")
    if request.places and graphs:
        return no_such_place(request.places, graphs, request.steps)
    return (
        "nothing was judged: no graph was compiled with backend='torchair_scope' or a "
        f"backend from get_npu_backend and ran in the steps {request.steps}. Compile the model "
        "with one of these; where TorchAir compiles, import torchair_scope."
    )


def _run(program: Program, state: State, folder: Path, request: _Request) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    plan = request.plan(state, folder / "findings.jsonl")
    for left in (plan.findings, folder / "graphs.jsonl"):
        Path(left).unlink(missing_ok=True)

    def is_enough(found: list[Finding]) -> bool:
        return after(state, found).decisive is not state.decisive

    program.run(plan, folder, is_enough)


def _begin(folder: Path, what: Mapping[str, Any]) -> int:
    """How many runs of the same bisection are done already."""
    path = folder / _TRANSCRIPT
    what = json.loads(json.dumps(what))
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
