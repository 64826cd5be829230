"""Try 16-bit products in a child process, limit this process and its children to what works, refuse the rest."""

from __future__ import annotations

import os
import runpy
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from pipepart.errors import ConfigError
from pipepart.machine.answers import VARIABLES, Products, announced, keep, kept

__all__ = ["Products", "check_products", "limit_instructions", "products", "usable"]

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
"""Tells the children of this process which dtypes work in the environment that they inherit."""


@cache
def limit_instructions() -> Products | None:
    """Limit this process and its children, if that is needed here; returns what was found. None: nothing to try.

    The cost is a few lines of /proc/cpuinfo where AMX is not announced, and one small file where the answer is known.
    """
    cpu = announced()
    if cpu is None:
        return None
    inherited = os.environ.get(_DONE)
    if inherited is not None:  # a parent has tried, and has set what is needed
        limit = {name: os.environ[name] for name in VARIABLES if name in os.environ}
        return Products(tuple(name for name in inherited.split(",") if name in _DTYPES), limit)
    answer = kept(cpu)
    if answer is None:
        answer, certain = _tried()
        if certain:
            keep(cpu, answer)
    _late.extend(["torch"] if answer.limit and "torch" in sys.modules else [])
    os.environ.update(answer.limit)
    os.environ[_DONE] = ",".join(answer.works)
    return answer


_late: list[str] = []
"""Has an entry if torch was imported, and has perhaps chosen its instructions, before the limit was set."""


def products() -> Products | None:
    """What was found for this machine; None where there was nothing to try."""
    return limit_instructions()


def usable(dtype: str) -> bool:
    """Whether products of a dtype (as torch names it) can be computed in this very process."""
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
            f"{dtype} products end this process with an illegal instruction: the CPU announces AMX, and this machine does "
            "not allow it."
        )
        if dtype not in found.works:
            raise ConfigError(f"{what} No limit of the instruction set helps here. Use float32.")
        limit = " ".join(f"{name}={value}" for name, value in found.limit.items())
        raise ConfigError(
            f"{what} torch has chosen its instructions before pipepart was imported, so they cannot be limited any more. "
            f"Set {limit} in the environment, or import pipepart before the first product is computed."
        )


def _tried() -> tuple[Products, bool]:
    """The weakest limit under which all products work; else the strongest one, and the dtypes that work under it.

    A child that did not come to an end by itself or by a signal says nothing: then all is taken to work, for this time.
    """
    answer = Products(())
    for limit in _LIMITS:
        if any(name in os.environ for name in limit):
            continue  # the user has said something else
        works = _child(limit)
        if works is None:
            return Products(_DTYPES), False
        answer = Products(works, limit)
        if works == _DTYPES:
            break
    return answer, True


def _child(limit: dict[str, str]) -> tuple[str, ...] | None:
    """The dtypes that a new process under a limit survives; None if it failed for a reason of its own."""
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
    return _said(done.stdout) if done.returncode <= 0 else None


@cache
def _works_here() -> tuple[str, ...]:
    """Try in a fork of this process, which has chosen the same instructions."""
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
    return _said(said)


def _said(text: bytes) -> tuple[str, ...]:
    lines = text.decode(errors="replace").splitlines()
    return tuple(name for name in _DTYPES if f"works {name}" in lines)


def _program() -> Path:
    return Path(os.environ.get("PIPEPART_CPU_PROBE") or Path(__file__).with_name("products.py"))
