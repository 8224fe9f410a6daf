"""Everything of torch that is private, or public without a promise, is called from this file.

Checked with torch 2.13.0. On another version a name that has moved fails here, with a message
that says which name and which version, and not somewhere inside a compile.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import os
import random
import sys
import threading
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
import wrapt

CHECKED_WITH = ("2.13",)

Compiled = Callable[[list[Any]], Sequence[Any]]
GraphCompiler = Callable[[torch.fx.GraphModule, Sequence[Any]], Any]
InnerCompile = Callable[..., Any]
_Function = TypeVar("_Function", bound=Callable[..., Any])
_Result = TypeVar("_Result")
DecompositionTable = Mapping[Any, Callable[..., Any]]


@functools.cache
def private(module: str, name: str) -> Any:
    """The attribute `name` of a private torch module, or an error that says what is missing.

    It is looked up once. What torch binds anew, `state` looks up each time.
    """
    return state(module, name)


def state(module: str, name: str) -> Any:
    """The attribute `name` of a private torch module as it is now; errors as for `private`."""
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise NotImplementedError(
            f"torchair_scope needs {module}.{name}, which torch {torch.__version__} does not have. "
            f"It was checked with torch {', '.join(CHECKED_WITH)}: install one of these."
        ) from error


# --- tracing -----------------------------------------------------------------------------------


def enclosing_annotations() -> Mapping[str, Any]:
    """The annotations in force at this point of a trace (`torch.fx.traceback.annotate`)."""
    return state("torch.fx.traceback", "current_meta").get("custom") or {}


@contextlib.contextmanager
def annotations_in_force(annotations: Mapping[str, Any]) -> Iterator[None]:
    """Have operators that are traced annotated with these, and no others.

    `torch.fx.traceback.annotate` writes into the dict in force, which may be that of a node.
    """
    meta = state("torch.fx.traceback", "current_meta")
    before = meta.get("custom")
    meta["custom"] = dict(annotations)
    try:
        yield
    finally:
        meta.pop("custom")
        if before is not None:
            meta["custom"] = before


def user_frames_of_trace() -> Sequence[Any]:
    """Frame summaries of the user code that Dynamo is tracing, outermost first; empty outside."""
    context = private("torch._guards", "TracingContext")
    return context.extract_stack() if context.try_get() is not None else ()


def as_error_of_trace(error: Exception) -> Exception:
    """An error of this kind and with this text that Dynamo lets pass as the user's own.

    Any other becomes an InternalTorchDynamoError.
    """
    of_dynamo = private("torch._dynamo.exc", "UserError")
    kind = private("torch._dynamo.exc", "UserErrorType").INVALID_INPUT
    both = type(type(error).__name__, (of_dynamo, type(error)), {"__module__": "builtins"})
    return both(kind, str(error))


_traced = threading.local()


@contextlib.contextmanager
def _tracing_annotations() -> Iterator[None]:
    """Remember the annotations of traced operators, for `annotations_of_traced_operator`."""
    before = getattr(_traced, "annotations", None)
    _traced.annotations = {}
    try:
        yield
    finally:
        _traced.annotations = before


def annotations_of_traced_operator() -> Mapping[str, Any]:
    """The annotations of the operator that AOTAutograd is tracing, forward or backward.

    While the forward is traced they stand in the current node meta. A backward operator has
    those of the forward node that has its sequence number, which is how AOTAutograd itself
    copies them, only later (`copy_fwd_metadata_to_bw_nodes`). A body is traced into a graph of its
    own, and a second time from that graph, where the number stands in the current meta.
    """
    annotations = enclosing_annotations()
    known: dict[int, Mapping[str, Any]] | None = getattr(_traced, "annotations", None)
    mode = private("torch.fx.experimental.proxy_tensor", "get_proxy_mode")()
    if known is None or mode is None:
        return annotations
    graphs = (mode.tracer.graph, *_graphs_around_the_traced_body())
    for graph in graphs:
        _remember_annotations(graph, known)
    autograd_node = private("torch._C", "_current_autograd_node")()
    if annotations or autograd_node is None or not any(map(_is_joint, graphs)):
        return annotations
    number = state("torch.fx.traceback", "current_meta").get("seq_nr")
    return known.get(autograd_node._sequence_nr() if number is None else number, {})


def annotations_by_sequence_number() -> Mapping[int, Mapping[str, Any]]:
    """The annotations of the operators that AOTAutograd has traced so far.

    The number is that of the last autograd node that an operator made; it may make several.
    """
    known: dict[int, Mapping[str, Any]] | None = getattr(_traced, "annotations", None)
    mode = private("torch.fx.experimental.proxy_tensor", "get_proxy_mode")()
    if known is None or mode is None:
        return {}
    for graph in (mode.tracer.graph, *_graphs_around_the_traced_body()):
        _remember_annotations(graph, known)
    return known


def gradients_of_transforms() -> Callable[..., Any]:
    """What `torch.func.grad` and its like call for gradients; it is a node of a Dynamo graph."""
    return private("torch._functorch.eager_transforms", "_autograd_grad")


def is_in_gradient_transform() -> bool:
    """Whether `torch.func.grad`, `vjp` or their like run the function that runs here."""
    kinds = private("torch._C._functorch", "TransformType")
    stack = private("torch._C._functorch", "get_interpreter_stack")() or ()
    return any(level.key() == kinds.Grad for level in stack)


def _is_joint(graph: torch.fx.Graph) -> bool:
    """Whether forward and backward are traced to one graph: only then does AOTAutograd copy."""
    placeholders = itertools.takewhile(lambda node: node.op == "placeholder", graph.nodes)
    return any(node.name.startswith("tangents") for node in placeholders)


def traced_graph() -> torch.fx.Graph | None:
    """The graph that operators are traced into now."""
    mode = private("torch.fx.experimental.proxy_tensor", "get_proxy_mode")()
    return None if mode is None else mode.tracer.graph


def node_of_traced(tensor: torch.Tensor) -> torch.fx.Node | None:
    """The node that stands for a tensor in the graph that is traced now."""
    module = "torch.fx.experimental.proxy_tensor"
    tracer = private(module, "get_proxy_mode")().tracer
    slot = private(module, "get_proxy_slot")(tensor, tracer, None)
    return None if slot is None else slot.proxy.node


def traces_a_body() -> bool:
    """Whether the graph that is traced now is a body of an operator in another one."""
    return next(_graphs_around_the_traced_body(), None) is not None


def _graphs_around_the_traced_body() -> Iterator[torch.fx.Graph]:
    tracer = state("torch.fx.experimental.proxy_tensor", "_CURRENT_MAKE_FX_TRACER")
    while tracer is not None and tracer.parent_tracer is not None:
        tracer = tracer.parent_tracer
        yield tracer.fx_tracer.graph


def _remember_annotations(graph: torch.fx.Graph, known: dict[int, Mapping[str, Any]]) -> None:
    """Add the forward nodes that came to a graph since the last time."""
    newest = next(iter(reversed(graph.nodes)), None)
    seen = graph.__dict__.get("_torchair_scope_seen")
    unseen = []
    while newest is not None and newest is not seen and newest.op != "root":
        unseen.append(newest)
        newest = newest.prev
    for node in reversed(unseen):
        if "seq_nr" in node.meta and not node.meta.get("autograd_backward"):
            known.setdefault(node.meta["seq_nr"], node.meta.get("custom") or {})
    if unseen:
        graph.__dict__["_torchair_scope_seen"] = unseen[0]


def annotations_are_traced() -> bool:
    """Whether the operators that run now become nodes with the annotations in force."""
    return private("torch.fx.traceback", "has_preserved_node_meta")()


def optimized_module_type() -> type:
    """The class of what `torch.compile(module)` returns."""
    return private("torch._dynamo.eval_frame", "OptimizedModule")


def compiler_control_flow() -> tuple[type[BaseException], ...]:
    """Exceptions with which Dynamo steers a compile; they are no failures."""
    names = ("SkipFrame", "RestartAnalysis")
    return tuple(private("torch._dynamo.exc", name) for name in names)


def constant_of_trace(function: _Function) -> _Function:
    """Have Dynamo run `function` while it traces, and keep its result as a constant.

    What `torch.compiler.assume_constant_result` does, without importing Dynamo now.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


