"""What the first call of a model sets up in it: flags and hooks. Recording leaves them as one call of the model does.

A library may install hooks in the first call and set a flag, so that the next call does not install them again. One
without the other breaks the model: hooks and flags are always put back, and kept, together.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.nn as nn

__all__ = ["Hooks", "Setup", "is_plain"]

_REGISTRIES = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


def is_plain(value: Any) -> bool:
    """Whether a value is a Python number, text, None, or a tuple of such: what a module sets itself up with."""
    if isinstance(value, tuple):
        return all(is_plain(item) for item in value)
    return value is None or (
        isinstance(value, (bool, int, float, str, torch.Size)) and not str(value).endswith(" items")
    )


class Hooks:
    """The hooks of modules at one moment."""

    def __init__(self, modules: Iterable[tuple[str, nn.Module]]):
        self.before = [(path, module, _hooks_of(module)) for path, module in modules]

    def changes(self) -> Iterator[tuple[str, str]]:
        """Module path and registry of hooks that have come or gone since."""
        for path, module, hooks in self.before:
            now = _hooks_of(module)
            for name in {*hooks, *now}:
                if not _same(hooks.get(name, {}), now.get(name, {})):
                    yield path, name

    def put(self) -> None:
        """Let the modules have the hooks of that moment and no others."""
        for _, module, known in self.before:
            attributes = vars(module)
            for name in _REGISTRIES:
                hooks, wanted = attributes.get(name), known.get(name, {})
                if hooks is not None and not _same(hooks, wanted):
                    hooks.clear()
                    hooks.update(wanted)


class Setup:
    """The plain attributes and the hooks of modules at one moment."""

    def __init__(self, modules: Iterable[tuple[str, nn.Module]]):
        modules = list(modules)
        self.hooks = Hooks(modules)
        self.attributes = [
            (
                module,
                set(vars(module)),
                {key: value for key, value in vars(module).items() if key != "training" and is_plain(value)},
            )
            for _, module in modules
        ]

    def put(self) -> None:
        """Let the modules have the attributes and hooks of that moment."""
        for module, names, values in self.attributes:
            now = vars(module)
            for name in [name for name, value in now.items() if name not in names and is_plain(value)]:
                del now[name]
            now.update(values)
        self.hooks.put()


def _hooks_of(module: nn.Module) -> dict[str, dict[Any, Any]]:
    """The hooks of a module by the registry that they are in; registries without hooks are left out."""
    attributes = vars(module)
    return {name: dict(hooks) for name in _REGISTRIES if (hooks := attributes.get(name))}


def _same(a: dict[Any, Any], b: dict[Any, Any]) -> bool:
    return len(a) == len(b) and all(key in b and b[key] is hook for key, hook in a.items())
