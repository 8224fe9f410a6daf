"""Capture and replay of an aclgraph on the CPU: ATen calls are taped, and run again in place."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .recorder import RECORDER


class _Tape(TorchDispatchMode):
    """Records each ATen call with the tensors that it worked on, which keeps their memory alive."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []
        self._before: dict[int, tuple[Any, Any]] = {}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """A capture on a device is no dispatch mode: Dynamo runs compiled code in it."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            for tensor in _tensors((args, kwargs)):
                storage = tensor.untyped_storage()
                self._before.setdefault(storage.data_ptr(), (storage, storage.clone()))
        out = func(*args, **kwargs)
        if _makes_empty(func):
            out.zero_()  # a later operator of this capture may take the contents as an index
        self.calls.append((func, args, kwargs, out))
        return out

    def undo_writes(self) -> None:
        """A capture on a device records without running, so no write may stay."""
        for storage, before in self._before.values():
            storage.copy_(before)
        self._before.clear()


class TapedGraph:
    """Stands in for `torch.npu.NPUGraph`.

    Attributes:
        captures, replays, resets: how often each was called.
        capturing: whether a capture is going on.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.captures, self.replays, self.resets = 0, 0, 0
        self.capturing = False
        self._tape: _Tape | None = None
        RECORDER.acl_graphs.append(self)

    def captured_ops(self) -> list[str]:
        """The operators of the last capture, such as `"aten.relu.default"`, in order."""
        return [str(call[0]) for call in self._tape.calls] if self._tape else []

    def capture_begin(self, *args: Any, **kwargs: Any) -> None:
        self.captures += 1
        self.capturing = True
        self._random_state = torch.get_rng_state()
        self._tape = _Tape()
        self._tape.__enter__()

    def capture_end(self) -> None:
        assert self._tape is not None
        self._tape.__exit__(None, None, None)
        self._tape.undo_writes()
        torch.set_rng_state(self._random_state)  # nothing was drawn, either
        self.capturing = False

    @torch.no_grad()
    def replay(self) -> None:
        if self._tape is None or self.capturing:
            raise RuntimeError(
                "an aclgraph is replayed after its capture has ended, and before reset()"
            )
        self.replays += 1
        for func, args, kwargs, out in self._tape.calls:
            if func.is_view or _makes_empty(func):
                continue  # a view of memory that is written anew, or memory without contents
            for old, new in zip(_tensors(out), _tensors(func(*args, **kwargs)), strict=True):
                if old.data_ptr() != new.data_ptr():  # equal for in-place and out= calls
                    old.copy_(new)

    def reset(self) -> None:
        self.resets += 1
        self._tape = None

    def pool(self) -> tuple[int, int]:
        return (0, 1)

    def debug_dump(self, path: str) -> None:
        pass

    def update(self, *args: Any, **kwargs: Any) -> None:
        pass


class capture_into:
    """Stands in for the context manager `torch.npu.graph`."""

    def __init__(self, npu_graph: TapedGraph, *args: Any, **kwargs: Any) -> None:
        self._graph = npu_graph

    def __enter__(self) -> None:
        self._graph.capture_begin()

    def __exit__(self, *exception: object) -> None:
        self._graph.capture_end()


def _makes_empty(func: Any) -> bool:
    return "empty" in func._schema.name


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [
        leaf for leaf in torch.utils._pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)
    ]
