"""A dump as one file: its tensors as npz or safetensors, its facts and statistics as parquet."""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from torchair_scope.analysis.dump import Dump
from torchair_scope.analysis.export_msprobe import export_msprobe
from torchair_scope.analysis.extras import need
from torchair_scope.analysis.tensors import MissingTensorError, Tensor


def export(dump: Dump, path: Path, file_format: str) -> Path:
    """Write a dump in another format; give the file or folder that was written.

    Args:
        dump: from `torchair_scope.load`.
        path: what is to be written; for msprobe a folder.
        file_format: one of `FORMATS`.

    Raises:
        ValueError: there is no such format.
    """
    if file_format not in FORMATS:
        raise ValueError(f"format is {file_format!r}; it can be one of {', '.join(FORMATS)}")
    path.parent.mkdir(parents=True, exist_ok=True)
    FORMATS[file_format](dump, path)
    return path


def named_tensors(dump: Dump) -> Iterator[tuple[str, Tensor]]:
    """Every tensor that is on disk, by `rank0/graph_1/0/add_1.OUTPUT.0`."""
    for call in dump.calls():
        for slot, tensor in call.tensors.items():
            if tensor.file is not None:
                name = f"rank{call.graph.rank.number}/{call.step}/{call.node}"
                clash = f"@{call.order}" if call.record is None else ""
                yield f"{name}{clash}.{slot}", tensor


def _npz(dump: Dump, path: Path) -> None:
    """One array at a time, so that the dump need not fit into memory."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
        for name, tensor in named_tensors(dump):
            try:
                array = tensor.numpy()
            except MissingTensorError:
                continue
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, array, allow_pickle=False)


def _safetensors(dump: Dump, path: Path) -> None:
    """True dtypes; what safetensors has no dtype for is written as in its file."""
    save_file = need("safetensors.torch").save_file
    tensors = {}
    for name, tensor in named_tensors(dump):
        try:
            value = tensor.torch()
        except MissingTensorError:
            continue
        tensors[name] = value.contiguous().clone()
    save_file(tensors, str(path), metadata={"format": "pt"})


def _parquet(dump: Dump, path: Path) -> None:
    need("pyarrow")
    dump.frame().to_parquet(path, index=False)


FORMATS: dict[str, Callable[[Dump, Path], None]] = {
    "msprobe": export_msprobe,
    "npz": _npz,
    "safetensors": _safetensors,
    "parquet": _parquet,
}
