"""Every example in a docstring runs, and prints what it shows."""

from __future__ import annotations

import doctest
import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from typing import Any

import pytest

import torchair_scope
from torchair_scope import backends, config, scope
from torchair_scope.analysis import compare, load, metrics, replay
from torchair_scope.store import reader, run

PUBLIC: list[Any] = [
    scope.data_dump,
    scope.configure,
    scope.dump_ops,
    scope.remove_dump_ops,
    scope.summary,
    backends.get_npu_backend,
    backends.get_compiler,
    backends.torchair_scope_backend,
    config.CompilerConfig,
    config.DataDump,
    config.DumpConfig,
    config.GraphDump,
    run.open_run,
    run.Run.graph,
    reader.read,
    reader.Call.load_args,
    load.load,
    compare.compare,
    replay.replay,
    metrics.measure,
]


def all_examples() -> Iterator[doctest.DocTest]:
    finder = doctest.DocTestFinder()
    for module in pkgutil.walk_packages(torchair_scope.__path__, f"{torchair_scope.__name__}."):
        tests = finder.find(importlib.import_module(module.name), module.name)
        yield from (test for test in tests if test.examples)


def name_of(example: doctest.DocTest) -> str:
    return example.name


@pytest.mark.parametrize("example", list(all_examples()), ids=name_of)
def test_an_example_does_what_it_shows(example: doctest.DocTest) -> None:
    example.globs = {"__name__": "example"}  # what a user has: nothing is imported yet
    report: list[str] = []
    runner = doctest.DocTestRunner(verbose=False, optionflags=doctest.ELLIPSIS)
    # The names stay until Dynamo has let go of the functions that it compiled.
    runner.run(example, out=report.append, clear_globs=False)
    assert not report, "".join(report)


@pytest.mark.parametrize("thing", PUBLIC, ids=lambda thing: thing.__qualname__)
def test_what_is_public_shows_an_example(thing: Any) -> None:
    assert doctest.DocTestParser().get_examples(inspect.getdoc(thing) or "")
