"""What a user hands to `torch.compile`: the backend, by name or from a config."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from torchair_scope.backends.aot import AotEager, AtenCompiler, interpret_whole, run_as_it_is
from torchair_scope.backends.inductor import Inductor
from torchair_scope.bisection import prober
from torchair_scope.capture.account import account
from torchair_scope.capture.compiler import Scoper
from torchair_scope.capture.settings import SETTINGS, DumpSettings
from torchair_scope.capture.twin import Twin
from torchair_scope.config import CompilerConfig
from torchair_scope.options import NONE, EngineName, OnError, Options, Taps, options_of

__all__ = ["get_compiler", "get_npu_backend", "torchair_scope_backend"]

InnerCompiler = str | Callable[[torch.fx.GraphModule, Sequence[Any]], Callable[..., Any]]
Backend = Callable[..., Any]

_OPTIONS = ("path", "backend", "type", "filter", "on_error", "engine", "tap", "graph_dump")
_INNER = ("inductor", "aot_eager")


def get_npu_backend(
    *,
    compiler_config: CompilerConfig | None = None,
    custom_decompositions: Mapping[Any, Callable[..., Any]] = {},
    inner: InnerCompiler = "inductor",
    on_error: OnError | None = None,
    engine: EngineName | None = None,
    tap: Taps | None = None,
) -> Backend:
    """A backend for `torch.compile` that dumps scopes and compiles everything else.

        >>> import torch, torchair_scope as torchair
        >>> config = torchair.CompilerConfig()
        >>> config.debug.data_dump.path = "./dump"
        >>> backend = torchair.get_npu_backend(compiler_config=config)
        >>> model = torch.compile(torch.nn.Linear(4, 4), backend=backend)

    A graph without a scope goes to the inner compiler as it is.

    Args:
        compiler_config: where and what to dump; the defaults of `CompilerConfig` if None.
        custom_decompositions: by operator overload, as AOTAutograd takes them.
        inner: what compiles all that is not dumped: "inductor", "aot_eager", or a callable that
            compiles an ATen graph, `(gm, example_inputs) -> callable`.
        on_error: what happens when a dump cannot be written, on a full disk for instance:
            "warn" once and go on, or "raise"; None is what `torchair.scope.configure` says, and
            else "warn".
        engine: how values are obtained: "interpret" or "tap", see `data_dump`.
        tap: which values engine "tap" takes: "all" or "boundary", see `data_dump`.

    Raises:
        TypeError: `compiler_config` is no CompilerConfig.
        ValueError: `inner`, `on_error`, `engine` or `tap` is none of the above.
    """
    given = {"on_error": on_error, "engine": engine, "tap": tap}
    options = options_of(given, "get_npu_backend")
    scoper, compiler = _assemble(compiler_config, custom_decompositions, inner, options)

    def backend(gm: torch.fx.GraphModule, example_inputs: Sequence[Any], **options: Any) -> Any:
        _refuse_options(options)
        twin = Twin(gm, scoper.settings)
        return twin.beside(compile_graph(gm, example_inputs))

    def compile_graph(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        account.arrived()
        asked = prober(scoper) or scoper
        if not asked.wants(gm):
            return compiler.untouched(gm, example_inputs)
        entered = asked.entered_with(gm)
        if entered.interprets_whole(gm):
            return interpret_whole(gm, example_inputs, entered, custom_decompositions)
        return compiler.scoped(gm, example_inputs, entered)

    setattr(backend, SETTINGS, lambda **options: scoper.settings)
    return backend


def torchair_scope_backend(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Any:
    """The backend behind `torch.compile(..., backend="torchair_scope", options={...})`.

        >>> import torch
        >>> options = {"path": "./dump", "backend": "aot_eager"}
        >>> model = torch.compile(torch.nn.Linear(4, 4), backend="torchair_scope", options=options)

    Args:
        gm: the graph that Dynamo made.
        example_inputs: the graph's inputs, as fake tensors.
        options: "path", "type" and "filter" as in `config.debug.data_dump`; "graph_dump" for
            the folder of `config.debug.graph_dump` with type "py"; "backend" for the inner
            compiler, "on_error", "engine" and "tap" as in `get_npu_backend`.
        mode: not for this backend; it must be None or "default".

    Raises:
        ValueError: an option that there is not, or a value that it cannot have.
    """
    if mode not in (None, "default"):
        raise ValueError(
            f"backend='torchair_scope' has no mode {mode!r}: leave mode out, and set "
            "torch._inductor.config for what it stands for"
        )
    return _backend_of(dict(options or {}))(gm, example_inputs)


def _settings_by_name(
    *, options: Mapping[str, Any] | None = None, mode: str | None = None
) -> DumpSettings:
    settings: DumpSettings = getattr(_backend_of(dict(options or {})), SETTINGS)()
    return settings


setattr(torchair_scope_backend, SETTINGS, _settings_by_name)


def get_compiler(
    compiler_config: CompilerConfig | None = None,
) -> Callable[[torch.fx.GraphModule, Sequence[Any]], Callable[..., Any]]:
    """A compiler of ATen graphs that dumps scopes, for one's own call of AOTAutograd.

        >>> import torchair_scope as torchair
        >>> compiler = torchair.get_compiler(torchair.CompilerConfig())

    Args:
        compiler_config: where and what to dump; the defaults of `CompilerConfig` if None.

    Returns:
        `(gm, example_inputs) -> callable`; the callable takes the graph's inputs as positional
        arguments and returns a flat tuple.
    """
    from torchair_scope.backends.aten import aten_compiler

    scoper, _ = _assemble(compiler_config, {}, "inductor", NONE)
    return aten_compiler(scoper)


def _assemble(
    config: CompilerConfig | None,
    decompositions: Mapping[Any, Callable[..., Any]],
    inner: InnerCompiler,
    options: Options,
) -> tuple[Scoper, Inductor | AtenCompiler]:
    config = CompilerConfig() if config is None else config
    if not isinstance(config, CompilerConfig):
        raise TypeError(f"compiler_config takes a CompilerConfig, got {config!r}")
    compiler = _inner_compiler(inner, decompositions)
    return Scoper(DumpSettings.of(config, options), compiler.name), compiler


def _inner_compiler(
    inner: InnerCompiler, decompositions: Mapping[Any, Callable[..., Any]]
) -> Inductor | AtenCompiler:
    if inner == "inductor":
        return Inductor(decompositions)
    if inner == "aot_eager":
        return AotEager(run_as_it_is, decompositions)
    if callable(inner):
        return AtenCompiler(inner, decompositions)
    raise ValueError(
        f"the inner compiler is {inner!r}; it can be one of {', '.join(_INNER)}, or a callable "
        "(gm, example_inputs) -> callable that compiles an ATen graph"
    )


def _backend_of(options: dict[str, Any]) -> Backend:
    for name in options:
        if name not in _OPTIONS:
            near = difflib.get_close_matches(name, _OPTIONS, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise ValueError(
                f"backend='torchair_scope' has no option {name!r}: {hint}"
                f"all options {', '.join(_OPTIONS)}"
            )
    config = CompilerConfig()
    for name in ("path", "type", "filter"):
        if name in options:
            setattr(config.debug.data_dump, name, options[name])
    if "graph_dump" in options:
        config.debug.graph_dump.type = "py"
        config.debug.graph_dump.path = options["graph_dump"]
    return get_npu_backend(
        compiler_config=config,
        inner=options.get("backend", "inductor"),
        on_error=options.get("on_error"),
        engine=options.get("engine"),
        tap=options.get("tap"),
    )


def _refuse_options(options: Mapping[str, Any]) -> None:
    given = {name: value for name, value in options.items() if value is not None}
    if given:
        raise ValueError(
            f"a backend from get_npu_backend takes its options from compiler_config, got {given}; "
            "options={...} belong to backend='torchair_scope'"
        )
