"""Load a dump, with or without a manifest, whole or damaged."""

from __future__ import annotations

import os

from torchair_scope.analysis.advice import no_dump
from torchair_scope.analysis.dump import Dump
from torchair_scope.analysis.records import holds_calls, read_rank
from torchair_scope.analysis.source import Folder
from torchair_scope.store import layout


def load(path: str | os.PathLike[str]) -> Dump:
    """Load a dump folder, or one rank folder of it.

        >>> import torch, torchair_scope as torchair
        >>> from torchair_scope.analysis.load import load
        >>> options = {"path": "./dump", "backend": "aot_eager"}
        >>> @torch.compile(backend="torchair_scope", options=options)
        ... @torchair.dump_ops
        ... def shift(x):
        ...     return x.sin() + 1
        >>> result = shift(torch.zeros(3, dtype=torch.bfloat16))
        >>> dump = load("./dump")
        >>> dump.scopes
        ['shift']
        >>> [call.node for call in dump.calls(target="aten.s*", step=0)]
        ['sin']
        >>> dump.tensor("add.OUTPUT.0").torch()
        tensor([1., 1., 1.], dtype=torch.bfloat16)
        >>> dump.problems
        []

    A dump without a manifest, as TorchAir's own, is loaded from its file names: then scopes,
    directions and true dtypes are not known. A damaged dump is loaded as far as it goes; see
    `Dump.problems`.

    Args:
        path: the folder, or any URL that fsspec can read.

    Raises:
        FileNotFoundError: there is no dump; the text says what there is instead.
        PermissionError: the folder cannot be read.
    """
    folder = Folder(os.fspath(path))
    ranks = [read_rank(rank) for rank in _rank_folders(folder)]
    if not ranks:
        raise no_dump(folder)
    return Dump(folder, sorted(ranks, key=lambda rank: (rank.world_size, rank.number)))


def _rank_folders(folder: Folder) -> list[Folder]:
    if holds_calls(folder):
        return [folder]
    found = [
        folder.folder(entry.name)
        for entry in folder.entries()
        if entry.is_folder and layout.parse_rank_folder_name(entry.name) is not None
    ]
    return [rank for rank in found if holds_calls(rank)]
