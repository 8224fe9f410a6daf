"""Run the benchmarks, one after the other; tables are printed, and written to results/*.json.

python benchmarks/run.py [--quick]
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
# Each takes `--json FILE`, and what else is given here.
MEASURED = ("unscoped", "dumping", "tap", "stats", "small_tensors", "unselected_steps", "peers")
OTHERS = ("compare", "partition")


def main() -> None:
    given = sys.argv[1:]
    for name in MEASURED:
        run(name, "--json", HERE / "results" / f"{name}.json", *given)
    for name in OTHERS:
        run(name)


def run(name: str, *arguments: object) -> None:
    print(f"== {name}", flush=True)
    script = HERE / f"{name}.py"
    subprocess.run([sys.executable, str(script), *map(str, arguments)], check=True)


if __name__ == "__main__":
    main()
