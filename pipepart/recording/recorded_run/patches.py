"""Patches of a recorded run: the calls that no torch function mode sees go through the recorder.

All patches are in one table, are set together and are undone in reverse order.
"""

from __future__ import annotations

import builtins
import importlib
import operator
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn as nn

from pipepart.recording.inputs.trees import library_of
from pipepart.recording.recorded_run import functions, intrinsics, ops, transforms
from pipepart.recording.recorded_run.caches import CachedFunction
from pipepart.recording.recorded_run.contexts import Checkpoint, outside_rng, settings_of, user_line
from pipepart.recording.recorded_run.conversions import conversions
from pipepart.recording.recorded_run.failures import DrawsOutside, NotRecordable, Updates
from pipepart.recording.recorded_run.recorder import Recorder
from pipepart.recording.recorded_run.tensors import storage_of, tensors_in, unwrap, version_of

__all__ = ["recording_patches"]

_checkpointing: Any = importlib.import_module("torch.utils.checkpoint")
_autograd: Any = importlib.import_module("torch.autograd.function")
_saving: Any = torch.autograd.graph

Patch = tuple[Any, str, Any]
"""An object, a cell or a namespace, the name of an attribute or variable in it, and the new value."""


@contextmanager
def recording_patches(
    recorder: Recorder,
    modules: Iterable[tuple[str, nn.Module]],
    whole: Sequence[Any],
    cached: Sequence[CachedFunction],
    compiling: bool,
) -> Iterator[None]:
    """Send calls that no torch function mode sees to the recorder.

    Calls of the functions `whole` are one op each. The functions `cached` compute anew for tracked numbers. With
    `compiling`, `torch.compiler.is_compiling` is true, so that libraries take code paths without reads of data.
    """
    table = [*_torch_patches(recorder), *_metric_patches(recorder, modules)]
    table += functions.replacements(recorder, whole)
    table += transforms.replacements(recorder)
    table += conversions(recorder.numbers)
    table += [place.replacement(recorder) for place in cached]
    table += [(torch.compiler, name, lambda: True) for name in ("is_compiling", "is_exporting") if compiling]
    with ExitStack() as stack:
        stack.callback(setattr, recorder.builder, "recording", False)
        for holder, name, value in table:
            stack.callback(_put, holder, name, _own(holder, name))
            _put(holder, name, value)
        yield


def _torch_patches(recorder: Recorder) -> list[Patch]:
    """Return the patches of torch and of Python's builtins."""
    generator = "_checkpoint_without_reentrant_generator"
    seed = _seed(recorder, torch.manual_seed)
    return [
        (nn.Module, "__call__", _module_call(recorder, nn.Module.__call__)),
        # An ``apply`` that was taken before recording is looked up on this class too.
        (_autograd._SingleLevelFunction, "apply", _apply(recorder, torch._C._FunctionBase.__dict__["apply"])),
        (torch._C.ScriptFunction, "__call__", _script_call(recorder, torch._C.ScriptFunction.__call__)),
        (_checkpointing, generator, _checkpoint(recorder, getattr(_checkpointing, generator))),
        (_saving.saved_tensors_hooks, "__enter__", _save(recorder, _saving.saved_tensors_hooks.__enter__)),
        (torch, "manual_seed", seed),
        (torch.random, "manual_seed", seed),
        (builtins, "len", _length(recorder, builtins.len)),
        (builtins, "print", _print(recorder, builtins.print)),
    ]


_ABSENT = object()


def _own(holder: Any, name: str) -> Any:
    """Return a variable or an attribute of the holder itself; `_ABSENT` if it has none, or inherits it."""
    if isinstance(holder, types.CellType):
        return holder.cell_contents
    return (holder if isinstance(holder, dict) else vars(holder)).get(name, _ABSENT)


def _put(holder: Any, name: str, value: Any) -> None:
    """Set a variable or an attribute; `_ABSENT` removes it, so that an inherited one is seen again."""
    if value is _ABSENT:
        remove = operator.delitem if isinstance(holder, dict) else delattr
        remove(holder, name)
    else:
        write = operator.setitem if isinstance(holder, dict) else setattr
        write(holder, name, value)


# ---------------------------------------------------------------- modules


def _module_call(recorder: Recorder, original: Any) -> Any:
    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        builder = recorder.builder
        if builder.idle:
            return original(module, *unwrap(args), **unwrap(kwargs))
        name = builder.module_names.get(id(module))
        if name is None:
            return original(module, *args, **kwargs)
        builder.stack.append((name, module))
        try:
            if name and recorder.is_one_op(module, name):
                own = ops.buffers_of(module)
                before = _marks(own)
                follows = name in recorder.whole or (bool(own) and not ops.is_metric(module))
                named = _named_marks(module) if follows else {}
                out = recorder.run_whole(
                    lambda *a, **k: original(module, *a, **k),
                    "call_module",
                    name,
                    args,
                    kwargs,
                    prefix=name,
                    own=own,
                    stateful=ops.is_metric(module),
                    random=ops.draws(module),
                    closed=ops.is_closed(module),
                )
                updates = before != _marks(ops.buffers_of(module))
                if updates and name not in recorder.whole and ops.can_be_opened(module):
                    raise Updates(f"module {name!r} updates its buffers")
                now = _named_marks(module) if follows else {}
                changed = tuple(f"{name}.{key}" for key in now if now[key] != named.get(key))
                if changed:
                    recorder.updates.setdefault(name, (changed, user_line()))
                return out
            if name and (module._backward_hooks or module._backward_pre_hooks):
                raise NotRecordable(f"module {name!r} has a backward hook and consists of several ops")
            out = original(module, *args, **kwargs)
            if recorder.watching and outside_rng() != recorder.drawn:
                raise DrawsOutside(f"module {name!r} draws random numbers outside torch (Python's random or numpy)")
            return out
        except BaseException:
            if recorder.failed_in is None:
                recorder.failed_in = [path for path, _ in builder.stack]
            raise
        finally:
            builder.stack.pop()

    return call


