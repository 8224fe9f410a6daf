"""Packages that only the analysis needs, imported where they are used."""

from __future__ import annotations

import importlib
from types import ModuleType


class MissingPackageError(ImportError):
    """A package of the extra `analysis` is not installed; the text says how to get it."""


def need(module: str) -> ModuleType:
    """Import a module of the extra `analysis`.

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
        raise MissingPackageError(
            f"this needs the package {package}; install it with the others of the analysis: "
            "pip install 'torchair_scope[analysis]'",
            name=package,
        ) from error
