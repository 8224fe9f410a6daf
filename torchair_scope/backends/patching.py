"""Put scopes into TorchAir when it is imported, whenever that is, and take them out again.

Three things of TorchAir are changed: `torchair.scope.data_dump` becomes ours,
`torchair.scope.dump_ops` is added, and the method through which every graph is compiled asks
`compile_with_scopes`. `npugraph_ex`, the other package in torch_npu, has that method as well.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch
import wrapt

from torchair_scope import scope
from torchair_scope._torchair_private import NPUGRAPH_EX, TORCHAIR, Package, has_own_data_dump
from torchair_scope.backends.torchair import compile_with_scopes

_METHOD = "_get_compiled_gm"
_MISSING = object()


class _Change(NamedTuple):
    owner: Any
    name: str
    before: Any


_changes: list[_Change] = []
# All that hooks were called with: torch_npu's lazy stand-ins may have a module loaded twice, and
# then `sys.modules` has another copy than the package uses.
_imported: list[tuple[Package, ModuleType]] = []
_enabled = False
_hooked = False


def patch() -> None:
    """Patch TorchAir now if it is imported, else as soon as it is. Never imports it."""
    global _enabled, _hooked
    _enabled = True
    for package, module in _imported:
        _patch_package(package, module)
    if _hooked:
        return
    _hooked = True
    for package in (TORCHAIR, NPUGRAPH_EX):
        wrapt.register_post_import_hook(_hook(package), package.compiler_module)


def unpatch() -> None:
    """Give TorchAir back everything that was changed in it, now and for later imports.

        >>> import torchair_scope
        >>> torchair_scope.unpatch()

    What has been compiled stays as it is.
    """
    global _enabled
    _enabled = False
    while _changes:
        change = _changes.pop()
        if change.before is _MISSING:
            delattr(change.owner, change.name)
        else:
            setattr(change.owner, change.name, change.before)


def _hook(package: Package) -> Callable[[ModuleType], None]:
    def imported(module: ModuleType) -> None:
        _imported.append((package, module))
        if package is TORCHAIR:
            _watch_for_another_scope_module(package.scope_module)
        if _enabled:
            _patch_package(package, module)

    return imported


def _watch_for_another_scope_module(module: ModuleType) -> None:
    """Patch a second copy of `torchair.scope` as well, if one is loaded.

    `from torchair.scope import data_dump`, as the first that is imported of TorchAir, wakes
    torch_npu's lazy stand-in, which loads all of TorchAir; then the statement goes on to load the
    module that it asked for, once more, and the user has that copy.
    """

    def loaded_again(copy: ModuleType) -> None:
        if any(change.owner is module for change in _changes):
            _patch_scopes(copy)

    # A hook for a module that is there would be called at once, and never again.
    del sys.modules[module.__name__]
    try:
        wrapt.register_post_import_hook(loaded_again, module.__name__)
    finally:
        sys.modules[module.__name__] = module


def _patch_package(package: Package, module: ModuleType) -> None:
    compiler = getattr(module, "_NpuFxCompiler", None)
    if any(change.owner is compiler for change in _changes):
        return
    problems = package.mismatches()
    if package is TORCHAIR and not has_own_data_dump(package.scope_module):
        problems.append("torchair.scope.data_dump is not as expected")
    if problems:
        warnings.warn(
            f"scopes do not reach {package.name}, which is not as torchair_scope knows it "
            f"({'; '.join(problems)}). Nothing of it is changed. Install torch_npu 2.13.0, or a "
            "torchair_scope that knows this version.",
            stacklevel=3,
        )
        return
    if package is TORCHAIR:
        _patch_scopes(package.scope_module)
    own = vars(compiler)[_METHOD]
    _set(compiler, _METHOD, wrapt.FunctionWrapper(own, _compiling(package)))


def _patch_scopes(module: ModuleType) -> None:
    # Assigned as they are: through a wrapt wrapper Dynamo would lose the tag.
    _set(module, "data_dump", scope.data_dump)
    _set(module, "dump_ops", scope.dump_ops)


def _set(owner: Any, name: str, value: Any) -> None:
    _changes.append(_Change(owner, name, vars(owner).get(name, _MISSING)))
    setattr(owner, name, value)


def _compiling(package: Package) -> Callable[..., Any]:
    def get_compiled_gm(
        wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        def compile_with(
            compiler: Any, gm: torch.fx.GraphModule, example_inputs: Sequence[Any]
        ) -> Any:
            return wrapped.__func__(compiler, gm, example_inputs)

        return compile_with_scopes(package, instance, compile_with, *args, **kwargs)

    return get_compiled_gm
