"""``python -m tools.bench.lightning NAME [options]``: ``modules`` (of other libraries), ``own`` (Lightning's own tests)
or ``language_models`` (of transformers).

Each part is a module of this package with ``main(arguments) -> exit code``; ``NAME --help`` lists its options.
"""

from __future__ import annotations

import importlib
import sys

PARTS = {
    "language_models": "small models of many types of transformers, loaded and written by the recipe finetune_hf",
    "modules": "LightningModules of other libraries and Lightning's example programs, one device against 2 stages",
    "own": "Lightning's own tests, with the pipeline strategy in place of the default one",
}


def main(arguments: list[str]) -> int:
    """Run the part that the first argument names with the other arguments; without one, say which there are."""
    if not arguments or arguments[0] not in PARTS:
        print("\n".join(["there are:", *(f"  {name:15} {what}" for name, what in PARTS.items())]), file=sys.stderr)
        return 2
    part = importlib.import_module(f"tools.bench.lightning.{arguments[0]}")
    result: int = part.main(arguments[1:])
    return result


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
