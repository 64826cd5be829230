"""`python -m tools.bench.manual [STAGESxREPLICAS ...]`: manual optimization and BYOL at several shapes, against one device.

The modules are those of `tests/lightning/manual.py` (GANs, actor-critic, an adversary, accumulation by hand) and a BYOL whose
hook moves its target network (`byol.py`). Each trains ten
steps in float64 at {1, 2, 3} stages x {1, 2} replicas, each replica on its share of the batch, and the table has the largest
difference of a parameter or buffer from one device on the whole batch.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from tools.bench.manual.byol import fit

TESTS = Path(__file__).parents[3] / "tests"
SHAPES = [(stages, replicas) for replicas in (1, 2) for stages in (1, 2, 3)]
NAMES = ("Gan", "ToggledGan", "ActorCritic", "Adversary", "Accumulated")


def _difference(got: dict[str, Any], wanted: dict[str, Any]) -> float:
    return max(float((got["state"][key] - value).abs().max()) for key, value in wanted["state"].items())


def main() -> int:
    sys.path[:0] = [str(TESTS), str(TESTS / "lightning")]
    cases, ranks = import_module("test_manual"), import_module("support.ranks")
    given = [tuple(map(int, word.split("x"))) for word in sys.argv[1:]]
    worst = 0.0
    alone = fit(0, 1)
    print(f"{'stages x replicas':18}" + "".join(f"{name:>14}" for name in (*NAMES, "Byol")), flush=True)
    for stages, replicas in given or SHAPES:
        answers = ranks.run_ranks(stages * replicas, cases._fit, list(NAMES), stages, replicas)
        row = [_difference(answers[0][name], cases._one_device(name)) for name in NAMES]
        states = ranks.run_ranks(stages * replicas, fit, stages, replicas)
        row.append(max(_difference({"state": state}, {"state": alone}) for state in states))
        worst = max(worst, *row)
        print(f"{stages} x {replicas:<14}" + "".join(f"{number:14.1e}" for number in row), flush=True)
    ranks.stop_pools()
    print(f"largest difference {worst:.1e}")
    return 0 if worst < 1e-11 else 1


if __name__ == "__main__":
    sys.exit(main())