# --- running -------------------------------------------------------------------------------------


def below_autograd() -> contextlib.AbstractContextManager[Any]:
    """Call operators as autograd calls them: without its own keys.

    So do the autograd functions of `cond` and its like call the operator. Above it, some trace
    their bodies for a backward (`scan`), others answer from a cache (`invoke_subgraph`).
    """
    return private("torch._C", "_AutoDispatchBelowAutograd")()


def triton_kernel_name(index: Any) -> str:
    """The name of the Triton kernel that `triton_kernel_wrapper_*` is given by its number."""
    table = private("torch._higher_order_ops.triton_kernel_wrap", "kernel_side_table")
    kernel = table.get_kernel(index)
    while not hasattr(kernel, "__name__"):  # within autotuning and heuristics
        kernel = kernel.fn
    return kernel.__name__


def is_tracing() -> bool:
    """Whether what runs now is traced, by Dynamo, `torch.export`, AOTAutograd or `make_fx`."""
    keys = private("torch._C", "_TorchDispatchModeKey")
    active = private("torch._C", "_get_dispatch_mode")
    modes = (active(keys.FAKE), active(keys.PROXY), active(keys.FUNCTIONAL))
    if any(mode is not None for mode in modes):
        return True
    return private("torch._guards", "TracingContext").try_get() is not None


