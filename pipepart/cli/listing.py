"""What there is to choose from: recipes and groups, with the first line that their files say about themselves."""

from __future__ import annotations

from pathlib import Path

from pipepart.cli.console import bold
from pipepart.cli.folders import conf_folder, group_options, groups

__all__ = ["group_help", "recipes_text", "says"]


def says(group: str, option: str, extra: Path | None = None) -> str:
    """The comment at the top of an option's file."""
    for folder in ([extra] if extra else []) + [conf_folder()]:
        path = folder / group / f"{option}.yaml"
        if path.is_file():
            lines = path.read_text().splitlines()
            comments = [line[1:].strip() for line in lines if line.startswith("#") and "@package" not in line]
            return comments[0] if comments else ""
    return ""


def recipes_text(extra: Path | None = None) -> str:
    """All recipes with one line each, and how to start one."""
    names = group_options("recipe", extra)
    width = max(map(len, [*names, "plain_pytorch"]))
    lines = [f"  {bold(name.ljust(width))}  {says('recipe', name, extra)}" for name in names]
    plain = "A loop without Lightning: torchrun --nproc-per-node 2 -m recipes.plain_pytorch"
    lines.append(f"  {bold('plain_pytorch'.ljust(width))}  {plain}")
    return "\n".join(["pipepart train recipe=NAME", "", *lines])


def group_help(extra: Path | None = None) -> str:
    """The groups and their options, for --help."""
    lines = []
    for group in groups(extra):
        if group != "cluster":
            lines.append(f"  {group:<10} {', '.join(group_options(group, extra))}")
    return "\n".join(lines)
