"""Everything of torch that is private, or public without a promise, is called from this file.

Checked with torch 2.13.0. On another version a name that has moved fails here, with a message
that says which name and which version, and not somewhere inside a compile.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch

CHECKED_WITH = ("2.13",)

Compiled = Callable[[list[Any]], Sequence[Any]]
GraphCompiler = Callable[[torch.fx.GraphModule, Sequence[Any]], Any]
InnerCompile = Callable[..., Any]
_Function = TypeVar("_Function", bound=Callable[..., Any])
DecompositionTable = Mapping[Any, Callable[..., Any]]


def private(module: str, name: str) -> Any:
    """The attribute `name` of a private torch module, or an error that says what is missing."""
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
    return private("torch.fx.traceback", "current_meta").get("custom") or {}


@contextlib.contextmanager
def annotations_in_force(annotations: Mapping[str, Any]) -> Iterator[None]:
    """Have operators that are traced annotated with these, and no others.

    `torch.fx.traceback.annotate` writes into the dict in force, which may be that of a node.
    """
    meta = private("torch.fx.traceback", "current_meta")
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
    number = private("torch.fx.traceback", "current_meta").get("seq_nr")
    return known.get(autograd_node._sequence_nr() if number is None else number, {})


def _is_joint(graph: torch.fx.Graph) -> bool:
    """Whether forward and backward are traced to one graph: only then does AOTAutograd copy."""
    placeholders = itertools.takewhile(lambda node: node.op == "placeholder", graph.nodes)
    return any(node.name.startswith("tangents") for node in placeholders)


def traces_a_body() -> bool:
    """Whether the graph that is traced now is a body of an operator in another one."""
    return next(_graphs_around_the_traced_body(), None) is not None


def _graphs_around_the_traced_body() -> Iterator[torch.fx.Graph]:
    tracer = private("torch.fx.experimental.proxy_tensor", "_CURRENT_MAKE_FX_TRACER")
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


def next_sequence_number() -> int:
    """The sequence number of the next autograd node of this thread."""
    return private("torch.autograd", "_get_sequence_nr")()


def optimized_module_type() -> type:
    """The class of what `torch.compile(module)` returns."""
    return private("torch._dynamo.eval_frame", "OptimizedModule")


def compiler_control_flow() -> tuple[type[BaseException], ...]:
    """Exceptions with which Dynamo steers a compile; they are no failures."""
    names = ("SkipFrame", "RestartAnalysis")
    return tuple(private("torch._dynamo.exc", name) for name in names)


def only_inlined(function: Callable[..., Any]) -> None:
    """Let Dynamo trace `function` as a part of its callers only.

    After a graph break Dynamo compiles the functions that an uncompiled frame calls, each as a
    graph of its own. For one that returns a context manager there is no such graph.
    """
    module = "torch._C._dynamo.eval_frame"  # Dynamo's own `skip_code` would import Dynamo now.
    action = private(module, "_FrameAction")
    strategy = private(module, "_FrameExecStrategy")(action.SKIP, action.DEFAULT)
    private(module, "set_code_exec_strategy")(function.__code__, strategy)


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
    """
    config = private("torch._functorch", "config")
    off = {
        "enable_autograd_cache": False,
        "force_autograd_cache": False,
        "bundled_autograd_cache": False,
        "cse": False,
        "donated_buffer": False,
    }
    with _floats_to_tensors(keeping_meta), config.patch(off), _tracing_annotations():
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
    own = private(module, name)

    def apply(gm: torch.fx.GraphModule) -> None:
        with keeping_meta(gm.graph):
            own(gm)

    # Dynamo compiles under a lock, so no other thread compiles meanwhile.
    setattr(importlib.import_module(module), name, apply)
    try:
        yield
    finally:
        setattr(importlib.import_module(module), name, own)


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
    graph_options["get_decomp_fn"] = private("torch._inductor.decomposition", "select_decomp_table")
    graph_options["cudagraphs"] = private("torch._inductor.utils", "BoxedBool")(False)
    compile_fx_inner = private("torch._inductor.compile_fx", "compile_fx_inner")
    config = private("torch._inductor", "config")
    with config.patch(dict(joint_passes)), _output_strides_unreported():
        return compile_fx_inner(gm, list(example_inputs), **graph_options)


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
def _output_strides_unreported() -> Iterator[None]:
    context = private("torch._guards", "TracingContext").try_get()
    if context is None:
        yield
        return
    reported, context.output_strides = context.output_strides, None
    try:
        yield
    finally:
        context.output_strides = reported


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
