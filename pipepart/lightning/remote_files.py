"""Files at addresses of object stores and other file systems of fsspec, such as `s3://bucket/runs/last.ckpt`.

A file appears at its address when all of it was sent, or not at all. Object stores work that way; on other systems it is sent
to `NAME.part` and renamed.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePath
from typing import Any

import fsspec

from pipepart.errors import ConfigError

__all__ = ["MANIFEST", "RemoteFile", "check_address", "is_remote", "received", "send_folder", "sent_from"]

MANIFEST = "manifest.json"
"""The file of a sharded checkpoint that is written last."""
_WHOLE_OR_NOT = frozenset({"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "oss", "r2", "oci", "memory"})
"""Protocols whose files appear when they are complete, and replace others in one step."""
_READ_ONLY = frozenset({"http", "https", "data", "zip", "tar", "github", "git"})
_MANGLED = re.compile(r"^[a-z][a-z0-9+.-]+:/[^/]")


def is_remote(path: Any) -> bool:
    """Whether a path is an address such as `s3://bucket/name`. ConfigError: it was one before it became a `Path`."""
    text = str(path)
    if isinstance(path, PurePath) and _MANGLED.match(text):
        raise ConfigError(
            f"{text} is an address that pathlib has changed: pass it as a string ({text.replace(':/', '://', 1)})"
        )
    return "://" in text


def check_address(address: Any, processes: int, source: str, writes: bool = True) -> None:
    """Refuse an address that this run cannot use: no file system for it, a read-only one, or the memory of one process."""
    protocol = str(address).partition("://")[0]
    try:
        fsspec.get_filesystem_class(protocol)
    except (ImportError, ValueError) as error:
        raise ConfigError(f"{source}={address}: there is no file system for {protocol}:// here: {error}") from error
    if writes and protocol in _READ_ONLY:
        raise ConfigError(
            f"{source}={address}: nothing can be written to {protocol}://; use a folder or an object store"
        )
    if protocol == "memory" and processes > 1:
        raise ConfigError(
            f"{source}={address}: memory:// is the memory of one process, and this run has {processes}, which would not see "
            "the files of each other. Use a folder or an object store."
        )


@dataclass(frozen=True)
class RemoteFile:
    """A file or a folder at an address. Methods raise the errors of its file system."""

    address: str

    @classmethod
    def at(cls, address: Any) -> RemoteFile:
        return cls(str(address).rstrip("/"))

    def __str__(self) -> str:
        return self.address

    def __truediv__(self, name: str) -> RemoteFile:
        return RemoteFile(f"{self.address}/{name}")

    @property
    def name(self) -> str:
        return self.address.rpartition("/")[2]

    @property
    def parent(self) -> RemoteFile:
        return RemoteFile(self.address.rpartition("/")[0])

    @cached_property
    def _place(self) -> tuple[Any, str]:
        fs, path = fsspec.core.url_to_fs(self.address)
        return fs, path

    @property
    def fs(self) -> Any:
        """The file system, without what it remembers of folders: other processes write there, too."""
        fs = self._place[0]
        fs.invalidate_cache()
        return fs

    @property
    def path(self) -> str:
        """The place in the file system."""
        return self._place[1]

    def is_file(self) -> bool:
        return self._kind() == "file"

    def exists(self) -> bool:
        return self._kind() is not None

    def _kind(self) -> str | None:
        """Return "file", "directory", or None if there is nothing. That the store cannot be reached is an error, not None."""
        try:
            return str(self.fs.info(self.path)["type"])
        except FileNotFoundError:
            return None

    def children(self) -> list[RemoteFile]:
        """The files and folders in this folder; none if there is no such folder."""
        try:
            found = self.fs.ls(self.path, detail=False)
        except FileNotFoundError:
            return []
        names = [str(path).rstrip("/").rpartition("/")[2] for path in found]
        return [self / name for name in names if name and name != self.name]

    def changed(self) -> str:
        """What differs after a checkpoint was written again, a file or a folder with a manifest: later ones are larger."""
        file = self if self.is_file() else self / MANIFEST
        try:
            return str(file.fs.modified(file.path).isoformat())
        except NotImplementedError:  # the file system knows no times
            return str(file.fs.info(file.path).get("size"))

    def read(self) -> bytes:
        content: bytes = self.fs.cat_file(self.path)
        return content

    def write(self, content: bytes) -> None:
        """Write a small file as a whole."""
        fs = self.fs
        fs.makedirs(self.parent.path, exist_ok=True)
        self._whole(lambda path: fs.pipe_file(path, content))

    def send(self, file: Path) -> None:
        """Copy a file of this host to this address."""
        fs = self.fs
        fs.makedirs(self.parent.path, exist_ok=True)
        self._whole(lambda path: fs.put_file(str(file), path))

    def _whole(self, write: Any) -> None:
        fs, path = self._place
        if self.address.partition("://")[0] in _WHOLE_OR_NOT:
            write(path)
            return
        write(f"{path}.part")
        fs.mv(f"{path}.part", path)

    def remove(self) -> None:
        """Remove the file, or the folder with all that is in it. Nothing happens if there is none."""
        with suppress(FileNotFoundError):
            self.fs.rm(self.path, recursive=True)


@contextmanager
def received(address: Any) -> Iterator[Path]:
    """Inside, a copy of a remote file in the folder of temporary files. What has mapped it keeps its content afterwards."""
    source = RemoteFile.at(address)
    with tempfile.TemporaryDirectory(prefix="pipepart-received-") as folder:
        copy = Path(folder) / source.name
        source.fs.get_file(source.path, str(copy))
        yield copy


@contextmanager
def sent_from(address: Any) -> Iterator[Path]:
    """Inside, the path of a temporary file; afterwards it is copied to the address."""
    target = RemoteFile.at(address)
    folder = Path(tempfile.mkdtemp(prefix="pipepart-sent-"))
    try:
        yield folder / target.name
        target.send(folder / target.name)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def send_folder(folder: Path, address: Any, leave_out: tuple[str, ...] = ()) -> int:
    """Copy the files below a folder to an address, without those of the top-level names; returns their number."""
    count, target = 0, RemoteFile.at(address)
    for place, folders, names in os.walk(folder):
        if Path(place) == folder:
            folders[:] = [name for name in folders if name not in leave_out]
        for name in names:
            file = Path(place) / name
            if file.is_file() and not file.is_symlink():
                RemoteFile(f"{target}/{file.relative_to(folder).as_posix()}").send(file)
                count += 1
    return count
