"""A GE executor on the CPU: it runs the FX graph that TorchAir kept, and answers as GE does.

Three details keep it honest against the C++ source: outputs are fresh and contiguous, whatever
strides the FX value has; inputs that TorchAir cloned are written and left for it to copy back; only
exact tensors are taken as inputs.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch

from .recorder import RECORDER, GeGraphRecord

_GE_TO_TORCH = {
    0: torch.float32,
    1: torch.float16,
    2: torch.int8,
    3: torch.int32,
    4: torch.uint8,
    6: torch.int16,
    7: torch.uint16,
    8: torch.uint32,
    9: torch.int64,
    10: torch.uint64,
    11: torch.float64,
    12: torch.bool,
    16: torch.complex64,
    17: torch.complex128,
    27: torch.bfloat16,
    33: torch.complex32,
    35: torch.float8_e5m2,
    36: torch.float8_e4m3fn,
}

_in_progress = threading.local()


class GeExecutor:
    """Stands in for the pybind class `TorchNpuGraphBase`: same methods, same arguments."""

    def __init__(self, name: str) -> None:
        self.record = GeGraphRecord(name=name)

    def load(
        self,
        proto: bytes,
        options: dict[str, str],
        input_placements: Sequence[int],
        output_dtypes: Sequence[int],
        executor_type: int,
    ) -> None:
        if not isinstance(proto, bytes):
            raise TypeError("load() takes the bytes of a GE ModelDef")
        if not all(isinstance(text, str) for pair in options.items() for text in pair):
            raise TypeError(f"GE options map text to text, got {options}")
        record = self.record
        record.proto, record.options = proto, dict(options)
        record.input_placements = list(input_placements)
        record.output_dtypes = list(output_dtypes)
        record.executor_type = int(executor_type)
        RECORDER.ge_graphs.append(record)

    def set_hint_shape(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        self._require_loaded()
        self.record.input_shapes = [list(shape) for shape in inputs]
        self.record.output_shapes = [list(shape) for shape in outputs]

    def compile(self) -> None:
        self._require_loaded()
        self.record.compiled += 1

    def auto_tune(self, packed: Any) -> None:
        self.record.auto_tunes += 1

    def summary(self) -> str:
        return ""

    def run(self, packed: tuple[Sequence[Any], Sequence[Any], Any]) -> list[torch.Tensor]:
        inputs, assigned, stream = packed
        record = self.record
        if not record.compiled:
            raise RuntimeError("Executor is not initialized.")
        if stream is not None:
            raise TypeError("expected Stream object")
        for index, tensor in enumerate(inputs):
            if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
                raise RuntimeError(f"element {index} is not a Tensor: {type(tensor)}")
        if len(inputs) != len(record.input_placements):
            raise RuntimeError(
                f"GE graph {record.name} has {len(record.input_placements)} inputs, "
                f"got {len(inputs)}"
            )
        record.runs += 1
        calls = getattr(_in_progress, "calls", None)
        if not calls:  # loaded from a compile cache, or built by hand: there is no FX graph to run
            return _zeros(record, assigned)
        return _run_fx(record, list(inputs), assigned, *calls[-1])

    def _require_loaded(self) -> None:
        if self.record.proto is None:
            raise RuntimeError(f"GE graph {self.record.name} was used before load()")


class _FxRun(torch.fx.Interpreter):
    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if (
            str(target) == "air.wait_tensor.default"
        ):  # it only orders streams, and has no CPU kernel
            return args[0]
        return super().call_function(target, args, kwargs)


def _run_fx(
    record: GeGraphRecord,
    inputs: list[torch.Tensor],
    assigned: Sequence[torch.Tensor | None],
    concrete_graph: Any,
    args: tuple[Any, ...],
) -> list[torch.Tensor]:
    with torch.no_grad():
        fx_outputs = _FxRun(concrete_graph.fx_graph).run(*args)
    for ge_index, fx_index in concrete_graph._cloned_ge_input_mapping.items():
        inputs[ge_index].copy_(args[fx_index])
    outputs: list[Any] = [None] * len(record.output_dtypes)
    for fx_index, ge_index in concrete_graph._fx_outputs_mapping.items():
        outputs[ge_index] = fx_outputs[fx_index].clone(memory_format=torch.contiguous_format)
    for index, target in enumerate(assigned):
        if target is not None:  # the output of an operator that writes an input in place
            outputs[index] = target
    missing = [index for index, value in enumerate(outputs) if value is None]
    if missing:
        raise RuntimeError(f"no FX value for the GE outputs {missing} of {record.name}")
    return outputs


def _zeros(record: GeGraphRecord, assigned: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
    """Outputs of the right shape and dtype, whose contents carry no meaning."""
    outputs = []
    for index, (shape, dtype) in enumerate(
        zip(record.output_shapes, record.output_dtypes, strict=True)
    ):
        target = assigned[index] if index < len(assigned) else None
        if target is None:
            target = torch.zeros([max(size, 1) for size in shape], dtype=_GE_TO_TORCH[int(dtype)])
        outputs.append(target)
    return outputs


def watch_concrete_graphs() -> None:
    """Let the executor see the FX graph and arguments of the `GeConcreteGraph` call in progress."""
    from torchair._ge_concrete_graph.fx2ge_converter import GeConcreteGraph

    call_of_torchair = GeConcreteGraph.__call__

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls = _in_progress.__dict__.setdefault("calls", [])
        calls.append((self, args))
        try:
            return call_of_torchair(self, *args, **kwargs)
        finally:
            calls.pop()

    GeConcreteGraph.__call__ = call
