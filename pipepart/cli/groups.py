"""The configuration folder, its groups and their options, read from the names and first comments of files."""

from __future__ import annotations

from pathlib import Path

from pipepart.cli.console import bold
from pipepart.errors import ConfigError

__all__ = ["conf_folder", "group_help", "group_options", "groups", "recipes_text"]


def conf_folder() -> Path:
    """`conf/` inside the package (installed from a wheel), or beside it (a checkout)."""
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "conf", package.parent / "conf"):
        if (folder / "train.yaml").is_file():
            return folder
    raise ConfigError("the folder conf/ is missing beside and inside the package: install pipepart again")


def _folders(extra: Path | None) -> list[Path]:
    if extra is not None and not extra.is_dir():
        raise ConfigError(f"--config-dir {str(extra)!r} is not a folder")
    return [*([extra] if extra else []), conf_folder()]


def groups(extra: Path | None = None) -> list[str]:
    """The configuration groups; `extra` is the user's own folder."""
    return sorted({path.name for folder in _folders(extra) for path in folder.iterdir() if path.is_dir()} - {"hydra"})


def group_options(group: str, extra: Path | None = None) -> list[str]:
    """The options of a group: the names of its files."""
    return sorted({path.stem for folder in _folders(extra) for path in (folder / group).glob("*.yaml")})


def _comment(group: str, option: str, extra: Path | None) -> str:
    """The first comment in the file of an option."""
    path = next(file for folder in _folders(extra) if (file := folder / group / f"{option}.yaml").is_file())
    lines = path.read_text().splitlines()
    return next((line[1:].strip() for line in lines if line.startswith("#") and "@package" not in line), "")


def recipes_text(extra: Path | None = None) -> str:
    """All recipes with one line each, and the command that trains one."""
    lines = {name: _comment("recipe", name, extra) for name in group_options("recipe", extra)}
    lines["plain_pytorch"] = "A loop without Lightning: torchrun --nproc-per-node 2 -m recipes.plain_pytorch"
    width = max(map(len, lines))
    return "\n".join(
        ["pipepart train recipe=NAME", "", *(f"  {bold(name.ljust(width))}  {text}" for name, text in lines.items())]
    )


def group_help() -> str:
    """The groups of a run and their options, for --help."""
    return "\n".join(f"  {group:<10} {', '.join(group_options(group))}" for group in groups() if group != "cluster")
