"""Random programs: functions of two 4x4 tensors, as source text, with scopes at random places."""

from __future__ import annotations

import linecache
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st

PLAIN = ("float32", "float64")
MIXED = (*PLAIN, "bfloat16")


@dataclass(frozen=True)
class Program:
    """A program, and what is known of it.

    Args:
        source: defines `program(x, y)`, which returns a tuple of tensors; opens scopes by `scope`.
        breaks: whether it breaks the graph.
        trains: whether its inputs require gradients; else it may write to them.
        dynamic: whether it is compiled for sizes of any kind.
    """

    source: str
    breaks: bool
    trains: bool
    dynamic: bool

    def function(self, scope: Callable) -> Callable[..., tuple[torch.Tensor, ...]]:
        """The program as a function, which opens its scopes with `scope`."""
        filename = f"<program {hash(self.source)}>"
        linecache.cache[filename] = (len(self.source), None, self.source.splitlines(True), filename)
        names: dict[str, Any] = {"torch": torch, "scope": scope}
        exec(compile(self.source, filename, "exec"), names)
        return names["program"]

    def __repr__(self) -> str:
        facts = f"breaks={self.breaks}, trains={self.trains}, dynamic={self.dynamic}"
        return f"Program({facts}):\n{self.source}"


class _Author:
    """Writes the lines of one program, and keeps account of what lies in whose memory."""

    def __init__(self, draw: st.DrawFn, dtypes: tuple[str, ...], breaks: bool) -> None:
        self.draw = draw
        self.dtypes = dtypes
        self.memory = {"x": 0, "y": 1}
        self.statements = [*STATEMENTS, *BREAKS, *BREAKS] if breaks else STATEMENTS

    def any_of(self, choices: Any) -> Any:
        return self.draw(st.sampled_from(list(choices)))

    def value(self) -> str:
        return self.any_of(self.memory)

    def apart_from(self, name: str) -> str:
        """A value, or a number, in other memory than `name`."""
        others = [other for other in self.memory if self.memory[other] != self.memory[name]]
        return self.any_of(["2.0", *others])

    def new(self, view_of: str | None = None) -> str:
        name = f"v{len(self.memory)}"
        self.memory[name] = len(self.memory) if view_of is None else self.memory[view_of]
        return name

    def block(self, depth: int) -> list[str]:
        lines: list[str] = []
        for _ in range(self.draw(st.integers(1, 4))):
            if depth < 3 and self.draw(st.integers(0, 2)) == 0:
                lines += [f"with {self.scope()}:", *_indented(self.block(depth + 1))]
            else:
                lines += self.any_of(self.statements)(self)
        return lines

    def scope(self) -> str:
        return self.any_of(["scope()", "scope('a')", "scope('b')"])


def _indented(lines: list[str]) -> list[str]:
    return textwrap.indent("\n".join(lines), "    ").split("\n")


def _unary(author: _Author) -> list[str]:
    operator = author.any_of(["sin", "tanh", "sigmoid", "relu", "neg", "nn.functional.gelu"])
    value = author.value()
    return [f"{author.new()} = torch.{operator}({value})"]


def _binary(author: _Author) -> list[str]:
    operator = author.any_of(["+", "*", "-"])
    first, second = author.value(), author.value()
    return [f"{author.new()} = {first} {operator} {second}"]


def _matmul(author: _Author) -> list[str]:
    first, second = author.value(), author.value()
    return [f"{author.new()} = torch.tanh({first} @ {second}.to({first}.dtype))"]


def _normalise(author: _Author) -> list[str]:
    call = author.any_of(["nn.functional.layer_norm({}, (4,))", "softmax({}, -1)"])
    value = author.value()
    return [f"{author.new()} = torch.{call.format(value)}"]


def _cast(author: _Author) -> list[str]:
    value, dtype = author.value(), author.any_of(author.dtypes)
    return [f"{author.new(view_of=value)} = {value}.to(torch.{dtype})"]


def _select(author: _Author) -> list[str]:
    value, other = author.value(), author.value()
    return [f"{author.new()} = torch.where({value} > 0, {value}, {other})"]


