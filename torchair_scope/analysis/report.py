"""A comparison, or a dump, as one HTML file that needs nothing else."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torchair_scope.analysis.compare import Comparison
from torchair_scope.analysis.details import detail_of, histograms, number_of, numbers_of
from torchair_scope.analysis.dump import Call, Dump
from torchair_scope.analysis.extras import need
from torchair_scope.analysis.judgement import TensorResult
from torchair_scope.analysis.pairing import RULES, execution_order
from torchair_scope.analysis.statistics import Statistics, statistics_of
from torchair_scope.analysis.tensors import MissingTensorError
from torchair_scope.analysis.verdict import ROLES, CallResult

# Calls that are shown with histograms and heat maps; of the others there are the numbers.
DETAILED = 60
# Where an error of 0, and one of NaN or Inf, are drawn on the log scale.
_SMALLEST, _MISMATCH = 1e-9, 10.0


def write_report(
    comparison: Comparison, path: str | os.PathLike[str], title: str = "Comparison"
) -> Path:
    """Write the report of a comparison; give its path.

        from torchair_scope.analysis.report import write_report
        write_report(torchair_scope.compare("./eager", "./npu"), "report.html")

    **Raises:** `MissingPackageError` without plotly and jinja2, which the extra `analysis` has.
    """
    results = comparison.results
    detailed = _most_telling(comparison)
    rows = [_row(position, result) for position, result in enumerate(results)]
    for position in detailed:
        rows[position]["tensors"] = _details(results[position])
    first = comparison.verdict.call
    notes = list(comparison.notes)
    for side, calls in (("golden", comparison.only_golden), ("target", comparison.only_target)):
        notes += [f"only in {side}: {call}" for call in calls]
    page = {
        "title": title,
        "kind": comparison.verdict.kind,
        "text": comparison.verdict.text,
        "first": None if first is None else _position(results, first),
        "roles": ROLES,
        "rules": RULES,
        "measure": "largest error / largest value",
        "rows": rows,
        "notes": notes,
    }
    return _write(page, Path(path))


def write_dump_report(dump: Dump, path: str | os.PathLike[str]) -> Path:
    """Write the report of a single dump: its values, and where NaN and Inf come from first."""
    rows = [
        _dump_row(position, call)
        for position, call in enumerate(sorted(dump.calls(), key=execution_order))
    ]
    first = next((row["id"] for row in rows if row["role"] == "made"), None)
    text = "all values are finite"
    if first is not None:
        text = f"{rows[first]['call']} ({rows[first]['operator']}) is the first to make NaN or Inf"
    roles = {
        "agrees": "its outputs are finite",
        "made": "its inputs are finite and its outputs are not",
        "carries": "its inputs have NaN or Inf already",
        "unclear": "an output is not on disk",
    }
    page = {
        "title": dump.folder.url,
        "kind": "agrees" if first is None else "made",
        "text": text,
        "first": first,
        "roles": roles,
        "rules": {},
        "measure": "largest magnitude of the outputs",
        "rows": rows,
        "notes": dump.problems,
    }
    return _write(page, Path(path))


def _write(page: dict[str, Any], path: Path) -> Path:
    jinja2 = need("jinja2")
    plotly = need("plotly.offline")
    loader = jinja2.PackageLoader("torchair_scope.analysis", "templates")
    environment = jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined
    )
    # A "</script>" in a name must not end the element that holds the data.
    data = json.dumps(page, allow_nan=False).replace("</", "<\\/")
    text = environment.get_template("report.html.jinja").render(
        page=page, data=data, plotly=plotly.get_plotlyjs(), scopes=_scope_tree(page["rows"])
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def _most_telling(comparison: Comparison) -> list[int]:
    """The verdict's call, then what does not agree in order, then the largest errors."""
    results = comparison.results
    first = comparison.verdict.call
    chosen = [] if first is None else [_position(results, first)]
    chosen += [position for position, each in enumerate(results) if each.role != "agrees"]
    chosen += sorted(range(len(results)), key=lambda position: -_error(results[position], False))
    return list(dict.fromkeys(chosen))[:DETAILED]


def _position(results: Sequence[CallResult], wanted: CallResult) -> int:
    return next(position for position, each in enumerate(results) if each is wanted)


