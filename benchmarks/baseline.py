"""The baseline: a plain serial dump, as TorchAir's `config.debug.data_dump` makes it.

The graph is run by `torch.fx.Interpreter`; before each operator each of its inputs is written by
`np.save`, after it each output, one after the other and under TorchAir's names. Nothing is written
once only, nothing overlaps, and there is no manifest.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import torch
from functorch.compile import make_boxed_func
from torch._functorch.aot_autograd import aot_module_simplified

Wanted = Callable[[torch.fx.Node], bool]


class Baseline:
    """A backend for `torch.compile`.

    Args:
        folder: of the dump.
        wanted: which nodes are dumped.
    """

    def __init__(self, folder: Path, wanted: Wanted = lambda node: True) -> None:
        self.folder = folder
        self.wanted = wanted
        self.steps = itertools.count()

    def __call__(self, gm: torch.fx.GraphModule, example_inputs: Any) -> Any:
        def compile_graph(graph: torch.fx.GraphModule, inputs: Any) -> Any:
            return make_boxed_func(lambda *args: self._run(graph, args))

        return aot_module_simplified(gm, example_inputs, fw_compiler=compile_graph)

    def _run(self, graph: torch.fx.GraphModule, args: tuple[Any, ...]) -> Any:
        folder = self.folder / "worldsize1_global_rank0" / "graph_1" / str(next(self.steps))
        folder.mkdir(parents=True)
        return _SavingInterpreter(graph, folder, self.wanted).run(*args)


class _SavingInterpreter(torch.fx.Interpreter):
    def __init__(self, graph: torch.fx.GraphModule, folder: Path, wanted: Wanted) -> None:
        super().__init__(graph)
        self.folder = folder
        self.wanted = wanted

    def run_node(self, n: torch.fx.Node) -> Any:
        if n.op != "call_function" or not self.wanted(n):
            return super().run_node(n)
        args, _ = self.fetch_args_kwargs_from_env(n)
        stamp = datetime.now(timezone.utc).strftime("%Y%m%d%H%M%S%f")
        for index, value in enumerate(args):
            self._save(n, f"INPUT.{index}", stamp, value)
        result = super().run_node(n)
        outputs = result if isinstance(result, (tuple, list)) else [result]
        for index, value in enumerate(outputs):
            self._save(n, f"OUTPUT.{index}", stamp, value)
        return result

    def _save(self, node: torch.fx.Node, slot: str, stamp: str, value: Any) -> None:
        if isinstance(value, (tuple, list)) and any(isinstance(v, torch.Tensor) for v in value):
            for index, member in enumerate(value):
                self._save(node, f"{slot}.{index}", stamp, member)
            return
        if isinstance(value, torch.Tensor):
            value = value.detach().cpu()
            value = (value.float() if value.dtype is torch.bfloat16 else value).numpy()
        np.save(self.folder / f"{node.name}-{node.target}.{slot}.{stamp}.npy", value)