def is_recorded() -> bool:
    """Whether operators become nodes of a graph, by `make_fx` or `torch.export`."""
    if (
        torch.compiler.is_compiling()
        and private("torch._guards", "CompileContext").try_get() is not None
    ):
        return True
    return private("torch.fx.experimental.proxy_tensor", "get_proxy_mode")() is not None


@contextlib.contextmanager
def annotating(annotations: Mapping[str, Any]) -> Iterator[None]:
    """Annotate nodes that are made outside of Dynamo, where no one may have asked for it."""
    traceback = "torch.fx.traceback"
    with (
        private(traceback, "preserve_node_meta")(),
        private(traceback, "annotate")(dict(annotations)),
    ):
        yield


def skip_frames(function: Callable[..., Any], *, sets_callback: bool = False) -> None:
    """Keep Dynamo from compiling `function`, and what it calls, as graphs of their own.

    After a graph break Dynamo compiles the functions that an uncompiled frame calls. Traced as a
    part of its callers `function` still is.

    Args:
        function: is not compiled.
        sets_callback: it calls `set_callback`, which stays as it has set it when it returns. Then
            it has to begin with this, so that what it calls is not compiled either.
    """
    module = "torch._C._dynamo.eval_frame"  # Dynamo's own `skip_code` would import Dynamo now.
    action = private(module, "_FrameAction")
    called = action.DEFAULT if sets_callback else action.SKIP
    strategy = private(module, "_FrameExecStrategy")(action.SKIP, called)
    private(module, "set_code_exec_strategy")(function.__code__, strategy)


# What Dynamo does on this thread with functions that are called from now on: None is nothing, a
# callable compiles them. Returns what was set before. No Python code of ours is run for it.
set_callback: Callable[[Any], Any] = private("torch._C._dynamo.eval_frame", "set_eval_frame")


# --- dispatch modes ----------------------------------------------------------------------------
# `with mode:` is not used: it keeps count of modes for the whole process, which goes wrong when
# two threads leave theirs in another order than they came.


def push_mode(mode: Any) -> None:
    """Put a mode on this thread's stack."""
    private("torch.utils._python_dispatch", "_push_mode")(mode)


def top_mode() -> Any:
    """The mode on top of this thread's stack, or None."""
    return private("torch.utils._python_dispatch", "_get_current_dispatch_mode")()


def remove_mode(mode: Any) -> None:
    """Take a mode off this thread's stack; those above it, not yet left, stay."""
    module = "torch.utils._python_dispatch"
    stack = private(module, "_get_current_dispatch_mode_stack")()
    if not any(other is mode for other in stack):
        return
    above = []
    while (top := private(module, "_pop_mode")()) is not mode:
        above.append(top)
    for other in reversed(above):
        push_mode(other)


@contextlib.contextmanager
def mode_pushed(mode: Any) -> Iterator[None]:
    """A mode on this thread's stack for the time being."""
    push_mode(mode)
    try:
        yield
    finally:
        remove_mode(mode)


def modes_disabled() -> contextlib.AbstractContextManager[Any]:
    """No mode at all for the time being, the user's own included."""
    return private("torch.utils._python_dispatch", "_disable_current_modes")()


def has_own_dispatch(cls: type) -> bool:
    """Whether tensors of a class make other operators of those that they are given."""
    handler = getattr(cls, "__torch_dispatch__", None)
    ordinary = (private("torch._C", "_disabled_torch_dispatch_impl"), None)
    return cls not in (torch.Tensor, torch.nn.Parameter) and handler not in ordinary


def composite_kernel(operator: torch._ops.OperatorBase) -> Callable[..., Any] | None:
    """How an operator is made of others, where autograd has not taken it apart (inference mode)."""
    if not isinstance(operator, torch._ops.OpOverload):
        return None
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    has_kernel = private("torch._C", "_dispatch_has_kernel_for_dispatch_key")
    if not has_kernel(operator.name(), key):  # type: ignore[no-untyped-call]
        return None
    return functools.partial(operator._op_dk, key)


