"""The cases of the suite by library. Declaring them imports no library: their programs do."""

from __future__ import annotations

import importlib

__all__ = ["EXAMPLES", "FAMILIES", "names_of"]

_HERE = "tools.bench.lightning"
FAMILIES = {
    "pytorch_forecasting": f"{_HERE}.modules_pytorch_forecasting",
    "neuralforecast": f"{_HERE}.modules_neuralforecast",
    "gluonts": f"{_HERE}.modules_gluonts",
    "darts": f"{_HERE}.modules_darts",
    "chemprop": f"{_HERE}.modules_chemprop",
    "scvi": f"{_HERE}.modules_scvi",
    "lightly": f"{_HERE}.modules_lightly",
    "torch_geometric": f"{_HERE}.modules_torch_geometric",
    "pytorch_tabular": f"{_HERE}.modules_pytorch_tabular",
    "examples": f"{_HERE}.modules_examples",
}
"""Library -> the module with its `CASES`."""
EXAMPLES = "LIGHTNING_EXAMPLES"
"""The environment variable by which the processes of a case know the folder of Lightning's examples."""


def names_of(examples: str | None) -> list[str]:
    """The names of all cases; those of Lightning's examples only if their folder is given."""
    families = [family for library, family in FAMILIES.items() if library != "examples" or examples]
    return [name for family in families for name in importlib.import_module(family).CASES]
