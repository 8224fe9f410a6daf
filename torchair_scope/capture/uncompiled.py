"""Why code in the reach of `torch.compile` runs uncompiled, and what a scope in it cannot see.

Dynamo leaves a frame to Python when it cannot trace it as a whole, and a graph break inside a
`with` block is such a case. It does so without a word.
"""

from __future__ import annotations

import os
import types
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torchair_scope import _torch_private
from torchair_scope.capture.account import account
from torchair_scope.capture.frames import frames_outwards
from torchair_scope.capture.other_backends import hides_operators, is_left_to_python
from torchair_scope.capture.settings import SETTINGS, DumpSettings, selects_this_rank
from torchair_scope.capture.tags import Tag
from torchair_scope.store.layout import rank_and_world_size, rank_folder_name
from torchair_scope.store.run import DumpWarning


@dataclass(frozen=True)
class Uncompiled:
    """Code that runs uncompiled within a call of a compiled function.

    Args:
        call: which call of a compiled function it is.
        function: the name of the outermost function that runs uncompiled, if it is known.
        reason: what Dynamo says.
        settings: those of the compiled function's backend, if that is one of ours.
        hides_operators: whether nothing is seen of what that backend compiles.
    """

    call: int
    function: str
    reason: str
    settings: DumpSettings | None
    hides_operators: bool

    def is_same_call_as(self, other: Uncompiled | None) -> bool:
        """Whether both run in one call of one compiled function."""
        return other is not None and self.call == other.call


def enclosing_compile() -> Uncompiled | None:
    """What runs here uncompiled although it lies in a compiled function; None if nothing does."""
    frame, frames = _compiled_call()
    if frame is None or is_left_to_python(frame) or _torch_private.compiles_nothing():
        return None
    function, reason = _torch_private.why_uncompiled(frames)
    backend, options = _torch_private.backend_of_call(frame)
    hides = hides_operators(backend)
    return Uncompiled(id(frame), function, reason, _settings_of(backend, options), hides)


def is_in_call(code: Uncompiled | None) -> bool:
    """Whether the call of a compiled function that `code` ran in goes on."""
    frame, _ = _compiled_call()
    return code is not None and frame is not None and id(frame) == code.call


def _compiled_call() -> tuple[types.FrameType | None, list[types.FrameType]]:
    """The frame of the innermost call of a compiled function, and those inside, outwards."""
    inside: list[types.FrameType] = []
    for frame in frames_outwards():
        if _torch_private.is_compiled_call(frame):
            return frame, inside
        inside.append(frame)
    return None, inside


def _settings_of(backend: Any, options: dict[str, Any]) -> DumpSettings | None:
    settings: Callable[..., DumpSettings] | None = getattr(backend, SETTINGS, None)
    return None if settings is None else settings(**options)


def warn(code: Uncompiled, tag: Tag, settings: DumpSettings) -> None:
    """Say once for each dump that a scope was reached without a compiler."""
    if not selects_this_rank(settings.options_of(None)):
        return  # This process has no dump; the account has the reason.
    what = f"{code.function}, which" if code.function else "code that"
    folder = os.path.join(_dump(settings), rank_folder_name(*rank_and_world_size()))
    _say_once(
        settings,
        f"uncompiled {tag} {code.reason}",
        f"scope {tag.scope!r} opened at {tag.opened_at} lies in {what} runs uncompiled although "
        f"it is reached from a compiled function: {code.reason}. The scope's operators are dumped "
        f"as they run, to {os.path.join(folder, 'eager_…')}. To have the rest compiled, move what "
        "breaks the graph out of the scope.",
    )


_GRADIENTS = (
    "it is opened in eager code in a function that torch.func.grad or its like differentiates: "
    "the operators of these gradients are not dumped. Open a scope around the call of torch.func, "
    "or compile the function with torchair_scope"
)


def warn_of_gradients(tag: Tag, settings: DumpSettings) -> None:
    """Say once for each dump that gradients are taken of a scope from outside, and not dumped."""
    _warn_of_unseen(tag, settings, _GRADIENTS)


def warn_of_subclass(tag: Tag, settings: DumpSettings, types: Sequence[type]) -> None:
    """Say once for each dump that the backward of some tensors is not dumped in eager code."""
    names = {cls.__name__ for cls in types if _torch_private.has_own_dispatch(cls)}
    what = (
        f"it is opened in eager code that differentiates {', '.join(sorted(names))}: the operators "
        "of their forward are dumped, those of their backward are not. Compile the code with "
        "torchair_scope to have both"
    )
    _warn_of_unseen(tag, settings, what)


def _warn_of_unseen(tag: Tag, settings: DumpSettings, what: str) -> None:
    account.unseen(tag, what)
    if selects_this_rank(settings.options_of(None)):
        said = f"scope {tag.scope!r} opened at {tag.opened_at}: {what}."
        _say_once(settings, f"unseen {tag} {what}", said)


_said: set[tuple[str, str]] = set()


def _say_once(settings: DumpSettings, key: str, message: str) -> None:
    """Warn once for each dump. The folder is not made: it may be that no step is selected."""
    if (_dump(settings), key) not in _said:
        _said.add((_dump(settings), key))
        warnings.warn(message, DumpWarning, stacklevel=3)


def _dump(settings: DumpSettings) -> str:
    return os.path.realpath(settings.options_of(None).path or ".")