def runs_bodies(operator: torch._ops.HigherOrderOperator) -> bool:
    """Whether a higher-order operator calls its bodies when it runs."""
    return torch._C.DispatchKey.CompositeExplicitAutograd in operator.py_kernels


def node_name_of(operator: torch._ops.OperatorBase) -> str:
    """The name that AOTAutograd gives the first node of this operator."""
    packet: Any = getattr(operator, "overloadpacket", operator)
    name = packet.__name__
    return torch.fx.Graph()._target_to_str(name)


# --- autograd ----------------------------------------------------------------------------------

NO_BACKWARD = -1


def running_backward() -> int:
    """A number for the backward that this thread runs; NO_BACKWARD if it runs none."""
    return private("torch._C", "_current_graph_task_id")()


def when_backward_ends(callback: Callable[[], None]) -> None:
    """Have something done at the end of the backward that runs now, unless that fails."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def next_sequence_number() -> int:
    """The sequence number that the next autograd node of this thread gets."""
    return private("torch.autograd", "_get_sequence_nr")()


def dispatch_state() -> tuple[Any, Any]:
    """Which dispatch keys this thread has switched on and off."""
    return (
        private("torch._C", "_dispatch_tls_local_include_set")(),
        private("torch._C", "_dispatch_tls_local_exclude_set")(),
    )


def dispatching(state: tuple[Any, Any]) -> contextlib.AbstractContextManager[Any]:
    """Dispatch as in a `dispatch_state` for the time being."""
    return private("torch._C", "_ForceDispatchKeyGuard")(*state)


# --- frames that Dynamo leaves to Python -------------------------------------------------------

_EVAL_FRAME = "torch._dynamo.eval_frame"


def _is_from(frame: types.FrameType, module: str, name: str) -> bool:
    source = getattr(sys.modules.get(module), "__file__", None)
    return frame.f_code.co_name == name and frame.f_code.co_filename == source


def is_compiled_call(frame: types.FrameType) -> bool:
    """Whether the frame is where a function under `torch.compile` is called."""
    return _is_from(frame, _EVAL_FRAME, "compile_wrapper")


def compiles_nothing() -> bool:
    """Whether the user has told Dynamo to leave everything to Python."""
    stance = state(_EVAL_FRAME, "_stance").stance
    return stance == "force_eager" or private("torch._dynamo", "config").disable


def backend_of_call(frame: types.FrameType) -> tuple[Any, dict[str, Any]]:
    """The backend behind an `is_compiled_call` frame, and the keywords that it is called with."""
    return _backend_behind(frame.f_locals.get("callback"))


def _backend_behind(callback: Any) -> tuple[Any, dict[str, Any]]:
    backend, keywords = callback, {}
    while hasattr(backend, "_torchdynamo_orig_backend"):
        backend = backend._torchdynamo_orig_backend
    if isinstance(backend, private("torch", "_TorchCompileWrapper")):
        backend, keywords = backend.compiler_fn, dict(backend.kwargs)
    while isinstance(backend, functools.partial):
        keywords = {**backend.keywords, **keywords}
        backend = backend.func
    return backend, keywords


def runs_graphs_in_python(backend: Any) -> bool:
    """Whether a backend leaves Dynamo's graphs to Python: each operator is dispatched as ever.

    So does the one that torch itself compiles `cond` and its like with in eager code.
    """
    name = getattr(backend, "__qualname__", "").split(".")[0]
    return getattr(backend, "__module__", "") == "torch._dynamo.backends.debugging" and (
        name.startswith(("eager", "pre_dispatch_eager", "make_eager_backend"))
    )


def ask_before_compiled_calls(
    is_asked: Callable[[], bool], leave_to_python: Callable[[types.FrameType, Any], bool]
) -> None:
    """Be asked at each call of a function under `torch.compile`, from now on.

    What it does when it is told to leave such a call to Python is what torch does under
    `set_stance("force_eager")`, which holds for all threads at once.

    Args:
        is_asked: whether `leave_to_python` is to be asked.
        leave_to_python: is given the frame of the call, and its backend.
    """

    def ask(module: types.ModuleType) -> None:
        own = state(_EVAL_FRAME, "_callback_from_stance")
        forget_count = private(_EVAL_FRAME, "set_fullgraph_compiled_frame_count")

        def callback_from_stance(callback: Any) -> Any:
            # None is a function that is kept out of compiled code.
            if callback is None or not is_asked():
                return own(callback)
            if not leave_to_python(sys._getframe(1), _backend_behind(callback)[0]):
                return own(callback)
            forget_count(-1)  # fullgraph=True wants a graph of each call, or no count at all.
            return None

        module._callback_from_stance = callback_from_stance  # type: ignore[attr-defined]

    wrapt.register_post_import_hook(ask, _EVAL_FRAME)


def why_uncompiled(frames: Sequence[types.FrameType]) -> tuple[str, str]:
    """Which function Dynamo has left to Python and why; `frames` are innermost first."""
    for frame in frames:
        if _is_from(frame, _EVAL_FRAME, "_fn"):
            function, context = frame.f_locals.get("fn"), frame.f_locals.get("self")
            said = getattr(context, "msg", None)
            name = getattr(function, "__qualname__", repr(function))
            return name, "torch.compiler.disable keeps it out" + (
                f", saying {said}" if said else ""
            )
    codes = [frame.f_code for frame in reversed(frames)]
    return _graph_break(codes) or _failed_compile(codes) or ("", "Dynamo gives no reason")


def _graph_break(codes: Sequence[types.CodeType]) -> tuple[str, str] | None:
    breaks = state("torch._dynamo.utils", "graph_break_reasons")
    for code, found in itertools.product(codes, reversed(breaks)):
        traced = next(iter(found.user_stack), None)
        if traced is None or (traced.filename, traced.name) != (code.co_filename, code.co_name):
            continue
        at = found.user_stack[-1]
        return code.co_name, (
            f"graph break at {os.path.basename(at.filename)}:{at.lineno}: {_brief(found.reason)}"
        )
    return None


def _failed_compile(codes: Sequence[types.CodeType]) -> tuple[str, str] | None:
    compiles = private("torch._dynamo.utils", "get_compilation_metrics")()
    # A limit is reported without the function; the one that reached it was compiled before.
    compiled_before = private("torch._C._dynamo.eval_frame", "_debug_get_cache_entry_list")
    for failed in reversed(compiles):
        for code in codes if failed.fail_type is not None else ():
            place = (failed.co_filename, failed.co_firstlineno)
            if place == (code.co_filename, code.co_firstlineno) or (
                failed.co_filename is None and compiled_before(code)
            ):
                return code.co_name, f"{failed.fail_type}: {_brief(failed.fail_reason)}"
    return None


def _brief(reason: str | None) -> str:
    """What Dynamo says first, with its explanation if it gives one."""
    lines = [line.strip().rstrip(".") for line in (reason or "").split("\n")]
    return ". ".join(line.removeprefix("Explanation: ") for line in lines[:2] if line)


# --- compilers ---------------------------------------------------------------------------------


def dynamo_backend(name: str) -> Callable[..., Any]:
    """A backend registered with Dynamo under this name."""
    return private("torch._dynamo.backends.registry", "lookup_backend")(name)


@contextlib.contextmanager
def compiling_for_scopes(
    keeping_meta: Callable[[torch.fx.Graph], contextlib.AbstractContextManager[None]],
) -> Iterator[None]:
    """Have AOTAutograd compile a graph for scopes.

    * Its cache stays out of it: annotations are not part of the key, so a scoped graph would be
      answered with the code of its unscoped twin.
    * No CSE, which keeps the first of two equal nodes, scoped or not.
    * No donated buffers: they are positions among the inputs of the whole backward graph, and
      a part of it would overwrite others.
    * Its pass that makes tensors of floats runs `keeping_meta`: the nodes that it puts in the
      place of others come without any.
    * `scan` hands annotations on, from the body that it differentiates to what it makes of it.
    """
    config = private("torch._functorch", "config")
    off = {
        "enable_autograd_cache": False,
        "force_autograd_cache": False,
        "bundled_autograd_cache": False,
        "cse": False,
        "donated_buffer": False,
    }
    with (
        _floats_to_tensors(keeping_meta),
        _annotated_partitions(),
        config.patch(off),
        _tracing_annotations(),
    ):
        yield


def compile_with_aot(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    compilers: Mapping[Any, GraphCompiler],
    decompositions: DecompositionTable,
) -> Any:
    """Run AOTAutograd as the backend `aot_eager` does; `compilers` has one for each direction."""
    aot_autograd = private("torch._dynamo.backends.common", "aot_autograd")
    return aot_autograd(
        fw_compiler=compilers["forward"],
        bw_compiler=compilers["backward"],
        inference_compiler=compilers["inference"],
        partition_fn=private(
            "torch._functorch.partitioners", "min_cut_rematerialization_partition"
        ),
        decompositions=dict(decompositions) or None,
        keep_inference_input_mutations=True,
    )(gm, example_inputs)


@contextlib.contextmanager
def _floats_to_tensors(
    keeping_meta: Callable[[torch.fx.Graph], contextlib.AbstractContextManager[None]],
) -> Iterator[None]:
    module, name = "torch._functorch._aot_autograd.graph_compile", "_apply_tensorify_python_scalars"
    own = state(module, name)

    def apply(gm: torch.fx.GraphModule) -> None:
        with keeping_meta(gm.graph):
            own(gm)

    # Dynamo compiles under a lock, so no other thread compiles meanwhile.
    setattr(importlib.import_module(module), name, apply)
    try:
        yield
    finally:
        setattr(importlib.import_module(module), name, own)


@contextlib.contextmanager
def _annotated_partitions() -> Iterator[None]:
    """Have the graphs that a body is differentiated and partitioned by run node by node.

    `scan` traces its body with its backward, traces that graph again, cuts it in two, and traces
    both halves into the graph around it. Where it runs generated code for that, what was known of
    the nodes is lost.
    """
    module = importlib.import_module("torch._higher_order_ops.partitioner")
    traced = state(module.__name__, "materialize_as_graph")
    partitioned = state(module.__name__, "HopPartitionedGraph")

    def materialize_as_graph(*args: Any, **kwargs: Any) -> torch.fx.GraphModule:
        return _run_node_by_node(traced(*args, **kwargs))

    def partitioned_graph(
        fw_gm: torch.fx.GraphModule, bw_gm: torch.fx.GraphModule, *facts: Any
    ) -> Any:
        return partitioned(_run_node_by_node(fw_gm), _run_node_by_node(bw_gm), *facts)

    # Dynamo compiles under a lock, so no other thread compiles meanwhile.
    module.materialize_as_graph = materialize_as_graph  # type: ignore[attr-defined]
    module.HopPartitionedGraph = partitioned_graph  # type: ignore[attr-defined]
    try:
        yield
    finally:
        module.materialize_as_graph = traced  # type: ignore[attr-defined]
        module.HopPartitionedGraph = partitioned  # type: ignore[attr-defined]


def _run_node_by_node(gm: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Have the nodes that are traced from a graph take over its annotations."""

    def forward(*args: Any) -> Any:
        with private("torch.fx.traceback", "preserve_node_meta")():
            return torch.fx.Interpreter(gm).run(*args)

    gm.forward = forward
    return gm