def _marks(buffers: Sequence[torch.Tensor]) -> list[Any]:
    """Return marks that differ if a buffer is replaced, gets other memory, or is changed in place."""
    with torch._C.DisableTorchFunction():
        return [(id(buffer), version_of(buffer), storage_of(buffer)) for buffer in buffers]


def _named_marks(module: nn.Module) -> dict[str, Any]:
    """Return the marks of the buffers of a module, by name; those of BatchNorm layers have a rule of their own."""
    norms = [path for path, part in module.named_modules() if isinstance(part, nn.modules.batchnorm._BatchNorm)]
    named = [(k, b) for k, b in module.named_buffers() if k.rpartition(".")[0] not in norms]
    return dict(zip((key for key, _ in named), _marks([buffer for _, buffer in named])))


def _metric_patches(recorder: Recorder, modules: Iterable[tuple[str, nn.Module]]) -> Iterator[Patch]:
    """Yield the patches of the methods that change the state of metrics."""
    for _, module in modules:
        if ops.is_metric(module):
            for name in ("update", "compute", "reset"):
                yield module.__dict__, name, _metric_method(recorder, module, name)


def _metric_method(recorder: Recorder, module: nn.Module, name: str) -> Callable[..., Any]:
    method, builder = getattr(module, name), recorder.builder
    path = builder.module_names[id(module)]

    def call(*args: Any, **kwargs: Any) -> Any:
        if builder.idle:
            return method(*unwrap(args), **unwrap(kwargs))
        lead = (builder.read_attribute(path), name)
        with builder.inside(path, module):
            return recorder.run_whole(
                method, "call_function", intrinsics.method_of, args, kwargs, lead=lead, prefix=path, stateful=True
            )

    return call


# ---------------------------------------------------------------- functions of torch


def _apply(recorder: Recorder, original: Any) -> Any:
    """Return the ``apply`` of custom autograd functions, which are one op each."""

    def apply(kind: Any, *args: Any, **kwargs: Any) -> Any:
        real = original.__get__(None, kind)
        if recorder.builder.idle:
            return real(*unwrap(args), **unwrap(kwargs))
        if kind is not _checkpointing.CheckpointFunction:
            return recorder.run_whole(real, "call_function", intrinsics.apply_function(kind), args, kwargs)
        function, preserve, *rest = args
        if not any(tensor.requires_grad for tensor in tensors_in(rest) if torch.is_grad_enabled()):
            with torch.no_grad():  # as this kind of checkpointing does: nothing inside gets a gradient
                return function(*rest)
        with recorder.builder.checkpointed(Checkpoint({"preserve_rng_state": preserve})):
            return function(*rest)

    return classmethod(apply)


def _script_call(recorder: Recorder, original: Any) -> Any:
    def call(function: Any, *args: Any, **kwargs: Any) -> Any:
        if recorder.builder.idle:
            return original(function, *unwrap(args), **unwrap(kwargs))
        target = intrinsics.opaque_function(function, f"script_{getattr(function, 'name', 'function')}")
        return recorder.run_whole(lambda *a, **k: original(function, *a, **k), "call_function", target, args, kwargs)

    return call


def _checkpoint(recorder: Recorder, original: Any) -> Any:
    """Return torch's generator of activation checkpointing, which notes the region of recorded ops."""

    def generator(function: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
        if recorder.builder.idle or not torch.is_grad_enabled():
            yield from original(function, *args, **kwargs)
            return
        region = settings_of(args)
        with recorder.builder.checkpointed(region), region.options["context_fn"]()[0]:
            yield

    return generator


def _save(recorder: Recorder, original: Any) -> Any:
    """Return the entry of contexts with hooks on saved tensors, which refuses those that a recording cannot keep."""

    def enter(hooks: Any) -> Any:
        if not recorder.builder.idle:
            where = recorder.builder.here()
            if not isinstance(hooks, _saving.save_on_cpu):
                raise NotRecordable(
                    f"torch.autograd.graph.{type(hooks).__name__} in {where}: hooks on saved tensors may change "
                    "gradients, and are not part of the graph. Put these layers into a submodule, which is then one op"
                )
            recorder.note(f"save_on_cpu in {where}: not kept, saved tensors stay on the device")
        return original(hooks)

    return enter


def _seed(recorder: Recorder, original: Any) -> Any:
    def seed(value: Any) -> Any:
        if not recorder.builder.idle:
            raise NotRecordable(
                f"torch.manual_seed in {recorder.builder.here()}: a recorded call seeds nothing. Draw these numbers "
                "once, into a buffer, or put this part into a submodule, which is then one op"
            )
        return original(value)

    return seed


# ---------------------------------------------------------------- builtins


def _length(recorder: Recorder, original: Any) -> Any:
    def length(value: Any) -> int:
        size: int = original(value)
        if isinstance(value, torch.Tensor):
            return recorder.numbers.length(value, size)  # type: ignore[no-any-return]
        if not recorder.builder.idle and library_of(value, "chemprop", "BatchMolGraph"):
            return value.batch.max().item() + 1  # type: ignore[no-any-return, attr-defined]
        return size

    return length


def _print(recorder: Recorder, original: Any) -> Any:
    def show(*args: Any, **kwargs: Any) -> None:
        if not recorder.builder.idle:
            module = recorder.builder.stack[-1][0]
            recorder.note(f"the model prints at {user_line()}, in module {module!r}: a recorded call prints nothing")
        original(*unwrap(args), **kwargs)

    return show
