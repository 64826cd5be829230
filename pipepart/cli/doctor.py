"""`pipepart doctor`: checks of the installation and the machine, with a remedy for each problem."""

from __future__ import annotations

import importlib
import importlib.metadata
import multiprocessing
import os
import re
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from pipepart.cli.console import bold, dim
from pipepart.machine import usable_cores

__all__ = ["doctor"]

_NEEDED = {
    "torch": "2.6",
    "lightning": "2.5",
    "hydra-core": "1.3.2",
    "networkx": "3.2",
    "numpy": "1.26",
    "wandb": "0.18",
}
_OPTIONAL = {
    "transformers": 'recipe=llama_hf and finetune_hf need it: pip install "pipepart[finetune]"',
    "peft": 'recipe=finetune_hf with LoRA needs it: pip install "pipepart[finetune]"',
    "hydra-submitit-launcher": 'launcher=slurm needs it: pip install "pipepart[slurm]"',
    "ray": 'launcher=ray and pipepart.ray need it: pip install "pipepart[ray]"',
    "pillow": "reading picture files needs it: pip install pillow",
}


@dataclass(frozen=True)
class Finding:
    """The result of one check. `state` is ok, note (works with a restriction) or fail."""

    subject: str
    state: str
    text: str
    todo: str = ""


def doctor(try_processes: bool = True) -> int:
    """Print all findings; returns 1 if something is broken."""
    signs = {"ok": bold("ok  "), "note": "note", "fail": "FAIL"}
    failed = 0
    for finding in _findings(try_processes):
        print(f"{signs[finding.state]}  {finding.subject:<14}  {finding.text}", flush=True)
        if finding.todo:
            print(f"      {'':<14}  {dim('->')} {finding.todo}", flush=True)
        failed += finding.state == "fail"
    print(f"\n{failed} problem(s) found" if failed else "\nno problems found: pipepart train recipe=mlp")
    return 1 if failed else 0


def _findings(try_processes: bool = True) -> Iterator[Finding]:
    """All checks, quick ones first."""
    yield Finding("python", "ok", ".".join(map(str, sys.version_info[:3])))
    yield from _packages()
    yield _configuration()
    yield from _devices()
    yield _products()
    yield from _backends()
    yield _ports()
    yield _host()
    yield _shared_memory()
    yield _folder("output folder", Path.cwd(), "change to a writable folder, or give output=FOLDER")
    yield _cache()
    if try_processes:
        yield _two_processes()


def _packages() -> Iterator[Finding]:
    for name in (*_NEEDED, *_OPTIONAL):
        least = _NEEDED.get(name, "0")
        try:
            found = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            if name in _OPTIONAL:
                yield Finding(name, "note", "is not installed (optional)", _OPTIONAL[name])
            else:
                yield Finding(name, "fail", "is not installed", f"pip install '{name}>={least}'")
            continue
        if _numbers(found) < _numbers(least):
            yield Finding(name, "fail", f"{found} is too old", f"pip install '{name}>={least}'")
        else:
            yield Finding(name, "ok", found)


