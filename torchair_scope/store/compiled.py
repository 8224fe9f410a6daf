"""Compiles kernels.c: at the first use, and once for each kind of processor."""

from __future__ import annotations

import contextlib
import ctypes
import errno
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
_FAILURES = OSError, ValueError, AttributeError, subprocess.SubprocessError


@functools.cache
def kernels() -> ctypes.CDLL | None:
    """The compiled functions; None without a compiler, and if TORCHAIR_SCOPE_NATIVE is 0."""
    if os.environ.get(VARIABLE) == "0":
        return None
    for place in (_kept, _for_this_process):
        with contextlib.suppress(*_FAILURES), place() as path:
            return _declared(ctypes.CDLL(str(path)))
    return None


def _declared(library: ctypes.CDLL) -> ctypes.CDLL:
    """The functions with the types of their arguments.

    **Raises:** `AttributeError` if one is missing.
    """
    number, size, address = ctypes.c_int, ctypes.c_size_t, ctypes.c_void_p
    text = ctypes.c_char_p
    for name in KINDS:
        part = getattr(library, f"part_{name}")
        part.argtypes, part.restype = [address, size, ctypes.c_double, address], None
    library.make_files.argtypes = [number, number, size, text, text, address, text, address]
    library.make_files.restype = None
    library.make_file.argtypes = [number, number, text, text, text, size, address, size]
    library.file_has.argtypes = [number, size, address, size]
    library.bits_hash.argtypes = [address, size, address, size, size]
    library.checksum.argtypes = [address, size, address]
    library.bits_hash.restype = library.checksum.restype = ctypes.c_uint64
    return library


# Of which there is a `part_` each.
KINDS = (
    *("float64", "float32", "bfloat16", "float16"),
    *("int64", "int32", "int16", "int8", "uint8"),
)


@contextlib.contextmanager
def _kept() -> Iterator[Path]:
    """The file of the compiled functions that is kept for the user's next process.

    **Raises:** `OSError` if there is no place for it that only this user can write to.
    """
    command, folder = _compiler(), _cache()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = folder / f"kernels-{_key(command)}.so"
    _is_ours(folder)
    if not path.exists():
        _compile(command, path)
    _is_ours(path)
    yield path


def _is_ours(path: Path) -> None:
    facts = path.stat()
    if facts.st_uid != os.geteuid() or facts.st_mode & 0o022:
        raise PermissionError(errno.EPERM, "others may write to it", str(path))


@contextlib.contextmanager
def _for_this_process() -> Iterator[Path]:
    """The same in a place that is gone once it is loaded."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernels.so"
        _compile(_compiler(), path)
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
    """Differs where the file of one processor, C library or source would not do for another."""
    processor = [platform.machine(), *platform.libc_ver()]
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
                made.chmod(0o755)
                os.replace(made, path)
                return
    raise OSError(f"{shlex.join(command)} cannot compile {SOURCE}")


def _runs(line: list[str]) -> bool:
    return subprocess.run(line, capture_output=True, timeout=_SECONDS).returncode == 0
