"""Only the values at the border of a scope: what enters it, and what leaves it."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from torchair_scope.capture.account import Outcome, account
from torchair_scope.capture.saved import SavedCall
from torchair_scope.capture.symbols import value_of
from torchair_scope.capture.tags import Tag, tag_of
from torchair_scope.capture.targets import is_call
from torchair_scope.capture.written import NotHandedOut, WrittenCall

_INSIDE = NotHandedOut("it stays inside its scope, and tap is 'boundary'")


def at_borders(
    calls: Iterable[WrittenCall], saved: Mapping[str, SavedCall]
) -> Iterator[WrittenCall]:
    """The calls, where a scope wants no more without the values that stay inside of it.

    A call of such a scope that neither reads nor makes a value at its border is left out.
    """
    for call in calls:
        known = saved[call.node.name]
        if not known.only_border:
            yield call
            continue
        limited = _limited(call, tag_of(call.node))
        if limited is not None:
            yield limited
        else:
            account.note([known.number], Outcome.INSIDE)


def _limited(call: WrittenCall, tag: Tag | None) -> WrittenCall | None:
    leaves, tree = tree_flatten((call.args, call.kwargs))
    written = tree_leaves((call.node.args, call.node.kwargs))
    enters = [_enters(each, tag) for each in written]
    is_left = any(_leaves(node, tag) for node in tree_leaves(call.result))
    if not is_left and not any(enters):
        return None
    kept = [
        leaf if entering or not _is_tensor(each) else _INSIDE
        for leaf, each, entering in zip(leaves, written, enters, strict=True)
    ]
    args, kwargs = tree_unflatten(kept, tree)
    result = call.result if is_left else tree_map(lambda each: _INSIDE, call.result)
    return replace(call, args=args, kwargs=kwargs, result=result)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, fx.Node) and isinstance(value_of(value), torch.Tensor)


def _enters(value: Any, tag: Tag | None) -> bool:
    """Whether an argument is a tensor from outside of the scope."""
    return _is_tensor(value) and not (is_call(value) and tag_of(value) == tag)


def _leaves(value: Any, tag: Tag | None) -> bool:
    """Whether a result is used outside of the scope."""
    users = value.users if isinstance(value, fx.Node) else ()
    return any(
        _leaves(user, tag) if user.target is operator.getitem else tag_of(user) != tag
        for user in users
    )
