"""Compiles the stand-in device once, and keeps the library in a folder that is named after what it was made from."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sysconfig
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

__all__ = ["built_library", "compile_seconds", "unavailable"]

_HERE = Path(__file__).parent
_OPTIONS = ("-std=c++20", "-O1", "-fPIC", "-w")
_LIMIT = 900.0
"""Seconds that the compiler may take for one file, on a machine that is busy with other things."""


def unavailable() -> str | None:
    """Why the stand-in cannot be used on this machine, or None."""
    import torch

    if _compiler() is None:
        return "the stand-in device needs a C++ compiler (g++ or clang++), and none was found"
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
        return "the stand-in device needs Python.h, which is not installed"
    if tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2]) < (2, 9):
        return f"the stand-in device is written for torch 2.9 and newer, this is {torch.__version__}"
    return None


def built_library() -> Path:
    """The path of the compiled library; other processes that ask for it at the same time wait for the same build."""
    reason = unavailable()
    if reason is not None:
        raise RuntimeError(reason)
    folder = _folder()
    library = folder / "libstandin.so"
    if library.exists():
        return library
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            started = time.monotonic()
            _compile(library)
            (folder / "seconds").write_text(f"{time.monotonic() - started:.1f}")
    return library


def compile_seconds() -> float:
    """How long the compiler took when the library was made."""
    return float((built_library().parent / "seconds").read_text())


def _compiler() -> str | None:
    return os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")


def _folder() -> Path:
    import torch

    made_from = hashlib.sha256()
    for part in (torch.__version__, torch.__file__, sysconfig.get_paths()["include"], *_OPTIONS):
        made_from.update(part.encode())
    for path in sorted([*_HERE.glob("*.cpp"), *_HERE.glob("*.h")]):
        made_from.update(path.name.encode() + path.read_bytes())
    return _cache() / made_from.hexdigest()[:20]


def _cache() -> Path:
    """Not the cache of the tests, which is new for each run. Nobody else may write into it."""
    given = os.environ.get("STANDIN_CACHE")
    if given:
        return Path(given)
    folder = Path(tempfile.gettempdir()) / f"pipepart-standin-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise RuntimeError(
            f"{folder} belongs to somebody else, or others may write into it: set STANDIN_CACHE to a folder"
        )
    return folder


def _compile(library: Path) -> None:
    from torch.utils.cpp_extension import include_paths, library_paths

    places = [*include_paths(), sysconfig.get_paths()["include"]]
    includes = [option for place in places for option in ("-isystem", place)]
    with tempfile.TemporaryDirectory(dir=library.parent) as scratch:

        def one(source: Path) -> str:
            made = os.path.join(scratch, f"{source.stem}.o")
            _run([str(_compiler()), *_OPTIONS, *includes, "-c", str(source), "-o", made])
            return made

        with ThreadPoolExecutor(max_workers=max(1, len(os.sched_getaffinity(0)))) as pool:
            objects = list(pool.map(one, sorted(_HERE.glob("*.cpp"), key=lambda path: -path.stat().st_size)))
        folders = [option for place in library_paths() for option in ("-L" + place, "-Wl,-rpath," + place)]
        made = os.path.join(scratch, library.name)
        needed = ["-ltorch_python", "-ltorch", "-ltorch_cpu", "-lc10"]
        _run([str(_compiler()), "-shared", *objects, *folders, *needed, "-o", made])
        os.replace(made, library)


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT)
    if done.returncode != 0:
        errors = "\n".join(line for line in done.stderr.splitlines() if "error" in line)[:4000]
        raise RuntimeError(
            f"the stand-in device does not compile\ncommand: {' '.join(command)}\n{errors or done.stderr[-4000:]}"
        )
