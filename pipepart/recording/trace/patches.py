"""What is patched while a model is recorded, and put back afterwards: the calls that no torch function mode sees."""

from __future__ import annotations

import builtins
import importlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn as nn

from pipepart.recording.inputs.trees import library_of
from pipepart.recording.model_state.places import is_plain_value
from pipepart.recording.model_state.reachable import OWN_NAMES
from pipepart.recording.model_state.side_effects import Effects
from pipepart.recording.model_state.state import Snapshot
from pipepart.recording.trace import intrinsics, ops
from pipepart.recording.trace.activation_checkpoints import Checkpoint, settings_of
from pipepart.recording.trace.arguments import tensors_in, unwrap
from pipepart.recording.trace.einops_calls import is_einops_layer
from pipepart.recording.trace.facts import outside_rng, user_line
from pipepart.recording.trace.failures import DrawsOutside, NotRecordable, Unsettled
from pipepart.recording.trace.recorder import Recorder
from pipepart.recording.trace.symbols import is_tracked

__all__ = [
    "is_leaf",
    "is_metric",
    "is_torch_leaf",
    "keep_attributes",
    "recording_patches",
    "refuse_effects",
    "refuse_hooks",
]

checkpointing: Any = importlib.import_module("torch.utils.checkpoint")
scripted: Any = torch._C.ScriptFunction
any_module: Any = nn.Module
any_function: Any = importlib.import_module("torch.autograd.function")._SingleLevelFunction
"""The class that ``Function.apply`` calls on: an ``apply`` that was taken before recording comes here too."""
anything: Any = builtins
compiler: Any = torch.compiler

_OPEN = (
    nn.Sequential,
    nn.ModuleList,
    nn.ModuleDict,
    nn.ParameterList,
    nn.ParameterDict,
    nn.Transformer,
    nn.TransformerEncoder,
    nn.TransformerDecoder,
    nn.TransformerEncoderLayer,
    nn.TransformerDecoderLayer,
)
"""Modules of ``torch.nn`` that are made of others: recorded through."""


def is_metric(module: nn.Module) -> bool:
    """Whether a module is a torchmetrics metric (known by its shape: torchmetrics is not imported)."""
    kind = type(module)
    if kind not in _metrics:
        _metrics[kind] = _is_metric_class(kind)
    return _metrics[kind]


_metrics: WeakKeyDictionary[type, bool] = WeakKeyDictionary()  # some classes are made for one recording


def _is_metric_class(kind: type) -> bool:
    return all(hasattr(kind, name) for name in ("update", "compute", "reset")) and any(
        base.__module__.startswith("torchmetrics") for base in kind.__mro__
    )


def is_leaf(recorder: Recorder, module: nn.Module, name: str) -> bool:
    """Whether a call of this module is one op."""
    if name in recorder.whole or is_metric(module) or is_torch_leaf(module) or is_einops_layer(type(module)):
        return True
    return not isinstance(module, _OPEN) and not module._modules and ops.reads_training_flag(type(module))


def is_torch_leaf(module: nn.Module) -> bool:
    """Whether a module comes from torch itself and is more than a container of others."""
    home = type(module).__module__
    if isinstance(module, _OPEN) or home.startswith("torch.nn.parallel"):
        return False
    return home.startswith(("torch.nn.", "torch.ao.nn.", "torch.jit"))


def keep_attributes(recorder: Recorder, before: Snapshot) -> None:
    """Tensors that the model keeps as attributes are kept by the graph too; other Python state cannot be."""
    whole = [name for name in recorder.module_names.values() if name in recorder.whole]
    lost: dict[str, NotRecordable] = {}
    for path, module, name, old, value in before.changes():
        inside = any(path == name_ or path.startswith(f"{name_}.") for name_ in whole)
        if inside or is_torch_leaf(module) or is_metric(module) or (not path and _is_kept_elsewhere(module, name)):
            continue
        if is_tracked(value) or callable(value):
            continue
        if tensors_in(value) and all(id(tensor) in recorder.values for tensor in tensors_in(value)):
            recorder.stack.append((path, module))
            owner = recorder.read_attribute(path)
            recorder.make("call_function", intrinsics.set_attribute, (owner, name, recorder.argument(value)), {})
            recorder.stack.pop()
            recorder.notes.append(f"attribute {name!r} of module {path!r}: a tensor that each call keeps")
            continue
        if value == old and type(value) is type(old):
            continue
        kind = Unsettled if is_plain_value(old) and is_plain_value(value) else NotRecordable
        lost.setdefault(
            path,
            kind(
                f"attribute {name!r} of module {path!r} is changed by the call (before: {str(old)[:60]}, after: "
                f"{str(value)[:60]}); a recorded call keeps no Python state. Keep it in a buffer, log it or return it; "
                "if the model only sets itself up in its first call, run it once before"
            ),
        )
    if lost:
        first, *others = lost
        recorder.failed_in = [first]
        error = lost[first]
        error.also = tuple((path, str(lost[path])) for path in others if type(lost[path]) is type(error))
        raise error


