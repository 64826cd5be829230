"""The seal of a checkpoint file: the digest of its content, kept in the file itself.

`torch.save` writes a zip archive, and such an archive may end with a comment, which readers of archives skip:

    [ content ........................ | length of the comment ][ pipepart sha256 <64 digits> ]
      \\____________ the digest is that of all these bytes ____/

So the file stays one that torch and Lightning load, there is no second file beside it, and a file and its digest appear
under a name in one step.
"""

from __future__ import annotations

import hashlib
import os
import struct
from pathlib import Path
from typing import IO

__all__ = ["fault_of_seal", "seal"]

_MARK = b"pipepart sha256 "
_COMMENT = len(_MARK) + 64
_FIRST = b"PK\x03\x04"
_END = b"PK\x05\x06"
_END_BYTES = 22
"""Bytes of the last record of an archive without a comment."""
_LONGEST = 65_535
"""Bytes of the longest comment of an archive."""
_BLOCK = 1 << 22


def seal(file: IO[bytes]) -> None:
    """Write the digest at the end of an archive that is open for reading and writing. Other files stay as they are."""
    size = file.seek(0, os.SEEK_END)
    if size < _END_BYTES:
        return
    file.seek(size - _END_BYTES)
    last = file.read(_END_BYTES)
    if last[:4] != _END or last[-2:] != b"\0\0":
        return
    file.seek(size - 2)
    file.write(struct.pack("<H", _COMMENT))
    file.write(_MARK + _digest(file, size).encode())


def fault_of_seal(path: Path) -> str | None:
    """A sentence on the damage of a sealed file, "" if it is intact, None if it has no seal (a file from elsewhere)."""
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        content = max(0, size - _COMMENT)
        file.seek(content)
        comment = file.read(_COMMENT)
        if comment.startswith(_MARK):
            expected, digest = comment[len(_MARK) :].decode(errors="replace"), _digest(file, content)
            if digest == expected:
                return ""
            return f"its content differs from the saved one (SHA-256 {digest[:16]}..., expected {expected[:16]}...)"
        file.seek(0)
        if file.read(4) == _FIRST:
            file.seek(max(0, size - _END_BYTES - _LONGEST))
            if _END not in file.read():
                return f"it has {size:,} bytes, and its end is missing (cut off)"
    return None


def _digest(file: IO[bytes], size: int) -> str:
    """The digest of the first `size` bytes. Afterwards the file is at that place."""
    digest = hashlib.sha256()
    file.seek(0)
    while size > 0 and (block := file.read(min(_BLOCK, size))):
        digest.update(block)
        size -= len(block)
    return digest.hexdigest()
