"""Runs in the readers' environment: msit reads two graphs and compares them call by call.

    python read_with_msit.py golden/…/graph_1 target/…/graph_1

Prints JSON: for each step, operator and output, what msit says of it.
"""

from __future__ import annotations

import json
import sys

from msit_llm.compare.torchair_acc_cmp import compare_single_data, init_fx_dump_data_from_path


def main() -> None:
    golden, target = (
        init_fx_dump_data_from_path(path, rank_info_existed=True)[0] for path in sys.argv[1:]
    )
    told = [
        {
            "step": step,
            "operator": operator,
            "files": files,
            "failures": [
                compare_single_data(*pair, step)["cmp_fail_reason"]
                for pair in zip(files["output"], target[step][operator]["output"], strict=True)
            ],
        }
        for step, operators in golden.items()
        for operator, files in operators.items()
    ]
    print(json.dumps(told))


if __name__ == "__main__":
    main()
