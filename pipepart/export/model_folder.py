"""A model of the transformers library as a folder that `from_pretrained` loads."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pipepart.export.network import CannotExport, Network

__all__ = ["is_library_model", "open_folder", "save_tokenizer", "write_folder"]


def is_library_model(module: nn.Module) -> bool:
    """Whether a module is a model of transformers, or one with adapters of peft."""
    return _is_a(module, "transformers", "PreTrainedModel") or _is_a(module, "peft", "PeftModel")


def _is_a(module: Any, library: str, name: str) -> bool:
    """Whether a module is of a class of a library; it cannot be if nothing has imported the library."""
    if library not in sys.modules:
        return False
    with suppress(ImportError, AttributeError):
        return isinstance(module, getattr(sys.modules[library], name))
    return False


def write_folder(network: Network, target: Path, quantize: str | None) -> None:
    """Write the configuration and the weights. Adapters are merged into the weights."""
    model: Any = network.module
    if not is_library_model(model):
        raise CannotExport(
            f"{type(model).__name__} is not a model of the transformers library, so --to hf cannot write it; use onnx, pt2 or "
            "safetensors"
        )
    if quantize is not None:
        raise CannotExport(
            f"--to hf takes no --quantize {quantize}: from_pretrained quantizes a folder when it loads it"
        )
    if _is_a(model, "peft", "PeftModel"):
        model = deepcopy(model).merge_and_unload()
    with _without_bars():
        model.save_pretrained(target)


@contextmanager
def _without_bars() -> Iterator[None]:
    """Hide the progress bars of transformers."""
    said: Any = import_module("transformers.utils.logging")
    shown = said.is_progress_bar_enabled()
    said.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            said.enable_progress_bar()


def save_tokenizer(owners: Iterable[Any], target: Path) -> bool:
    """Write the tokenizer that one of the objects has as its attribute; whether there was one."""
    for owner in owners:
        tokenizer: Any = getattr(owner, "tokenizer", None)
        if callable(getattr(tokenizer, "save_pretrained", None)):
            tokenizer.save_pretrained(target)
            return True
    return False


def open_folder(network: Network, target: Path) -> Callable[[Sequence[torch.Tensor]], tuple[torch.Tensor, ...]]:
    """The model that `from_pretrained` of its class loads from the folder, in the place of the original."""
    model: Any = network.module
    kind = type(model.get_base_model() if _is_a(model, "peft", "PeftModel") else model)
    function: Any = deepcopy(network.function)
    with _without_bars():
        function.network = kind.from_pretrained(target, local_files_only=True).eval()

    def run(values: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        with torch.no_grad():
            return tuple(function(*values))

    return run
