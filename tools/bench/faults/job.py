"""One rank of a small pipeline that fails at a chosen place in a chosen way."""

from __future__ import annotations

import os
import signal
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

__all__ = ["CAUSE", "Fault", "rank_main"]

CAUSE = "the cause of it all"
_STEP = 2  # in which the fault comes
_SYNC: dict[str, Any] = {"local": {"mode": "local", "every": 1}}
"""Settings of modes with which there is an exchange in each step."""
_armed: list[Fault] = []


@dataclass(frozen=True)
class Fault:
    where: str
    """``forward``, ``backward``, ``communication``; between replicas: ``gradients`` or ``parameters``"""
    how: str
    """``raise``, ``kill`` or ``stop``"""
    rank: int
    ranks: int
    transport: str
    limit: float
    """Seconds that a rank may wait for another."""
    sync: str = "mean"
    """How the replicas are kept in step; there are two if the fault is between them."""

    @property
    def stages(self) -> int:
        return self.ranks // 2 if self.where in ("gradients", "parameters") else self.ranks

    def strike(self, note: str) -> None:
        with open(note, "w") as file:
            file.write(str(time.time()))
        if self.how == "raise":
            raise ValueError(CAUSE)
        os.kill(os.getpid(), signal.SIGKILL if self.how == "kill" else signal.SIGSTOP)


def rank_main(rank: int, folder: str, fault: Fault) -> None:
    """Runs until the fault; what this rank says at its end goes to a file."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(fault.ranks), LOCAL_RANK=str(rank))
    os.environ.update(LOCAL_WORLD_SIZE=str(fault.ranks))
    try:
        store = dist.FileStore(os.path.join(folder, "store"), fault.ranks)
        limit = timedelta(seconds=60)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=fault.ranks, timeout=limit)
        _train(rank, folder, fault)
        said = "finished"
    except BaseException:
        said = traceback.format_exc()
    with open(os.path.join(folder, f"said-{rank}"), "w") as file:
        file.write(said)
    os._exit(1)  # as the launchers end a rank: no goodbye to the others


def _train(rank: int, folder: str, fault: Fault) -> None:
    import torch
    from torch import nn

    from pipepart import Pipeline

    note = os.path.join(folder, "struck")

    class Trip(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            if _armed and fault.where == "forward":
                fault.strike(note)
            return x * 1.0

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
            if _armed and fault.where == "backward":
                fault.strike(note)
            return gradient

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(32, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Trip.apply(self.linear(x))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*(Layer() for _ in range(fault.ranks)))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers(x).square().mean()

    cuts = [f"layers.{index}" for index in range(1, fault.stages)]
    pipe = Pipeline(Model(), (torch.randn(8, 32),), stages=fault.stages, microbatches=4, schedule="1f1b", slack=0,
                    split_at=cuts, transport=fault.transport, timeout=fault.limit,
                    sync=_SYNC.get(fault.sync, fault.sync))  # fmt: skip
    optimizer = torch.optim.AdamW(pipe.parameters())
    for step in range(6):
        if step == _STEP and rank == fault.rank:
            _armed.append(fault)
            if fault.where == "communication":
                _trip_sends(pipe, note, fault)
            elif fault.where in ("gradients", "parameters"):
                _trip_replicas(note, fault)
        pipe.step(torch.randn(8, 32))
        optimizer.step()
        optimizer.zero_grad()
    pipe.average_replicas()  # a replica that makes updates of its own may come here before it hears of the fault


def _trip_replicas(note: str, fault: Fault) -> None:
    """The fault comes in the next exchange of gradients, or of parameters, between replicas."""
    import torch.distributed as dist

    sums = fault.where == "gradients" or fault.sync == "local"
    for name in ("all_reduce", "reduce") if sums else ("broadcast",):
        original = getattr(dist, name)

        def struck(*args: Any, original: Any = original, **given: Any) -> Any:
            if given.get("async_op"):
                fault.strike(note)
            return original(*args, **given)

        setattr(dist, name, struck)


def _trip_sends(pipe: Any, note: str, fault: Fault) -> None:
    """The fault comes in the third send of the step."""
    transport = pipe._runtime._transport
    original, sends = transport.send, []

    def send(tensor: Any, target: int) -> Any:
        sends.append(target)
        if len(sends) == 3:
            fault.strike(note)
        return original(tensor, target)

    transport.send = send