def inductor_decompositions() -> DecompositionTable:
    """The table that Inductor uses in its present configuration."""
    return private("torch._inductor.decomposition", "select_decomp_table")()


def compile_with_inductor(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    inner_compile: InnerCompile | None = None,
    decompositions: DecompositionTable | None = None,
    before_joint_passes: Callable[[torch.fx.Graph], None] | None = None,
    after_joint_passes: Callable[[torch.fx.Graph], None] | None = None,
) -> Any:
    """Inductor's whole pipeline; each ATen graph goes to `inner_compile` in place of its own."""
    config = private("torch._inductor", "config")
    compile_fx = private("torch._inductor.compile_fx", "compile_fx")
    options: dict[str, Any] = {}
    if inner_compile is not None:
        options["inner_compile"] = inner_compile
    if decompositions is not None:
        options["decompositions"] = dict(decompositions)
    hooks = {}
    if before_joint_passes is not None:
        hooks["joint_custom_pre_pass"] = [before_joint_passes, *_passes("joint_custom_pre_pass")]
    if after_joint_passes is not None:
        hooks["joint_custom_post_pass"] = [*_passes("joint_custom_post_pass"), after_joint_passes]
    with config.patch(hooks):
        return compile_fx(gm, example_inputs, **options)


def _passes(name: str) -> tuple[Any, ...]:
    passes = getattr(private("torch._inductor", "config"), name)
    return private("torch._inductor.custom_graph_pass", "get_custom_graph_passes")(passes)


