"""The user's code that a recorded call can reach, and the variables of files and enclosing functions that it names.

The code is found by reading byte code from the entry on: names of functions, and names of methods of the classes that
take part. Hooks of a LightningModule that no step calls are not reached, so a recording does not depend on variables that
they alone use.
"""

from __future__ import annotations

import dis
import functools
import sys
import types
from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary

import torch.nn as nn

from pipepart.recording.model_state.places import MISSING, Cell, Place, is_plain_value

__all__ = ["OWN_NAMES", "functions_of", "is_foreign", "is_library", "user_classes", "variables"]

OWN_NAMES = frozenset(set(vars(nn.Module())) - {"training"}) | {
    "_trainer", "_fabric", "_device", "_dtype", "_current_fx_name", "_param_requires_grad_state", "_metric_attributes",
    "_compiler_ctx", "_example_input_array", "_automatic_optimization", "_fabric_optimizers", "_jit_is_scripting",
    "_should_prevent_trainer_and_dataloaders_deepcopy", "_hparams_initial", "_hparams_name", "_log_hyperparams",
    "_strict_loading", "_pipepart_cut", "_use_distributed", "_compiled_call_impl", "prepare_data_per_node",
    "allow_zero_length_dataloader_with_multiple_devices", "_device_mesh", "trainer", "log", "log_dict", "print",
    "manual_backward", "optimizers", "lr_schedulers", "toggle_optimizer", "untoggle_optimizer",
    "toggled_optimizer", "clip_gradients", "forward",
}  # fmt: skip
"""Attributes of modules that belong to torch and Lightning, or are replaced while a step is recorded.

All other attributes, private ones included, belong to the user.
"""
_LIBRARIES = frozenset(
    {"torch", "torchmetrics", "lightning", "pytorch_lightning", "lightning_fabric", "lightning_utilities", "pipepart",
     "numpy", "torchgen", "sympy"}
)  # fmt: skip
_MOST = 3000
"""Largest number of functions whose code is read; no known model has more functions of its own."""


def is_library(module_name: str | None) -> bool:
    """Return whether code of this module belongs to torch or to another library that keeps no state of the user."""
    return (module_name or "").partition(".")[0] in _LIBRARIES


def is_foreign(module_name: str | None) -> bool:
    """Return whether code of this module belongs to one of the libraries of `is_library`, or to Python itself."""
    package = (module_name or "").partition(".")[0]
    return package in _LIBRARIES or (package in sys.stdlib_module_names and package != "__main__")


def user_classes(kind: type) -> list[type]:
    """Return a class and its bases, without those of libraries and of Python."""
    return [base for base in kind.__mro__ if not is_foreign(base.__module__)]


def functions_of(kind: type) -> list[Any]:
    """Return the functions that the user wrote in a class: methods, getters of properties, static and class methods."""
    if kind not in _functions:
        members = (_bare(member) for base in user_classes(kind) for member in vars(base).values())
        _functions[kind] = [member for member in members if isinstance(member, types.FunctionType)]
    return _functions[kind]


def _bare(member: Any) -> Any:
    if isinstance(member, property):
        return member.fget
    return member.__func__ if isinstance(member, (staticmethod, classmethod)) else member


_functions: WeakKeyDictionary[type, list[Any]] = WeakKeyDictionary()
"""The keys are weak, because classes that are made for one recording refer to the recorded module."""


class _Uses:
    """The names in a code object: global variables, attributes, and attributes of global variables."""

    def __init__(self, code: types.CodeType) -> None:
        self.globals: set[str] = set()
        self.attributes: set[str] = set()
        self.pairs: set[tuple[str, str]] = set()
        last = None
        for instruction in dis.get_instructions(code):
            if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                self.globals.add(instruction.argval)
                last = instruction.argval
            elif instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"):
                self.attributes.add(instruction.argval)
                if last is not None:
                    self.pairs.add((last, instruction.argval))
                last = None
            elif instruction.opname not in ("CACHE", "EXTENDED_ARG", "PRECALL"):
                last = None
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                inner = _uses(constant)
                self.globals |= inner.globals
                self.attributes |= inner.attributes
                self.pairs |= inner.pairs


def _uses(code: types.CodeType) -> _Uses:
    if code not in _known:
        _known[code] = _Uses(code)
    return _known[code]


_known: WeakKeyDictionary[types.CodeType, _Uses] = WeakKeyDictionary()


