"""Imports run in one direction: a package may import only from packages to its left."""

from __future__ import annotations

import ast
from pathlib import Path

import pipepart

ORDER = [
    "errors",
    "secrets",
    "values",
    "files",
    "machine",
    "parent",
    "spare_files",
    "devices",
    "recording",
    "samples",
    "graph",
    "cost",
    "partition",
    "schedule",
    "planning",
    "options",
    "runtime",
    "build",
    "pipeline",
    "report",
    "lightning",
    "ray",
    "export",
    "cli",
]
REPORT_READERS = {"lightning", "cli"}
ROOT = Path(pipepart.__file__).parent


def imported_packages(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.add(node.module)
    return {name.split(".")[1] if "." in name else "" for name in found if name.split(".")[0] == "pipepart"}


def violations(package: str, imports: set[str]) -> set[str]:
    position = ORDER.index(package)
    known = imports - {package} - ({""} if package == "cli" else set())  # the command line may use the public surface
    wrong = {name for name in known if name not in ORDER or ORDER.index(name) > position}
    if package not in REPORT_READERS | {"report"} and "report" in imports:
        wrong.add("report")
    if package == "report":  # reads plans and traces; knows no processes
        wrong |= imports & {"runtime", "build", "pipeline", "lightning", "cli"}
    return wrong


def test_imports_run_in_one_direction() -> None:
    seen = set()
    for path in sorted(ROOT.rglob("*.py")):
        package = path.relative_to(ROOT).parts[0].removesuffix(".py")
        if package == "__init__":
            continue
        assert package in ORDER, f"{path}: {package!r} has no place in the order of imports"
        seen.add(package)
        wrong = violations(package, imported_packages(path))
        assert not wrong, (
            f"{path.relative_to(ROOT.parent)} imports {sorted(wrong)}, which is not to the left of {package!r}"
        )
    assert seen == set(ORDER)


def test_the_check_finds_a_wrong_import() -> None:
    assert violations("cost", {"recording", "runtime"}) == {"runtime"}
    assert violations("runtime", {"planning", "report"}) == {"report"}
    assert violations("report", {"planning", "runtime"}) == {"runtime"}


def test_pure_packages_know_no_processes() -> None:
    for package in ("recording", "samples", "graph", "cost", "partition", "schedule", "planning"):
        for path in (ROOT / package).rglob("*.py"):
            assert "torch.distributed" not in "".join(
                line for line in path.read_text().splitlines(True) if line.lstrip().startswith(("import ", "from "))
            ), f"{path} imports torch.distributed"


def test_each_module_has_a_name_of_its_own():
    paths = [path for path in ROOT.rglob("*.py") if path.name not in ("__init__.py", "__main__.py")]
    names = [path.stem for path in paths] + [path.parent.name for path in ROOT.rglob("__init__.py")]
    assert not {name for name in names if names.count(name) > 1}
