"""A dump as the folder that msprobe writes itself: for its compare, overflow check and graphs."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

from torchair_scope.analysis.dump import Call, Dump
from torchair_scope.analysis.pairing import execution_order
from torchair_scope.analysis.statistics import statistics_of_tensor
from torchair_scope.analysis.tensors import MissingTensorError, Tensor

_MODE = 0o640
_FOLDER_MODE = 0o750


def export_msprobe(dump: Dump, path: Path) -> None:
    """Write `step{i}/rank{r}/` with `dump.json`, `stack.json`, `construct.json` and the tensors.

    Graphs of one step number are put together: the forward and the backward of a step are one.
    """
    folders: dict[tuple[int, int], list[Call]] = defaultdict(list)
    for call in dump.calls():
        folders[call.step.number, call.graph.rank.number].append(call)
    for (step, rank), calls in folders.items():
        calls.sort(key=execution_order)
        _write_step(path / f"step{step}" / f"rank{rank}", calls)


def _write_step(folder: Path, calls: list[Call]) -> None:
    data_folder = folder / "dump_tensor_data"
    data_folder.mkdir(parents=True, exist_ok=True, mode=_FOLDER_MODE)
    counts: dict[str, int] = defaultdict(int)
    data: dict[str, Any] = {}
    stack: dict[str, Any] = {}
    for call in calls:
        name = _name(call, counts)
        data[name] = _described(call, name, data_folder)
        stack[str(len(stack))] = [[name], _frames(call)]
    header = {"task": "tensor", "level": "L1", "framework": "pytorch"}
    _write_json(
        folder / "dump.json", {**header, "dump_data_dir": str(data_folder.resolve()), "data": data}
    )
    _write_json(folder / "stack.json", stack)
    _write_json(folder / "construct.json", dict.fromkeys(data))


def _name(call: Call, counts: dict[str, int]) -> str:
    """`Aten.mm.0.forward`: the operator, and which of its calls in the step this is."""
    parts = call.operator.split(".")
    operator = parts[1] if len(parts) > 1 else call.operator
    safe = "".join(letter if letter.isalnum() or letter == "_" else "_" for letter in operator)
    direction = "backward" if call.graph.direction == "backward" else "forward"
    number = counts[f"{safe}.{direction}"]
    counts[f"{safe}.{direction}"] += 1
    return f"Aten.{safe}.{number}.{direction}"


def _described(call: Call, name: str, folder: Path) -> dict[str, Any]:
    backward = name.endswith(".backward")
    positional = [
        _record(call.tensors[slot], f"{name}.input.{position}", folder)
        for position, slot in enumerate(slot for slot in call.inputs if slot.startswith("INPUT"))
    ]
    results = [
        _record(tensor, f"{name}.output.{position}", folder)
        for position, tensor in enumerate(call.outputs.values())
    ]
    if backward:
        return {"input": positional, "output": results}
    keywords = {
        slot.removeprefix("KWARG."): _record(tensor, f"{name}.input.{slot[6:]}", folder)
        for slot, tensor in call.inputs.items()
        if slot.startswith("KWARG")
    }
    return {"input_args": positional, "input_kwargs": keywords, "output": results}


def _record(tensor: Tensor, name: str, folder: Path) -> dict[str, Any] | None:
    try:
        value = tensor.torch()
    except MissingTensorError:
        return None
    file = folder / f"{name}.pt"
    torch.save(value.contiguous().clone(), file)
    file.chmod(_MODE)
    found = statistics_of_tensor(tensor)
    bad = found.nans + found.infinities
    return {
        "type": "torch.Tensor",
        "dtype": f"torch.{tensor.dtype}",
        "shape": list(value.shape),
        **_extremes(value, bad > 0, (found.maximum, found.minimum, found.mean, found.norm)),
        "requires_grad": bool(tensor.description.get("requires_grad", False)),
        "data_name": file.name,
    }


def _extremes(
    value: torch.Tensor, has_bad: bool, finite: tuple[float, float, float, float]
) -> dict[str, Any]:
    """The numbers as msprobe takes them: NaN and infinities show in them."""
    names = ("Max", "Min", "Mean", "Norm")
    if not value.numel():
        return dict.fromkeys(names)
    if not has_bad:
        return dict(zip(names, (_text(number) for number in finite), strict=True))
    wide = value.double() if not value.is_complex() else value.abs().double()
    numbers = wide.max().item(), wide.min().item(), wide.mean().item(), wide.norm().item()
    return dict(zip(names, (_text(number) for number in numbers), strict=True))


def _text(number: float) -> float | str:
    return number if math.isfinite(number) else str(number)


def _frames(call: Call) -> list[str]:
    source = call.source
    if not source:
        return []
    return [f"File {source['file']}, line {source['line']}, in forward, \n {source['code']}"]


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=1), encoding="utf-8")
    path.chmod(_MODE)
