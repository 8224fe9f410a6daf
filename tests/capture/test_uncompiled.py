"""A scope in compiled code that Dynamo leaves to Python is dumped, and said to be uncompiled."""

from __future__ import annotations

import logging
import warnings

import pytest
import torch

from torchair_scope.scope import data_dump
from torchair_scope.store.reader import read


@pytest.fixture
def run(dump_path):
    """`run(function, x)` compiles and calls; gives the result, the warnings and the calls."""

    def run(function, *calls, backend="torchair_scope", **how):
        options = {"path": str(dump_path), "backend": "aot_eager"}
        how = how if backend != "torchair_scope" else {"options": options, **how}
        compiled = torch.compile(function, backend=backend, **how)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            results = [compiled(*inputs) for inputs in calls]
        said = [str(warning.message) for warning in caught if "scope" in str(warning.message)]
        dumped = read(dump_path).ranks[0].calls if dump_path.exists() else []
        return results, said, [(call.kind, call.node, call.scope) for call in dumped]

    return run


def breaks(x):
    with data_dump("mine"):
        x = x.sin()
        torch._dynamo.graph_break()
        return x + 1


def test_a_graph_break_in_a_scope_is_named_once_and_its_operators_are_dumped(run, dump_path):
    x = torch.ones(3)
    results, said, dumped = run(breaks, (x,), (x,))
    assert all(torch.equal(result, x.sin() + 1) for result in results)
    line = breaks.__code__.co_firstlineno
    (message,) = said
    for part in (
        f"scope 'mine' opened at test_uncompiled.py:{line + 1}",
        "breaks, which runs uncompiled",
        f"graph break at test_uncompiled.py:{line + 3}",
        "torch._dynamo.graph_break",
    ):
        assert part in message
    assert dumped == [("eager", "sin", "mine"), ("eager", "add", "mine")] * 2
    (graph,) = read(dump_path).ranks[0].graphs
    assert "graph break" in graph["uncompiled"]


def test_a_break_in_a_function_that_the_scope_calls_is_named_where_it_is(run):
    def helper(x):
        print("", end="")
        return x * 2

    def function(x):
        with data_dump("mine"):
            return helper(x.sin()) + 1

    _, (message,), dumped = run(function, (torch.ones(3),))
    assert f"test_uncompiled.py:{helper.__code__.co_firstlineno + 1}" in message
    assert "print" in message
    assert [node for _, node, _ in dumped] == ["sin", "mul", "add"]


def test_scopes_within_an_uncompiled_one_are_not_said_again(run):
    def function(x):
        with data_dump("outer"):
            with data_dump("inner"):
                x = x.sin()
            torch._dynamo.graph_break()
            return x + 1

    _, said, dumped = run(function, (torch.ones(3),))
    assert len(said) == 1
    assert [scope for _, _, scope in dumped] == ["outer/inner", "outer"]


def test_the_scopes_of_other_frames_are_compiled_as_ever(run):
    def clean(x):
        with data_dump("clean"):
            return x.cos()

    def function(x):
        x = clean(x)
        torch._dynamo.graph_break()
        return breaks(x)

    _, said, dumped = run(function, (torch.ones(3),))
    assert len(said) == 1
    assert ("graph", "cos", "clean") in dumped
    assert ("eager", "sin", "mine") in dumped


def test_a_function_that_the_compiler_is_kept_out_of(run):
    @torch.compiler.disable(reason="it is odd")
    def kept_out(x):
        with data_dump("mine"):
            return x.sin()

    _, (message,), dumped = run(lambda x: kept_out(x + 1) * 2, (torch.ones(3),))
    assert "kept_out, which runs uncompiled" in message
    assert "torch.compiler.disable keeps it out, saying it is odd" in message
    assert dumped == [("eager", "sin", "mine")]


def fine(x, factor=1):
    with data_dump("mine"):
        return x.sin() * factor


def test_an_error_that_is_suppressed(run, monkeypatch, dump_path):
    monkeypatch.setenv("TORCHAIR_SCOPE_PATH", str(dump_path))

    def fails(gm, example_inputs):
        raise RuntimeError("no such kernel")

    logging.disable(logging.CRITICAL)
    try:
        with torch._dynamo.config.patch(suppress_errors=True):
            _, (message,), dumped = run(fine, (torch.ones(3),), backend=fails)
    finally:
        logging.disable(logging.NOTSET)
    assert "no such kernel" in message
    assert [node for _, node, _ in dumped] == ["sin", "mul"]


def test_a_recompile_limit(run):
    x = torch.ones(3)
    with torch._dynamo.config.patch(recompile_limit=1):
        results, (message,), dumped = run(fine, (x, 1), (x, 2), (x, 3), dynamic=False)
    assert torch.equal(results[2], x.sin() * 3)
    assert "recompile limit exceeded" in message
    assert [kind for kind, _, _ in dumped].count("eager") == 4


def test_a_golden_run_is_not_warned_of(run, dump_path, monkeypatch):
    monkeypatch.setenv("TORCHAIR_SCOPE_PATH", str(dump_path))
    with torch.compiler.set_stance("force_eager"):
        _, said, dumped = run(breaks, (torch.ones(3),))
    with torch._dynamo.config.patch(disable=True):
        _, also_said, _ = run(breaks, (torch.ones(3),))
    assert said == also_said == []
    assert [kind for kind, _, _ in dumped] == ["eager"] * 2


def test_a_stance_that_is_set_after_a_scope_was_opened_is_respected(run):
    _, (message,), _ = run(breaks, (torch.ones(3),))
    assert "graph break" in message
    with torch.compiler.set_stance("force_eager"):
        _, said, _ = run(lambda x: breaks(x) * 2, (torch.ones(3),))
    assert said == []
