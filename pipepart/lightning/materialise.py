"""Models that are built on the meta device: each rank gives memory and values to the tensors that it holds.

Values come from the mapping that `configure_weights()` of the LightningModule returns, if it has this method. Other values
come from the modules themselves: `reset_parameters()`, as in torch.nn, then `_init_weights(module)` of the module around them,
if there is one (the convention of many model libraries). Random numbers are seeded by the path of each module. So a value
depends on the seed and on the name, not on the partition: the model is the same on any number of stages.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torchmetrics import Metric

from pipepart.errors import ConfigError
from pipepart.lightning.given_weights import GivenWeights, gives_weights, note_read
from pipepart.lightning.random_states import isolate_rng
from pipepart.runtime import StageRuntime

__all__ = ["check_can_be_filled", "empty_names", "fill_stage", "materialise"]


def empty_names(root: nn.Module) -> list[str]:
    """The (first) full names of parameters and buffers on the meta device."""
    return [name for name, tensor in (*root.named_parameters(), *root.named_buffers()) if tensor.is_meta]


def check_can_be_filled(root: nn.Module) -> None:
    """Refuse tensors on the meta device that are neither parameters nor buffers, and weights for which there is no place."""
    if gives_weights(root) and not empty_names(root):
        raise ConfigError(
            f"{type(root).__name__}.configure_weights() gives weights for tensors on the meta device, but the module was built "
            "with values, so they would not be used. Build the model in configure_model, inside `with torch.device('meta'):`, "
            "or load the weights into it and remove configure_weights."
        )
    for path, module in root.named_modules():
        if isinstance(module, Metric):
            lost = [key for key, value in module._defaults.items() if isinstance(value, torch.Tensor) and value.is_meta]
            if lost:
                raise ConfigError(
                    f"the metric {path} ({type(module).__name__}) was built on the meta device, so the values that its states "
                    "start with are lost. Build metrics in __init__, outside of `torch.device('meta')`."
                )
        for key, value in vars(module).items():
            if isinstance(value, torch.Tensor) and value.is_meta and not isinstance(module, Metric):
                raise ConfigError(
                    f"{path or type(root).__name__}.{key} is a tensor on the meta device, but not a parameter or buffer, so "
                    f"nothing can fill it. Make it a buffer that reset_parameters() of {type(module).__name__} fills."
                )


def materialise(root: nn.Module, seed: int | None = None, device: torch.device | str = "cpu") -> None:
    """Fill a module that was built on the meta device in one process, with the same values as in a pipeline.

    The default of `seed` is the seed of torch (`torch.initial_seed()`, as `seed_everything` sets it).
    """
    check_can_be_filled(root)
    weights = GivenWeights(root)
    weights.refuse([weights.faults])
    unfilled = _fill(root, None, torch.initial_seed() if seed is None else seed, torch.device(device), weights)
    weights.refuse([weights.faults])
    _refuse_unfilled(root, unfilled)
    note_read(root)


def fill_stage(
    runtime: StageRuntime, seed: int, gather: Callable[[list[str]], list[list[str]]], from_checkpoint: bool
) -> None:
    """Give memory and values to the empty tensors of this stage, after the model was planned. All ranks must call it.

    ``gather(names)`` returns the names of all ranks. With `from_checkpoint`, the tensors in the state dict may stay
    unfilled.
    """
    root = runtime.root
    weights = GivenWeights(root)
    weights.refuse(gather(weights.faults))
    unfilled = _fill(root, {*runtime.named_parameters(), *runtime.held_buffers}, seed, runtime.device, weights)
    weights.refuse(gather(weights.faults))
    if from_checkpoint:
        saved = root.state_dict()
        unfilled = [name for name in unfilled if name not in saved]
    _refuse_unfilled(root, {name for names in gather(unfilled) for name in names})
    note_read(root)
    runtime.parts.drop_empty_buffers()


def _fill(
    root: nn.Module, names: Collection[str] | None, seed: int, device: torch.device, weights: GivenWeights
) -> list[str]:
    """Give memory and values to the empty tensors among `names` (None: to all). Returns the names that nothing has filled.

    Unfilled tensors hold NaN, or the smallest integer. Random states are restored.
    """
    born = {id(tensor): name for name, tensor in (*root.named_parameters(), *root.named_buffers()) if tensor.is_meta}
    wanted = [name for name in born.values() if names is None or name in names]
    if not wanted:
        return []
    made: dict[int, torch.Tensor] = {}
    for module, key, tensor in _tensors(root):
        if born.get(id(tensor)) in wanted:
            if id(tensor) not in made:
                made[id(tensor)] = _marked(tensor, device)
            setattr(module, key, made[id(tensor)])
    versions = {id(tensor): tensor._version for tensor in made.values()}
    kept = list(made.values())  # so that no other tensor gets the identity of one of them
    given = {key for key, tensor in made.items() if weights.fill(born[key], tensor)}
    home = {id(tensor): born[key] for key, tensor in made.items() if key not in given}
    wanted = list(home.values())
    with isolate_rng(), torch.no_grad(), device:
        for path, module in reversed(list(root.named_modules())):  # children before the modules around them
            prefix = f"{path}." if path else ""
            if any(name.startswith(prefix) for name in wanted):
                _initialise(root, path, module, prefix, home, seed, device)
    unfilled = []
    for name, tensor in (*root.named_parameters(), *root.named_buffers()):
        if id(tensor) in versions and tensor._version == versions[id(tensor)] and _has_marks(tensor):
            unfilled.append(name)
    del kept
    return unfilled


def _refuse_unfilled(root: nn.Module, names: Collection[str]) -> None:
    """Raise an error on unfilled tensors. All ranks must pass the names of all ranks, so that their errors are equal."""
    if not names:
        return
    first = min(names)
    owner = root.get_submodule(first.rpartition(".")[0])
    raise ConfigError(
        f"{len(names)} parameters or buffers were built on the meta device and nothing fills them, such as {first}: "
        f"{type(owner).__name__} has no reset_parameters() that does. Write one (it sets the parameters and buffers of that "
        "module), or build this part outside of `torch.device('meta')`. Persistent ones may also come from a checkpoint "
        "(`ckpt_path=`) or from the method configure_weights() of the LightningModule."
    )


def _initialise(
    root: nn.Module, path: str, module: nn.Module, prefix: str, home: dict[int, str], seed: int, device: torch.device
) -> None:
    """Run the initialisers of `module` on all tensors in it, and restore those that must not change."""
    if not any(id(tensor) in home or tensor.is_meta for _, _, tensor in _tensors(module, recurse=False)):
        return
    steps = list(_initialisers(root, path, module))
    if not steps:
        return
    # Tensors of other stages, tensors that were built with values, and tensors that are tied to a module elsewhere: the
    # initialiser gets scratch memory for them, so that it draws the same random numbers on every stage.
    scratch: dict[int, torch.Tensor] = {}
    aside: list[tuple[nn.Module, str, torch.Tensor]] = []
    for part, key, tensor in _tensors(module):
        if not home.get(id(tensor), "").startswith(prefix) or id(tensor) not in home:
            aside.append((part, key, tensor))
            scratch.setdefault(id(tensor), _marked(tensor, device))
            setattr(part, key, scratch[id(tensor)])
    digest = hashlib.sha256(f"{seed} {path}".encode()).digest()
    torch.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    for step in steps:
        step()
    for part, key, tensor in aside:
        setattr(part, key, tensor)
    for part, key, tensor in _tensors(module):  # an initialiser may have put another tensor in the place of a buffer
        if id(tensor) not in home and tensor.device != device and not tensor.is_meta:
            setattr(part, key, tensor.to(device))


def _initialisers(root: nn.Module, path: str, module: nn.Module) -> Iterator[Callable[[], Any]]:
    for name in ("reset_parameters", "_reset_parameters"):
        own = getattr(module, name, None)
        if callable(own):
            yield own
            break
    parts = path.split(".") if path else []
    for length in range(len(parts), -1, -1):  # the nearest module around it, or itself
        around = getattr(root.get_submodule(".".join(parts[:length])), "_init_weights", None)
        if callable(around) and _takes_a_module(around):
            yield partial(around, module)
            break


def _takes_a_module(function: Callable[..., Any]) -> bool:
    try:
        inspect.signature(function).bind(object())
    except (TypeError, ValueError):
        return False
    return True


def _tensors(root: nn.Module, recurse: bool = True) -> Iterator[tuple[nn.Module, str, torch.Tensor]]:
    """Every place that holds a parameter or a buffer. A tied tensor has several places."""
    for module in list(root.modules()) if recurse else [root]:
        for registry in (module._parameters, module._buffers):
            for key, tensor in list(registry.items()):
                if tensor is not None:
                    yield module, key, tensor


def _marked(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Memory for a tensor, filled with a value that no initialiser writes."""
    made = torch.empty_like(tensor, device=device)
    if made.is_floating_point() or made.is_complex():
        made.detach().fill_(float("nan"))
    elif made.dtype != torch.bool:
        made.fill_(torch.iinfo(made.dtype).min)
    return nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made


def _has_marks(tensor: torch.Tensor) -> bool:
    """Whether the marks are still there. Booleans have no marks; only their version shows a change."""
    if tensor.is_floating_point() or tensor.is_complex():
        return bool(tensor.isnan().any())
    return tensor.dtype == torch.bool or bool((tensor == torch.iinfo(tensor.dtype).min).any())
