"""A model that is too large for one device: it is planned by shapes, each rank moves its part, and the run is the same."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from support.lightning_modules import Module, loader
from support.ranks import run_ranks
from torch import nn
from watching import QUIET

from pipepart import PipelineStrategy
from pipepart.devices import Memory
from pipepart.lightning import kept_on_host
from pipepart.lightning.kept_on_host import only_shapes


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.register_buffer("scale", torch.ones(2))
        self.second.register_buffer("scale", self.scale)


def test_an_error_while_planning_brings_all_values_back() -> None:
    module = Tied()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    weight = module.first.weight

    def fail() -> None:
        with only_shapes(module, True):
            assert all(tensor.is_meta for tensor in (*module.parameters(), *module.buffers()))
            assert module.first.weight is module.second.weight is weight and module.scale is module.second.scale
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert module.first.weight is module.second.weight is weight and module.scale is module.second.scale
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    with only_shapes(module, False) as values:
        assert values is None and not module.scale.is_meta


def _fit(name: str, memory: int | None) -> tuple[list[float], dict[str, torch.Tensor], list[Any]]:
    """Two fits with validation on devices with this memory; None: on one process of plain Lightning."""
    module, facts = Module(name), []
    strategy: Any = "auto"
    usual = kept_on_host.memory_of
    if memory is not None:
        kept_on_host.memory_of = lambda device: Memory(memory, memory)
    try:
        for _ in range(2):
            if memory is not None:
                strategy = PipelineStrategy(stages=2, microbatches=2, schedule="1f1b")
            trainer = L.Trainer(strategy=strategy, devices=1 if memory is None else 2, max_epochs=1, **QUIET)
            trainer.fit(module, loader(name, 16, 8), loader(name, 8, 4))
            module.seen.append(float(trainer.callback_metrics["val_loss"]))
            facts += [] if memory is None else [strategy._recorded.empty]
    finally:
        kept_on_host.memory_of = usual
    return module.seen, {key: value.clone() for key, value in module.state_dict().items()}, facts


@pytest.mark.parametrize("name", ["gpt", "resnet"])
@pytest.mark.slow
def test_a_run_with_a_model_that_no_device_can_hold(name: str) -> None:
    # Batch statistics are those of micro-batches: a model with them is compared with a pipeline that holds it.
    seen, state, measured = _fit(name, None) if name == "gpt" else run_ranks(2, _fit, name, 10**12)[0]
    assert not any(measured)
    for losses, whole, by_shapes in run_ranks(2, _fit, name, 1000):
        assert losses == pytest.approx(seen, rel=1e-9)
        assert by_shapes == [True, True], "it was planned by shapes"
        assert list(whole) == list(state)
        assert all(torch.allclose(whole[key], value, rtol=1e-9, atol=1e-12) for key, value in state.items())