def compile_piece_with_inductor(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    joint_passes: Mapping[str, Any],
    **graph_options: Any,
) -> Compiled:
    """Inductor's inner compiler on a part of a graph.

    Every output keeps the strides that the graph's meta says, since the next part is compiled
    for these, and AOTAutograd's record of the whole graph's output strides stays untouched.
    """
    output = next(iter(reversed(gm.graph.nodes)))
    output.meta["user_visible_output_idxs"] = [
        index for index, value in enumerate(output.args[0]) if isinstance(value, torch.fx.Node)
    ]
    graph_options["cudagraphs"] = private("torch._inductor.utils", "BoxedBool")(False)
    with output_strides_unreported():
        return compile_whole_with_inductor(
            gm, list(example_inputs), joint_passes=joint_passes, **graph_options
        )


def inductor_joint_passes() -> Mapping[str, Any]:
    """The user's own joint-graph passes, to be in force again while a part is compiled."""
    config = private("torch._inductor", "config")
    names = ("joint_custom_pre_pass", "joint_custom_post_pass")
    return {name: getattr(config, name) for name in names}


def compile_whole_with_inductor(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    joint_passes: Mapping[str, Any],
    **graph_options: Any,
) -> Any:
    """Inductor's inner compiler on a graph that is not cut, just as `compile_fx` calls it."""
    graph_options["get_decomp_fn"] = private("torch._inductor.decomposition", "select_decomp_table")
    config = private("torch._inductor", "config")
    with config.patch(dict(joint_passes)):
        return private("torch._inductor.compile_fx", "compile_fx_inner")(
            gm, example_inputs, **graph_options
        )


