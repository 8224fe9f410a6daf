"""Packages that only the analysis needs, imported where they are used."""

from __future__ import annotations

import importlib
from types import ModuleType

_EXPORT = ("pyarrow", "safetensors")


class MissingPackageError(ImportError):
    """A package of an extra is not installed; the text says which extra, and how to get it."""


def need(module: str) -> ModuleType:
    """Import a module of the extra `analysis`, or `export`.

        >>> from torchair_scope.analysis.extras import need
        >>> need("json").dumps([1])
        '[1]'

    **Raises:** `MissingPackageError` if it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        if error.name is None or error.name.partition(".")[0] != package:
            raise
        extra = "export" if package in _EXPORT else "analysis"
        raise MissingPackageError(
            f"this needs the package {package}, which the extra {extra!r} has: "
            f"pip install 'torchair_scope[{extra}]'",
            name=package,
        ) from error