def _facts(position: int, call: Call) -> dict[str, Any]:
    source = call.source
    place = f"{os.path.basename(str(source['file']))}:{source['line']}" if source else ""
    shapes = [tensor.description.get("shape") for tensor in call.outputs.values()]
    return {
        "id": position,
        "call": f"{call.step} {call.node}",
        "operator": call.target,
        "scope": call.scope or "",
        "module": call.module or "",
        "source": place,
        "code": str(source["code"]) if source else "",
        "shape": ", ".join(
            "x".join(map(str, shape)) or "scalar" for shape in shapes if shape is not None
        ),
    }


def _row(position: int, result: CallResult) -> dict[str, Any]:
    golden = result.pair.golden
    bad = sum(each.metrics.mismatches for each in result.outputs if each.metrics)
    return {
        **_facts(position, result.pair.target),
        "golden": f"{golden.step} {golden.node}",
        "rule": result.pair.rule,
        "role": result.role,
        "reason": result.reason or "",
        "input": _error(result, True),
        "output": _error(result, False),
        "bad": bad,
        "drawn": _MISMATCH if bad else max(_error(result, False), _SMALLEST),
        "tensors": [_numbers(each) for each in result.tensors],
    }


def _error(result: CallResult, inputs: bool) -> float:
    worst = result.worst_input if inputs else result.worst_output
    if worst is None or worst.metrics is None:
        return 0.0
    return min(worst.metrics.max_relative, sys.float_info.max)


def _numbers(result: TensorResult) -> dict[str, Any]:
    relative = number_of(result.metrics.max_relative) if result.metrics else None
    return {
        "slot": result.slot,
        "agreement": result.agreement,
        "dtypes": list(result.dtypes),
        "reason": result.reason,
        "metrics": {"largest error / largest value": relative},
    }


def _details(result: CallResult) -> list[dict[str, Any]]:
    golden, target = result.pair.golden.tensors, result.pair.target.tensors
    return [detail_of(each, golden[each.slot], target[each.slot]) for each in result.tensors]


def _dump_row(position: int, call: Call) -> dict[str, Any]:
    found: dict[str, Statistics] = {}
    tensors: list[dict[str, Any]] = []
    for slot, tensor in call.tensors.items():
        try:
            array = tensor.numpy()
        except MissingTensorError as error:
            tensors.append({"slot": slot, "agreement": "", "dtypes": [], "reason": str(error)})
            continue
        found[slot] = statistics_of(array)
        shown: dict[str, Any] = {
            "slot": slot,
            "agreement": "",
            "dtypes": [tensor.dtype],
            "reason": None,
        }
        if position < DETAILED or found[slot].nans or found[slot].infinities:
            shown["histogram"] = histograms(array)
        tensors.append({**shown, "target": numbers_of(array)})
    bad = {slot: each.nans + each.infinities for slot, each in found.items()}
    outputs = [slot for slot in found if slot.startswith("OUTPUT")]
    largest = max((_magnitude(found[slot]) for slot in outputs), default=0.0)
    return {
        **_facts(position, call),
        "golden": "",
        "rule": "",
        "reason": "",
        "role": _dump_role(bad, outputs),
        "input": max((_magnitude(found[s]) for s in found if s not in outputs), default=0.0),
        "output": largest,
        "bad": sum(bad[slot] for slot in outputs),
        "drawn": max(largest, _SMALLEST),
        "tensors": tensors,
    }


def _dump_role(bad: dict[str, int], outputs: Sequence[str]) -> str:
    if not outputs:
        return "unclear"
    if not any(bad[slot] for slot in outputs):
        return "agrees"
    return "carries" if any(count for slot, count in bad.items() if slot not in outputs) else "made"


def _magnitude(statistics: Statistics) -> float:
    largest = max(abs(statistics.minimum), abs(statistics.maximum))
    return largest if largest == largest else 0.0


def _scope_tree(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Scopes inside scopes, each with the number of its calls and of those that do not agree."""
    root: dict[str, Any] = {"name": "all", "path": "", "calls": 0, "wrong": 0, "inside": {}}
    for row in rows:
        levels, node = [root], root
        path = ""
        for name in row["scope"].split("/") if row["scope"] else ():
            path = f"{path}/{name}" if path else name
            node = node["inside"].setdefault(
                name, {"name": name, "path": path, "calls": 0, "wrong": 0, "inside": {}}
            )
            levels.append(node)
        for level in levels:
            level["calls"] += 1
            level["wrong"] += row["role"] != "agrees"
    return root
