"""One call as a Python script that runs it again by itself, for a bug report."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from string import Template
from typing import Any

import torch

from torchair_scope.analysis.dump import Call
from torchair_scope.analysis.operators import NotReplayableError
from torchair_scope.analysis.tensors import MissingTensorError

_SCRIPT = Template('''\
"""$target, as it ran in $call$place.

The arguments and the result of that run are in $tensors, beside this file. The operator is run
again in the same dtypes and in float64, and both results are compared with the float64 one.
"""

import pathlib

import torch
$imports
tensors = torch.load(pathlib.Path(__file__).with_name("$tensors"))

$arguments

def wide(value):
    """The same argument, with each float in float64."""
    if isinstance(value, torch.Tensor):
        value = value.clone()
        return value.double() if value.is_floating_point() else value
    if isinstance(value, torch.dtype):
        return torch.float64 if value.is_floating_point else value
    if isinstance(value, (list, tuple)):
        return type(value)(map(wide, value))
    return value


def outputs(result, slot="OUTPUT"):
    """The tensors of a result by the names that they have in the dump."""
    if isinstance(result, torch.Tensor):
        return {slot if slot != "OUTPUT" else "OUTPUT.0": result}
    found = {}
    if isinstance(result, (list, tuple)):
        for position, member in enumerate(result):
            found.update(outputs(member, f"{slot}.{position}"))
    return found


def error(value, reference):
    """The largest error, as a share of the reference's largest value."""
    difference = (value.double() - reference.double()).abs().max().item()
    return difference / (reference.double().abs().max().item() or 1.0)


operator = $operator
exact = outputs(operator(*map(wide, args), **{name: wide(value) for name, value in kwargs.items()}))
again = outputs(operator(*args, **kwargs))
for slot in again:
    if slot in tensors and slot in exact:
        print(f"{slot} {tensors[slot].dtype}, against float64")
        print(f"  error of the dumped result: {error(tensors[slot], exact[slot]):.3e}")
        print(f"  error of a run here:        {error(again[slot], exact[slot]):.3e}")
''')


def export_script(call: Call, folder: Path, imports: Sequence[str] = ()) -> Path:
    """Write `{node}.py` and its tensors into a folder; give the path of the script.

    Args:
        call: from `torchair_scope.load`.
        folder: made if it is missing.
        imports: modules that the script has to import first, as those of custom operators.

    Raises:
        NotReplayableError: the arguments are not all known, or not all on disk.
    """
    record = call.record or {}
    if "args" not in record or "kwargs" not in record:
        raise NotReplayableError(f"{call}: without its record its arguments are not all known")
    arguments = [f"args = {python_of({'tuple': record['args']})}"]
    entries = [f"{name!r}: {python_of(tree)}" for name, tree in record["kwargs"].items()]
    arguments.append("kwargs = {" + ", ".join(entries) + "}")
    folder.mkdir(parents=True, exist_ok=True)
    name = re.sub(r"\W", "_", call.node)
    torch.save(_tensors(call), folder / f"{name}.pt")
    script = folder / f"{name}.py"
    source = call.source
    place = f", from {source['file']}, line {source['line']}" if source else ""
    script.write_text(
        _SCRIPT.substitute(
            target=call.target,
            call=str(call.step),
            place=place,
            tensors=f"{name}.pt",
            imports="".join(f"import {module}\n" for module in imports),
            arguments="\n".join(arguments) + "\n",
            operator=_operator(call.target),
        ),
        encoding="utf-8",
    )
    return script


def _tensors(call: Call) -> dict[str, torch.Tensor]:
    try:
        return {slot: tensor.torch() for slot, tensor in call.tensors.items() if tensor.description}
    except MissingTensorError as error:
        raise NotReplayableError(f"{call}: {error}") from error


def _operator(target: str) -> str:
    return f"torch.ops.{target}" if "." in target else f"torch.ops.higher_order.{target}"


def python_of(encoded: Any) -> str:
    """The Python expression for an argument tree of a record.

        >>> from torchair_scope.analysis.export_script import python_of
        >>> python_of([{"tensor": {"slot": "INPUT.0"}}, {"dtype": "torch.float32"}, None])
        "[tensors['INPUT.0'], torch.float32, None]"

    **Raises:** `NotReplayableError` for a value of which only the text was kept.
    """
    if isinstance(encoded, list):
        return f"[{_joined(encoded)}]"
    if not isinstance(encoded, dict):
        return repr(encoded)
    ((kind, content),) = encoded.items()
    if kind not in _EXPRESSIONS:
        raise NotReplayableError(f"only the text of an argument was kept: {str(content)[:80]}")
    return _EXPRESSIONS[kind](content)


def _joined(members: Sequence[Any]) -> str:
    return ", ".join(map(python_of, members))


def _tuple(members: Sequence[Any]) -> str:
    return f"({_joined(members)},)" if members else "()"


_EXPRESSIONS: dict[str, Callable[[Any], str]] = {
    "tensor": lambda content: f"tensors[{content['slot']!r}]",
    "tuple": _tuple,
    "size": _tuple,
    "namedtuple": lambda content: _tuple(content[2]),
    "slice": lambda content: f"slice({_joined(content)})",
    "dict": lambda content: (
        "{" + ", ".join(f"{python_of(key)}: {python_of(value)}" for key, value in content) + "}"
    ),
    "float": lambda content: f"float({content!r})",
    "complex": lambda content: f"complex({_joined(content)})",
    "device": lambda content: f"torch.device({content!r})",
    "dtype": str,
    "layout": str,
    "memory_format": str,
    "op": lambda content: f"torch.ops.{content}",
    "ellipsis": lambda content: "...",
}