def variables(entries: Iterable[Any], modules: Iterable[tuple[str, nn.Module]]) -> list[Place]:
    """Return the variables outside of modules that the code can use; `entries` are the functions that the call begins with."""
    search = _Search()
    classes: set[type] = set()
    for path, module in modules:
        entered = path == "" or not is_foreign(type(module).__module__)
        if type(module) not in classes:
            classes.add(type(module))
            search.add_class(type(module), entered)
        if entered and "forward" in vars(module):  # put on the object, in place of the method
            search.add(vars(module)["forward"])
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values()):
            search.add(hook)
        for name, value in vars(module).items():
            if isinstance(value, (types.FunctionType, types.MethodType, functools.partial)):
                search.methods.setdefault(name, []).append(value)
            elif hasattr(value, "__dict__") and type(value) not in classes and not isinstance(value, type):
                classes.add(type(value))
                search.add_class(type(value))
    for entry in entries:
        search.add(entry)
    search.run()
    return list(search.found.values())


class _Search:
    def __init__(self) -> None:
        self.found: dict[str, Place] = {}
        self.methods: dict[str, list[Any]] = {}
        self.named: set[str] = set()
        self.queue: list[Any] = []
        self.seen: set[int] = set()
        self.cells: set[int] = set()

    def add_class(self, kind: type, entered: bool = False) -> None:
        """Add a class that takes part. Its methods are reached by name; `forward` is reached if the module is `entered`."""
        for function in functions_of(kind):
            self.methods.setdefault(function.__name__, []).append(function)
            if function.__name__ in self.named or (entered and function.__name__ == "forward"):
                self._queue(function)

    def add(self, value: Any) -> None:
        """Add something that is called: a function, a method, a partial, an object with ``__call__``."""
        while isinstance(value, functools.partial):
            for given in (*value.args, *value.keywords.values()):
                if isinstance(given, (types.FunctionType, types.MethodType, functools.partial)):
                    self.add(given)
            value = value.func
        value = getattr(value, "__func__", value)
        while hasattr(value, "__wrapped__") and isinstance(value, types.FunctionType):
            self._queue(value)
            value = getattr(value, "__wrapped__")  # noqa: B009
        if isinstance(value, types.FunctionType):
            self._queue(value)
        elif not isinstance(value, (type, types.BuiltinFunctionType)) and callable(value):
            self.named.add("__call__")
            self.add_class(type(value))

    def _queue(self, function: Any) -> None:
        if id(function) not in self.seen and not is_foreign(function.__globals__.get("__name__")):
            self.seen.add(id(function))
            self.queue.append(function)

    def run(self) -> None:
        while self.queue and len(self.seen) < _MOST:
            self._look(self.queue.pop())

    def _look(self, function: Any) -> None:
        uses = _uses(function.__code__)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
            if name != "__class__" and id(cell) not in self.cells:
                self.cells.add(id(cell))
                text = f"variable {name!r} around {function.__qualname__}"
                self._variable(Place(self._free(text), Cell(cell), "value"))
        variables = function.__globals__
        for name in uses.globals:
            value = variables.get(name, MISSING)
            if value is MISSING:
                continue
            if isinstance(value, types.ModuleType):
                if not is_foreign(value.__name__):
                    for first, attribute in uses.pairs:
                        if first == name and attribute in vars(value):
                            self._variable(Place(f"{value.__name__}.{attribute}", vars(value), attribute))
            else:
                place = Place(f"global {name!r} of {function.__module__}", variables, name)
                self._variable(place, installed="-packages" in function.__code__.co_filename)
        for name in uses.attributes - self.named:
            self.named.add(name)
            for method in self.methods.get(name, ()):
                self.add(method)

    def _free(self, text: str) -> str:
        count = 2
        name = text
        while name in self.found:
            name, count = f"{text} ({count})", count + 1
        return name

    def _variable(self, place: Place, installed: bool = False) -> None:
        """Add a variable; of installed libraries only plain values count, not their tables and registries."""
        if place.text in self.found:
            return
        value = place.read()
        if isinstance(value, type):
            self.add_class(value)
            return
        if isinstance(value, (types.FunctionType, types.MethodType, functools.partial)):
            self.add(value)
        elif not isinstance(value, nn.Module) and hasattr(value, "__dict__"):
            self.add_class(type(value))
        if not installed or is_plain_value(value):
            self.found[place.text] = place
