"""`pipepart.ray` where no cluster of Ray runs: what is refused in words. Its runs are in tests/ray_clusters."""

from __future__ import annotations

import subprocess
import sys

import lightning as L
import pytest

from pipepart import ConfigError, PipelineStrategy
from pipepart.lightning.ray_workers import in_worker

pytest.importorskip("ray")


@pytest.mark.slow  # the import of Ray
def test_outside_of_a_worker() -> None:
    import pipepart.ray

    assert not in_worker()
    trainer = L.Trainer(strategy=PipelineStrategy(stages=1), devices=1, accelerator="cpu", logger=False)
    with pytest.raises(ConfigError, match="outside of a worker of Ray Train"):
        pipepart.ray.prepare_trainer(trainer)
    assert trainer.world_size == 1
    with pytest.raises(ConfigError, match="3 workers are no whole number of replicas with 2 stages"):
        pipepart.ray.ReplicaDataConfig(stages=2).configure({}, 3, None, None)
    with pytest.raises(ConfigError, match="every_n_epochs"):
        pipepart.ray.ReportCheckpoint(every_n_epochs=0)


def test_without_ray() -> None:
    """The message says what to install; the rest of pipepart does not import Ray."""
    program = (
        "import sys; sys.modules['ray'] = None\nimport pipepart.lightning\nassert 'ray.train' not in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", f"{program}import pipepart.ray"], capture_output=True, text=True, timeout=120
    )
    assert 'ImportError: pipepart.ray needs Ray Train: pip install "pipepart[ray]"' in done.stderr
