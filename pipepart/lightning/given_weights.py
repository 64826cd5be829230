"""Weights that a module brings along: `configure_weights` returns a mapping from its names to values.

Each rank asks the mapping for the tensors of its own stage only. A value of None means that the module fills the tensor itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from pipepart.errors import ConfigError, PipepartError
from pipepart.runtime.foreign import ForeignTensor
from pipepart.values import shortened

__all__ = ["GivenWeights", "gives_weights", "note_read"]

_HOOK = "configure_weights"
_READ = "_pipepart_weights_read"
"""Attribute of a module whose weights were read: later runs continue with the values that it has."""


def gives_weights(root: nn.Module) -> bool:
    """Whether a module has the hook, and its weights were not read yet."""
    return callable(getattr(root, _HOOK, None)) and not root.__dict__.get(_READ, False)


def note_read(root: nn.Module) -> None:
    """Note that a module has its weights."""
    if gives_weights(root):
        root.__dict__[_READ] = True


class GivenWeights:
    """The weights of a module for its tensors on the meta device. Faults are collected, to be raised by all ranks together."""

    def __init__(self, root: nn.Module) -> None:
        """Call the hook of the module, which must still have its empty tensors, and compare the names."""
        self.faults: list[str] = []
        self._root = type(root).__name__
        self._values: Mapping[str, torch.Tensor | None] | None = None
        self._names: dict[str, list[str]] = {}
        self._given: set[str] = set()
        if not gives_weights(root):
            return
        self._values = self._collected(getattr(root, _HOOK))
        if self._values is not None:
            self._compare(root, self._values)

    def _collected(self, action: Callable[[], Any]) -> Any:
        try:
            return action()
        except (PipepartError, OSError, ValueError, KeyError) as error:
            self.faults.append(str(error))
            return None

    def _compare(self, root: nn.Module, values: Mapping[str, torch.Tensor | None]) -> None:
        """Find names that only one side has, among the tensors that this rank holds; the ranks together hold all of them."""
        missing, full = [], []
        self._given = set(values)  # by its iterator: `in` of a plain Mapping reads the value
        for name, (tensor, names, saved) in _named(root).items():
            self._names[name] = names
            given = [alias for alias in names if alias in self._given]
            if tensor.is_meta and not isinstance(tensor, ForeignTensor) and saved and not given:
                missing.append(name)
            if given and not tensor.is_meta:
                full.append(given[0])
        if missing:
            self.faults.append(
                f"the weights lack {_listed(missing)}, which {self._root} has. If the module fills them itself, give them "
                "the value None (`fresh` of SafetensorsWeights)"
            )
        if full:
            self.faults.append(
                f"the weights have {_listed(full)}, but {self._root} was built with values for them. Build them on the meta "
                "device, or leave them out of the mapping"
            )
        known = {alias for names in self._names.values() for alias in names}
        unexpected = sorted(self._given - known)
        if unexpected:
            self.faults.append(
                f"the weights have {_listed(unexpected)}, which {self._root} does not have. Leave them out of the mapping, or "
                "build the model that the weights belong to"
            )

    def fill(self, name: str, tensor: torch.Tensor) -> bool:
        """Copy the value of a parameter or buffer (by its first name) into its memory. False: the module fills it."""
        if self._values is None or self.faults:
            return False
        aliases = [alias for alias in self._names[name] if alias in self._given]
        values: dict[str, torch.Tensor] = {}
        for alias in aliases:
            found = self._collected(lambda alias=alias: self._values[alias])  # type: ignore[misc,index]
            if found is not None:
                values[alias] = found
        if not values:
            return False
        first, value = next(iter(values.items()))
        for alias, other in list(values.items())[1:]:
            if not torch.equal(other, value):
                self.faults.append(
                    f"{first} and {alias} are tied in {self._root}, but the weights have different values"
                )
        return self._copied(first, value, tensor)

    def _copied(self, name: str, value: torch.Tensor, tensor: torch.Tensor) -> bool:
        if value.shape != tensor.shape:
            self.faults.append(
                f"{name} has the shape {tuple(value.shape)} in the weights, and {tuple(tensor.shape)} in the module"
            )
        elif value.is_floating_point() != tensor.is_floating_point():
            self.faults.append(f"{name} has the dtype {value.dtype} in the weights, and {tensor.dtype} in the module")
        else:
            with torch.no_grad():
                tensor.copy_(value)
            return True
        return False

    def refuse(self, faults: list[list[str]]) -> None:
        """Close the files, and raise the faults of all ranks. All ranks must pass those of all ranks."""
        close = getattr(self._values, "close", None)
        if callable(close):
            close()
        every = list(dict.fromkeys(fault for found in faults for fault in found))
        if every:
            shown = "\n  ".join(every[:5]) + (f"\n  and {len(every) - 5} more" if len(every) > 5 else "")
            raise ConfigError(f"the weights of {self._root}.{_HOOK}() do not fit the model:\n  {shown}")


def _named(root: nn.Module) -> dict[str, tuple[torch.Tensor, list[str], bool]]:
    """Each tensor by its first name, with all its names (a tied tensor has several) and whether checkpoints have it."""
    firsts: dict[int, str] = {}
    found: dict[str, tuple[torch.Tensor, list[str], bool]] = {}
    for path, module in root.named_modules():
        for registry in (module._parameters, module._buffers):
            for key, tensor in registry.items():
                if tensor is None:
                    continue
                name = f"{path}.{key}" if path else key
                first = firsts.setdefault(id(tensor), name)
                _, names, saved = found.get(first, (tensor, [], False))
                found[first] = tensor, [*names, name], saved or key not in module._non_persistent_buffers_set
    return found


def _listed(names: list[str]) -> str:
    return ", ".join(shortened(name) for name in names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