def compile_aten_with_inductor(
    gm: torch.fx.GraphModule, example_inputs: Sequence[Any]
) -> Callable[..., Any]:
    """Inductor on an ATen graph from anywhere: it is traced once more, and decomposed."""
    tracing = private("torch._guards", "TracingContext").try_get() is not None
    return private("torch._inductor", "standalone_compile")(
        gm,
        list(example_inputs),
        dynamic_shapes="from_tracing_context" if tracing else "from_graph",
    )


@contextlib.contextmanager
def output_strides_unreported() -> Iterator[None]:
    """Leave AOTAutograd's record of the whole graph's output strides as it is."""
    context = private("torch._guards", "TracingContext").try_get()
    if context is None:
        yield
        return
    reported, context.output_strides = context.output_strides, None
    try:
        yield
    finally:
        context.output_strides = reported


@contextlib.contextmanager
def output_strides_reported(outputs: int) -> Iterator[None]:
    """Have AOTAutograd told of the strides of the first `outputs` outputs only."""
    context = private("torch._guards", "TracingContext").try_get()
    yield
    if context is not None and context.output_strides is not None:
        del context.output_strides[outputs:]


def inductor_kernels_made() -> int:
    """How many kernels Inductor has generated so far, those of its cache included."""
    return private("torch._inductor", "metrics").generated_kernel_count


class _Foreseen(BaseException):
    """Ends a compile when its kernels are known; not to be taken for a failure by the compiler."""


def inductor_kernels_foreseen(compile: Callable[[], Any]) -> int | None:
    """How many kernels Inductor generates in a compile, which ends before they are compiled.

    If its cache has the code, the number stands there.
    """
    lowering = private("torch._inductor.graph", "GraphLowering")
    before = inductor_kernels_made()
    own = lowering.compile_to_module

    def stop(self: Any) -> Any:
        self.codegen()
        raise _Foreseen

    lowering.compile_to_module = stop  # Dynamo compiles under a lock.
    try:
        with output_strides_unreported():
            compile()
    except _Foreseen:
        pass
    except Exception:
        return None
    finally:
        lowering.compile_to_module = own
        made = inductor_kernels_made() - before
        private("torch._inductor", "metrics").generated_kernel_count = before
    return made


class LaterCompileError(Exception):
    """Code that was compiled later does not fit what was compiled before it."""


class LaterCompile:
    """A compile that is under way, to be gone on with when what it has compiled runs.

    AOTAutograd compiles a backward graph so, at the first backward. Here the code of a later
    compile stands in for code of the first one, so it must take what that one takes: no guard may
    be added to those that Dynamo has made of the first, and the outputs have to have the strides
    that AOTAutograd was told of.
    """

    def __init__(self) -> None:
        self._tracing = private("torch._guards", "TracingContext").try_get()
        self._compile = private("torch._guards", "CompileContext").try_get()
        # The first compile fills this list.
        self._strides = None if self._tracing is None else self._tracing.output_strides
        self._configs = {name: _config(name).get_config_copy() for name in _loaded_configs()}

    def __call__(self, compile: Callable[[], _Result]) -> _Result:
        """Compile more, on any thread, whatever it is doing; its random numbers stay as they are.

        Raises:
            LaterCompileError: the code would return other strides than the first.
            Exception: what the compiler raises, that a guard would be needed among it.
        """
        with self._resumed(), self._strides_reported() as strides:
            result = compile()
            if self._strides and strides and strides != self._strides:
                raise LaterCompileError("its outputs are laid out in another way")
            return result

    @contextlib.contextmanager
    def _resumed(self) -> Iterator[None]:
        utils = functools.partial(private, "torch._dynamo.utils")
        guards = functools.partial(private, "torch._guards")
        with contextlib.ExitStack() as stack:
            enter = stack.enter_context
            enter(private("torch._dynamo.convert_frame", "compile_lock"))
            enter(_random_state_kept())
            enter(utils("preserve_rng_state")())
            enter(utils("maybe_disable_inference_mode")())
            enter(modes_disabled())
            enter(private("torch._C", "_DisableAutocast")())
            enter(private("torch._C", "_DisableFuncTorch")())
            for name, then in self._configs.items():
                enter(_config(name).patch(_changed(name, then)))
            enter(guards("tracing")(self._tracing))
            enter(guards("compile_context")(self._compile))
            enter(utils("get_metrics_context")())
            fake_mode = None if self._tracing is None else self._tracing.fake_mode
            if fake_mode is not None and fake_mode.shape_env is not None:
                enter(fake_mode.shape_env.error_on_new_guards())
            yield

    @contextlib.contextmanager
    def _strides_reported(self) -> Iterator[list[Any] | None]:
        if self._tracing is None or self._strides is None:
            yield None
            return
        before, self._tracing.output_strides = self._tracing.output_strides, []
        try:
            yield self._tracing.output_strides
        finally:
            self._tracing.output_strides = before


