"""`python -m tools.bench.heads [--vocabulary V] [--context T] [--schedule S]`: whole heads and heads in slices, side by side.

A GPT with a large vocabulary runs on two stages, once with a whole head and once in slices. Both pipelines are in the same
processes and take turns, and the table has the median of the steps, the largest memory that a step allocates on each stage
(all tensors of the allocator of torch, gradients included), and what the plan has predicted for both.
"""

from __future__ import annotations

import argparse

from tools.bench.heads.measure import measure
from tools.bench.runtime.processes import on_ranks

STAGES = 2


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vocabulary", type=int, default=32_000)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--tied", action="store_true")
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--slice", type=int, default=0, help="tokens of a slice; 0: as the plan chooses")
    parser.add_argument("--steps", type=int, default=8)
    answers = on_ranks(STAGES, measure, vars(parser.parse_args()))
    print(f"{'head':8} {'loss':>10} {'step':>10} {'by costs':>10}   peak of each stage in a step (predicted)")
    for head in ("whole", "sliced"):
        first = answers[0][head]
        peaks = "   ".join(f"{a[head]['peak'] / 1e6:8.1f} MB ({a[head]['told'] / 1e6:.1f})" for a in answers)
        name = head if head == "whole" else f"{first['slice']}"
        print(
            f"{name:8} {first['loss']:10.6f} {first['seconds'] * 1e3:7.1f} ms {first['predicted'] * 1e3:7.1f} ms   {peaks}"
        )
    whole, sliced = (answers[0][head]["seconds"] for head in ("whole", "sliced"))
    print(f"the step in slices takes {sliced / whole:.2f} x that of the whole head")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
