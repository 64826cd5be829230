"""Where the configuration lies and what there is to choose from: read from the names of files, without Hydra."""

from __future__ import annotations

from pathlib import Path

from pipepart.errors import ConfigError

__all__ = ["conf_folder", "group_options", "groups"]


def conf_folder() -> Path:
    """`conf/` inside the package (installed from a wheel), or beside it (a checkout)."""
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "conf", package.parent / "conf"):
        if (folder / "train.yaml").is_file():
            return folder
    raise ConfigError("the configuration folder conf/ is missing beside and inside the package: install pipepart again")


def groups(extra: Path | None = None) -> list[str]:
    """The configuration groups."""
    folders = [conf_folder(), *([extra] if extra else [])]
    if extra is not None and not extra.is_dir():
        raise ConfigError(f"--config-dir {str(extra)!r} is no folder")
    return sorted({path.name for folder in folders for path in folder.iterdir() if path.is_dir()} - {"hydra"})


def group_options(group: str, extra: Path | None = None) -> list[str]:
    """The options of a group: its files, without those that only others are built on."""
    folders = [conf_folder(), *([extra] if extra else [])]
    return sorted({path.stem for folder in folders for path in (folder / group).glob("*.yaml")})
