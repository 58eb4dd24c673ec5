"""The layer benchmark with all its families, a row each: python -m bench.layers --out ROWS.jsonl [--family rival]

``codec``: the encodings, as ``gistkit bench`` has them; ``operator``: fused operators; ``rival``: what PyTorch,
cuSPARSE and torch.compile have for the same purpose. Exit status 1 where a case failed.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from pathlib import Path

import torch

from bench.layer_operators import operator_cases
from bench.layer_rivals import rival_cases
from bench.rows import environment, utc
from gistkit.benchmark import DTYPES, codec_cases, jobs, rows

FAMILIES = {"codec": codec_cases, "operator": operator_cases, "rival": rival_cases}


def main(argv: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="bench.layers", description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--family", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["fp32", "bf16"])
    parser.add_argument("--sizes-mib", nargs="+", type=float, default=[512.0])
    parser.add_argument("--max-s", type=float, default=math.inf)
    args = parser.parse_args(argv)
    cases = [case for name in args.family for case in FAMILIES[name]()]
    on_gpu = torch.device(args.device).type == "cuda"
    deadline = time.monotonic() + args.max_s
    todo, failed = jobs(cases, [DTYPES[name] for name in args.dtypes], args.sizes_mib, on_gpu), 0
    with open(args.out, "w", encoding="utf-8") as file:
        for row in rows(todo, args.device):
            about = {"kind": "layer", "time_utc": utc(), **environment(args.device)}
            file.write(json.dumps(about | row) + "\n")
            file.flush()
            failed += "error" in row
            figures = row.get("error") or f"{row['gbps']:,.0f} GB/s, {row['percent_of_copy']:.0f} % of a copy"
            print(row["case"], row["direction"], row["dtype"], f"{row['size_mib']:g} MiB:", figures, flush=True)
            if time.monotonic() > deadline:
                break
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
