"""Answers about this CPU on disk, so that each CPU is tried once."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from pipepart.errors import PipepartError
from pipepart.files import keep_json, load_json

__all__ = ["VARIABLES", "Products", "announced", "cache_folder", "keep", "kept"]

VARIABLES = ("ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS")
"""What limits the instructions of the libraries that compute products: oneDNN, torch's own kernels, MKL."""


@dataclass(frozen=True)
class Products:
    """What was found by trying."""

    works: tuple[str, ...]
    """The dtypes whose products work under `limit`."""
    limit: Mapping[str, str] = field(default_factory=dict)
    """Variables of the environment that are needed for that."""


def cache_folder() -> Path:
    """Where answers and measurements are kept: PIPEPART_CACHE, or the user's cache folder."""
    if "PIPEPART_CACHE" in os.environ:
        return Path(os.environ["PIPEPART_CACHE"])
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "pipepart"


def announced() -> tuple[str, str] | None:
    """Model and flags of a CPU that announces AMX; None on every other machine."""
    found: dict[str, str] = {}
    try:
        with open(os.environ.get("PIPEPART_CPUINFO", "/proc/cpuinfo"), errors="replace") as lines:
            for line in lines:  # the first core is enough; hundreds of cores make a long file
                name, _, value = line.partition(":")
                found.setdefault(name.strip(), value.strip())
                if name.strip() == "flags":
                    break
    except OSError:
        return None
    flags = found.get("flags", "")
    if not any(flag.startswith("amx_") for flag in flags.split()):
        return None
    return " ".join(found.get(key, "") for key in ("vendor_id", "cpu family", "model", "model name", "stepping")), flags


def kept(cpu: tuple[str, str]) -> Products | None:
    """The answer for this CPU; a file that cannot be read is no answer."""
    try:
        found = load_json(_file(cpu))
        return Products(found.at("works").read(tuple[str, ...]), found.at("limit").read(dict[str, str]))
    except PipepartError:
        return None


def keep(cpu: tuple[str, str], answer: Products) -> None:
    """Keep the answer; a folder that cannot be written costs the time to try again."""
    keep_json(_file(cpu), {**asdict(answer), "cpu": cpu[0]})


def _file(cpu: tuple[str, str]) -> Path:
    """A name for the CPU, the version of torch, and what the environment says already."""
    try:
        torch = version("torch")
    except PackageNotFoundError:
        torch = ""
    said = [os.environ.get(name, "") for name in (*VARIABLES, "PIPEPART_CPU_PROBE")]
    name = hashlib.sha256(json.dumps([cpu, torch, said]).encode()).hexdigest()[:16]
    return cache_folder() / f"products-{name}.json"
