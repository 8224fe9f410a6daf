"""What two calls of different runs are known to be the same by."""

from __future__ import annotations

import os
import re
from typing import NamedTuple

from torchair_scope.analysis.dump import Call
from torchair_scope.analysis.tensors import MissingTensorError, Tensor

_IN_PLACE = re.compile(r"(?<=[a-z0-9])_(?=\.|$)")
_SAME_OPERATOR = {"aten._unsafe_view.default": "aten.view.default"}

Shapes = tuple[tuple[int, ...] | None, ...]


class Signature(NamedTuple):
    """The facts of a call that do not depend on the device, the compiler and the graph's number."""

    operator: str
    shapes: Shapes
    scope: str | None
    module: str | None
    source: tuple[str, int, str] | None
    node: str
    direction: str | None
    layouts: Shapes

    @property
    def elsewhere(self) -> Signature:
        """The same without what is another one in each run: the node's name and the strides."""
        return self._replace(node="", layouts=())

    @property
    def is_placed(self) -> bool:
        """Whether the place in the user's code is known."""
        return self.source is not None


def signature_of(call: Call) -> Signature:
    """The signature of a call."""
    source = call.source
    place = None
    if source:
        file = os.path.basename(str(source.get("file")))
        place = file, int(source.get("line", 0)), str(source.get("code"))
    return Signature(
        operator=functional_name(call.operator),
        shapes=tuple(map(_shape, call.outputs.values())),
        scope=call.scope,
        module=call.module or None,  # the outermost module has no path, or an empty one
        source=place,
        node=call.node,
        direction=direction_of(call),
        layouts=tuple(map(_strides, call.outputs.values())),
    )


def direction_of(call: Call) -> str | None:
    """The direction of its graph, where an inference is a forward; None if it is not known."""
    direction = call.graph.direction
    return "forward" if direction == "inference" else direction


def functional_name(operator: str) -> str:
    """The operator that computes the same and changes nothing in place.

    >>> from torchair_scope.analysis.signature import functional_name
    >>> functional_name("aten.add_.Tensor"), functional_name("aten._softmax.default")
    ('aten.add.Tensor', 'aten._softmax.default')
    """
    return _SAME_OPERATOR.get(operator) or _IN_PLACE.sub("", operator)


def _shape(tensor: Tensor) -> tuple[int, ...] | None:
    try:
        return tensor.shape
    except MissingTensorError:
        return None


def _strides(tensor: Tensor) -> tuple[int, ...] | None:
    strides = tensor.description.get("stride")
    return None if strides is None else tuple(strides)
