"""A CPU that announces AMX on a machine that does not allow it. Its part is played by probes that really die of SIGILL.

One of them asks oneDNN for the instructions that it has really chosen in that process, so everything but the illegal
instruction itself is as on such a machine: the environment that limits, the moment at which torch chooses, the child.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from support.environment import short_imports

from pipepart.machine import limits

ROOT = Path(__file__).parents[2]
FLAGS = "fpu sse2 avx2 avx512f avx512_bf16 amx_bf16 amx_tile amx_int8"
CPU = f"processor\t: 0\nvendor_id\t: GenuineIntel\nmodel\t\t: 207\nmodel name\t: Xeon\nflags\t\t: {FLAGS}\n\n"
PROBE = """
    import os, signal
    with open(os.environ["COUNT"], "a") as count:
        count.write("x")
    if os.environ.get("ONEDNN_MAX_CPU_ISA") != "AVX2":
        os.kill(os.getpid(), signal.SIGILL)
    os.write(1, b"works bfloat16\\nworks float16\\n")
"""
CHOSEN = """
    import os, signal, tempfile
    with open(os.environ["COUNT"], "a") as count:
        count.write("x")
    import torch

    torch.set_num_threads(1)
    with tempfile.TemporaryFile() as said:  # oneDNN writes to the file descriptor of stdout
        kept = os.dup(1)
        os.dup2(said.fileno(), 1)
        with torch.backends.mkldnn.verbose(1):
            torch.ones(64, 64).bfloat16() @ torch.ones(64, 64).bfloat16()
        os.dup2(kept, 1)
        said.seek(0)
        if b"avx512" in said.read():
            os.kill(os.getpid(), signal.SIGILL)
    os.write(1, b"works bfloat16\\nworks float16\\n")
"""
DEAD = """
    import os, signal
    os.kill(os.getpid(), signal.SIGILL)
"""
BROKEN = """
    raise ImportError("no torch here")
