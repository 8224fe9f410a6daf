"""Statistics in place of tensors, against one pass of `torch.aminmax` over the same tensors.

python benchmarks/stats.py [--quick] [--folder DISK]
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from functorch.compile import make_boxed_func
from measuring import Table, alternating, arguments, median, scratch, seconds, show
from models import Encoder, sentences
from torch._functorch.aot_autograd import aot_module_simplified

import torchair_scope as torchair


class Collected(torch.fx.Interpreter):
    """Runs a graph, and keeps each tensor that an operator is given and returns."""

    def __init__(self, graph: torch.fx.GraphModule) -> None:
        super().__init__(graph)
        self.tensors: list[torch.Tensor] = []

    def run_node(self, n: torch.fx.Node) -> Any:
        result = super().run_node(n)
        if n.op == "call_function" and not str(n.target).startswith("<built-in function getitem"):
            args, _ = self.fetch_args_kwargs_from_env(n)
            outputs = result if isinstance(result, (tuple, list)) else [result]
            self.tensors += [t for t in (*args, *outputs) if isinstance(t, torch.Tensor)]
        return result


def tensors_of(model: torch.nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """Every INPUT and OUTPUT of a step, as the dump has a row for."""
    found: list[torch.Tensor] = []

    def backend(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        def compile_graph(graph: torch.fx.GraphModule, _: Any) -> Any:
            def run(*args: Any) -> Any:
                collected = Collected(graph)
                result = collected.run(*args)
                found.extend(collected.tensors)
                return result

            return make_boxed_func(run)

        return aot_module_simplified(gm, inputs, fw_compiler=compile_graph)

    with torch.no_grad():
        torch.compile(model, backend=backend, fullgraph=True)(x)
    return found


def once_each(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """The same without what is the same part of the same memory."""
    places = {
        (t.untyped_storage().data_ptr(), t.storage_offset(), t.shape, t.stride()): t
        for t in tensors
    }
    return list(places.values())


def extremes(tensors: list[torch.Tensor]) -> None:
    for tensor in tensors:
        torch.aminmax(tensor)


def measure(folder: Path, layers: int, dtype: torch.dtype, repeats: int) -> list[Any]:
    """The cells of one case."""

    def compiled(model: torch.nn.Module, backend: Any, **options: Any) -> Callable[[Any], Any]:
        return torch.compile(model.to(dtype).eval(), backend=backend, fullgraph=True, **options)

    def scope() -> Any:
        return torchair.scope.data_dump("encoder", data="stats")

    undumped = compiled(Encoder(layers), "aot_eager")
    options = {"path": str(folder / "ours"), "backend": "aot_eager"}
    measured = compiled(Encoder(layers, range(layers), scope), "torchair_scope", options=options)
    tensors = tensors_of(Encoder(layers).to(dtype).eval(), sentences(0, dtype))
    distinct = once_each(tensors)
    sides = {
        "undumped": lambda repeat: seconds(lambda: undumped(sentences(repeat, dtype))),
        "stats": lambda repeat: seconds(lambda: measured(sentences(repeat, dtype))),
        "aminmax": lambda repeat: seconds(lambda: extremes(tensors)),
        "distinct": lambda repeat: seconds(lambda: extremes(distinct)),
    }
    with torch.no_grad():
        alternating(sides, 2)
        needed = {side: median(times) for side, times in alternating(sides, repeats).items()}
    added = needed["stats"] - needed["undumped"]
    aminmax, once = needed["aminmax"], needed["distinct"]
    rows = sum(len(t.read_text().splitlines()) - 1 for t in folder.rglob("graph_*/0/stats.csv"))
    assert rows == len(tensors), (rows, len(tensors))
    return [rows, needed["undumped"], added, aminmax, added / aminmax, once, added / once]


def main() -> None:
    options = arguments(__doc__)
    table = Table(
        "5. seconds that statistics add to a step, against torch.aminmax of each tensor in a row, "
        "and of each different one",
        ["layers", "dtype", "rows", "undumped", "added", "aminmax", "ratio", "once", "ratio "],
    )
    for layers in (6,) if options.quick else (6, 24):
        for dtype in (torch.float32, torch.bfloat16):
            with scratch(options) as folder:
                torch.compiler.reset()
                kind = str(dtype).removeprefix("torch.")
                table.add(layers, kind, *measure(folder, layers, dtype, options.repeats))
    show([table], options.json)


if __name__ == "__main__":
    main()
