"""The batch check on the zoo: ``python -m tools.bench.samples [plain|language|images] [names...]``.

Prints a line for each model that is flagged or could not be checked, and what the check took next to the recording.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import sys
import time
import warnings

import torch

from pipepart.build.batch_verdict import look_at_samples
from pipepart.recording import record
from tools.bench.zoo import images, language, plain

FAMILIES = {"plain": plain.ARCHITECTURES, "language": language.ARCHITECTURES, "images": images.ARCHITECTURES}
SIZE = 4
"""Samples of a micro-batch; there are two."""


def main() -> int:
    """Check the asked models; exit 1 if one could not be checked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("family", nargs="?", default="all", choices=["all", *FAMILIES])
    parser.add_argument("names", nargs="*")
    parser.add_argument("--part", default="1/1", help="I/N: only every N-th model, from the I-th on")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    wanted = [
        (family, name)
        for family, builders in FAMILIES.items()
        for name in builders
        if options.family in ("all", family) and (not options.names or name in options.names)
    ]
    part, parts = (int(number) for number in options.part.split("/"))
    same, tails, refused, unchecked, costs = 0, [], [], [], []
    for family, name in wanted[part - 1 :: parts]:
        torch.manual_seed(0)
        model, example = FAMILIES[family][name]()
        model.train()
        started = time.perf_counter()
        try:
            recording = record(model, example(SIZE))
        except Exception as error:
            print(f"{family}/{name:30} not recorded: {str(error)[:100]}", flush=True)
            continue
        recorded = time.perf_counter() - started
        started = time.perf_counter()
        samples = look_at_samples(recording, example(2 * SIZE), {}, SIZE)
        took = time.perf_counter() - started
        costs.append(took / recorded)
        if samples.text.startswith("micro-batches were not compared"):
            unchecked.append(name)
        elif samples.text and samples.cut is None:
            refused.append(name)
        elif samples.text:
            tails.append(name)
        else:
            same += 1
        if samples.text:
            print(f"{family}/{name:30} {recorded:5.2f} s, check {took:5.2f} s  {samples.text}", flush=True)
    print(f"\n{same} equal without a word, {len(tails)} with a tail: {tails}")
    print(f"{len(refused)} different: {refused}, {len(unchecked)} not checked: {unchecked}")
    if costs:
        print(
            f"the check took {statistics.median(costs):.2f} (median) of what recording took, at most {max(costs):.2f}"
        )
    return 1 if unchecked else 0


if __name__ == "__main__":
    sys.exit(main())
