"""One call of a hook of the user, on all stages of a replica: tensors of other stages are brought when it touches them.

```
rank 0   hook ... first touch | vote, gather | ... end | vote     all stages stop at their first touch of a tensor of the
rank 1   hook .......... end  | vote, gather |         | vote     model, own or not, or at the end if they touch none
```

A stage stops before it reads or writes any tensor of the model. So the values that are gathered are those from before the
hook, whatever the stages have run until then, and no code runs twice. A hook that asks whether a tensor is on the meta
device (`is_meta`) tells the stages apart itself: nothing is gathered for it.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch.overrides import TorchFunctionMode

from pipepart.errors import ForeignTensorError, PipelineError
from pipepart.lightning.hook_lessons import Hook, Named, Seen, generators, learn, memory_of
from pipepart.lightning.hook_rules import FORMS, GRADIENT, SET_DATA, SET_GRADIENT, internal, tells_apart
from pipepart.runtime.failure import first_cause, guarded, stopped
from pipepart.runtime.foreign import Follower, ForeignTensor, follow
from pipepart.runtime.gathering import Gathering
from pipepart.runtime.meeting import reduce_numbers
from pipepart.runtime.mesh import Groups

__all__ = ["Alone", "HookCall", "aside", "tell_others"]

_PATIENCE = 3.0
"""Seconds to wait for the text of the failure of another rank."""


class Alone(Follower):
    """Follows a hook for which nothing is gathered: gradients of other stages are not taken for missing ones."""

    def __init__(self, label: str, device: torch.device) -> None:
        self._label, self.device = label, device

    def told_apart(self, frame: Any) -> None:
        """Nothing to do."""

    def values(self, tensor: ForeignTensor) -> torch.Tensor | None:
        return None

    def set_gradient(self, tensor: ForeignTensor, value: torch.Tensor) -> bool:
        return False

    def gradient(self, tensor: ForeignTensor, frame: Any) -> tuple[torch.Tensor | None] | None:
        if not internal(frame):
            place = tensor.place
            raise ForeignTensorError(
                f"{self._label} reads the gradient of parameter {place.name!r}, which is on stage {place.stage} (rank "
                f"{place.rank}); its first call did not. Put the code, on every rank, inside `with "
                "trainer.strategy.whole_parameters(gradients=True):`."
            )
        return None


class HookCall(Follower):
    """A call of a hook that is followed. Every stage of the replica must make it."""

    def __init__(self, hook: Hook, gathering: Gathering, shares: bool) -> None:
        """`shares`: whether all replicas make this call."""
        self._hook, self._gathering, self._groups, self._shares = hook, gathering, gathering.groups, shares
        self._mode = _Mode(self)
        self._before: Follower | None = None
        self.device = gathering.device
        self._busy = self._alone = self._asked = self._over = False
        self._places: dict[int, Named] | None = None
        self._seen: Seen | None = None
        """What the call does, from the time when everything is here."""
        self._draws = generators()
        self._cost = 0.0

    def __enter__(self) -> HookCall:
        self._before = follow(self)
        self._mode.__enter__()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._mode.__exit__(kind, error, trace)
        try:
            if error is None or isinstance(error, Exception):
                self._end(error)
                self._hook.calls += 1
        finally:
            follow(self._before)
            self._gathering.put_back()

    # ---- what the code of the hook does

    def told_apart(self, frame: Any) -> None:
        self._asked |= tells_apart(frame)

    def values(self, tensor: ForeignTensor) -> torch.Tensor | None:
        place = tensor.place
        if self._busy or not self._need(place.kind, place.name):
            return None
        here = self._gathering.tensor(place.kind, place.name)
        return here if here is tensor or here is None else here.detach()

    def gradient(self, tensor: ForeignTensor, frame: Any) -> tuple[torch.Tensor | None] | None:
        name = tensor.place.name  # the tensor itself may become a plain parameter below
        if self._busy or internal(frame) or not self._need("gradient", name):
            return None
        return (self._gathering.tensor("gradient", name),)

    def set_gradient(self, tensor: ForeignTensor, value: torch.Tensor) -> bool:
        name = tensor.place.name
        if self._busy or not self._need("gradient", name):
            return False
        self._gathering.set_gradient(name, value)
        return True

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a function of torch that the hook has called."""
        if self._busy or self._alone:
            return func(*args, **kwargs)
        if func == GRADIENT:
            name = self._gathering.names.get(id(args[0]))
            if name is not None and self._gathering.is_filled(name) and not internal():
                self._need("gradient", name)
            return func(*args, **kwargs)
        if func in FORMS:
            return func(*args, **kwargs)
        before = args[0] if func == SET_DATA else args[0].grad if func == SET_GRADIENT else None
        memory = 0 if before is None else memory_of(before)
        if func == SET_GRADIENT and args[1] is None:
            (self._places or {}).pop(memory, None)
            return func(*args, **kwargs)
        tensors = [leaf for leaf in pytree.arg_tree_leaves(*args, **kwargs) if isinstance(leaf, torch.Tensor)]
        found = [self._place(tensor) for tensor in tensors]
        if func == SET_GRADIENT and found[0] is not None:
            found[0] = "gradient", found[0][1]
        touched = [place for place in found if place is not None]
        if not (touched or (self._seen is not None and self._seen.results)) or internal():
            return func(*args, **kwargs)
        if not all(self._need(*place) for place in touched):
            return func(*args, **kwargs)
        if any(isinstance(tensor, ForeignTensor) for tensor in tensors):
            args, kwargs = pytree.tree_map(self._real, (args, kwargs))
        result = func(*args, **kwargs)
        if func in (SET_DATA, SET_GRADIENT) and self._places is not None and found[0] is not None:
            self._places.pop(memory, None)
            self._places[memory_of(args[0] if func == SET_DATA else args[0].grad)] = found[0]
        if self._seen is not None:
            new = isinstance(result, torch.Tensor) and self._place(result) is None
            self._seen.note(func, tensors, found, result, new)
        return result

    def _real(self, leaf: Any) -> Any:
        values = self.values(leaf) if isinstance(leaf, ForeignTensor) else None
        return leaf if values is None else values

    def _place(self, tensor: torch.Tensor) -> Named | None:
        """The kind and the name of a tensor of the model, or of a view of one."""
        if isinstance(tensor, ForeignTensor):
            return tensor.place.kind, tensor.place.name
        name = self._gathering.names.get(id(tensor))
        if name is not None:
            return "parameter", name
        if self._places is None:
            self._places = self._find_places()
        return self._places.get(memory_of(tensor))

    def _find_places(self) -> dict[int, Named]:
        found: dict[int, Named] = {}
        gathering = self._gathering
        for name, parameter in gathering.parameters.items():
            if not isinstance(parameter, ForeignTensor):
                found[memory_of(parameter)] = "parameter", name
            gradient = gathering.tensor("gradient", name)
            if gradient is not None:
                found[memory_of(gradient)] = "gradient", name
        for name, buffer in gathering.buffers().items():
            if not isinstance(buffer, ForeignTensor):
                found[memory_of(buffer)] = "buffer", name
        found.pop(0, None)
        return found

    # ---- agreement

    def _need(self, kind: str, name: str) -> bool:
        """Bring a tensor, unless it is here; False if the hook is left alone. A stop: all stages of the replica meet here."""
        while not self._gathering.here.has(kind, name):
            if self._alone:
                return False
            known = self._hook.wanted is not None and self._hook.wanted.has(kind, name)
            self._vote(touched=True, beyond=not known or len(self._gathering.here) > 0)
        if self._seen is not None:
            self._seen.touched[kind].add(name)
        return not self._alone

    def _vote(self, touched: bool = False, beyond: bool = False, failed: bool = False) -> bool:
        """Meet the other stages. If one of them has touched a tensor, all gather; return whether one has."""
        drew = not touched and self._draws != generators()
        flags = torch.tensor([touched, beyond, self._asked, failed, drew], dtype=torch.uint8)
        self._busy = True
        try:
            with guarded(self._groups), torch.inference_mode(False):
                reduce_numbers(flags, self._groups, self._groups.pipeline)
                someone, further, asked, broken, drawn = (bool(flag) for flag in flags.tolist())
                self._hook.draws |= drawn
                if broken:
                    self._over = True
                    if failed:
                        return False
                    cause = first_cause(self._groups, _PATIENCE)
                    raise PipelineError(stopped(self._groups, cause or f"{self._hook.label} failed on another stage."))
                if asked:
                    self._hook.aware = self._alone = True
                elif someone:
                    self._gather(further or self._hook.wanted is None)
        except BaseException:
            self._over = True  # the others have heard of it, or are in the middle of the same transfer
            raise
        finally:
            self._busy = False
        return someone and not self._alone

    def _gather(self, everything: bool) -> None:
        gathering, started = self._gathering, time.perf_counter()
        wanted = self._hook.wanted
        gathering.gather(gathering.everything if everything or wanted is None else wanted)
        self._places = None
        self._cost += time.perf_counter() - started
        if everything and self._seen is None:
            self._seen = Seen(gathering)

    def _end(self, error: Exception | None) -> None:
        """End the call, or a part of it, on all stages: those that have touched nothing help the others."""
        if self._alone or self._over:
            return
        if error is not None:
            tell_others(self._groups, error)
            self._vote(failed=True)
            return
        while self._vote():
            pass
        if self._alone:
            return
        if self._seen is not None:
            self._over = True  # if all stages refuse what was seen
            learn(self._hook, self._seen, self._cost)
            self._over = False
        if self._hook.draws and len(self._gathering.here):
            for kind in ("parameter", "buffer"):
                self._gathering.share(kind, getattr(self._hook.written, kind), self._shares)

    @contextmanager
    def outside(self) -> Iterator[None]:
        """Inside is no code of the hook: its part until now has ended, and another one begins afterwards."""
        if self._busy or self._alone:
            with _not_followed(self._mode):
                yield
            return
        with _not_followed(self._mode):
            self._end(None)
            self._gathering.put_back()
            self._seen, self._places, self._cost = None, None, 0.0
            yield


def tell_others(groups: Groups, error: Exception) -> None:
    """Report an error of a hook, so that other ranks do not wait for this one."""
    with suppress(Exception), guarded(groups):
        raise error


class _Mode(TorchFunctionMode):
    """Passes the functions of torch that a hook calls to its `HookCall`."""

    def __init__(self, call: HookCall) -> None:
        super().__init__()
        self._call = weakref.proxy(call)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._call.run(func, args, kwargs or {})


@contextmanager
def _not_followed(mode: _Mode) -> Iterator[None]:
    before = follow(None)
    on_top = torch.overrides._get_current_function_mode() is mode
    if on_top:
        torch.overrides._pop_mode()
    try:
        yield
    finally:
        if on_top:
            torch.overrides._push_mode(mode)
        follow(before)


@contextmanager
def aside() -> Iterator[None]:
    """Inside, no hook is followed. For work of the strategy that all ranks do together, and that a hook may ask for."""
    current = follow(None)
    try:
        if isinstance(current, HookCall):
            follow(current)
            with current.outside():
                yield
        else:
            yield
    finally:
        follow(current)
