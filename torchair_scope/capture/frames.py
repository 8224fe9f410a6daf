"""What the Python stack tells of code that runs now: its line, its module, where a scope stands."""

from __future__ import annotations

import linecache
import os
import sys
import types
import weakref
from collections.abc import Iterator
from typing import Any

import torch

from torchair_scope import _torch_private
from torchair_scope.capture.nodes import Source
from torchair_scope.capture.tags import UNKNOWN

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_GENERATED = "<eval_with_key>"  # how FX names the code of a graph
_CALLS_MODULE = torch.nn.Module._call_impl.__code__
_CHECKPOINT = _TORCH + os.path.join("utils", "checkpoint.py")


def frames_outwards() -> Iterator[types.FrameType]:
    """The frames of this thread from the caller outwards, without those of this package."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if not frame.f_code.co_filename.startswith(_PACKAGE):
            yield frame
        frame = frame.f_back


def opened_at() -> str:
    """Where the user opens a scope, as `model.py:12`; in a trace, where Dynamo stands.

    A scope on a live module is opened where the user calls that, or a module around it.
    """
    traced = [(frame.filename, frame.lineno) for frame in _torch_private.user_frames_of_trace()]
    running = [(frame.f_code.co_filename, frame.f_lineno) for frame in frames_outwards()]
    for filename, line in [*reversed(traced), *running]:
        if not os.path.abspath(filename).startswith((_PACKAGE, _TORCH)):
            return f"{os.path.basename(filename)}:{line}"
    return UNKNOWN


def source_here() -> Source | None:
    """The innermost line of code outside torch, and outside of what it generates, that runs."""
    for frame in frames_outwards():
        filename = frame.f_code.co_filename
        if not filename.startswith((_TORCH, _GENERATED)):
            code = linecache.getline(filename, frame.f_lineno).strip()
            return Source(filename, frame.f_lineno, code)
    return None


def module_here() -> str | None:
    """The path of the innermost module that is being called, as `layers.0.mlp`.

    It starts at the outermost module that is being called, whose own path is empty. A module
    that `torch.compile` has wrapped has the path that it has without that.
    """
    called = [
        frame.f_locals["self"] for frame in frames_outwards() if frame.f_code is _CALLS_MODULE
    ]
    path = _path(called[-1], called[0]) if called else None
    if path is None:
        return None
    return ".".join(step for step in path.split(".") if step != "_orig_mod")


def is_recomputing() -> bool:
    """Whether activation checkpointing runs a forward again, in the backward."""
    return _torch_private.running_backward() != _torch_private.NO_BACKWARD and any(
        frame.f_code.co_filename == _CHECKPOINT for frame in frames_outwards()
    )


_paths: weakref.WeakKeyDictionary[Any, dict[int, str]] = weakref.WeakKeyDictionary()


def _path(root: torch.nn.Module, module: torch.nn.Module) -> str | None:
    """Where `module` stands in `root`; looked up anew if `root` has changed since."""
    paths = _paths.get(root, {})
    path = paths.get(id(module))
    if path is None or not _stands_at(root, path, module):
        paths = _paths[root] = {id(part): name for name, part in root.named_modules()}
        path = paths.get(id(module))
    return path


def _stands_at(root: torch.nn.Module, path: str, module: torch.nn.Module) -> bool:
    try:
        return root.get_submodule(path) is module
    except AttributeError:
        return False
