"""One graph feature per file; `CASES` are their names and `load` imports one.

Each file defines `make(data_dump)`, which returns a function or module and its example inputs, and
says in its docstring what a correct dump of it holds. Names that it may define besides:

`MUST`, `MUST_NOT`: parts of targets that have to be, or must not be, in the dump.
`MUST_NESTED`: parts of targets inside a sub-graph (a `cond` branch) that have to be.
`COUNT`, `COUNT_MIN`: how many calls of a target a step has.
`N_INPUT_TENSORS`: how many input tensors, keyword ones included, a call of a target has.
`EXPECT_VALUES`: values that the docstring explains.
`GRAD`: run the backward too. `NEEDS_NO_GRAD`: run under `torch.no_grad`.
`RANDOM`: seed the generator before each run. `DYNAMIC`: compile with `dynamic=True`.
`FULLGRAPH = False`: it has a graph break. `SETUP_DIST`: `make` starts a process group.
`EAGER_OUTER`: do not compile it, it compiles an inner function itself, with `BACKEND`.
`CONFIG`: a dict for `torch._dynamo.config.patch`. `THREADS`: how many threads call it at once.
`more_inputs()`: the inputs of further calls.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

CASES = sorted(path.stem for path in Path(__file__).parent.glob("case_*.py"))


def load(name: str) -> ModuleType:
    """Import the case called `name`, once a process: some register operators."""
    return importlib.import_module(f"{__name__}.{name}")
