"""Large models on clusters that are not there, everything auto: smaller sizes of `tools.bench.partition --thousand`."""

from __future__ import annotations

import pytest

from pipepart.schedule import validate
from tools.bench.partition.thousand import CASES, plan_case


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_everything_auto(case):
    small = case.smaller(layers=8, width=2048, devices=32, batch=128)
    found, module, _ = plan_case(small)
    assert found.replicas * found.stages == 32
    assert found.replicas * found.batch_size >= 128
    assert sum(chunk.parameters for chunk in found.chunks) == sum(p.numel() for p in module.parameters())
    assert max(memory.total for memory in found.memory) <= found.memory_limit
    assert found.lower_bound <= found.step_time * (1 + 1e-9)
    validate(found.make_schedule(), found.edges.forward, found.edges.backward)
