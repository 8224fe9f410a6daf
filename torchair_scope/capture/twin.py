"""A scope around a call of compiled code: the call takes another way, operator by operator.

The graph that Dynamo made is kept beside what the inner compiler made of it. While a scope is open
on the calling thread, that graph is run in its place, as eager code: nothing is compiled, and all
of its operators pass through the scope, as in a golden run of the same script.
"""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch

from torchair_scope.capture.eager import SavingMode, open_mode
from torchair_scope.capture.eager_bodies import GraphRun
from torchair_scope.capture.settings import DumpSettings

Compiled = Callable[..., Any]


class Twin:
    """The graph as Dynamo made it. Make it before an inner compiler changes the graph.

    Args:
        gm: the Dynamo graph; its nodes are copied, its parameters and constants are not.
        settings: those of the backend that was given the graph.
        below_autograd: whether it is an ATen graph, which AOTAutograd runs as one operator.
    """

    def __init__(
        self, gm: torch.fx.GraphModule, settings: DumpSettings, *, below_autograd: bool = False
    ) -> None:
        self._gm = torch.fx.GraphModule(gm, copy.deepcopy(gm.graph))
        self._settings = settings
        self._below_autograd = below_autograd
        self._said_uncompiled = False

    def beside(self, compiled: Compiled) -> Compiled:
        """`compiled`, but for calls in a scope, which run the twin."""

        @functools.wraps(compiled)
        def call(*args: Any) -> Any:
            mode = open_mode()
            if mode is None:
                return compiled(*args)
            return self._run(mode, list(args))

        return call

    def _run(self, mode: SavingMode, args: list[Any]) -> Any:
        if self._settings.within(mode.options).options_of(None).engine == "tap":
            self._say_uncompiled()
        with mode.running_graph(self._settings) as at_node:
            results = GraphRun(self._gm, at_node).boxed_run(args)
        if self._below_autograd:
            mode.ran_below_autograd(results)
        return results

    def _say_uncompiled(self) -> None:
        if not self._said_uncompiled:
            self._said_uncompiled = True
            warnings.warn(
                "a scope with engine='tap' stands around a call of compiled code, which has no "
                "taps: this call runs uncompiled, operator by operator. Put the scope inside the "
                "compiled function to have the values of its compiled code dumped.",
                stacklevel=4,
            )
