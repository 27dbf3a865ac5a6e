"""Parameters that took no part in the loss of a step, for which flat gradients hold zeros.

An optimizer leaves a parameter without a gradient as it is, and steps one whose gradient is zero: by the averages of
the steps before, and by weight decay.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.distributed_c10d import _get_default_store


class Unused:
    """Record of the parameters that took no part in the loss of a step, on any rank.

    Args:
        parameters: by name. What is frozen now is left out, also if it is trained later.
        timeout_seconds: to wait for a rank, whose backward pass may take longer.
        key: the same on all ranks, and another for each fit, which must not read this one's keys in the store.

    Attributes:
        world_size: ranks that contribute.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], timeout_seconds: float, key: str) -> None:
        self._parameters = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
        self._used: set[Tensor] = set()
        self._step = 0
        self._timeout = timedelta(seconds=timeout_seconds)
        self.world_size = dist.get_world_size()
        self._store = PrefixStore(f"unused/{key}", _get_default_store())

    def mark_used(self, parameter: Tensor) -> None:
        """Note a parameter that has a gradient: a hook of its gradient."""
        self._used.add(parameter)

    def of_step(self) -> dict[str, nn.Parameter]:
        """Return the parameters by name that no rank has used since the last call, to which every rank contributes.

        Ranks tell each other by way of the store where they met: one that has used all parameters does not wait.
        """
        here = {name for name, p in self._parameters.items() if p.requires_grad and p not in self._used}
        self._used.clear()
        if self.world_size > 1:
            self._tell(here)
        for rank in range(self.world_size) if here and self.world_size > 1 else ():
            key = f"{self._step}/{rank}"
            self._store.wait([key], self._timeout)
            here &= set(json.loads(self._store.get(key)))
        return {name: self._parameters[name] for name in sorted(here)}

    def _tell(self, here: set[str]) -> None:
        self._step += 1
        self._store.set(f"{self._step}/{dist.get_rank()}", json.dumps(sorted(here)))
        self._store.delete_key(f"{self._step - 2}/{dist.get_rank()}")  # no rank is so far behind
