"""Runs at the start of every program that a test starts, before anything is imported: it makes their imports shorter.

Lightning imports torchmetrics, which imports transformers wherever it is installed, for one metric of texts: a second of
processor time in each of some hundred programs. They see a torchmetrics without it. A program that imports transformers
itself gets it. Large thresholds keep the garbage collector from searching half-imported libraries again and again.
"""

import gc
import sys
from importlib import metadata

_version = metadata.version


def _version_for_torchmetrics(name: str) -> str:
    if name == "transformers":
        frame = sys._getframe(1)
        while frame is not None:
            if frame.f_globals.get("__name__", "").startswith("torchmetrics."):
                raise metadata.PackageNotFoundError(name)
            frame = frame.f_back
    return _version(name)


metadata.version = _version_for_torchmetrics
gc.set_threshold(50_000, 20, 20)
