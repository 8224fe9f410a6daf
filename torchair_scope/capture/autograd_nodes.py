"""Find the autograd nodes that operators make, with nothing but the operators' results to go by."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

import torch

from torchair_scope import _torch_private

_SEEN = "torchair_scope"  # in a node's metadata: it was found before, or made elsewhere
_Maker = TypeVar("_Maker")


class NodeFinder(Generic[_Maker]):
    """Calls `found(node, maker)` for each autograd node that is made while the finder is in use.

    A dispatch mode runs below autograd: an operator's results get their node only after the mode
    has returned them. They are looked at when the next operator comes, or there is no next one.

    Args:
        found: is told of each new node, and what made it.
    """

    def __init__(self, found: Callable[[Any, _Maker], None]) -> None:
        self._found = found
        self._first = _torch_private.next_sequence_number()
        self._dispatch_state = _torch_private.dispatch_state()
        self._results: list[weakref.ref[torch.Tensor]] = []
        self._maker: _Maker | None = None

    def before(self, arguments: Any) -> None:
        """An operator is about to run: what its arguments come from was not made by it."""
        with self._outside_dispatch(list(_with_history(arguments))) as tensors:
            for tensor in tensors:
                node: Any = tensor.grad_fn
                if node is not None:
                    node.metadata.setdefault(_SEEN, True)

    def after(self, results: Any, maker: _Maker) -> None:
        """An operator has run; its results are looked at later, and not kept alive until then."""
        self.returned(results)
        self._maker = maker

    def returned(self, results: Any) -> None:
        """What made the last operators returns; one autograd node stands for all of them."""
        self._results = [weakref.ref(tensor) for tensor in tensors_in(results)]

    def look(self) -> None:
        """Look at the results of the last operator."""
        alive = [tensor for tensor in (result() for result in self._results) if tensor is not None]
        self._results = []
        with self._outside_dispatch(list(_with_history(alive))) as tensors:
            for tensor in tensors:
                self._follow(tensor.grad_fn)

    @contextlib.contextmanager
    def _outside_dispatch(self, tensors: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
        """The dispatcher as it was at first: a view that is asked for its node may make one."""
        if not tensors:
            yield tensors
            return
        with _torch_private.modes_disabled(), _torch_private.dispatching(self._dispatch_state):
            yield tensors

    def _follow(self, node: Any) -> None:
        unseen = [node]
        while unseen:
            node = unseen.pop()
            if node is None or _SEEN in node.metadata or not self._is_new(node):
                continue
            node.metadata[_SEEN] = True
            if self._maker is not None:
                self._found(node, self._maker)
            unseen += [earlier for earlier, _ in node.next_functions]

    def _is_new(self, node: Any) -> bool:
        # The nodes that add to `.grad` have the highest number there is.
        is_leaf = str(node.name()).endswith("AccumulateGrad")
        return not is_leaf and bool(node._sequence_nr() >= self._first)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in a tree of tuples, lists and dicts."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for member in value:
            yield from tensors_in(member)
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))


def _with_history(value: Any) -> Iterator[torch.Tensor]:
    return (tensor for tensor in tensors_in(value) if tensor.requires_grad)
