"""What depends on the type of a device is in one file, and nothing else names one."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import torch

import pipepart
from pipepart import devices
from pipepart.errors import ConfigError

ROOT = Path(pipepart.__file__).parent
NAMES = re.compile(r"\b(cuda|xpu|hpu|npu|mps|hip|rocm|nccl|xccl|hccl)\b")


def _names(path: Path) -> list[str]:
    """Return the strings and attributes of a file that name a type of device or its backend; docstrings are prose."""
    tree = ast.parse(path.read_text())
    prose = {
        id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and NAMES.fullmatch(node.attr):
            found.append(f"{path.name}:{node.lineno} .{node.attr}")
        if isinstance(node, ast.Constant) and id(node) not in prose and NAMES.search(str(node.value)):
            found.append(f"{path.name}:{node.lineno} {node.value!r}")
    return found


def test_one_file_names_types_of_devices() -> None:
    found = [name for path in sorted(ROOT.rglob("*.py")) if path.name != "devices.py" for name in _names(path)]
    assert not found


def test_the_check_finds_a_named_type(tmp_path: Path) -> None:
    path = tmp_path / "wrong.py"
    path.write_text('"""On cuda."""\nimport torch\ntorch.cuda.synchronize()\nkind = "cuda:0"\n')
    assert len(_names(path)) == 2


def test_without_an_accelerator_the_device_is_the_cpu() -> None:
    if devices.accelerator() is not None:
        pytest.skip("this machine has an accelerator")
    assert devices.local_device(3) == torch.device("cpu")
    assert devices.backend_for(torch.device("cpu")) == "gloo"
    assert devices.memory_of(torch.device("cpu")) is None
    assert devices.new_stream(torch.device("cpu")) is None


@pytest.mark.parametrize("wanted", ["cuda", "cuda:1", "xpu"])
def test_a_device_that_is_not_here_is_refused(wanted: str) -> None:
    if devices.accelerator() is not None:
        pytest.skip("this machine has an accelerator")
    with pytest.raises(ConfigError, match=r"has no .* device. Use device='cpu'"):
        devices.local_device(0, wanted)


def test_a_name_that_is_no_device_is_refused() -> None:
    with pytest.raises(ConfigError, match="is no device of torch"):
        devices.local_device(0, "gpu0")