def _numbers(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", version)[:3]]


def _configuration() -> Finding:
    from pipepart.cli.config import checked, compose_config
    from pipepart.cli.groups import group_options
    from pipepart.errors import PipepartError

    names, broken = group_options("recipe"), []
    for name in names:
        try:
            checked(compose_config([f"recipe={name}"]))
        except PipepartError as error:
            broken.append(f"{name}: {error}")
    if len(broken) == len(names):
        return Finding("recipes", "fail", "none can be used", broken[0] if broken else "install pipepart again")
    if broken:
        return Finding("recipes", "note", f"{len(names) - len(broken)} of {len(names)} can be used", "; ".join(broken))
    return Finding("recipes", "ok", f"{len(names)}: {', '.join(names)}")


def _devices() -> Iterator[Finding]:
    import torch

    from pipepart.devices import accelerator, build_of_torch, device_count, device_name

    cores = usable_cores()
    todo = "stages share one core, so a pipeline is not faster than one process" if cores < 2 else ""
    yield Finding("cores", "note" if cores < 2 else "ok", f"{cores} for this process", todo)
    if hasattr(os, "getloadavg") and os.getloadavg()[0] > 1.5 * cores:
        yield Finding(
            "load",
            "note",
            f"{os.getloadavg()[0]:.1f}",
            "other programs use the cores; measured costs will be inaccurate",
        )
    kind, count = accelerator(), device_count()
    if kind is not None:
        names = {device_name(torch.device(kind, index)) for index in range(count)}
        yield Finding("gpus", "ok", f"{count}: {', '.join(sorted(names))}")
        return
    built = build_of_torch()
    if built is not None and shutil.which(built[1]):
        yield Finding(
            "gpus", "fail", f"torch is built for {built[0]} but sees none", f"check the driver with {built[1]}"
        )
    else:
        yield Finding("gpus", "ok", "none; stages run on cores")


def _products() -> Finding:
    """The check of bfloat16 and float16 products, and the limit that they need."""
    from pipepart.machine import products

    found = products()
    if found is None:
        return Finding("16-bit products", "ok", "need no limit on this CPU")
    limit = " ".join(f"{name}={value}" for name, value in found.limit.items())
    failing = [name for name in ("bfloat16", "float16") if name not in found.works]
    if failing:
        todo = "use float32 (trainer.precision=32-true)"
        return Finding("16-bit products", "note", f"{' and '.join(failing)} end the process on this CPU", todo)
    if not limit:
        return Finding("16-bit products", "ok", "work with all instructions of this CPU (tried)")
    todo = f"pipepart sets this limit; set {limit} in scripts that compute before they import pipepart"
    text = f"work with {limit}: the CPU announces AMX, and this machine does not allow it"
    return Finding("16-bit products", "note", text, todo)


def _backends() -> Iterator[Finding]:
    import torch.distributed as dist

    from pipepart.devices import accelerator, backend_problem

    if not dist.is_available() or not dist.is_gloo_available():
        yield Finding("gloo", "fail", "is not in this build of torch", "install an official build of torch")
    else:
        yield Finding("gloo", "ok", "available")
    if (kind := accelerator()) is not None:
        problem = backend_problem(kind)
        yield Finding(f"transfers between {kind} devices", "fail" if problem else "ok", problem or "available")


def _ports() -> Finding:
    try:
        with socket.socket() as server, socket.socket() as client:
            server.bind(("127.0.0.1", 0))
            server.listen()
            client.settimeout(5)
            client.connect(server.getsockname())
    except OSError as error:
        return Finding(
            "ports",
            "fail",
            f"processes cannot connect on 127.0.0.1: {error}",
            "allow connections on the loopback device",
        )
    return Finding("ports", "ok", "processes can connect on 127.0.0.1")


def _host() -> Finding:
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError:
        return Finding(
            "host name",
            "note",
            "does not resolve",
            f"for several machines: add {name} to /etc/hosts, or set GLOO_SOCKET_IFNAME",
        )
    if address.startswith("127."):
        todo = "for several machines: let it resolve to an address that they can reach, or set GLOO_SOCKET_IFNAME"
        return Finding("host name", "note", "resolves to this machine only", todo)
    return Finding("host name", "ok", "resolves")


def _shared_memory() -> Finding:
    place = Path("/dev/shm")
    if not place.is_dir():
        return Finding("shared memory", "ok", "managed by the system (no /dev/shm)")
    free = shutil.disk_usage(place).free
    if free < 64e6:
        todo = "start the container with more (docker run --shm-size=1g)"
        return Finding("shared memory", "fail" if free < 8e6 else "note", f"only {free / 1e6:.0f} MB free", todo)
    return Finding("shared memory", "ok", f"{free / 1e9:.1f} GB free")


def _folder(subject: str, folder: Path, todo: str) -> Finding:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        return Finding(subject, "fail", f"cannot be written: {error.strerror}", todo)
    free = shutil.disk_usage(folder).free
    if free < 1e9:
        return Finding(subject, "note", f"can be written, {free / 1e9:.2f} GB free", "free some space for checkpoints")
    return Finding(subject, "ok", f"can be written, {free / 1e9:.0f} GB free")


def _cache() -> Finding:
    from pipepart.machine import cache_folder

    found = _folder("cache", cache_folder(), "set PIPEPART_CACHE to a writable folder")
    return Finding("cache", "note", found.text, found.todo) if found.state == "fail" else found


def _exchange(rank: int, store: str, answers: multiprocessing.Queue) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    value = torch.full((1000,), float(rank + 1))
    dist.all_reduce(value)
    answers.put(float(value[0]))
    dist.barrier()
    dist.destroy_process_group()


def _two_processes(seconds: float = 90) -> Finding:
    """Start two processes that add two tensors over gloo, as stages do."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="pipepart-doctor-") as folder:
        answers = context.Queue()
        ranks = [
            context.Process(target=_exchange, args=(rank, os.path.join(folder, "store"), answers), daemon=True)
            for rank in range(2)
        ]
        try:
            for rank in ranks:
                rank.start()
            for rank in ranks:
                rank.join(seconds)
            codes = [rank.exitcode for rank in ranks]
        finally:
            for rank in ranks:
                if rank.is_alive():
                    rank.kill()
        if codes != [0, 0] or {answers.get(timeout=5) for _ in ranks} != {3.0}:
            todo = "allow connections between processes of this machine; GLOO_SOCKET_IFNAME=lo may help"
            return Finding("two processes", "fail", f"could not exchange a tensor (exit codes {codes})", todo)
    return Finding("two processes", "ok", "exchanged a tensor over gloo")
