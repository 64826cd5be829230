"""Losses of the whole batch: ``python -m tools.bench.losses [--stages 2 3] [--replicas 1 2] [--schedules ...] [--trainer]``.

All forms of loss at once (their weighted sum is trained on, each is also returned), on uneven batches, with and without
accumulation, over all schedules: loss, values and all gradients against one process on the whole batch, in float64.
With ``--trainer``, weights and logs of Lightning's Trainer after three steps.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from itertools import product

import torch

from tools.bench.losses.cases import NAMES, run, worst
from tools.bench.losses.trainer import fit, worst_of_trainer
from tools.bench.runtime.processes import on_ranks

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb_h1", "zb_h2", "zb_v")


def main() -> int:
    """Print a line for each case; exit 1 if one is not equal to 1e-6."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stages", type=int, nargs="*", default=[2, 3])
    parser.add_argument("--replicas", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--schedules", nargs="*", default=list(SCHEDULES))
    parser.add_argument("--trainer", action="store_true", help="under Lightning's Trainer instead of Pipeline")
    options = parser.parse_args()
    torch.set_default_dtype(torch.float64)
    warnings.filterwarnings("ignore")
    bad = 0
    print(f"{len(NAMES)} forms of loss")
    for stages, replicas in product(options.stages, options.replicas):
        cases = list(product(options.schedules, (1, 2)))
        started = time.perf_counter()
        answers = on_ranks(stages * replicas, fit if options.trainer else run, stages, cases, timeout=1200.0)
        for index, (schedule, accumulate) in enumerate(cases):
            own = [answer[index] for answer in answers]
            if options.trainer:
                error, where = worst_of_trainer(own, replicas, accumulate)
            else:
                error, where = worst(own, stages, replicas, accumulate)
            bad += not error <= 1e-6
            word = "equal" if error <= 1e-6 else "NOT EQUAL"
            print(
                f"stages {stages} replicas {replicas} {schedule:12} accumulate {accumulate}: {word}, largest difference "
                f"{error:.1e} ({where})",
                flush=True,
            )
        print(f"  {time.perf_counter() - started:.0f} s")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
