"""What to try next where a path or a name leads nowhere."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from torchair_scope.analysis.records import holds_calls
from torchair_scope.analysis.source import Folder, is_remote
from torchair_scope.store import layout

if TYPE_CHECKING:
    from torchair_scope.analysis.dump import Dump

_MOST = 5


def no_dump(folder: Folder) -> FileNotFoundError:
    """The error for a path at which there is no dump."""
    return FileNotFoundError(f"{folder.url} is no dump: {_why(folder)}")


def _why(folder: Folder) -> str:
    around = _dump_around(folder)
    if around is not None:
        return f"it is a part of one; try {around.url}"
    if folder.is_file():
        return "it is a file; give the folder that was set as the dump path"
    entries = folder.entries()
    inside = [folder.folder(entry.name) for entry in entries if entry.is_folder]
    dumps = [each.short for each in inside if _is_dump(each)]
    if dumps:
        return f"it holds {len(dumps)} of them; try {listed(dumps)}"
    if entries:
        example = layout.rank_folder_name(0, 1)
        return (
            f"expected a folder with {layout.MANIFEST} or with folders such as graph_1/0, or one "
            f"that holds folders such as {example} with these in them"
        )
    if not folder.exists():
        return "it does not exist" + _beside(folder)
    return (
        "it is empty. Where a scope was entered and nothing was dumped, print(torchair.scope."
        "summary()) at the end of the script tells why"
    )


def _dump_around(folder: Folder) -> Folder | None:
    """The dump that a path leads into, if it does."""
    if is_remote(folder.url):
        return None
    outer = folder.parent()
    for _ in range(3):  # a file is in a step, in a graph, in a rank folder
        if holds_calls(outer):
            above = outer.parent()
            is_rank = layout.parse_rank_folder_name(outer.name) is not None
            return above if is_rank else outer
        outer = outer.parent()
    return None


def _is_dump(folder: Folder) -> bool:
    return holds_calls(folder) or any(
        layout.parse_rank_folder_name(entry.name) is not None
        for entry in folder.entries()
        if entry.is_folder
    )


def _beside(folder: Folder) -> str:
    if is_remote(folder.url):
        return ""
    outer = folder.parent()
    if not outer.exists():
        return f", and neither does {outer.url}"
    names = [entry.name for entry in outer.entries() if entry.is_folder]
    close = nearest(folder.name, names) or [name for name in names if _is_dump(outer.folder(name))]
    return f"; there is {listed([outer.folder(name).short for name in close])}" if close else ""


def no_call(dump: Dump, scope: str | None, node: str | None, step: int | None) -> LookupError:
    """The error where no call of a dump is the one that was asked for."""
    wanted = {"scope": scope, "node": node, "step": step}
    path = dump.folder.url
    if not dump.calls():
        return LookupError(f"{path} has no calls at all; see what `torchair-scope ls` says of it")
    for name, value in wanted.items():
        if value is not None and not dump.calls(**{name: value}):  # type: ignore[arg-type]
            return LookupError(f"{path} has no {name} {value!r}; {_instead(dump, name, value)}")
    told = ", ".join(f"{name} {value!r}" for name, value in wanted.items() if value is not None)
    return LookupError(f"{path} has no call with {told}, though it has each of these")


def _instead(dump: Dump, kind: str, wanted: object) -> str:
    if kind == "scope":
        close = nearest(str(wanted), dump.scopes) or dump.scopes
        return f"it has {listed(close)}" if close else "its scopes are not known"
    if kind == "step":
        numbers = sorted({step.number for step in dump.steps})
        return f"it has {listed([str(number) for number in numbers])}"
    return no_such_name(dump, str(wanted))


def no_such_name(dump: Dump, wanted: str) -> str:
    """What nodes and tensors there are with a name like this one."""
    calls = dump.calls()
    names = dict.fromkeys(call.node for call in calls)
    of_target = [
        call.node
        for call in calls
        if fnmatch.fnmatchcase(call.target, wanted) or wanted in call.target.split(".")
    ]
    node, dot, _ = wanted.partition(".")
    tensors = [
        f"{call.node}.{slot}" for call in calls if call.node == node for slot in call.tensors
    ]
    if dot and tensors:
        return f"it has {listed(list(dict.fromkeys(tensors)))}"
    found = list(dict.fromkeys([*of_target, *nearest(node, names)]))
    if found:
        return f"did you mean {listed(found)}?"
    return f"it has {listed(list(names))}; `torchair-scope stats` lists all"


def nearest(wanted: str, names: Iterable[str]) -> list[str]:
    """The names that someone may have meant."""
    names = list(names)
    close = difflib.get_close_matches(wanted, names, n=_MOST, cutoff=0.6)
    return close or [name for name in names if wanted and wanted in name][:_MOST]


def listed(names: Sequence[str]) -> str:
    """Some names in a sentence, the first few if there are many."""
    if len(names) <= 1:
        return "".join(names)
    if len(names) <= _MOST:
        return f"{', '.join(names[:-1])} or {names[-1]}"
    return f"{', '.join(names[:_MOST])}, …"
