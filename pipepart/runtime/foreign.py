"""Tensors of other stages: this rank knows their form, and any use of their values is an error.

A plain meta tensor is not a safe stand-in: `here.add_(meta)` does nothing and raises nothing. A `ForeignTensor` has a form
(shape, dtype, names, `requires_grad`, `is_meta`), and ops on it raise, from Python and from C++, since the dispatcher calls
`__torch_dispatch__` before any kernel. The exception is arithmetic on tensors of a single other stage: all ranks run the
same code, so that stage computes the result, which is foreign here.

A parameter becomes foreign, and whole again, in place. So lists of parameters that a module or an optimizer made earlier
see the change.

Code of the user can be followed (`follow`): a `Follower` is asked before a use is refused, and can bring the values.
"""

from __future__ import annotations

import copy
import sys
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import torch
import torch.utils._pytree as pytree
from torch import nn

from pipepart.errors import ForeignTensorError

__all__ = ["Follower", "ForeignParameter", "ForeignTensor", "Place", "become", "come_back", "fill_in", "follow"]

_PLACE = "_pipepart_place"
_aten = torch.ops.aten
_ALIASES = {_aten.detach.default, _aten.alias.default}
_FORMS = {
    _aten.empty_like, _aten.zeros_like, _aten.ones_like, _aten.full_like, _aten.rand_like, _aten.randn_like,
    _aten.new_empty, _aten.new_zeros, _aten.new_ones, _aten.new_full, _aten.new_empty_strided, _aten.is_same_size,
}  # fmt: skip
"""Ops that read the form of a tensor only."""
_NORMS = {
    ("torch.nn.utils.clip_grad", "clip_grad_norm_"),
    ("lightning.pytorch.utilities.grads", "grad_norm"),
    ("lightning.fabric.utilities.grads", "grad_norm"),
    ("pytorch_lightning.utilities.grads", "grad_norm"),
    ("lightning_fabric.utilities.grads", "grad_norm"),
}
"""Functions that compute a norm over all gradients that they find, which would be the norm of one stage only."""


@dataclass(frozen=True)
class Place:
    """The home of a tensor."""

    name: str
    kind: str
    """``parameter`` or ``buffer``."""
    stage: int
    rank: int

    def refuse(self, use: str) -> NoReturn:
        """Raise the error for a use that needs the values."""
        raise ForeignTensorError(
            f"{self.kind} {self.name!r} lives on stage {self.stage} (rank {self.rank}); this rank holds no values of it, "
            f"and {use} needs them. Do one of these: put the code, on every rank, inside "
            "`with trainer.strategy.whole_parameters():` (with `Pipeline`: `with pipe.whole_parameters():`), where each rank "
            f"sees all values and keeps the values that it writes to its own; leave out tensors of other stages (`if not "
            "tensor.is_meta`); or keep modules that need each other on one stage (`keep_together=[[path, path]]`)."
        )


class Follower(Protocol):
    """Follows what code of the user does with tensors of other stages."""

    device: torch.device
    """The device of the values, once they are brought."""

    def told_apart(self, frame: Any) -> None:
        """The code in `frame` asks whether a tensor is on the meta device, that is, on another stage."""

    def values(self, tensor: ForeignTensor) -> torch.Tensor | None:
        """The tensor with its values on this rank; None if the use is to be refused."""

    def gradient(self, tensor: ForeignTensor, frame: Any) -> tuple[torch.Tensor | None] | None:
        """The gradient, for the code in `frame`, which reads it; None if this code does not need it."""

    def set_gradient(self, tensor: ForeignTensor, value: torch.Tensor) -> bool:
        """Take a gradient that the code sets; False if that is to be refused."""


_follower: Follower | None = None


def follow(follower: Follower | None) -> Follower | None:
    """Let a follower see the uses of foreign tensors from now on, or none; return the one before."""
    global _follower
    before, _follower = _follower, follower
    return before


