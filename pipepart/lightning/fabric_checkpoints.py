"""Checkpoints under Fabric: plain files, as one device writes them, that any other shape reads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

from pipepart.lightning.fabric_steps import PipelinedModule
from pipepart.lightning.optimizers import full_optimizer_state, load_full_optimizer_state
from pipepart.runtime import StageRuntime

if TYPE_CHECKING:
    from pipepart.lightning.pipeline_strategy import PipelineStrategy as _Base
else:
    _Base = object

__all__ = ["FabricCheckpoints"]


class FabricCheckpoints(_Base):
    """Methods of the strategy for `fabric.save` and `fabric.load`. Every rank must call them."""

    _module: PipelinedModule | None

    @property
    def _cut(self) -> StageRuntime | None:
        """The runtime that has cut the module; None while it is whole."""
        return self._whole.runtime

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """The state of the whole module, on rank 0. Every rank must call it."""
        if module is not self._module:
            return module.state_dict()
        original, runtime = self._module.original, self._cut
        return original.state_dict() if runtime is None else runtime.full_state_dict()

    def load_module_state_dict(self, module: nn.Module, state_dict: dict[str, Any], strict: bool = True) -> None:
        own = self._module is not None and module is self._module
        if own and self._cut is not None:
            self._cut.load_full_state_dict(dict(state_dict), strict)
        else:
            (self._module.original if own and self._module is not None else module).load_state_dict(
                state_dict, strict=strict
            )

    def get_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The state as on one device, on rank 0. Every rank must call it."""
        return optimizer.state_dict() if self._cut is None else full_optimizer_state(optimizer, self._cut)

    def save_checkpoint(  # type: ignore[override]
        self, path: Any, state: dict[str, Any], storage_options: Any = None, filter: Any = None
    ) -> None:
        """Write one plain file, as one device writes it. Every rank must call it."""
        plain = self._convert_stateful_objects_in_state(state, filter=filter or {})  # type: ignore[attr-defined]
        io = self.checkpoint_io
        self._checkpoints.on_rank_zero(lambda: io.save_checkpoint(plain, path, storage_options=storage_options))

    def load_checkpoint(  # type: ignore[override]
        self, path: Any, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read a plain file; each rank keeps the parts that it holds."""
        found = self._checkpoints.load(path, self.checkpoint_io, weights_only)
        if not state:
            return found
        if isinstance(state, (nn.Module, Optimizer)):
            self._restore(state, found, strict)
            return {}
        if strict and (missing := [key for key in state if key not in found]):
            raise KeyError(
                f"The checkpoint {path} has no entry {missing[0]!r}; it has {sorted(map(str, found))}. To load the rest, set "
                "strict=False."
            )
        for name, thing in state.copy().items():
            if name not in found:
                continue
            if isinstance(thing, (nn.Module, Optimizer)) or hasattr(thing, "load_state_dict"):
                self._restore(thing, found.pop(name), strict)
            else:
                state[name] = found.pop(name)
        return found

    def _restore(self, thing: Any, saved: Any, strict: bool) -> None:
        if isinstance(thing, nn.Module):
            self.load_module_state_dict(thing, saved, strict)
        elif isinstance(thing, Optimizer) and self._cut is not None:
            load_full_optimizer_state(thing, saved, self._cut)
        else:
            thing.load_state_dict(saved)