"""

AVX2 = "ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2 ATEN_CPU_CAPABILITY=avx2"


class Machine:
    """Runs programs as on the machine with that CPU and that probe."""

    def __init__(self, folder: Path, probe: str = PROBE, cpu: str = CPU) -> None:
        self.folder = folder
        (folder / "cpuinfo").write_text(cpu)
        (folder / "probe.py").write_text(textwrap.dedent(probe))
        dropped = ("ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS", "PIPEPART_PRODUCTS")
        self.environment = {name: value for name, value in os.environ.items() if name not in dropped} | {
            "PYTHONPATH": str(ROOT),
            "PIPEPART_CACHE": str(folder / "cache"),
            "PIPEPART_CPUINFO": str(folder / "cpuinfo"),
            "PIPEPART_CPU_PROBE": str(folder / "probe.py"),
            "COUNT": str(folder / "count"),
        }

    def run(self, *words: str, **more: str) -> str:
        done = subprocess.run(
            [sys.executable, *words],
            env=short_imports({**self.environment, **more}),
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert done.returncode == 0, (done.returncode, done.stdout + done.stderr)
        return done.stdout

    def says(self, program: str, **more: str) -> str:
        return self.run("-c", textwrap.dedent(program), **more)

    @property
    def tried(self) -> int:
        """How many children have been started."""
        path = self.folder / "count"
        return len(path.read_text()) if path.exists() else 0


LIMIT = "import os, pipepart; print(os.environ.get('ONEDNN_MAX_CPU_ISA'), os.environ.get('ATEN_CPU_CAPABILITY'))"


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """On it, AVX-512 kernels die, and AVX2 is known to work."""
    if "avx512_bf16" not in Path("/proc/cpuinfo").read_text().split():
        pytest.skip("oneDNN has no AVX-512 kernels to choose on this CPU")
    made = Machine(tmp_path, CHOSEN)
    known = {"works": ["bfloat16", "float16"], "limit": limits._LIMITS[-1]}
    name = made.says("from pipepart.machine import host, limits; print(limits._file(host.cpu_with_amx()).name)",
                     PIPEPART_PRODUCTS="")  # fmt: skip
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / name.strip()).write_text(json.dumps(known))
    return made


def test_a_cpu_without_amx_is_never_tried(tmp_path: Path) -> None:
    there = Machine(tmp_path, DEAD, CPU.replace("amx_", "avx_"))
    assert there.says(LIMIT) == "None None\n"
    assert "torch" not in there.says("import sys, pipepart; print(*sys.modules)").split()
    assert not (tmp_path / "cache").exists()


def test_a_child_that_dies_leads_to_a_limit_that_is_remembered(tmp_path: Path) -> None:
    """No limit, then weaker and weaker instruction sets, until one works."""
    there = Machine(tmp_path)
    assert there.says(LIMIT) == "AVX2 avx2\n"
    assert there.tried == 4
    assert there.says(LIMIT) == "AVX2 avx2\n"
    assert there.tried == 4, "the answer is in the cache"
    assert there.says(LIMIT, ONEDNN_MAX_CPU_ISA="AVX2") == "AVX2 None\n", "what the user has set is kept, and enough"
    assert there.tried == 5


def test_a_corrupt_answer_is_found_again_and_a_failure_of_another_kind_is_not_kept(tmp_path: Path) -> None:
    there = Machine(tmp_path, DEAD)
    works = "from pipepart.machine import products; print(products().works)"
    assert there.says(works) == "()\n"
    (answer,) = (tmp_path / "cache").iterdir()
    answer.write_text('{"works": 3')
    (tmp_path / "probe.py").write_text("import os; os.write(1, b'works bfloat16\\nworks float16\\n')")
    assert there.says(works) == "('bfloat16', 'float16')\n"
    assert json.loads(answer.read_text())["limit"] == {}
    answer.unlink()
    (tmp_path / "probe.py").write_text(textwrap.dedent(BROKEN))
    assert there.says(works) == "('bfloat16', 'float16')\n"
    assert list((tmp_path / "cache").iterdir()) == []


RUN = """
    import torch
    {before}
    import pipepart
    from pipepart.errors import ConfigError
    from pipepart.machine import usable
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)).bfloat16()
    try:
        pipepart.capture(model, (torch.ones(8, 64, dtype=torch.bfloat16),))
        print("captured", usable("bfloat16"))
    except ConfigError as error:
        print("refused", usable("bfloat16"), error)
    with torch.autocast("cpu", torch.bfloat16):
        try:
            pipepart.capture(model.float(), (torch.ones(8, 64),))
            print("captured under autocast")
        except ConfigError as error:
            print("refused", error)
    print("float32 works", len(pipepart.capture(model.float(), (torch.ones(8, 64),)).graph))
    from pipepart.cost.this_machine import measure_machine
    print("measured", *measure_machine().device.flops)
"""


@pytest.mark.slow
def test_torch_imported_first_is_early_enough(machine: Machine) -> None:
    said = machine.says(RUN.format(before=""))
    assert "captured True\ncaptured under autocast\nfloat32 works" in said
    assert "measured float32 bfloat16" in said
    assert machine.tried == 1, "one trial in a fork of the process, whose torch was there before"


@pytest.mark.slow
def test_a_process_that_has_chosen_is_refused_instead_of_killed(machine: Machine) -> None:
    """oneDNN has AVX-512 already: the fork of this process dies, this process does not."""
    said = machine.says(RUN.format(before="torch.ones(64, 64).to_mkldnn().to_dense()"))
    assert "refused False bfloat16 products would end this process with an illegal instruction" in said
    assert said.count(f"Set {AVX2} in the environment") == 2
    assert "float32 works" in said
    assert said.splitlines()[-1] == "measured float32"


@pytest.mark.slow
def test_the_command_line_says_so_and_ranks_inherit_the_limit(machine: Machine) -> None:
    said = machine.run("-m", "pipepart.cli", "doctor", "--quick")
    assert f"note  16-bit products  work with {AVX2}" in said
    child = f"import subprocess, sys, pipepart; subprocess.run([sys.executable, '-c', {LIMIT!r}], check=True)"
    assert machine.says(child) == "AVX2 avx2\n"
    short = ["recipe=mlp", "trainer.precision=bf16-mixed", "trainer.max_steps=2", "logger=none", "callbacks=none"]
    machine.run("-m", "pipepart.cli", "train", *short)
    assert machine.tried == 0
