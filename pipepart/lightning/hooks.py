"""Hooks of the user's program in a run: of the module and of callbacks. Those that touch tensors get what they expect.

Hooks of Lightning's own classes are not followed: they need no values of parameters.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from pipepart.errors import ForeignTensorError
from pipepart.lightning.as_written import AsWritten
from pipepart.lightning.hook_calls import Alone, HookCall, aside, tell_others
from pipepart.lightning.hook_lessons import Hook
from pipepart.lightning.hook_rules import may_touch, of_library
from pipepart.lightning.namespaces import of
from pipepart.lightning.run_patches import RunPatches
from pipepart.lightning.wholeness import Wholeness
from pipepart.runtime import StageRuntime
from pipepart.runtime.foreign import follow
from pipepart.runtime.gathering import Gathering

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

__all__ = ["HookedStrategy", "follow_hooks", "outside_hooks"]

_ELSEWHERE = {"on_exception", "on_before_batch_transfer", "on_after_batch_transfer", "on_gpu"}
"""Not called on all ranks together."""
_NOT_ON = {"backward", "optimizer_step", "optimizer_zero_grad", "configure_gradient_clipping", "lr_scheduler_step"}
"""Hooks of modules with other names than on_..."""


def _hooks_of(kind: type) -> set[str]:
    return {name for name in dir(kind) if name.startswith("on_") or name in _NOT_ON} - _ELSEWHERE


def follow_hooks(trainer: Trainer, module: LightningModule, runtime: StageRuntime, patches: RunPatches) -> None:
    """Follow the hooks of this run, until the patches are undone. Every rank must call it."""
    if runtime.groups is None or runtime.parts.whole:
        return
    hooks = _Hooks(trainer, module, Gathering(runtime, runtime.groups))
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        for name in sorted(_hooks_of(of(trainer).Callback)):
            function = getattr(callback, name, None)
            if not callable(function):
                continue
            called = function if of_library(function) else hooks.followed(function, callback, name)
            if isinstance(callback, of(trainer).ProgressBar) and name.endswith("_end") and "_batch_" not in name:
                called = _shown(called, trainer)
            if called is not function:
                patches.put(callback, name, called)
    # The module itself stays as it is: its attributes are state that recordings compare.
    calls: Any = of(trainer).module("pytorch.trainer.call")
    patches.put(calls, "_call_lightning_module_hook", hooks.of_module(calls._call_lightning_module_hook))


def _shown(function: Callable[..., Any], trainer: Trainer) -> Callable[..., Any]:
    """A hook of a progress bar, which reads logged metrics on the first rank only: all ranks compute them before."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with aside():
            _ = trainer.progress_bar_metrics
        return function(*args, **kwargs)

    return call


class _Hooks:
    """The hooks of one run, with what is known about each."""

    def __init__(self, trainer: Trainer, module: LightningModule, gathering: Gathering) -> None:
        self._trainer, self._module, self._gathering = trainer, module, gathering
        self._known: dict[tuple[int, str], Hook] = {}
        self._names = _hooks_of(of(trainer).LightningModule)
        self._followed: dict[str, bool] = {}

    def followed(self, function: Callable[..., Any], owner: Any, name: str) -> Callable[..., Any]:
        """The function with each call followed."""

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            return self._call(function, owner, name, functools.partial(function, *args, **kwargs))

        return call

    def of_module(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Lightning's function that calls a hook of the module, with calls in this run followed."""

        @functools.wraps(original)
        def call(trainer: Trainer, name: str, *args: Any, pl_module: Any = None, **kwargs: Any) -> Any:
            run = functools.partial(original, trainer, name, *args, pl_module=pl_module, **kwargs)
            ours = trainer is self._trainer and (pl_module is None or pl_module is self._module)
            if not ours or not self._of_user(name):
                return run()
            return self._call(getattr(self._module, name), self._module, name, run)

        return call

    def _of_user(self, name: str) -> bool:
        if name not in self._followed:
            function = getattr(self._module, name, None)
            self._followed[name] = name in self._names and callable(function) and not of_library(function)
        return self._followed[name]

    def _call(self, function: Callable[..., Any], owner: Any, name: str, run: Callable[[], Any]) -> Any:
        hook = self._known.get((id(owner), name))
        if hook is None:
            often = may_touch(function, owner, self._module)
            hook = self._known[id(owner), name] = Hook(f"{type(owner).__name__}.{name}", often)
        before = follow(None)
        follow(before)
        if isinstance(before, HookCall):  # a hook that calls another one
            return run()
        if hook.alone:
            follow(None if hook.aware else Alone(hook.label, self._gathering.device))
            try:
                return run()
            except ForeignTensorError as error:  # other stages may not have failed
                tell_others(self._gathering.groups, error)
                raise
            finally:
                follow(before)
        with HookCall(hook, self._gathering, shares=self._trainer.training):
            return run()


class HookedStrategy:
    """The part of a strategy that hooks use."""

    _written: AsWritten
    _whole: Wholeness

    if TYPE_CHECKING:

        @property
        def runtime(self) -> StageRuntime: ...

    @contextmanager
    def whole_parameters(self, gradients: bool = False) -> Iterator[None]:
        """Inside, every rank has the values (and gradients) of all parameters and buffers. All ranks must enter together.

        ```python
        with trainer.strategy.whole_parameters(), torch.no_grad():
            for target, online in zip(module.target.parameters(), module.online.parameters()):
                target.lerp_(online, 0.01)
        ```

        Values that are written to a parameter inside are kept on the stages that hold it, so every rank must write the
        same values. Hooks do not need it: what they touch is gathered for them.
        """
        if self._written.possible and self._whole.runtime is None:  # this process holds all values
            yield
            return
        with aside(), self.runtime.gathered(gradients):
            yield

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        """The step of the optimizer, with the closure that trains on a batch. It is no part of the hook that asks for it."""
        with aside():
            return super().optimizer_step(*args, **kwargs)  # type: ignore[misc]


def outside_hooks(*names: str) -> Callable[[type], type]:
    """Class decorator: these methods are no part of the hook that calls them, and all ranks call them together."""

    def decorate(kind: type) -> type:
        for name in names:
            setattr(kind, name, _outside(getattr(kind, name)))
        return kind

    return decorate


def _outside(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        with aside():
            return method(*args, **kwargs)

    return run
