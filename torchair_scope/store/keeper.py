"""What is kept of the values of a call: the decision, apart from the walk through its arguments."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from torchair_scope.store.arrays import Array, Description

if TYPE_CHECKING:
    from torchair_scope.store.writer import Call


class Keeper(Protocol):
    """Takes the values of the calls of one step, on the thread that runs the model.

    A value has to be read, or a snapshot of it be taken, before the method returns: what comes
    next may change it. What has become of a slot is told to the call, at once or, after
    `Call.promise`, later and by any thread: `Call.has_file` or `Call.is_missing`.
    """

    def keep_tensor(self, call: Call, slot: str, tensor: Any, description: Description) -> None:
        """Take one tensor. `description` goes to the call's record, and may be added to."""

    def keep_again(self, call: Call, slot: str, tensor: Any) -> Description | None:
        """Take one tensor if it is known to be what was taken in this step; give its description.

        None if that is not known: then it is described, and given to `keep_tensor`.
        """

    def keep_numbers(self, call: Call, slot: str, array: Array) -> None:
        """Take a number, or a list of numbers, that an operator was given or returned."""

    def finish(self) -> None:
        """The graph has returned: settle every slot that is still promised."""
