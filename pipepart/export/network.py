"""The network that is exported: a module in evaluation mode, seen as one function from tensors to tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree

from pipepart.errors import ConfigError, PipepartError, did_you_mean
from pipepart.export.example_inputs import named_leaves

__all__ = ["CannotExport", "Network", "part_of", "refused"]

_ROWS = 4
"""Rows of the example: at least 2, since torch takes a size of 1 for a constant."""


class CannotExport(PipepartError):
    """A model or a format cannot do what an export needs."""


class _Function(nn.Module):
    """The network as a function of its tensors in one order, with its other arguments as they were."""

    def __init__(self, network: nn.Module, leaves: Sequence[Any], form: Any, places: Sequence[int]) -> None:
        super().__init__()
        self.network = network
        self._leaves, self._form, self._places = list(leaves), form, tuple(places)

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        leaves = list(self._leaves)
        for place, tensor in zip(self._places, tensors):
            leaves[place] = tensor
        args, kwargs = _pytree.tree_unflatten(leaves, self._form)
        return tuple(value for _, value in outputs_of(self.network(*args, **kwargs)))


@dataclass(frozen=True)
class Network:
    """A network with the inputs of an example. The first dimension of its batched inputs and outputs is any number of rows."""

    module: nn.Module
    function: nn.Module
    """`module` as a function of its input tensors that returns a tuple of tensors."""
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    example: tuple[torch.Tensor, ...]
    batched: tuple[bool, ...]
    """Whether the first dimension of an input is that of the rows."""

    @classmethod
    def of(cls, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], rows: int | None = None) -> Network:
        """Describe a module by a call of it. `rows`: the rows of the call (default: those of its first tensor)."""
        module.eval()
        leaves, form = _pytree.tree_flatten((tuple(args), dict(kwargs)))
        places = [number for number, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        for leaf in leaves:
            if not isinstance(leaf, (torch.Tensor, bool, int, float, str, type(None))):
                raise CannotExport(
                    f"{type(module).__name__} gets a {type(leaf).__name__}; expected tensors, numbers and texts, and "
                    "lists, tuples and mappings of them"
                )
        tensors = [leaves[place] for place in places]
        if rows is None:
            rows = next((len(tensor) for tensor in tensors if tensor.ndim), 0)
        batched = tuple(bool(tensor.ndim) and len(tensor) == rows for tensor in tensors)
        if not any(batched):
            raise CannotExport(
                f"{type(module).__name__} gets no tensor of {rows} rows, so it has no batch; its inputs have the shapes "
                f"{[tuple(tensor.shape) for tensor in tensors]}"
            )
        example = tuple(_rows_of(tensor, _ROWS) if many else tensor for tensor, many in zip(tensors, batched))
        function = _Function(module, leaves, form, places).eval()
        for place, tensor in zip(places, example):
            function._leaves[place] = tensor
        given_args, given_kwargs = _pytree.tree_unflatten(function._leaves, form)
        outputs = tuple(name for name, _ in outputs_of(_called(module, given_args, given_kwargs)))
        inputs = tuple(name for name, _ in named_leaves(module, given_args, given_kwargs))
        for place in places:
            function._leaves[place] = None  # only the form is kept
        return cls(module, function, inputs, outputs, example, batched)

    def rows(self, count: int) -> tuple[torch.Tensor, ...]:
        """The example with so many rows, which repeat."""
        return tuple(_rows_of(tensor, count) if many else tensor for tensor, many in zip(self.example, self.batched))

    def __call__(self, values: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        with torch.no_grad():
            found: tuple[torch.Tensor, ...] = self.function(*values)
        return found

    def program(self) -> torch.export.ExportedProgram:
        """The network as a program of `torch.export`, for any number of rows."""
        many = torch.export.Dim("batch", min=1)
        shapes = (tuple({0: many} if flag else {} for flag in self.batched),)
        try:
            with torch.no_grad():
                return torch.export.export(self.function, self.example, dynamic_shapes=shapes, strict=False)
        except Exception as error:
            raise refused(self, "torch.export", error) from error


def _called(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    try:
        with torch.no_grad():
            return module(*args, **kwargs)
    except Exception as error:
        raise CannotExport(
            f"{type(module).__name__} fails with {_ROWS} rows of the example: {type(error).__name__}: {error}"
        ) from error


def refused(network: Network, who: str, error: BaseException) -> CannotExport:
    """The error for a network that a library cannot export, with the first line of its reason."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return CannotExport(
        f"{type(network.module).__name__} cannot be exported: {who} raised {type(error).__name__}: "
        f"{' '.join(lines[:2])[:400]}. Weights alone need no program: --to safetensors"
    )


def outputs_of(value: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors that a network returns, with their names: the keys of mappings, the positions in tuples."""
    if isinstance(value, torch.Tensor):
        yield name or "output", value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from outputs_of(inner, f"{name}_{key}" if name else str(key))
    elif isinstance(value, (tuple, list)):
        for number, inner in enumerate(value):
            yield from outputs_of(inner, f"{name or 'output'}_{number}")
    elif value is not None:
        raise CannotExport(
            f"the network returns a {type(value).__name__}; expected tensors, and mappings, tuples and lists of them"
        )


def part_of(root: nn.Module, path: str | None, wanted: Callable[[nn.Module], bool] | None = None) -> nn.Module:
    """The part of a module that is exported: the one at `path`, else the module that its steps call.

    That is the module itself if it has a forward, else its only submodule with parameters. `wanted`: the kind of module that
    the format needs; the first one of that kind is taken.
    """
    if path:
        try:
            return root.get_submodule(path)
        except AttributeError as error:
            known = [name for name, _ in root.named_modules() if name]
            raise ConfigError(
                f"--module {path}: {type(root).__name__} has no such module; {did_you_mean(path, known)}"
            ) from error
    if wanted is not None:
        found = next((module for module in root.modules() if wanted(module)), None)
        if found is not None:
            return found
    if _has_forward(root):
        return root
    children = {name: child for name, child in root.named_children() if next(child.parameters(), None) is not None}
    if len(children) == 1:
        return next(iter(children.values()))
    raise ConfigError(
        f"{type(root).__name__} has no forward, and {len(children)} submodules with parameters ({', '.join(children)}): "
        "name the one to export with --module, or give the class a forward"
    )


def _has_forward(module: nn.Module) -> bool:
    """Whether a class has a forward of its own; those of torch and Lightning without one raise."""
    home = str(getattr(getattr(type(module), "forward", None), "__module__", ""))
    return not home.startswith(("torch.nn.modules.module", "lightning.pytorch.core", "pytorch_lightning.core"))


def _rows_of(tensor: torch.Tensor, count: int) -> torch.Tensor:
    return tensor[torch.arange(count, device=tensor.device) % len(tensor)].detach().clone()
