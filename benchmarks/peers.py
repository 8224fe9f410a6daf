"""What a dump adds to a step with other tools, on the same eager model.

python benchmarks/peers.py [--quick] [--folder DISK] [--environments FOLDER]

msprobe and torchlens are installed in environments of their own, which see this one's torch. A tool
that cannot be installed or run is said so in its row.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
import numpy as np
import torch
from measuring import Table, alternating, arguments, median, scratch, seconds, show
from models import Encoder, sentences

LAYERS = 6
PACKAGES = {"msprobe": "mindstudio-probe", "torchlens": "torchlens"}
Run = Callable[[torch.nn.Module, torch.Tensor], Any]


def hooks(folder: Path) -> Run:
    """Forward hooks that save what each leaf module is given and returns."""
    steps = iter(range(10**6))

    def run(model: torch.nn.Module, x: torch.Tensor) -> Any:
        into = folder / str(next(steps))
        into.mkdir(parents=True)

        def save(name: str) -> Any:
            def hook(module: Any, args: Any, output: torch.Tensor) -> None:
                for slot, value in (*enumerate(args), ("output", output)):
                    np.save(into / f"{name}.{slot}.npy", value.numpy())

            return hook

        leaves = [(n, m) for n, m in model.named_modules() if not list(m.children())]
        handles = [module.register_forward_hook(save(name)) for name, module in leaves]
        model(x)
        for handle in handles:
            handle.remove()

    return run


def ours(data: Any) -> Callable[[Path], Run]:
    """The eager scope of this package."""
    from torchair_scope.scope import data_dump

    def begin(folder: Path) -> Run:
        def run(model: torch.nn.Module, x: torch.Tensor) -> Any:
            with data_dump("encoder", path=folder, data=data):
                model(x)

        return run

    return begin


def msprobe(task: str) -> Callable[[Path], Run]:
    """msprobe's dump of every operator (level L1)."""

    def begin(folder: Path) -> Run:
        from msprobe.pytorch import PrecisionDebugger  # type: ignore[import-not-found]

        folder.mkdir(parents=True)
        config = folder / "config.json"
        kinds = {"task": task, "dump_path": str(folder), "rank": [], "step": [], "level": "L1"}
        config.write_text(
            json.dumps({**kinds, task: {"scope": [], "list": [], "data_mode": ["all"]}})
        )
        config.chmod(0o640)
        debugger = PrecisionDebugger(config_path=str(config))

        def run(model: torch.nn.Module, x: torch.Tensor) -> Any:
            debugger.start(model=model)
            model(x)
            debugger.stop()
            debugger.step()

        return run

    return begin


def torchlens(folder: Path) -> Run:
    """torchlens' trace of every operator, which stays in memory."""
    import torchlens as lens  # type: ignore[import-not-found]

    return lambda model, x: lens.trace(model, x)


TOOLS: dict[str, tuple[str | None, Callable[[], Callable[[Path], Run]]]] = {
    "torchair_scope, tensors": (None, lambda: ours("tensors")),
    "torchair_scope, statistics": (None, lambda: ours("stats")),
    "forward hooks and np.save": (None, lambda: hooks),
    "msprobe, tensors": ("msprobe", lambda: msprobe("tensor")),
    "msprobe, statistics": ("msprobe", lambda: msprobe("statistics")),
    "torchlens, in memory": ("torchlens", lambda: torchlens),
}


def measure(tool: str, folder: Path, repeats: int) -> list[float]:
    """Seconds of an undumped step, and of one with a tool."""
    run = TOOLS[tool][1]()(folder / "dump")
    model = Encoder(LAYERS).eval()
    sides: dict[str, Callable[[int], float]] = {
        "undumped": lambda repeat: seconds(lambda: model(sentences(repeat))),
        "dumped": lambda repeat: seconds(lambda: run(model, sentences(repeat))),
    }
    with torch.no_grad():
        alternating(sides, 1)
        return [median(times) for times in alternating(sides, repeats).values()]


def python_of(package: str | None, environments: Path) -> str:
    """The interpreter that has a package; an environment is made for it if need be."""
    if package is None:
        return sys.executable
    folder = environments / package
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, symlinks=True)
        (site,) = folder.glob("lib/python*/site-packages")
        (site / "shared.pth").write_text(sysconfig.get_path("purelib") + "\n")
        constraints = Path(__file__).parents[1] / "constraints.txt"
        install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
        subprocess.run([*install, "-c", str(constraints), PACKAGES[package]], check=True)
    return str(python)


def in_its_environment(tool: str, folder: Path, options: Any) -> list[float] | str:
    """What `measure` gives in the tool's environment; the reason if it fails."""
    try:
        python = python_of(TOOLS[tool][0], options.environments)
        command = [python, __file__, "--tool", tool, "--folder", str(folder)]
        done = subprocess.run(
            [*command, "--repeats", str(options.repeats)],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
        )
        measured: list[float] = json.loads(done.stdout.splitlines()[-1])
        return measured
    except subprocess.CalledProcessError as error:
        lines = (error.stderr or "").strip().splitlines() or [str(error)]
        return lines[-1]


def main() -> None:
    options = arguments(
        __doc__,
        environments={"type": Path, "default": Path(".venv-peers"), "help": "where to make them"},
        tool={"choices": list(TOOLS), "help": "measure one tool in this environment"},
    )
    if options.tool:
        print(json.dumps(measure(options.tool, options.folder, options.repeats)))
        return
    table = Table(
        "7. seconds that tools add to a step of an eager encoder of 6 layers",
        ["tool", "undumped", "added", "remark"],
    )
    for tool in TOOLS:
        with scratch(options) as folder:
            found = in_its_environment(tool, folder, options)
        if isinstance(found, str):
            table.add(tool, "", "", found)
        else:
            undumped, dumped = found
            table.add(tool, undumped, dumped - undumped, "")
    show([table], options.json)


if __name__ == "__main__":
    main()