def refuse_hooks(recorder: Recorder, before: Snapshot) -> None:
    """A call that leaves hooks behind has set the model up: the recording starts from what one call leaves."""
    for path, name in before.hook_changes():
        recorder.failed_in = [path]
        raise Unsettled(
            f"the call adds or removes hooks of module {path!r} ({name}); a recorded call does not. Register hooks "
            "before the model is recorded, and remove in the call what the call has added"
        )


def _is_kept_elsewhere(module: nn.Module, name: str) -> bool:
    """Whether an attribute is torch's or Lightning's own, or is set again after each step by whoever watches it."""
    return name in OWN_NAMES or getattr(type(module), "_pipepart_sets", False)


def refuse_effects(recorder: Recorder, effects: Effects) -> None:
    """What a call changes in Python outside of its modules is lost in a recorded call: say so."""
    for path, text in effects.changes():
        recorder.failed_in = [path]
        raise Unsettled(
            f"{text} is changed by the call of module {path!r}; a recorded call keeps no Python state. Keep it in a "
            "buffer, log it or return it"
        )
    if any(getattr(nn.modules.module, name) for name in _GLOBAL_HOOKS):
        recorder.notes.append(
            "global module hooks: they run for the modules that are one op each, not for those around"
        )


_GLOBAL_HOOKS = ("_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks")


def _call_module(recorder: Recorder, original: Any, module: nn.Module, args: Any, kwargs: Any) -> Any:
    if not recorder.recording or recorder.frames:
        return original(module, *unwrap(args), **unwrap(kwargs))
    name = recorder.module_names.get(id(module))
    if name is None:
        return original(module, *args, **kwargs)
    recorder.stack.append((name, module))
    try:
        if name and is_leaf(recorder, module, name):
            return recorder.run_whole(
                lambda *a, **k: original(module, *a, **k),
                "call_module",
                name,
                args,
                kwargs,
                prefix=name,
                own=_buffers(module),
                stateful=is_metric(module),
                random=_draws(module),
                closed=_is_closed(module),
            )
        if name and (module._backward_hooks or module._backward_pre_hooks):
            raise NotRecordable(f"module {name!r} has a backward hook and consists of several ops")
        out = original(module, *args, **kwargs)
        if recorder.watching and outside_rng() != recorder.drawn:
            raise DrawsOutside(f"module {name!r} draws random numbers outside torch (Python's random or numpy)")
        return out
    except BaseException:
        if recorder.failed_in is None:
            recorder.failed_in = [path for path, _ in recorder.stack]
        raise
    finally:
        recorder.stack.pop()


def _is_closed(module: nn.Module) -> bool:
    """Whether a module runs torch's own code over its own parameters and its arguments, and nothing else."""
    hooks = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    return (
        not module._modules
        and not hooks
        and not any(getattr(nn.modules.module, name) for name in _GLOBAL_HOOKS)
        and "forward" not in vars(module)
        and all(type(p) is nn.Parameter for p in module._parameters.values() if p is not None)
        and type(module).__module__.startswith("torch.nn.modules.")
    )


def _buffers(module: nn.Module) -> list[torch.Tensor]:
    if module._modules:
        return list(module.buffers())
    return [buffer for buffer in module._buffers.values() if buffer is not None]


def _draws(module: nn.Module) -> bool:
    parts = module.modules() if module._modules else (module,)
    return any(isinstance(part, ops.RANDOM_MODULES) and part.training and getattr(part, "p", 1) for part in parts) or (
        isinstance(module, (nn.RNNBase, nn.MultiheadAttention)) and module.training and bool(module.dropout)
    )


def _metric_method(recorder: Recorder, module: nn.Module, name: str) -> Any:
    method = getattr(module, name)
    path = recorder.module_names[id(module)]

    def call(*args: Any, **kwargs: Any) -> Any:
        if not recorder.recording or recorder.frames:
            return method(*unwrap(args), **unwrap(kwargs))
        lead = (recorder.read_attribute(path), name)
        recorder.stack.append((path, module))
        try:
            return recorder.run_whole(
                method, "call_function", intrinsics.method_of, args, kwargs, lead=lead, prefix=path, stateful=True
            )
        finally:
            recorder.stack.pop()

    return call


