"""A wrong kernel in a small compiled model: what `torchair-scope demo` runs."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import sysconfig
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from torchair_scope import scope


@dataclass(frozen=True)
class Runs:
    """The two runs of the model, and what a user sees of them without a dump.

    Args:
        golden: the dump of the eager run.
        target: the dump of the compiled run.
        compiler: what it was compiled with.
        difference: the largest difference of the results, over the largest value.
    """

    golden: Path
    target: Path
    compiler: Literal["inductor", "aot_eager"]
    difference: float


def run(folder: Path) -> Runs:
    """Dump the model twice: in eager mode, and compiled for a device with a wrong kernel.

        >>> from pathlib import Path
        >>> import torchair_scope
        >>> from torchair_scope.demo import run
        >>> runs = run(Path("demo"))
        >>> torchair_scope.compare(runs.golden, runs.target).verdict.call.pair.target.target
        'aten.native_layer_norm.default'

    Args:
        folder: where the folders `golden` and `target` are made, and `model.py`.

    Raises:
        FileExistsError: there is one of them already.
    """
    golden, target = folder / "golden", folder / "target"
    for path in (golden, target):
        if path.exists():
            raise FileExistsError(f"{path} is there already: remove it, or give another folder")
    generator = torch.Generator().manual_seed(0)
    definition = _copied_module(folder / "model.py")
    model: torch.nn.Module = definition.Block().requires_grad_(False)
    for parameter in model.parameters():
        shift = 1.0 if parameter.dim() == 1 else 0.0
        parameter.copy_(torch.randn(parameter.shape, generator=generator) / 8 + shift)
    x = torch.randn(32, definition.FEATURES, generator=generator)
    with scope.configure(path=str(golden)):
        expected = model(x)
    compiler = usable_compiler()
    options: dict[str, Any] = {"path": str(target), "backend": compiler}
    compiled = torch.compile(model, backend="torchair_scope", options=options, fullgraph=True)
    with wrong_layer_norm():
        result = compiled(x)
    difference = (result - expected).abs().max() / expected.abs().max()
    return Runs(golden, target, compiler, difference.item())


def _copied_module(path: Path) -> Any:
    """The model from a file of the user's: source lines of this package are in no dump."""
    path.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(Path(__file__).with_name("demo_model.py"), path)
    spec = importlib.util.spec_from_file_location("torchair_scope_demo_model", path.resolve())
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextmanager
def wrong_layer_norm() -> Iterator[None]:
    """While open, the CPU's layer norm has a fault that is easily made: it divides by n - 1."""
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is meant to replace the right one
        library.impl(  # type: ignore[no-untyped-call]
            "native_layer_norm", _layer_norm, "CPU", allow_override=True
        )
    try:
        yield
    finally:
        del library  # the last reference: the right kernel is back


def _layer_norm(
    x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    dims = tuple(range(-len(shape), 0))
    mean = x.mean(dims, keepdim=True)
    scale = (x.var(dims, correction=1, keepdim=True) + eps).rsqrt()
    result = (x - mean) * scale
    if weight is not None:
        result = result * weight
    return result if bias is None else result + bias, mean, scale


def usable_compiler() -> Literal["inductor", "aot_eager"]:
    """Inductor, if it finds a C++ compiler and the headers of Python."""
    compiler = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
    header = Path(sysconfig.get_path("include")) / "Python.h"
    return "inductor" if shutil.which(compiler) and header.exists() else "aot_eager"
