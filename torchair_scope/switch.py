"""Whether scopes do anything in this process.

A module attribute and nothing cleverer: Dynamo guards on it, so that compiled code is compiled
anew, without tags, once it is switched off, and the cached code is used again after that.
"""

from __future__ import annotations

import os

VARIABLE = "TORCHAIR_SCOPE"


def _from_environment() -> bool:
    value = os.environ.get(VARIABLE, "")
    if value not in ("", "0", "1"):
        raise ValueError(
            f"the environment variable {VARIABLE} is {value!r}; it can be 0 (all scopes are off) "
            "or 1 (they are on, as they are without it)"
        )
    return value != "0"


on: bool = _from_environment()
