"""`pipepart plan`: the plan of a recipe or of any module, for this machine or for a cluster; no process is started."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pipepart.capture import Recording, record, record_step
from pipepart.cli.config import checked, compose_config
from pipepart.cli.console import quiet_libraries, shown
from pipepart.cli.train import resolve_devices
from pipepart.cost import profiled
from pipepart.cost.analytic import analytic
from pipepart.cost.cluster import Cluster, cluster_from
from pipepart.errors import ConfigError
from pipepart.graph import op_graph
from pipepart.planning import Plan, Request, check_request, make_plan
from pipepart.planning.layout import Layout
from pipepart.runtime import Mesh, Options, example_microbatch, fit_mesh
from pipepart.runtime.microbatch import batch_size_of

__all__ = ["plan"]

_DTYPES = {"bf16": "bfloat16", "16": "float16", "64": "float64"}


def plan(words: Sequence[str], extra: Path | None = None, as_json: bool = False, output: Path | None = None) -> int:
    """Plan what the overrides describe, or `module:callable`; print the table or JSON, and write it if asked to."""
    quiet_libraries()
    named = [word for word in words if ":" in word and "=" not in word]
    overrides = [word for word in words if word not in named]
    if len(named) > 1:
        raise ConfigError(f"one module:callable at a time, got {' and '.join(named)}")
    config = checked(compose_config(overrides, "plan", extra))
    strategy = config["strategy"]
    check_request(strategy["schedule"], strategy["microbatches"], strategy["stages"], strategy["recompute"])
    cluster = None if config["cluster"].get("measured") else cluster_from(config["cluster"])
    mesh = _mesh(config, cluster)
    found = _plan_for(config, mesh, cluster, named[0] if named else None)
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        found.save(output)
    if as_json:
        print(found.to_json())
        return 0
    title = named[0] if named else f"recipe {config['name']}"
    print(f"pipepart plan  {title} for {'this machine' if cluster is None else cluster.name}\n\n{found.describe()}")
    if output is not None:
        print(f"\nplan  {shown(output)}")
    return 0


def _mesh(config: dict[str, Any], cluster: Cluster | None) -> Mesh:
    stages, replicas = config["strategy"]["stages"], config["strategy"]["replicas"]
    if (
        cluster is not None
        and config["devices"] == "auto"
        and not (isinstance(stages, int) and isinstance(replicas, int))
    ):
        return fit_mesh(cluster.size, stages, replicas)
    return fit_mesh(resolve_devices(config) * int(config["launcher"]["nodes"]), stages, replicas)


def _plan_for(config: dict[str, Any], mesh: Mesh, cluster: Cluster | None, named: str | None) -> Plan:
    strategy = config["strategy"]
    options = Options(mesh.stages, mesh.replicas, strategy["microbatches"])
    if named is None:
        recording, leaves, count = _recipe_step(config, options, mesh)
    else:
        recording, leaves, count = _callable(named, options, mesh)
    graph = op_graph(recording)
    request = Request(
        stages=mesh.stages,
        replicas=mesh.replicas,
        microbatches=count,
        schedule=strategy["schedule"],
        chunks=strategy["chunks"],
        slack=strategy["slack"],
        keep_together=tuple(tuple(group) for group in strategy["keep_together"]),
        split_at=None if strategy["split_at"] is None else tuple(strategy["split_at"]),
        recompute=strategy["recompute"],
        memory_limit=strategy["memory_limit"],
    )
    size = batch_size_of([leaf for leaf in leaves if isinstance(leaf, torch.Tensor)])
    sizes = {name: (p.numel(), p.numel() * p.element_size()) for name, p in recording.root.named_parameters()}
    if cluster is None:
        return make_plan(graph, profiled(recording, leaves, agree=bool), request, size, sizes)
    whole = cluster.with_devices(mesh.world_size)
    layout = Layout.on(whole, mesh.stages, mesh.replicas, memory_limit=strategy["memory_limit"])
    dtype = next((name for key, name in _DTYPES.items() if str(config["trainer"]["precision"]).startswith(key)), None)
    by_kind = {kind: analytic(graph, whole.kinds[kind], dtype=dtype) for kind in set(layout.kinds)}
    return make_plan(graph, [by_kind[kind] for kind in layout.kinds], request, size, sizes, layout=layout)


def _recipe_step(config: dict[str, Any], options: Options, mesh: Mesh) -> tuple[Recording, Sequence[Any], int]:
    import lightning as L

    from pipepart.cli.fit import build_recipe

    L.seed_everything(int(config["seed"]), verbose=False)
    module, data = build_recipe(config)
    data.prepare_data()
    data.setup("fit")
    batch = next(iter(data.train_dataloader()), None)
    if batch is None:
        raise ConfigError("data: the training loader gives no batch; planning needs one to know the shapes")
    example, count = example_microbatch(batch, options, mesh)
    module.train()
    recording = record_step(module, "training_step", example)
    return recording, recording.flatten((example,), {}), count


def _callable(name: str, options: Options, mesh: Mesh) -> tuple[Recording, Sequence[Any], int]:
    """What the user has named on the command line: called, it gives the module and the arguments of one batch."""
    path, _, attribute = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        function = getattr(importlib.import_module(path), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{name}: {error}. Expected package.module:function") from error
    made = function()
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module)):
        raise ConfigError(f"{name} returned {type(made).__name__}; expected (module, tuple of example arguments)")
    module, arguments = made
    given = tuple(arguments) if isinstance(arguments, (tuple, list)) else (arguments,)
    (example, keywords), count = example_microbatch((given, {}), options, mesh)
    module.train()
    recording = record(module, example, keywords)
    return recording, recording.flatten(example, keywords), count
