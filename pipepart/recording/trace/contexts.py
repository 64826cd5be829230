"""Settings of the process that a model switches around some of its ops: which attention kernels are allowed and the like.

They are read at every op and kept for it, as gradient mode and autocast are. Two other contexts cannot be kept and are
refused by name: hooks on saved tensors, and seeding torch's random numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from pipepart.recording.trace.failures import NotRecordable

if TYPE_CHECKING:
    from pipepart.recording.trace.recorder import Recorder

__all__ = ["contexts_refused", "set_switches", "switches"]

_cuda: Any = torch.backends.cuda
_graph: Any = torch.autograd.graph
_SWITCHES: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (_cuda.flash_sdp_enabled, _cuda.enable_flash_sdp),
    (_cuda.mem_efficient_sdp_enabled, _cuda.enable_mem_efficient_sdp),
    (_cuda.math_sdp_enabled, _cuda.enable_math_sdp),
    (_cuda.cudnn_sdp_enabled, _cuda.enable_cudnn_sdp),
    (torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    (torch.get_default_dtype, torch.set_default_dtype),
)


def switches() -> tuple[Any, ...]:
    """How the settings are now."""
    return tuple(read() for read, _ in _SWITCHES)


def set_switches(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Switch to these settings; returns what was set before."""
    before = switches()
    for (_, write), old, new in zip(_SWITCHES, before, values):
        if old != new:
            write(new)
    return before


@contextmanager
def contexts_refused(recorder: Recorder) -> Iterator[None]:
    """What a recording cannot keep is refused where the model begins it."""
    enter, seed = _graph.saved_tensors_hooks.__enter__, torch.manual_seed

    def patched_enter(hooks: Any) -> Any:
        if recorder.recording and not recorder.frames:
            if not isinstance(hooks, _graph.save_on_cpu):
                raise NotRecordable(
                    f"torch.autograd.graph.{type(hooks).__name__} in {recorder.here()}: hooks on saved tensors may change "
                    "gradients, and are not part of the graph. Put these layers into a submodule, which is then one op"
                )
            note = f"save_on_cpu in {recorder.here()}: not kept, saved tensors stay on the device"
            recorder.notes += [note] if note not in recorder.notes else []
        return enter(hooks)

    def patched_seed(value: Any) -> Any:
        if recorder.recording and not recorder.frames:
            raise NotRecordable(
                f"torch.manual_seed in {recorder.here()}: a recorded call seeds nothing. Draw these numbers once, into a "
                "buffer, or put this part into a submodule, which is then one op"
            )
        return seed(value)

    homes: tuple[Any, ...] = (torch, torch.random)
    _graph.saved_tensors_hooks.__enter__ = patched_enter
    for home in homes:
        home.manual_seed = patched_seed
    try:
        yield
    finally:
        _graph.saved_tensors_hooks.__enter__ = enter
        for home in homes:
            home.manual_seed = seed
