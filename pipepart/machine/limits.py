"""Limits of the instruction set: 16-bit matrix products are tried in a child process, and the answer is kept on disk.

The process and its children are limited to the instructions that work. Dtypes without a working limit are refused.
"""

from __future__ import annotations

import hashlib
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from pipepart.errors import ConfigError, PipepartError
from pipepart.files import keep_json, load_json
from pipepart.machine.host import cache_folder, cpu_with_amx

__all__ = ["Products", "check_products", "limit_instructions", "products", "usable"]

_VARIABLES = ("ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS")
"""Environment variables that limit oneDNN, torch's own kernels and MKL."""
_LIMITS: tuple[dict[str, str], ...] = (
    {},
    {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"},
    {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE", "MKL_ENABLE_INSTRUCTIONS": "AVX512"},
    {"ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"},
)
"""From no limit to the strongest one."""
_DTYPES = ("bfloat16", "float16")
_PATIENCE = 120.0  # seconds for a child that imports torch on a loaded machine
_DONE = "PIPEPART_PRODUCTS"
"""Environment variable that tells child processes which dtypes work in the environment that they inherit."""


@dataclass(frozen=True)
class Products:
    """The 16-bit dtypes whose matrix products work on this machine, and the limit of the instruction set that they need."""

    works: tuple[str, ...]
    """Dtypes whose products work under `limit`."""
    limit: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of the limit."""


@cache
def limit_instructions() -> Products | None:
    """Limit the instruction set of this process and its children if needed. Returns None if the CPU announces no AMX.

    The call reads a few lines of /proc/cpuinfo and, if the CPU announces AMX, one small file with the kept answer. Only
    if there is no such file, child processes try the products.
    """
    cpu = cpu_with_amx()
    if cpu is None:
        return None
    inherited = os.environ.get(_DONE)
    if inherited is not None:  # a parent has tried, and has set the limit
        limit = {name: os.environ[name] for name in _VARIABLES if name in os.environ}
        return Products(tuple(name for name in inherited.split(",") if name in _DTYPES), limit)
    answer = _kept(cpu)
    if answer is None:
        answer, certain = _tried()
        if certain:
            _keep(cpu, answer)
    _late.extend(["torch"] if answer.limit and "torch" in sys.modules else [])
    os.environ.update(answer.limit)
    os.environ[_DONE] = ",".join(answer.works)
    return answer


_late: list[str] = []
"""Has an entry if torch was imported, and may have chosen its instructions, before the limit was set."""


def products() -> Products | None:
    """Return the result of `limit_instructions`; None if the CPU announces no AMX."""
    return limit_instructions()


def usable(dtype: str) -> bool:
    """Return whether products of a dtype, as named by torch, can be computed in this process."""
    found = limit_instructions()
    if found is None or dtype not in _DTYPES:
        return True
    return dtype in (_works_here() if _late else found.works)


def check_products(dtypes: Iterable[str]) -> None:
    """Refuse dtypes whose products would end this process."""
    found = limit_instructions()
    if found is None:
        return
    for dtype in sorted(set(dtypes)):
        if usable(dtype):
            continue
        what = (
            f"{dtype} products would end this process with an illegal instruction: the CPU announces AMX, but this machine "
            "does not allow its use."
        )
        if dtype not in found.works:
            raise ConfigError(f"{what} No limit of the instruction set helps here. Use float32.")
        limit = " ".join(f"{name}={value}" for name, value in found.limit.items())
        raise ConfigError(
            f"{what} torch chose its instructions before pipepart was imported, so they cannot be limited any more. "
            f"Set {limit} in the environment, or import pipepart before the first product is computed."
        )


def _tried() -> tuple[Products, bool]:
    """Return the weakest limit under which all products work, or the strongest limit with the dtypes that work under it.

    Also returns whether the answer is certain. If a child fails for another reason than a signal, all dtypes are assumed
    to work, and the answer is not kept.
    """
    answer = Products(())
    for limit in _LIMITS:
        if any(name in os.environ for name in limit):
            continue  # the user has set it
        works = _child(limit)
        if works is None:
            return Products(_DTYPES), False
        answer = Products(works, limit)
        if works == _DTYPES:
            break
    return answer, True


def _child(limit: dict[str, str]) -> tuple[str, ...] | None:
    """Return the dtypes whose products work in a new process under a limit; None if the process failed for another reason."""
    try:
        done = subprocess.run(
            [sys.executable, str(_program())],
            env={**os.environ, **limit},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=_PATIENCE,
            check=False,
        )
    except (subprocess.TimeoutExpired, OSError):
        return None
    return _working(done.stdout) if done.returncode <= 0 else None


@cache
def _works_here() -> tuple[str, ...]:
    """Return the dtypes whose products work in a fork of this process, which has chosen the same instructions."""
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.dup2(writes, 1)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            runpy.run_path(str(_program()), run_name="__main__")
        finally:
            os._exit(0)
    os.close(writes)
    said, deadline = b"", time.monotonic() + _PATIENCE
    try:
        while select.select([reads], [], [], max(0.0, deadline - time.monotonic()))[0]:
            part = os.read(reads, 4096)
            if not part:
                break
            said += part
    finally:
        os.close(reads)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return _working(said)


def _working(text: bytes) -> tuple[str, ...]:
    lines = text.decode(errors="replace").splitlines()
    return tuple(name for name in _DTYPES if f"works {name}" in lines)


def _program() -> Path:
    return Path(os.environ.get("PIPEPART_CPU_PROBE") or Path(__file__).with_name("probe.py"))


def _kept(cpu: tuple[str, str]) -> Products | None:
    """Return the answer for this CPU from the disk; None if there is none that can be read."""
    try:
        found = load_json(_file(cpu))
        answer = Products(found.at("works").read(tuple[str, ...]), found.at("limit").read(dict[str, str]))
    except PipepartError:
        return None
    return answer if answer.limit in _LIMITS and set(answer.works) <= set(_DTYPES) else None


def _keep(cpu: tuple[str, str], answer: Products) -> None:
    """Write the answer in one piece. If the folder cannot be written, the next process tries again."""
    keep_json(_file(cpu), {**asdict(answer), "cpu": cpu[0]})


def _file(cpu: tuple[str, str]) -> Path:
    """Return the file of the answer; its name depends on the CPU, the version of torch and the limits of the user."""
    try:
        torch = version("torch")
    except PackageNotFoundError:
        torch = ""
    said = [os.environ.get(name, "") for name in (*_VARIABLES, "PIPEPART_CPU_PROBE")]
    name = hashlib.sha256(json.dumps([cpu, torch, said]).encode()).hexdigest()[:16]
    return cache_folder() / f"products-{name}.json"
