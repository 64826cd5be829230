"""The functions of `torch.standin`: what torch and Lightning expect of the module of a device."""

from __future__ import annotations

import ctypes
from types import ModuleType
from typing import Any

import torch

__all__ = ["make_module"]


class _Device:
    """Makes a device the current one, as `torch.cuda.device` does."""

    def __init__(self, device: Any) -> None:
        self.index = _index(device)
        self.before = -1

    def __enter__(self) -> None:
        self.before = torch.accelerator.current_device_index()
        torch.accelerator.set_device_index(self.index)

    def __exit__(self, *_: object) -> None:
        torch.accelerator.set_device_index(self.before)


class _Properties:
    def __init__(self, index: int, memory: int) -> None:
        self.name, self.index, self.total_memory = "stand-in", index, memory

    def __repr__(self) -> str:
        return f"standin:{self.index}, {self.total_memory} bytes"


def _index(device: Any) -> int:
    if device is None:
        return torch.accelerator.current_device_index()
    if isinstance(device, int):
        return device if device >= 0 else torch.accelerator.current_device_index()
    index = torch.device(device).index
    return torch.accelerator.current_device_index() if index is None else index


def make_module(library: ctypes.PyDLL) -> ModuleType:
    """The module that is registered as `torch.standin`."""
    module = ModuleType("torch.standin")
    module.__dict__.update(_devices(library), **_memory(library), **_generators(library))
    return module


def _devices(library: ctypes.PyDLL) -> dict[str, Any]:
    def stream(of: torch.Stream | None) -> Any:
        return of if of is not None else _Device(None)

    return {
        "Stream": torch.Stream,
        "Event": torch.Event,
        "device": _Device,
        "stream": stream,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "init": lambda: None,
        "_lazy_init": lambda: None,
        "_is_in_bad_fork": lambda: False,
        "device_count": library.standin_device_count,
        "current_device": library.standin_current_device,
        "set_device": lambda device: torch.accelerator.set_device_index(_index(device)),
        "synchronize": lambda device=None: torch.accelerator.synchronize(_index(device)),
        "current_stream": lambda device=None: torch.accelerator.current_stream(_index(device)),
        "set_stream": torch.accelerator.set_stream,
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16, torch.float32],
        "is_bf16_supported": lambda including_emulation=True: True,
        "get_device_name": lambda device=None: "stand-in",
        "get_device_properties": lambda device=None: _Properties(
            _index(device), library.standin_memory_limit(_index(device))
        ),
    }


def _memory(library: ctypes.PyDLL) -> dict[str, Any]:
    def mem_get_info(device: Any = None) -> tuple[int, int]:
        limit = library.standin_memory_limit(_index(device))
        return limit - library.standin_allocated(_index(device)), limit

    def memory_stats(device: Any = None) -> dict[str, int]:
        now, peak = library.standin_allocated(_index(device)), library.standin_peak(_index(device))
        return {"allocated_bytes.all.current": now, "allocated_bytes.all.peak": peak}

    return {
        "mem_get_info": mem_get_info,
        "memory_stats": memory_stats,
        "memory_allocated": lambda device=None: library.standin_allocated(_index(device)),
        "max_memory_allocated": lambda device=None: library.standin_peak(_index(device)),
        "memory_reserved": lambda device=None: library.standin_allocated(_index(device)),
        "max_memory_reserved": lambda device=None: library.standin_peak(_index(device)),
        "reset_peak_memory_stats": lambda device=None: library.standin_reset_peak(_index(device)),
        "empty_cache": lambda: None,
    }


def _generators(library: ctypes.PyDLL) -> dict[str, Any]:
    generators = tuple(library.standin_default_generator(i) for i in range(library.standin_device_count()))

    def manual_seed_all(seed: int) -> None:
        for generator in generators:
            generator.manual_seed(int(seed))

    def get_rng_state(device: Any = None) -> torch.Tensor:
        return generators[_index(device)].get_state()

    def set_rng_state(new_state: torch.Tensor, device: Any = None) -> None:
        generators[_index(device)].set_state(new_state)

    def set_rng_state_all(new_states: list[torch.Tensor]) -> None:
        for generator, state in zip(generators, new_states):
            generator.set_state(state)

    return {
        "default_generators": generators,
        "manual_seed": lambda seed: generators[_index(None)].manual_seed(int(seed)),
        "manual_seed_all": manual_seed_all,
        "seed": lambda: generators[_index(None)].seed(),
        "initial_seed": lambda: generators[_index(None)].initial_seed(),
        "get_rng_state": get_rng_state,
        "set_rng_state": set_rng_state,
        "get_rng_state_all": lambda: [generator.get_state() for generator in generators],
        "set_rng_state_all": set_rng_state_all,
    }
