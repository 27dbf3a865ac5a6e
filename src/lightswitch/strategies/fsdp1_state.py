"""Portable checkpoints of FullyShardedDataParallel, whose flat parameters have no names of their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.optim import Optimizer

from lightswitch.checkpoints import names
from lightswitch.checkpoints.portable import PortableCheckpoints


class PortableFSDP1(PortableCheckpoints):
    """One unit after the other is gathered and cut by dimension 0 of its parameters, as DTensors."""

    _root: FullyShardedDataParallel | None

    def lightning_module_state_dict(self) -> dict[str, Any]:
        assert self._root is not None
        return names.first_names(get_model_state_dict(self._root), self._root.module)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        optimizer = getattr(optimizer, "_optimizer", optimizer)
        assert self._root is not None
        # of an optimizer that has not stepped, torch would make a step of its own
        state: Any = get_optimizer_state_dict(self._root, optimizer)["state"] if optimizer.state else {}
        groups = names.groups_of(optimizer, self._root.module)
        return {"class": type(optimizer).__name__, "state": state, "param_groups": groups}

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        live = {name: value for name, value in self.lightning_module_state_dict().items() if isinstance(value, Tensor)}
        assert self.lightning_module is not None
        self._reader.check_model(live, self.lightning_module.hparams, strict)
        saved = self._reader.names("model.")
        self._reader.fill({f"model.{name}": value for name, value in live.items() if name in saved})
        assert self._root is not None
        set_model_state_dict(self._root, {**live, **checkpoint.get("extra_state", {})})

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        assert self._root is not None
        self.check_optimizers(checkpoint["optimizer_states"])
        for index, optimizer in enumerate(self.optimizers):
            saved, prefix = checkpoint["optimizer_states"][index], f"optimizer.{index}."
            groups = [
                {key: value for key, value in group.items() if key != "params"} for group in saved["param_groups"]
            ]
            if self._reader.names(prefix):
                live: Any = get_optimizer_state_dict(self._root, optimizer)
                self._reader.fill({prefix + name: value for name, value in names.tensors_in(live["state"]).items()})
                for name, values in saved["state"].items():
                    live["state"][name].update(values)
                set_optimizer_state_dict(self._root, optimizer, live)
            for group, values in zip(optimizer.param_groups, groups, strict=True):
                group.update(values)