class ForeignTensor(torch.Tensor):
    """A tensor whose values are on another stage."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def of(cls, tensor: torch.Tensor, place: Place, requires_grad: bool = False) -> ForeignTensor:
        made: ForeignTensor = torch.Tensor._make_subclass(cls, _form(tensor), requires_grad)
        made.__dict__[_PLACE] = place
        return made

    @property
    def place(self) -> Place:
        found: Place = self.__dict__[_PLACE]
        return found

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        found = next(leaf for leaf in tensors if isinstance(leaf, ForeignTensor))
        if func in _ALIASES:
            return ForeignTensor.of(found, found.place)
        if _follower is not None and func.overloadpacket not in _FORMS:
            values = {id(t): _follower.values(t) for t in tensors if isinstance(t, ForeignTensor)}
            if all(value is not None for value in values.values()):
                args, kwargs = pytree.tree_map(lambda leaf: values.get(id(leaf), leaf), (args, kwargs or {}))
                return func(*args, **kwargs)
        if func.overloadpacket not in _FORMS and not _done_elsewhere(func, tensors):
            found.place.refuse(f"{func.overloadpacket.__name__}()")
        made = func(*pytree.tree_map(_by_form, args), **pytree.tree_map(_by_form, kwargs or {}))
        if func._schema.is_mutable:
            return args[0]
        return ForeignTensor.of(made, found.place) if isinstance(made, torch.Tensor) and made.is_meta else made

    @property
    def data(self) -> torch.Tensor:
        return ForeignTensor.of(self, self.place)

    @data.setter
    def data(self, value: Any) -> None:
        if _follower is not None and (here := _follower.values(self)) is not None:
            given = value._here() if isinstance(value, ForeignTensor) else None
            here.data = value if given is None else given
            return
        if not isinstance(value, ForeignTensor) or value.place.rank != self.place.rank:
            self.place.refuse("setting .data")

    @property
    def grad(self) -> Any:  # type: ignore[override]
        """None, since gradients are on the stage of the values, unless a follower brings it. Optimizers skip None."""
        frame: Any = sys._getframe(1)
        while frame.f_code.co_name.startswith("<") and frame.f_back is not None:  # the frame of a comprehension
            frame = frame.f_back
        found = None if _follower is None else _follower.gradient(self, frame)
        if found is not None:
            return found[0]
        if (frame.f_globals.get("__name__"), frame.f_code.co_name) in _NORMS:
            raise ForeignTensorError(
                f"{frame.f_code.co_name}() takes the norm of the gradients it finds, and the gradient of parameter "
                f"{self.place.name!r} is on stage {self.place.stage} (rank {self.place.rank}). Do one of these: use "
                "gradient_clip_val or self.clip_gradients(...), which clip by the norm over all stages; or put the code, on "
                "every rank, inside `with trainer.strategy.whole_parameters(gradients=True):`."
            )
        return None

    @grad.setter
    def grad(self, value: Any) -> None:
        if value is not None and (_follower is None or not _follower.set_gradient(self, value)):
            self.place.refuse("setting .grad")

    @grad.deleter
    def grad(self) -> None:
        return

    @property
    def is_meta(self) -> bool:  # type: ignore[override]
        if _follower is not None:
            _follower.told_apart(sys._getframe(1))
        return True

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The meta device; for code that is followed, the device on which it makes tensors to compute with this one."""
        return torch.device("meta") if _follower is None else _follower.device

    def _here(self) -> torch.Tensor | None:
        return None if _follower is None else _follower.values(self)

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
        return (
            f"{type(self).__name__}({self.place.name!r}, on stage {self.place.stage}, shape={tuple(self.shape)}, "
            f"dtype={self.dtype}, requires_grad={self.requires_grad})"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        if id(self) not in memo:
            kind = type(self)
            here = self._here()
            memo[id(self)] = (
                kind.of(self, self.place, self.requires_grad) if here is None else copy.deepcopy(here, memo)
            )
        copied: torch.Tensor = memo[id(self)]
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        here = self._here()
        return self.place.refuse("saving (pickling) it") if here is None else here.__reduce_ex__(protocol)

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        here = self._here()
        return self.place.refuse("converting it to an array") if here is None else here.__array__(*args, **kwargs)


def _refusing(method: str) -> Any:
    def refuse(self: ForeignTensor, *args: Any, **kwargs: Any) -> Any:
        here = self._here()
        if here is not None:
            return getattr(here, method)(*args, **kwargs)
        self.place.refuse(f"{method}()")

    return refuse


for _method in ("numpy", "tolist", "data_ptr", "untyped_storage", "share_memory_", "__dlpack__"):
    setattr(ForeignTensor, _method, _refusing(_method))
ForeignTensor.storage = ForeignTensor._typed_storage = ForeignTensor.untyped_storage  # type: ignore[method-assign]
ForeignTensor.__dlpack_device__ = ForeignTensor.__dlpack__  # type: ignore[method-assign,assignment]


class ForeignParameter(ForeignTensor):
    """A parameter of another stage, for which `isinstance(..., nn.Parameter)` is true."""

    _is_param = True


def become(parameter: nn.Parameter, place: Place | None) -> torch.Tensor:
    """Make a parameter foreign in place and free its memory. Without a place it becomes a plain meta tensor.

    Returns the tensor that has the content of the parameter now, and its memory as long as somebody holds it.
    """
    other: torch.Tensor
    if place is None:
        other = nn.Parameter(_form(parameter), requires_grad=parameter.requires_grad)
        _exchange(parameter, other)
        parameter.__dict__.pop(_PLACE, None)
    else:
        other = ForeignParameter.of(parameter, place, parameter.requires_grad)
        _exchange(parameter, other)
        parameter.__dict__[_PLACE] = place
    return other


def come_back(parameter: nn.Parameter, other: torch.Tensor) -> None:
    """Give a foreign parameter the content that `become` has returned; whether it is trained may have changed since."""
    trained = parameter.requires_grad
    _exchange(parameter, other)
    parameter.__dict__.pop(_PLACE, None)
    parameter.requires_grad_(trained)


def fill_in(parameter: nn.Parameter, values: torch.Tensor) -> None:
    """Give values to a foreign parameter, in place."""
    other = nn.Parameter(values, requires_grad=parameter.requires_grad)
    _exchange(parameter, other)
    place = parameter.__dict__.pop(_PLACE, None)
    if place is not None:  # code in the middle of a call may still hold what was exchanged
        other.__dict__[_PLACE] = place


def _exchange(one: torch.Tensor, other: torch.Tensor) -> None:
    """Swap the contents of two tensors, but not their attributes, such as marks for an optimizer.

    `torch.utils.swap_tensors` refuses tensors with other references, which is the case here.
    """
    one.__class__, other.__class__ = other.__class__, one.__class__
    torch._C._swap_tensor_impl(one, other)  # type: ignore[attr-defined]


def _done_elsewhere(func: Any, tensors: list[torch.Tensor]) -> bool:
    """Return whether another rank computes this op, since all ranks run the same code.

    This holds for arithmetic on tensors of one other rank and plain numbers: `target.mul_(m).add_(online, alpha=1 - m)`.
    """
    arithmetic = torch.Tag.pointwise in func.tags or func is _aten.copy_.default
    if not arithmetic or torch.Tag.nondeterministic_seeded in func.tags or func._overloadname.endswith("out"):
        return False
    if any(
        str(result.type) != "Tensor" for result in func._schema.returns
    ):  # a number, on which Python code may branch
        return False
    return len({t.place.rank if isinstance(t, ForeignTensor) else None for t in tensors}) == 1


def _by_form(value: Any) -> Any:
    return _form(value) if isinstance(value, ForeignTensor) else value


def _form(tensor: torch.Tensor) -> torch.Tensor:
    """Return a meta tensor of the same form."""
    if isinstance(tensor, ForeignTensor):
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    return torch.empty_like(tensor.detach(), device="meta")
