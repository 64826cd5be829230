"""This host: cores and memory of the process, the cache folder, and the CPU if it announces AMX."""

from __future__ import annotations

import os
import resource
import sys
from contextlib import suppress
from pathlib import Path

__all__ = ["cache_folder", "cpu_with_amx", "peak_memory", "shared_cores", "usable_cores"]


def usable_cores() -> int:
    """Return the cores that this process may run on, which may be fewer than the machine has (containers, taskset)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def shared_cores(processes: int) -> int:
    """Return the cores for each of the processes of a job on this host, at least one.

    A queue may give a job fewer cores than the host has, without binding its processes to them.
    """
    cores, names = usable_cores(), os.environ
    for_a_task = _number(names.get("SLURM_CPUS_PER_TASK"))
    if for_a_task and (_number(names.get("SLURM_NTASKS")) or 1) > 1:  # each process is a task of the queue
        return max(1, min(cores, for_a_task))
    given = for_a_task or _number(names.get("SLURM_CPUS_ON_NODE")) or cores
    return max(1, min(cores, given) // max(1, processes))


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() and int(text) > 0 else None


def peak_memory() -> int:
    """Return the bytes of resident memory that this program has used at most.

    The count of `getrusage` begins with the memory of the process that has started this one.
    """
    with suppress(OSError), open("/proc/self/status") as lines:
        for line in lines:
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def cache_folder() -> Path:
    """Return the folder of cached measurements: PIPEPART_CACHE, or the user's cache folder."""
    if "PIPEPART_CACHE" in os.environ:
        return Path(os.environ["PIPEPART_CACHE"])
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "pipepart"


def cpu_with_amx() -> tuple[str, str] | None:
    """Return the model and the flags of the CPU if it announces AMX; None if it does not, or if it is not known."""
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
