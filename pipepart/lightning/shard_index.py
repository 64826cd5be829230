"""The index of a sharded checkpoint (`.metadata`), read without running code.

torch.distributed.checkpoint writes the index as a pickle, and a pickle can call any function when it is read. Here the
classes of the index are replaced by stand-ins that only hold values, all other classes are refused by name, and the objects
of torch are made from the values after their types have been checked.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint._fsspec_filesystem import FileSystem
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from pipepart.lightning.checkpoint_files import CheckpointError
from pipepart.lightning.remote_files import is_remote
from pipepart.values import MOST_WHOLE

__all__ = ["ShardReader"]

_INDEX = ".metadata"
_METADATA = "torch.distributed.checkpoint.metadata"
_HELD = {
    **dict.fromkeys(
        (
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
        ),
        _METADATA,
    ),
    "_StorageInfo": "torch.distributed.checkpoint.filesystem",
}
"""Classes of the index with fields, and their modules."""


class ShardReader(FileSystemReader):
    """Reader of torch's files of tensors, in a folder or at an address, that reads the index without running code."""

    def __init__(self, path: Any) -> None:
        super().__init__(path)
        if is_remote(path):
            self.fs: Any = FileSystem()
            self.path = self.fs.init_path(str(path))

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        path = self.fs.concat_path(self.path, _INDEX)
        try:
            with self.fs.create_stream(path, "rb") as file:
                metadata = _made(_Unpickler(file).load())
        except _Refused as refusal:
            raise CheckpointError(
                f"the checkpoint {self.path} is refused: its index {_INDEX} names {refusal}, which is not part of an index "
                "of tensors and could run code. Use a checkpoint from a source that you trust."
            ) from refusal
        except Exception as error:  # unpickling and wrong types raise errors of many kinds
            raise CheckpointError(
                f"the checkpoint {self.path} cannot be read: its index {_INDEX} is not valid: {error}"
            ) from error
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return metadata


class _Refused(pickle.UnpicklingError):
    """The file names a class or function that an index does not have."""


class _Held:
    """The fields of an object of the index, as the file has them."""

    fields: Any = None

    def __setstate__(self, state: Any) -> None:
        self.fields = state


class _Unpickler(pickle.Unpickler):
    """Unpickler that makes plain values and `_Held` objects only."""

    def __init__(self, file: Any) -> None:
        super().__init__(file)
        # New ones for each file, since a pickle can set attributes of all objects that it gets.
        self._known: dict[tuple[str, str], Any] = {
            **{(module, name): type(name, (_Held,), {}) for name, module in _HELD.items()},
            ("torch", "Size"): lambda sizes=(): tuple(sizes),
            ("torch.serialization", "_get_layout"): lambda name: name,
            (_METADATA, "_MEM_FORMAT_ENCODING"): lambda value: value,
            ("builtins", "getattr"): lambda kind, name: name,  # some versions of Python write members of enums so
            ("collections", "OrderedDict"): dict,
        }
        for module in (
            "pathlib",
            "pathlib._local",
        ):  # the folder in which the checkpoint was written, which is not used
            for name in ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"):
                self._known[module, name] = lambda *parts: None

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in self._known:
            return self._known[module, name]
        dtype = vars(torch).get(name) if module == "torch" else None
        if isinstance(dtype, torch.dtype):
            return dtype
        raise _Refused(f"{module}.{name}")


def _made(value: Any) -> Metadata:
    """The objects of torch from the values of a file. ValueError: a value has a wrong type."""
    top = _fields(value, "Metadata")
    tensors: dict[str, Any] = {
        _text(name): _tensor(name, entry) for name, entry in _dict(top.get("state_dict_metadata")).items()
    }
    stored = {_place(key): _storage(entry) for key, entry in _dict(top.get("storage_data")).items()}
    version = top.get("version")
    return Metadata(tensors, storage_data=stored, version=None if version is None else _text(version))


def _tensor(name: str, entry: Any) -> TensorStorageMetadata:
    fields = _fields(entry, "TensorStorageMetadata")
    properties, chunks = fields.get("properties"), fields.get("chunks")
    state = properties.fields if isinstance(properties, _Held) else None
    if not isinstance(state, tuple) or not state or not isinstance(state[0], torch.dtype):
        raise ValueError(f"{name} has no dtype")
    if not isinstance(chunks, list):
        raise ValueError(f"{name} has no list of chunks")
    parts = [_fields(chunk, "ChunkStorageMetadata") for chunk in chunks]
    return TensorStorageMetadata(
        TensorProperties(dtype=state[0]),
        _sizes(fields.get("size")),
        [ChunkStorageMetadata(_sizes(part.get("offsets")), _sizes(part.get("sizes"))) for part in parts],
    )


def _place(key: Any) -> MetadataIndex:
    fields = _fields(key, "MetadataIndex")
    offset, index = fields.get("offset"), fields.get("index")
    return MetadataIndex(
        _text(fields.get("fqn")),
        None if offset is None else _sizes(offset),
        None if index is None else _whole(index),
    )


def _storage(entry: Any) -> _StorageInfo:
    fields = _fields(entry, "_StorageInfo")
    file = _text(fields.get("relative_path"))
    if file != Path(file).name or "\0" in file:
        raise ValueError(f"it names the file {file!r}; expected a file inside the checkpoint")
    if fields.get("transform_descriptors") is not None:
        raise ValueError(f"the data in {file} is transformed, which pipepart does not write")
    return _StorageInfo(file, _whole(fields.get("offset")), _whole(fields.get("length")))


def _fields(value: Any, kind: str) -> dict[str, Any]:
    if not isinstance(value, _Held) or type(value).__name__ != kind:
        raise ValueError(f"it has a {type(value).__name__} in the place of a {kind}")
    return _dict(value.fields)


def _dict(value: Any) -> dict[Any, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"it has a {type(value).__name__} in the place of a dict")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"it has a {type(value).__name__} in the place of a name")
    return value


def _whole(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= MOST_WHOLE:
        raise ValueError(f"it has {type(value).__name__} values that are not numbers of elements or bytes")
    return value


def _sizes(value: Any) -> torch.Size:
    if not isinstance(value, tuple):
        raise ValueError(f"it has a {type(value).__name__} in the place of sizes")
    return torch.Size([_whole(size) for size in value])
