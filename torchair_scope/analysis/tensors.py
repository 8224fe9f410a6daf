"""One tensor of a dump: where its file is, and what it truly was."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from torchair_scope.analysis.source import Array, File, Identity

if TYPE_CHECKING:
    import torch

    from torchair_scope.store.statistics import Statistics

Found = TypeVar("Found")


class MissingTensorError(LookupError):
    """A tensor is not on disk, or not whole; the text says why."""


@dataclass(frozen=True)
class Tensor:
    """One input or output of a call. `Call.tensors` has them by slot.

    Args:
        slot: which value of the call it is, as `INPUT.0`, `INPUT.1.0`, `KWARG.mask`, `OUTPUT.0`.
        file: its file; None if it has none.
        size: bytes of the file.
        description: what the manifest says of the tensor; empty where there is no manifest, and
            for a number.
        reason: why the file is not there, if it is not.
        statistics: what `stats.csv` says of it, if there is a row.
        identity: what tensors that share a file have in common; None if that is not known.
    """

    slot: str
    file: File | None
    size: int = 0
    description: dict[str, Any] = field(default_factory=dict, repr=False)
    reason: str | None = None
    identity: Identity | None = field(default=None, repr=False)
    statistics: Statistics | None = field(default=None, repr=False)

    @property
    def is_input(self) -> bool:
        """Whether it is an argument of the call, and not a result."""
        return not self.slot.startswith("OUTPUT")

    @property
    def sample(self) -> str | None:
        """Which part of it the file has, as `head=1000`; None for all of it."""
        sample = self.description.get("sample")
        return None if sample is None else str(sample)

    @cached_property
    def dtype(self) -> str:
        """The true dtype, as `bfloat16`; without a manifest that of the file."""
        name = self.description.get("dtype")
        return str(name).removeprefix("torch.") if name else str(self.numpy().dtype)

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """The true shape; without a manifest that of the file."""
        recorded = self.description.get("shape")
        return tuple(self.numpy().shape if recorded is None else recorded)

    def numpy(self) -> Array:
        """The array in the file, memory-mapped: bfloat16 and float8 are float32 there.

        **Raises:** `MissingTensorError` if it is not on disk, or not whole.
        """
        return self._of_file(File.array)

    def check(self) -> None:
        """See that the file is there and whole, without a look at the values; not that of a URL.

        **Raises:** `MissingTensorError` if it is not.
        """
        self._of_file(File.check)

    def _of_file(self, function: Callable[[File], Found]) -> Found:
        if self.file is None:
            raise MissingTensorError(f"{self.slot} is not on disk: {self.reason}")
        try:
            return function(self.file)
        except (OSError, ValueError) as error:
            raise MissingTensorError(f"{self.slot}: {self.file.url}: {error}") from error

    def torch(self, device: str | torch.device | None = "cpu") -> torch.Tensor:
        """The tensor with its true dtype, shape and strides, on the CPU if not told otherwise.

        Of one that is sampled it is the part in the file.

        **Raises:** `MissingTensorError` if it is not on disk, or not whole.
        """
        from torchair_scope.store.arrays import to_tensor

        array = self.numpy()
        description = self.description or {"dtype": str(array.dtype)}
        if self.sample is not None:
            description = {"dtype": description["dtype"], "device": description["device"]}
        return to_tensor(array, description, device)


def descriptions(tree: Any) -> dict[str, dict[str, Any]]:
    """The tensors in an argument tree of a record, by slot."""
    found: dict[str, dict[str, Any]] = {}
    members = tree.values() if isinstance(tree, dict) else tree
    if isinstance(tree, dict) and isinstance(tree.get("tensor"), dict):
        description = tree["tensor"]
        found[str(description.get("slot"))] = description
    elif isinstance(tree, dict | list):
        for member in members:
            found.update(descriptions(member))
    return found
