"""What becomes of an error of the dump: one warning, or an exception if the user asked for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torchair_scope.store import layout

if TYPE_CHECKING:
    from torchair_scope.store.run import Run


class Guarded:
    """A block that keeps every failure of ours out of the model, unless the user asked for it.

    Args:
        run: that the block works for.
        path: what the user is told to be affected, if the error does not say it.
        problems: is told what went wrong.
    """

    __slots__ = ("_path", "_problems", "_run")  # There are two for each call.

    def __init__(self, run: Run, path: str, problems: list[str] | None = None) -> None:
        self._run = run
        self._path = path
        self._problems = problems

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> bool:
        if not isinstance(error, Exception):
            return False
        if self._problems is not None:
            self._problems.append(f"{type(error).__name__}: {error}")
        report(self._run, error, self._path)
        return True


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