_CONFIGS = ("torch._inductor.config", "torch._functorch.config", "torch._dynamo.config")


def _loaded_configs() -> list[str]:
    return [name for name in _CONFIGS if name in sys.modules]


def _config(name: str) -> Any:
    return private(*name.rsplit(".", 1))


def _changed(name: str, then: Mapping[str, Any]) -> dict[str, Any]:
    now = _config(name).get_config_copy()
    return {key: value for key, value in then.items() if now[key] != value}


@contextlib.contextmanager
def _random_state_kept() -> Iterator[None]:
    state = random.getstate()
    try:
        yield
    finally:
        random.setstate(state)


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether a tensor stands for one while a graph is traced, and holds no memory."""
    return isinstance(tensor, private("torch._subclasses.fake_tensor", "FakeTensor"))


def boxed(function: Callable[[list[Any]], Any]) -> Compiled:
    """Mark a callable as one that takes a list of arguments and may empty it."""

    @functools.wraps(function)
    def run(args: list[Any]) -> Any:
        return function(args)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def boxed_call(compiled: Callable[..., Any]) -> Compiled:
    """Call `compiled` with a list, whatever calling convention it has."""
    if getattr(compiled, "_boxed_call", False):
        return compiled
    return lambda args: compiled(*args)


def run_uncompiled(gm: torch.fx.GraphModule) -> Compiled:
    """The graph's own generated Python, which frees each argument after its last use."""
    gm.graph.set_codegen(private("torch.fx.graph", "_BoxedCodeGen")())
    gm.recompile()
    return gm.forward


def is_capturing() -> bool:
    """Whether the current CUDA stream is captured; a build without CUDA cannot be asked."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return False
    return torch.cuda.is_current_stream_capturing()


# --- memory ------------------------------------------------------------------------------------


def storage_address(tensor: torch.Tensor) -> int:
    """What a storage is known by while it, or a `weak_storage` of it, lives."""
    return tensor.untyped_storage()._cdata


def bytes_of_storage(tensor: torch.Tensor) -> Any:
    """The memory that a tensor on the host lies in, as an array of bytes."""
    storage = tensor.untyped_storage()
    with torch.no_grad():
        return torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage).numpy()


def is_plain_on_cpu(tensor: torch.Tensor) -> bool:
    """Whether a tensor's memory is on the host, and is its value, element by element.

    It is no conj or neg view, not sparse, quantised, nested, functional, batched or fake. The
    single questions (`is_neg`) let another thread take the interpreter's lock; this does not.
    """
    keys: int = private("torch._C", "_dispatch_keys")(tensor).raw_repr()
    return not keys & ~_plain_keys()


@functools.cache
def _plain_keys() -> int:
    plain = torch.empty(0, device="cpu")
    return private("torch._C", "_dispatch_keys")(plain).raw_repr()


def weak_storage(tensor: torch.Tensor) -> Any:
    """A reference that does not keep a tensor's memory; its `expired` says if that was freed."""
    return private("torch.multiprocessing.reductions", "StorageWeakRef")(tensor.untyped_storage())


def owners_of_storage(tensor: torch.Tensor) -> int:
    """How many tensors share this one's memory, itself included, as well as views in Python."""
    return private("torch._C", "_storage_Use_Count")(storage_address(tensor))
