"""Build a stub for every CANN library that torch_npu needs and this machine lacks.

    python -m tests.torchair.setups.stub_libraries FOLDER     # by the Python that has torch_npu

Every function that torch_npu's libraries import and nothing here provides returns 0, except those
that `acl_overrides.c` defines: a device whose memory is host memory. Needs gcc, nm, readelf and
ldconfig, on x86-64.
"""

from __future__ import annotations

import glob
import importlib.util
import os
import re
import subprocess
import sys

_STUB_ASSEMBLY = """.text
stub_zero:
 xorl %eax,%eax
 xorl %edx,%edx
 pxor %xmm0,%xmm0
 ret
"""
_OVERRIDES = os.path.join(os.path.dirname(os.path.abspath(__file__)), "acl_overrides.c")
_SYSTEM_LIBRARY = (
    r"=> (\S*(?:libstdc\+\+|libm|libgcc_s|libc|libdl|librt|libpthread|ld-linux-x86-64)\.so[.\d]*)$"
)
# torch_npu asks for these with dlsym(), so that their names are plain text in its library.
_ASKED_BY_NAME = (
    rb"(?:acl(?:rt|op|Set|Get|mdl|prof|sys|Init|Create|Destroy|Update)|Hccl|rt[A-Z])[A-Za-z0-9_]*"
)


def _output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _package_folder(name: str) -> str:
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise RuntimeError(f"{name} is not installed for {sys.executable}")
    return os.path.dirname(spec.origin)


def _defined(library: str) -> set[str]:
    lines = _output("nm", "-D", "--defined-only", library).splitlines()
    return {line.split()[-1].partition("@")[0] for line in lines}


def _undefined(library: str) -> set[str]:
    """Symbols that the loader must find; weak and versioned (system) ones are not ours to give."""
    lines = _output("nm", "-D", "--undefined-only", "--with-symbol-versions", library).splitlines()
    pairs = [line.split()[-2:] for line in lines]
    return {name for kind, name in pairs if kind == "U" and "@" not in name}


def _needed(library: str) -> set[str]:
    return set(re.findall(r"NEEDED.*\[(.*)\]", _output("readelf", "-d", library)))


def _asked_by_name(library: str) -> set[str]:
    with open(library, "rb") as file:
        texts = re.findall(rb"[\x20-\x7e]{6,}", file.read())
    return {text.decode() for text in texts if re.fullmatch(_ASKED_BY_NAME, text)}


def missing_libraries_and_symbols() -> tuple[list[str], list[str]]:
    """The names of the libraries that are missing, and of the symbols that they would provide."""
    npu = glob.glob(_package_folder("torch_npu") + "/**/*.so", recursive=True)
    torch = glob.glob(_package_folder("torch") + "/lib/*.so*")
    system = _output("/sbin/ldconfig", "-p")
    present = {os.path.basename(library) for library in npu + torch}
    present |= set(re.findall(r"^\s(\S+) \(", system, re.MULTILINE))
    libraries = set().union(*map(_needed, npu)) - present

    wanted = set().union(*map(_undefined, npu))
    wanted |= set().union(*(_asked_by_name(path) for path in npu if "libtorch_npu" in path))
    provided = set().union(*map(_defined, npu + torch + re.findall(_SYSTEM_LIBRARY, system, re.M)))
    python = {name for name in wanted if name.startswith(("Py", "_Py"))}
    return sorted(libraries), sorted(wanted - provided - python)


def overridden() -> set[str]:
    """The functions that `acl_overrides.c` defines."""
    with open(_OVERRIDES) as file:
        return set(re.findall(r"^(?!static)[\w *]+?\b(\w+)\([^)]*\) \{", file.read(), re.MULTILINE))


def build(folder: str) -> tuple[list[str], list[str]]:
    """Build the stubs in `folder`. Returns the libraries, and the functions that return 0."""
    libraries, symbols = missing_libraries_and_symbols()
    data = [name for name in symbols if name.startswith(("_ZTV", "_ZTI", "_ZTS", "_ZTT"))]
    if data:
        raise RuntimeError(f"these symbols are data, for which no stub can be made: {data}")
    functions = [name for name in symbols if name not in overridden()]
    os.makedirs(folder, exist_ok=True)
    source = os.path.join(folder, "stub.s")
    with open(source, "w") as file:
        file.write(_STUB_ASSEMBLY)
        file.writelines(
            f".globl {name}\n.type {name},@function\n{name}: jmp stub_zero\n" for name in functions
        )
        file.write('.section .note.GNU-stack,"",@progbits\n')
    _link(folder, "libcann_stub.so", "-O1", source, _OVERRIDES)
    for library in libraries:
        # Empty but for its name: the library that it is tied to has the symbols.
        tie = ("-Wl,--no-as-needed", f"-L{folder}", "-lcann_stub", "-Wl,-rpath,$ORIGIN")
        _link(folder, library, *tie)
    return libraries, functions


def _link(folder: str, library: str, *arguments: str) -> None:
    target = os.path.join(folder, library)
    _output("gcc", "-shared", "-fPIC", f"-Wl,-soname,{library}", "-o", target, *arguments)


def main() -> None:
    libraries, functions = build(os.path.abspath(sys.argv[1]))
    print(f"{len(libraries)} libraries: {' '.join(libraries)}")
    print(f"{len(functions)} functions that return 0, {len(overridden())} with behaviour")


if __name__ == "__main__":
    main()
