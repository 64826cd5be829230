"""Refusal of models that call `torch.distributed` themselves, before anything is sent.

In a pipeline each rank runs the ops of its own stage, and for some checks rank 0 alone runs the whole graph. A collective
inside the model would then be matched with a different collective of another rank, or wait for ranks that never call it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn

from pipepart.errors import CaptureError
from pipepart.recording.recorded_run.ops import is_metric

__all__ = ["collectives_refused"]

_CALLS = (
    "_allgather_base", "_reduce_scatter_base", "all_gather_single", "all_gather_single_coalesced", "all_to_all_single",
    "allgather", "allgather_coalesced", "allgather_into_tensor_coalesced", "allreduce", "allreduce_coalesced", "alltoall",
    "alltoall_base", "barrier", "broadcast", "gather", "monitored_barrier", "recv", "recv_anysource", "reduce",
    "reduce_scatter", "reduce_scatter_single", "reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced",
    "scatter", "send",
)  # fmt: skip
"""The methods of a process group that the functions of ``torch.distributed`` call."""
_TORCH = str(torch.__path__[0])
_DISTRIBUTED = f"{_TORCH}/distributed/"
_OURS = __file__.rpartition("/build/")[0]


@contextmanager
def collectives_refused(root: nn.Module) -> Iterator[None]:
    """Refuse calls of ``torch.distributed`` inside the context that would wait for another rank, except those of metrics.

    If the error was caught inside the context, it is raised again at the end: recording goes on if the backward of a model
    fails.
    """
    if not dist.is_initialized() or dist.get_world_size() < 2:
        yield
        return
    kind: Any = dist.ProcessGroup
    functional: Any = sys.modules.get("torch.distributed._functional_collectives")
    resolve: Any = getattr(functional, "_resolve_group", None) or getattr(functional, "_resolve_group_name", None)
    refused: list[CaptureError] = []
    refuse = partial(_refuse, root, refused)
    with ExitStack() as stack:
        for name in _CALLS:
            if name in vars(kind):
                stack.callback(setattr, kind, name, vars(kind)[name])  # getattr would bind it
                setattr(kind, name, _refusing(getattr(kind, name), refuse, lambda group: group.size() > 1))
        if resolve is not None:  # functional collectives are ops that look up their group first
            stack.callback(setattr, functional, resolve.__name__, resolve)
            setattr(functional, resolve.__name__, _refusing(resolve, refuse, lambda group: True))
        yield
    if refused:
        raise refused[0]


def _refusing(
    original: Callable[..., Any], refuse: Callable[[], None], waits: Callable[[Any], bool]
) -> Callable[..., Any]:
    def call(group: Any, *args: Any, **kwargs: Any) -> Any:
        if waits(group):
            refuse()
        return original(group, *args, **kwargs)

    return call


def _refuse(root: nn.Module, refused: list[CaptureError]) -> None:
    modules, function, line = _callers()
    if any(is_metric(module) for module in modules):  # every rank computes metrics together
        return
    names = {id(module): name for name, module in root.named_modules()}
    where = next((names[id(module)] for module in modules if names.get(id(module))), "")
    refused.append(
        CaptureError(
            f"{type(root).__name__} cannot be recorded.\n  where: {f'module {where!r}, ' if where else ''}{line}\n"
            f"  what: the model calls torch.distributed.{function} itself, with {dist.get_world_size()} ranks in this job. "
            "In a pipeline a rank runs its own stage only, so the other ranks would not take part in that call\n"
            "  do: build the model as for one process (libraries have an option such as is_distributed=False); the pipeline "
            "provides replicas and stages"
        )
    )
    raise refused[-1]


def _callers() -> tuple[list[nn.Module], str, str]:
    """Return the modules on the call stack, innermost first, the called function of torch.distributed, and its line."""
    found: list[nn.Module] = []
    function, line = "?", ""
    frame: Any = sys._getframe(2)
    while frame is not None:
        module, code = frame.f_locals.get("self"), frame.f_code
        if not line and code.co_name != "wrapper" and code.co_filename.startswith(_DISTRIBUTED):
            function = code.co_name
        if not line and not code.co_filename.startswith((_TORCH, _OURS)):
            line = f"{code.co_filename.rpartition('/')[2]}:{frame.f_lineno}"
        if isinstance(module, nn.Module) and not any(module is other for other in found):
            found.append(module)
        frame = frame.f_back
    return found, function, line
