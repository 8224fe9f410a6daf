"""Reads memory on a host at its full speed, by kernels in C.

They are compiled at their first use, once for each kind of processor. Where there is no compiler,
or `TORCHAIR_SCOPE_NATIVE=0` is set, each function here gives None, and its caller does the same
with operators of torch, which takes several times as long.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from torchair_scope.store.arrays import Array
from torchair_scope.store.statistics import SUMS, Part

SOURCE = Path(__file__).with_name("kernels.c")
VARIABLE = "TORCHAIR_SCOPE_NATIVE"
_FLAGS = ["-O3", "-fopenmp-simd", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC"]
# What not every compiler takes is left out then.
_FOR_THIS_PROCESSOR: tuple[list[str], ...] = (
    ["-march=native", "-mprefer-vector-width=512"],
    ["-march=native"],
    [],
)
_SECONDS = 60


_NUMBERS = Part._fields[:-1]  # all but the hash


class _Part(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_double if index < SUMS else ctypes.c_int64)
        for index, name in enumerate(_NUMBERS)
    ]


def part_of(values: torch.Tensor, tiny: float) -> Part | None:
    """What is in values that lie in a row; see `measuring_on_cpu`."""
    library = _library()
    name = _NAMES.get(values.dtype)
    if library is None or name is None or values.data_ptr() % values.itemsize:
        return None
    part = _Part()
    kernel = getattr(library, f"part_{name}")
    kernel(values.data_ptr(), values.numel(), tiny, ctypes.byref(part))
    return Part(*(getattr(part, name) for name in _NUMBERS))


def bits_hash(data: torch.Tensor, weights: torch.Tensor, distance: int) -> int | None:
    """The hash that docs/statistics.md defines, of bytes that lie in a row."""
    library = _library()
    if library is None:
        return None
    number = library.bits_hash(
        data.data_ptr(), data.numel(), weights.data_ptr(), weights.numel(), distance
    )
    return int(number)


def checksum(data: Array) -> int | None:
    """A number that most surely differs if the bytes do, for use in this process alone."""
    library = _library()
    if library is None:
        return None
    return int(library.checksum(data.ctypes.data, data.size, _KEYS.ctypes.data))


_KEYS = np.random.default_rng(0).integers(0, 1 << 64, 32, dtype=np.uint64)
_NAMES = {
    torch.float64: "float64",
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.int64: "int64",
    torch.int32: "int32",
    torch.int16: "int16",
    torch.int8: "int8",
    torch.uint8: "uint8",
    torch.bool: "uint8",
}


@functools.cache
def _library() -> ctypes.CDLL | None:
    """The compiled kernels; None if there are none."""
    if os.environ.get(VARIABLE) == "0":
        return None
    try:
        with _compiled() as path:
            library = ctypes.CDLL(str(path))
    except (OSError, subprocess.SubprocessError):
        return None
    size, address = ctypes.c_size_t, ctypes.c_void_p
    for name in {*_NAMES.values()}:
        kernel = getattr(library, f"part_{name}")
        kernel.argtypes = [address, size, ctypes.c_double, address]
        kernel.restype = None
    library.bits_hash.argtypes = [address, size, address, size, size]
    library.checksum.argtypes = [address, size, address]
    library.bits_hash.restype = library.checksum.restype = ctypes.c_uint64
    return library


@contextlib.contextmanager
def _compiled() -> Iterator[Path]:
    """The file of the compiled kernels: kept for the user's next process, if there is a place."""
    command = _compiler()
    with contextlib.ExitStack() as stack:
        try:
            folder = _cache()
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / f"kernels-{_key(command)}.so"
            with tempfile.NamedTemporaryFile(dir=folder):  # whether it may be written to
                pass
        except OSError:
            path = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "kernels.so"
        if not path.exists():
            _compile(command, path)
        yield path


def _cache() -> Path:
    kept = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(kept) / "torchair_scope"


def _compiler() -> list[str]:
    """The command that compiles C.

    **Raises:** `FileNotFoundError` if there is none.
    """
    for command in (os.environ.get("CC"), "cc", "gcc", "clang"):
        words = shlex.split(command) if command else []
        if words and shutil.which(words[0]):
            return words
    raise FileNotFoundError("there is no C compiler")


def _key(command: list[str]) -> str:
    """Differs where the file of one processor, compiler or version would not do for another."""
    processor = [platform.machine(), platform.processor()]
    with contextlib.suppress(OSError):
        described = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
        processor += [line for line in described if line.lower().startswith(_OF_PROCESSOR)]
    parts = [SOURCE.read_text(), *_FLAGS, *command, *processor]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:20]


_OF_PROCESSOR = ("model", "flags", "features", "cpu implementer", "cpu part", "cpu variant")


def _compile(command: list[str], path: Path) -> None:
    """Compile to a file that is whole or not there.

    **Raises:** `subprocess.SubprocessError` or `OSError` if that fails.
    """
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder) / path.name
        for further in _FOR_THIS_PROCESSOR:
            line = [*command, *_FLAGS, *further, "-o", str(made), str(SOURCE), "-lm"]
            if _runs(line):
                os.replace(made, path)
                return
    raise OSError(f"{shlex.join(command)} cannot compile {SOURCE}")


def _runs(line: list[str]) -> bool:
    return subprocess.run(line, capture_output=True, timeout=_SECONDS).returncode == 0