def _apply(recorder: Recorder, original: Any, kind: Any, args: Any, kwargs: Any) -> Any:
    real = original.__get__(None, kind)
    if not recorder.recording or recorder.frames:
        return real(*unwrap(args), **unwrap(kwargs))
    if kind is checkpointing.CheckpointFunction:
        function, preserve, *rest = args
        if not any(tensor.requires_grad for tensor in tensors_in(rest) if torch.is_grad_enabled()):
            with torch.no_grad():  # as this kind of checkpointing does: nothing inside gets a gradient
                return function(*rest)
        with recorder.checkpointed(Checkpoint({"preserve_rng_state": preserve})):
            return function(*rest)
    return recorder.run_whole(real, "call_function", intrinsics.apply_function(kind), args, kwargs)


@contextmanager
def recording_patches(recorder: Recorder, modules: Iterable[tuple[str, nn.Module]], compiling: bool) -> Iterator[None]:
    """Module calls, custom autograd functions, scripted functions, ``len`` and metrics go through the recorder.

    With `compiling`, libraries that ask whether they are being compiled hear yes, and take paths free of data reads.
    """
    module_call = nn.Module.__call__
    apply = torch._C._FunctionBase.__dict__["apply"]
    script_call = scripted.__call__
    length = builtins.len
    compile_flags = torch.compiler.is_compiling, torch.compiler.is_exporting
    metrics = [module for _, module in modules if is_metric(module)]

    def patched_len(value: Any) -> int:
        size = length(value)
        if isinstance(value, torch.Tensor):
            return recorder.length(value, size)
        if recorder.recording and not recorder.frames and library_of(value, "chemprop", "BatchMolGraph"):
            return value.batch.max().item() + 1  # type: ignore[no-any-return, attr-defined]
        return size

    def patched_script(function: Any, *args: Any, **kwargs: Any) -> Any:
        if not recorder.recording or recorder.frames:
            return script_call(function, *unwrap(args), **unwrap(kwargs))
        target = intrinsics.opaque_function(function, f"script_{getattr(function, 'name', 'function')}")
        return recorder.run_whole(lambda *a, **k: script_call(function, *a, **k), "call_function", target, args, kwargs)

    checkpoint = checkpointing._checkpoint_without_reentrant_generator

    def patched_checkpoint(function: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
        if not recorder.recording or recorder.frames or not torch.is_grad_enabled():
            yield from checkpoint(function, *args, **kwargs)
            return
        region = settings_of(args)
        with recorder.checkpointed(region), region.options["context_fn"]()[0]:
            yield

    show = builtins.print

    def patched_print(*args: Any, **kwargs: Any) -> None:
        if recorder.recording and not recorder.frames:
            note = f"prints at {user_line()}, in module {recorder.stack[-1][0]!r}: a recorded call prints nothing"
            if note not in recorder.notes:
                recorder.notes.append(note)
        show(*unwrap(args), **kwargs)

    saved: list[tuple[dict[str, Any], str, Any]] = []
    anything.print = patched_print
    any_module.__call__ = lambda module, *a, **k: _call_module(recorder, module_call, module, a, k)
    any_function.apply = classmethod(lambda kind, *a, **k: _apply(recorder, apply, kind, a, k))
    scripted.__call__ = patched_script
    anything.len = patched_len
    checkpointing._checkpoint_without_reentrant_generator = patched_checkpoint
    if compiling:
        compiler.is_compiling = compiler.is_exporting = lambda: True
    for metric in metrics:
        for name in ("update", "compute", "reset"):
            wrapped = _metric_method(recorder, metric, name)
            saved.append((metric.__dict__, name, metric.__dict__.get(name)))
            metric.__dict__[name] = wrapped
    try:
        yield
    finally:
        any_module.__call__ = module_call
        del any_function.apply  # the one that it inherits is seen again
        scripted.__call__ = script_call
        anything.len = length
        anything.print = show
        checkpointing._checkpoint_without_reentrant_generator = checkpoint
        compiler.is_compiling, compiler.is_exporting = compile_flags
        for attributes, name, value in saved:
            if value is None:
                attributes.pop(name, None)
            else:
                attributes[name] = value
        recorder.recording = False