def _view(author: _Author) -> list[str]:
    value = author.value()
    call = author.any_of(["t()", "flip(0).t()", "reshape(16).reshape(4, 4)", "unsqueeze(0)[0]"])
    return [f"{author.new(view_of=value)} = {value}.{call}"]


def _many_outputs(author: _Author) -> list[str]:
    value = author.value()
    new = author.new()
    return author.any_of(
        [
            [f"p, q = {value}.split(2)", f"{new} = torch.cat([q, p])"],
            [f"p, q = {value}.sort(dim=0)", f"{new} = p"],
            [f"p, q = torch.var_mean({value}, dim=0, keepdim=True)", f"{new} = ({value} - q) * p"],
            [f"{new} = torch.stack({value}.unbind(1))"],
            [f"{new} = {value} - {value}.max(dim=1, keepdim=True).values"],
        ]
    )


def _in_place(author: _Author) -> list[str]:
    value = author.value()
    other = author.apart_from(value)
    return [
        author.any_of(
            [
                f"{value}.add_({other})",
                f"{value}[1:3].mul_(0.5)",
                f"{value}.diagonal().add_(1)",
                f"{value}[0] = 1.5",
                f"torch.relu_({value})",
            ]
        )
    ]


def _sizes(author: _Author) -> list[str]:
    value = author.value()
    return [f"{author.new()} = {value} * ({value}.shape[0] * 0.25)"]


def _dropout(author: _Author) -> list[str]:
    value = author.value()
    return [f"{author.new()} = torch.dropout({value}, 0.5, True)"]


def _cond(author: _Author) -> list[str]:
    value = author.value()
    new = author.new()
    scoped = author.draw(st.booleans())
    lines = [f"def yes_{new}(a):"]
    lines += ["    with scope('yes'):"] * scoped
    lines += [f"    {'    ' * scoped}return a.sin() + a", f"def no_{new}(a):"]
    lines += ["    return a.cos() * a"]
    return [*lines, f"{new} = torch.cond({value}.sum() > 0, yes_{new}, no_{new}, ({value},))"]


def _loop(author: _Author) -> list[str]:
    value = author.value()
    new = author.new()
    scoped = author.draw(st.booleans())
    lines = [f"def again_{new}(n, a):", "    return n < 2", f"def once_{new}(n, a):"]
    lines += ["    with scope('loop'):"] * scoped
    lines += [f"    {'    ' * scoped}return n + 1, a.tanh()"]
    given = f"(torch.zeros((), dtype=torch.int64), {value}.detach().clone())"
    call = f"torch._higher_order_ops.while_loop(again_{new}, once_{new}, {given})"
    return [*lines, f"_, {new} = {call}"]


def _break(author: _Author) -> list[str]:
    return [author.any_of(["torch._dynamo.graph_break()", "print('', end='')"])]


def _item(author: _Author) -> list[str]:
    value = author.value()
    return [f"{author.new()} = {value} * (1 + {value}.sum().sign().item())"]


STATEMENTS = [
    *(_unary, _unary, _binary, _binary, _matmul, _normalise, _cast, _select),
    *(_view, _many_outputs, _in_place, _in_place, _sizes, _dropout, _cond, _loop),
]
BREAKS = [_break, _item]


@st.composite
def programs(draw: st.DrawFn, *, dtypes: tuple[str, ...] = MIXED) -> Program:
    """Programs with up to a score of operators and scopes that nest up to three deep."""
    breaks = draw(st.integers(0, 2)) == 0
    trains = draw(st.booleans())
    author = _Author(draw, dtypes, breaks)
    body = ["x, y = x.clone(), y.clone()"] * trains
    body += author.block(0)
    body += [f"with {author.scope()}:", *_indented(author.block(1))]
    results = draw(st.lists(st.sampled_from(list(author.memory)), min_size=1, max_size=4))
    body += [f"return ({', '.join(results)},)"]
    source = "\n".join(["def program(x, y):", *_indented(body)]) + "\n"
    has_break = any(part in source for part in ("graph_break", "print", "item"))
    return Program(source, has_break, trains, draw(st.integers(0, 4)) == 0)
