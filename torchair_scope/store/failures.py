"""What becomes of an error of the dump: one warning, or an exception if the user asked for it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from torchair_scope.store import layout

if TYPE_CHECKING:
    from torchair_scope.store.run import Run


@contextlib.contextmanager
def guarded(run: Run, path: str, problems: list[str] | None = None) -> Iterator[None]:
    """Keep every failure of ours out of the model, unless the user asked for it."""
    try:
        yield
    except Exception as error:
        if problems is not None:
            problems.append(f"{type(error).__name__}: {error}")
        report(run, error, path)


def report(run: Run, error: Exception, path: str) -> None:
    """Warn once for the run's folder, or raise the error if the user asked for that."""
    if run.on_error == "raise":
        raise error
    run.rank_folder.say_once(
        "write",
        f"torchair_scope cannot write {getattr(error, 'filename', None) or path}: "
        f"{getattr(error, 'strerror', None) or repr(error)}. The model goes on, the dump in "
        f"{run.folder} is not complete; see its {layout.MANIFEST}",
    )
