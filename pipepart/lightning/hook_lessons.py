"""What is known about a hook of the user's program: learned in a call that has every tensor of the model at hand.

All stages of a replica exchange what they have seen. So they know the same about a hook, or refuse it together.
"""

from __future__ import annotations

import random
import weakref
from dataclasses import dataclass, field
from typing import Any

import torch

from pipepart.errors import ForeignTensorError
from pipepart.lightning.announce import tell
from pipepart.lightning.hook_rules import is_local, writes
from pipepart.planning.describe import format_bytes, format_seconds
from pipepart.runtime.failure import guarded
from pipepart.runtime.gathering import Gathering, Wanted
from pipepart.runtime.meeting import exchange_objects

__all__ = ["Hook", "Named", "Seen", "generators", "learn", "memory_of"]

Named = tuple[str, str]
"""The kind (parameter, buffer, gradient) and the full name of a tensor of the model."""
_MOST = 0.5
"""If a hook touches more than this part of the parameters, by bytes, all are gathered."""


@dataclass
class Hook:
    """What is known about a hook. All stages of a replica know the same."""

    label: str
    often: bool
    """Whether its code names tensors of the model, so that each call is followed, and not only the first one."""
    calls: int = 0
    aware: bool = False
    """Whether it tells tensors of other stages apart, so that it is left alone."""
    local: bool = False
    """Whether it computes only with tensors that the same stages hold, so that each stage runs its own part."""
    wanted: Wanted | None = None
    """The tensors that it touches; None if it has not touched any."""
    written: Wanted = field(default_factory=Wanted)
    draws: bool = False
    """Whether it draws random numbers, so that stages and replicas may write different values."""

    @property
    def alone(self) -> bool:
        """Whether it runs without being followed."""
        return self.aware or self.local or (self.wanted is None and self.calls > 0 and not self.often)


def _none() -> dict[str, set[str]]:
    return {"parameter": set(), "buffer": set(), "gradient": set()}


@dataclass
class Seen:
    """What a call has done since everything is at hand."""

    gathering: Gathering
    touched: dict[str, set[str]] = field(default_factory=_none)
    written: dict[str, set[str]] = field(default_factory=_none)
    local: bool = True
    results: dict[int, tuple[Any, frozenset[int]]] = field(default_factory=dict)
    """Results of arithmetic on tensors of the same stages, and these stages."""

    def note(self, func: Any, tensors: list[torch.Tensor], found: list[Named | None], result: Any, new: bool) -> None:
        """Note a call of a function. `found`: what its tensors are; `new`: whether the result is a tensor of its own."""
        if writes(func) and found and found[0] is not None:
            self.written[found[0][0]].add(found[0][1])
        if not self.local:
            return
        stages = [self._stages_of(tensor, place) for tensor, place in zip(tensors, found)]
        if not is_local(func, tensors) or len(set(stages)) != 1 or stages[0] is None:
            self.local = False
            self.results.clear()
        elif new:
            self.results[id(result)] = weakref.ref(result), stages[0]

    def _stages_of(self, tensor: torch.Tensor, place: Named | None) -> frozenset[int] | None:
        """The stages that hold a tensor: several if it is a parameter that they all use, and each of them updates its copy."""
        if place is not None:
            return self.gathering.holders(place[1]) if place[0] == "parameter" else None
        known = self.results.get(id(tensor))
        return known[1] if known is not None and known[0]() is tensor else None

    def problem(self) -> str:
        """What the call has done to the model itself, if that cannot work; empty otherwise."""
        names = self.gathering.names
        now = {id(p): name for name, p in self.gathering.root.named_parameters()}
        if now != names:
            new = next((name for key, name in now.items() if key not in names), "some are gone")
            return f"replaces parameter objects ({new}), and stages and optimizers keep the earlier ones"
        first: dict[int, str] = {}
        for name, parameter in self.gathering.parameters.items():
            start = parameter.data_ptr() if parameter.numel() and memory_of(parameter) else -len(first) - 1
            other = first.setdefault(start, name)
            if other != name and {name, other} & self.written["parameter"]:
                return f"lets parameters {other!r} and {name!r} share memory: copy the values (`a.data.copy_(b.data)`)"
        return ""


def learn(hook: Hook, seen: Seen, seconds: float) -> None:
    """Agree with the other stages on what this hook does, from now on. `seconds`: the time of the gathering."""
    gathering = seen.gathering
    mine = (seen.touched, seen.written, seen.local, seen.problem())
    with guarded(gathering.groups):
        answers = exchange_objects(mine, gathering.groups, inside_replica=True)
    _check(hook, gathering, answers)
    touched, written = (_union([answer[index] for answer in answers]) for index in (0, 1))
    everything = Wanted(frozenset(gathering.parameters))
    if gathering.bytes_of(Wanted(touched.parameter)) > _MOST * gathering.bytes_of(everything):
        touched |= everything
    hook.local = hook.wanted is None and not hook.draws and all(answer[2] for answer in answers)
    hook.wanted = touched if hook.wanted is None else hook.wanted | touched
    hook.written |= written
    _tell(hook, hook.wanted, gathering, seconds)


def _check(hook: Hook, gathering: Gathering, answers: list[Any]) -> None:
    """Refuse, on all stages, a hook whose effect would not be that on one device."""
    problem = next((answer[3] for answer in answers if answer[3]), "")
    for kind in ("parameter", "buffer"):
        for stage, answer in enumerate(answers):
            for name in sorted(answer[1][kind]):
                home = gathering.home(kind, name)
                if name not in answers[home][1][kind] and not problem:
                    problem = (
                        f"writes {kind} {name!r} on the rank of stage {stage}, but not on that of stage {home}, which "
                        "holds it: let it do the same on every rank (without `if trainer.is_global_zero`)"
                    )
    if problem:
        raise ForeignTensorError(f"{hook.label} {problem}.")


def _tell(hook: Hook, wanted: Wanted, gathering: Gathering, seconds: float) -> None:
    counts = {"parameters": wanted.parameter, "buffers": wanted.buffer, "gradients": wanted.gradient}
    what = ", ".join(f"{len(names)} {kind}" for kind, names in counts.items() if names)
    if hook.local:
        tell(f"pipepart: {hook.label} computes with {what}, each on its own stage: nothing is sent")
        return
    size, all_of_it = (format_bytes(gathering.bytes_of(tensors)) for tensors in (wanted, gathering.everything))
    tell(
        f"pipepart: {hook.label} uses {what} of all stages: {size} are gathered in each call that touches them. The first "
        f"such call has gathered {all_of_it} in {format_seconds(seconds)}"
    )


def _union(parts: list[dict[str, set[str]]]) -> Wanted:
    return Wanted(**{kind: frozenset[str]().union(*(part[kind] for part in parts)) for kind in parts[0]})


def memory_of(tensor: torch.Tensor) -> int:
    """A number for the memory of a tensor, which its views share; 0 if it has none."""
    try:
        return int(tensor.untyped_storage().data_ptr())
    except (RuntimeError, NotImplementedError):  # sparse tensors, wrappers of other libraries
        return 0


def generators() -> tuple[bytes, Any]:
    """The states of the generators of torch (of the host) and Python."""
    return torch.get_rng_state().numpy().tobytes(), random.getstate()
