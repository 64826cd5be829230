"""Weights of a model of the transformers library: read from its folder stage by stage, and written back to such a folder."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)

from pipepart.lightning import SafetensorsWeights

__all__ = ["HuggingFaceWeights", "local_folder"]

_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]


def local_folder(pretrained: str | Path, download: bool = False) -> Path:
    """The folder of a model: a folder of yours, or the local copy of a model of the Hugging Face hub, by its name."""
    if Path(pretrained).is_dir():
        return Path(pretrained)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(str(pretrained), allow_patterns=_FILES, local_files_only=not download))


class HuggingFaceWeights(Mapping[str, "torch.Tensor | None"]):
    """The tensors of a folder by the names that they have in a LightningModule, with the conversions of transformers.

    It is made for a plain model. peft may then wrap its layers, and `rename` takes the names in the LightningModule around it.
    """

    def __init__(self, folder: Path, model: PreTrainedModel) -> None:
        self.files = SafetensorsWeights(folder)
        self._model, self._state = model, dict.fromkeys(model.state_dict(), True)
        self._inner: dict[int, tuple[str, ...]] = {}
        """All names of each parameter and buffer in the model, by its identity. A tied tensor has several."""
        for each in (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)):
            for name, tensor in each:
                self._inner[id(tensor)] = (*self._inner.get(id(tensor), ()), name)
        conversions = get_model_conversion_mapping(model)
        self._renamings = [entry for entry in conversions if isinstance(entry, WeightRenaming)]
        self._converters = [entry for entry in conversions if isinstance(entry, WeightConverter)]
        self._sources: dict[str, list[tuple[str, str | None]]] = {}
        """For each name in the model the tensors in the files, with the pattern of the conversion that combines them."""
        self._unknown = [key for key in sorted(self.files, key=dot_natural_key) if not self._placed(key)]
        used = [entry for entry in conversions if entry.was_used()]
        model._weight_conversions = used  # type: ignore[assignment]  # for writing it back
        self._names: dict[str, tuple[str, ...]] = {}

    def rename(self, root: nn.Module) -> None:
        """Take the names that the tensors of the model have in `root`, before any of them is replaced."""
        self.names = {
            name: self._inner[id(tensor)]
            for name, tensor in (*root.named_parameters(), *root.named_buffers())
            if id(tensor) in self._inner
        }
        """For the first name of each tensor in `root` all its names in the model."""
        fresh = _pattern(self._model._keys_to_ignore_on_load_missing)
        for name, aliases in self.names.items():
            found = tuple(alias for alias in aliases if alias in self._sources)
            if found or any(fresh.search(alias) for alias in aliases):
                self._names[name] = found
        ignored = _pattern(
            self._model._keys_to_ignore_on_load_unexpected, r"rotary_emb\.inv_freq", r"(^|\.)position_ids$"
        )
        self._names |= {key: () for key in self._unknown if not ignored.search(key)}  # pipepart names them in its error

    def _placed(self, key: str) -> bool:
        """Find the place of a tensor of the files in the model; False if it has none."""
        name, pattern = rename_source_key(
            key, self._renamings, self._converters, self._model.base_model_prefix, self._state
        )
        if name not in self._state and key in self._state:
            name, pattern = key, None
        if pattern is not None and len(self._converter(pattern).target_patterns) > 1:
            raise ValueError(
                f"{key} holds several tensors of {type(self._model).__name__}, which can be on several stages. Load and save "
                "the model once with from_pretrained and save_pretrained(save_original_format=False)."
            )
        if name in self._state:
            self._sources.setdefault(name, []).append((key, pattern))
        return name in self._state

    def _converter(self, pattern: str) -> WeightConverter:
        return next(entry for entry in self._converters if pattern in entry.source_patterns)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __getitem__(self, name: str) -> torch.Tensor | None:
        values = {alias: self._read(alias) for alias in self._names[name]}
        if not values:
            return None
        first, *others = values
        for other in others:
            if not torch.equal(values[first], values[other]):
                raise ValueError(
                    f"{first} and {other} are tied in {type(self._model).__name__}, but the files have different values for "
                    "them. Set tie_word_embeddings to false in config.json"
                )
        return values[first]

    def _read(self, name: str) -> torch.Tensor:
        first, pattern = self._sources[name][0]
        if pattern is None:
            return self._stored(first)
        converter: Any = deepcopy(self._converter(pattern))
        for key, own_pattern in self._sources[name]:
            converter.add_tensor(name, key, own_pattern, self._stored(key))
        found: Any = converter.convert(name, model=self._model, config=self._model.config)[name]
        return found[0] if isinstance(found, list) else found

    def _stored(self, key: str) -> torch.Tensor:
        found = self.files[key]
        assert found is not None
        return found

    def written(self, part: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The entries of a part of a state dict in the form of the folder that was read; tied ones once."""
        state = {self.names[name][0]: value for name, value in part.items() if name in self.names}
        form: dict[str, torch.Tensor] = revert_weight_conversion(self._model, state)
        return form

    def close(self) -> None:
        self.files.close()


def _pattern(*words: Any) -> re.Pattern[str]:
    found = [word for each in words for word in ([each] if isinstance(each, str) else each or ())]
    return re.compile("|".join(f"({word})" for word in found) or r"(?!)")
