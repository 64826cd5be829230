"""Models that talk to other ranks themselves, in their forward: refused by name before the first word is sent.

In a pipeline each rank runs the ops of its own stage, and rank 0 alone runs the whole graph for some checks. A collective
call inside the model would then meet another call of another rank, or none.
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
from pipepart.recording.trace.ops import is_metric
from pipepart.runtime.failure import guarded
from pipepart.runtime.mesh import Groups

__all__ = ["collectives_refused", "recording_on_every_rank"]

_CALLS = (
    "_allgather_base", "_reduce_scatter_base", "all_gather_single", "all_gather_single_coalesced", "all_to_all_single",
    "allgather", "allgather_coalesced", "allgather_into_tensor_coalesced", "allreduce", "allreduce_coalesced", "alltoall",
    "alltoall_base", "barrier", "broadcast", "gather", "monitored_barrier", "recv", "recv_anysource", "reduce",
    "reduce_scatter", "reduce_scatter_single", "reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced",
    "scatter", "send",
)  # fmt: skip
"""The methods of a process group that all functions of ``torch.distributed`` come to."""
_TORCH = str(torch.__path__[0])
_DISTRIBUTED = f"{_TORCH}/distributed/"
_OURS = __file__.rpartition("/build/")[0]


@contextmanager
def recording_on_every_rank(groups: Groups | None, root: nn.Module) -> Iterator[None]:
    """Around a recording that every rank makes: a rank that fails alone tells the others; the model may not talk to them."""
    with guarded(groups), collectives_refused(root):
        yield


@contextmanager
def collectives_refused(root: nn.Module) -> Iterator[None]:
    """Inside, a call of ``torch.distributed`` that would wait for another rank is an error; those of metrics are not.

    The error is raised at the end if somebody has caught it: a recording goes on when the backward of a model fails.
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
                stack.callback(setattr, kind, name, vars(kind)[name])  # not what getattr makes of it
                setattr(kind, name, _refusing(getattr(kind, name), refuse))
        if resolve is not None:  # functional collectives are ops, and ask for their group first
            stack.callback(setattr, functional, resolve.__name__, resolve)
            setattr(functional, resolve.__name__, _refusing_any(resolve, refuse))
        yield
    if refused:
        raise refused[0]


def _refusing(original: Callable[..., Any], refuse: Callable[[], None]) -> Callable[..., Any]:
    def call(group: Any, *args: Any, **kwargs: Any) -> Any:
        if group.size() > 1:
            refuse()
        return original(group, *args, **kwargs)

    return call


def _refusing_any(original: Callable[..., Any], refuse: Callable[[], None]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        refuse()
        return original(*args, **kwargs)

    return call


def _refuse(root: nn.Module, refused: list[CaptureError]) -> None:
    modules, function, line = _callers()
    if any(is_metric(module) for module in modules):  # they gather over replicas, and every rank computes them together
        return
    names = {id(module): name for name, module in root.named_modules()}
    where = next((names[id(module)] for module in modules if names.get(id(module))), "")
    refused.append(
        CaptureError(
            f"{type(root).__name__} cannot be recorded.\n  where: {f'module {where!r}, ' if where else ''}{line}\n"
            f"  what: it calls torch.distributed.{function} itself, with {dist.get_world_size()} ranks in this job. In a "
            "pipeline a rank runs its own stage only, so the others would not be in that call\n"
            "  do: build the model as for one process (libraries have an option such as is_distributed=False); replicas and "
            "stages are the pipeline's"
        )
    )
    raise refused[-1]


def _callers() -> tuple[list[nn.Module], str, str]:
    """The modules that are being called, the innermost first, the function of torch.distributed that they call, and where."""
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
