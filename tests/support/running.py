"""Run a case of `tests/cases` twice: with its scopes, and without them and without this package."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import torch._inductor.config
from torch.utils._pytree import tree_leaves

import torchair_scope
from tests.support.account import rows
from torchair_scope.capture.account import Row, account
from torchair_scope.store.reader import Call, Dump, read


@dataclass
class Outcome:
    """What a case computed; `values` are the tensors that all its calls returned."""

    values: list[Any] = field(default_factory=list)
    gradients: dict[str, torch.Tensor | None] = field(default_factory=dict)
    state: dict[str, torch.Tensor] = field(default_factory=dict)
    warnings: list[warnings.WarningMessage] = field(default_factory=list)


@dataclass
class CaseResult:
    """`result` and `account` come from the scoped run, `reference` from the inner one alone."""

    result: Outcome
    reference: Outcome
    dump: Dump
    account: list[Row]

    @property
    def calls(self) -> list[Call]:
        """All calls of the dump, in order of graph, step and execution."""
        return [call for rank in self.dump.ranks for call in rank.calls]


def run_case(
    case: ModuleType, backend_options: dict[str, Any], tmp_path: Path, calls: int = 1
) -> CaseResult:
    """Run `case` with the inner backend alone, then scoped with it, each from a fresh state.

    The reference goes first, so that the scoped run finds the inner compiler's caches warm.

    **Arguments:**

    - `backend_options`: options of the backend "torchair_scope", `{"backend": "inductor"}`.
    - `tmp_path`: the dump folder.
    - `calls`: how often the example inputs are used, before those of `case.more_inputs()`.
    """
    inner = backend_options["backend"]
    options = {"path": str(tmp_path), **backend_options}
    reference = run_once(case, contextlib.nullcontext, calls, backend=inner)
    account.forget()
    result = run_once(
        case, torchair_scope.scope.data_dump, calls, backend="torchair_scope", options=options
    )
    return CaseResult(result, reference, _read_if_there(tmp_path), rows())


def run_golden(case: ModuleType, tmp_path: Path, calls: int = 1) -> CaseResult:
    """Run `case` without a compiler, without its scopes and with them: a golden run."""
    eager = torch.compiler.set_stance("force_eager")
    path = mock.patch.dict("os.environ", {"TORCHAIR_SCOPE_PATH": str(tmp_path)})
    with eager, path:
        reference = run_once(case, contextlib.nullcontext, calls, backend="eager")
        account.forget()
        result = run_once(case, torchair_scope.scope.data_dump, calls, backend="eager")
    return CaseResult(result, reference, _read_if_there(tmp_path), rows())


def _read_if_there(path: Path) -> Dump:
    return read(path) if path.is_dir() and any(path.iterdir()) else Dump(path, [])


def run_once(case: ModuleType, data_dump: Callable, calls: int, **backend: Any) -> Outcome:
    """Run `case` compiled with `backend`, and `options` if it takes any, from a fresh state."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    with contextlib.ExitStack() as stack:
        caught = stack.enter_context(warnings.catch_warnings(record=True))
        warnings.simplefilter("always")
        for context in _surroundings(case, backend):
            stack.enter_context(context)
        function, compiled, inputs = _made(case, data_dump, backend)
        outcome = _called(case, compiled, [inputs] * calls + _more_inputs(case))
        outcome.warnings = caught
        if isinstance(function, torch.nn.Module):
            outcome.state = {name: value.clone() for name, value in function.state_dict().items()}
            for name, parameter in function.named_parameters():
                outcome.gradients[name] = parameter.grad
    return outcome


def _surroundings(case: ModuleType, backend: dict[str, Any]) -> Iterator[Any]:
    if getattr(case, "NEEDS_NO_GRAD", False):
        yield torch.no_grad()
    if getattr(case, "RANDOM", False):
        yield torch._inductor.config.patch(fallback_random=True)
    if getattr(case, "CONFIG", None):
        yield torch._dynamo.config.patch(case.CONFIG)
    if getattr(case, "SETUP_DIST", False):
        yield _process_group()
    if getattr(case, "EAGER_OUTER", False):
        yield mock.patch.object(case, "BACKEND", _as_backend(**backend))


@contextlib.contextmanager
def _process_group() -> Iterator[None]:
    """Leave no process group behind; the case itself starts it."""
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def _as_backend(backend: str, options: dict[str, Any] | None = None) -> Any:
    """A `backend=` argument that needs no `options=` beside it."""
    if options is None:
        return backend
    return functools.partial(torch._dynamo.lookup_backend(backend), options=options)


def _made(case: ModuleType, data_dump: Callable, backend: dict[str, Any]) -> tuple:
    compile_one = functools.partial(
        torch.compile,
        fullgraph=getattr(case, "FULLGRAPH", True),
        dynamic=getattr(case, "DYNAMIC", None),
        **backend,
    )
    function, inputs = case.make(data_dump)
    if hasattr(case, "parts"):
        parts = [compile_one(part) for part, _ in case.parts(data_dump)]
        return (
            function,
            lambda x: functools.reduce(lambda value, part: part(value), parts, x),
            inputs,
        )
    if getattr(case, "EAGER_OUTER", False):
        return function, function, inputs
    return function, compile_one(function), inputs


def _more_inputs(case: ModuleType) -> list[tuple]:
    return case.more_inputs() if hasattr(case, "more_inputs") else []


def _called(case: ModuleType, compiled: Callable, all_inputs: list[tuple]) -> Outcome:
    outcome = Outcome()
    for inputs in all_inputs:
        torch.manual_seed(1)
        values = _in_threads(compiled, inputs, getattr(case, "THREADS", 1))
        if getattr(case, "GRAD", False):
            sum(_loss(value) for value in values).backward()
        outcome.values.extend(tree_leaves(values))
    for position, value in enumerate(tree_leaves(all_inputs)):
        if isinstance(value, torch.Tensor) and value.requires_grad:
            outcome.gradients[f"input {position}"] = value.grad
    return outcome


def _in_threads(compiled: Callable, inputs: tuple, threads: int) -> list[Any]:
    if threads == 1:
        return [compiled(*inputs)]
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(lambda _: compiled(*inputs), range(threads)))


def _loss(value: Any) -> torch.Tensor:
    leaves = tree_leaves(value)
    return sum(leaf.square().sum() for leaf in leaves if leaf.requires_grad)
