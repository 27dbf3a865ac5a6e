"""Gradients under fsdp of parameters that not all ranks use in a step, which count as zero where they are not used."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.distributed.fsdp import FSDPModule

from lightswitch.strategies.gathered_writes import groups


class UnevenUse:
    """Record of which parameters the backward passes of a step use, on this rank and on others.

    Replicated parameters are averaged after each pass. Sharded ones are reduced by torch, unit by unit, and without
    those that have no gradient: sizes would differ between ranks that use different ones, and the reduction fail. They
    get zeros here, which are taken away again if no rank has used the parameter.

    Args:
        root: the model; if it is among the units, every pass goes through it.
        units: modules that each gather parameters.
        replicated: parameters that each rank holds whole, in the same order on all ranks.
        device: the rank's device.
    """

    def __init__(
        self,
        root: nn.Module,
        units: Iterable[nn.Module],
        replicated: Sequence[nn.Parameter],
        device: torch.device,
    ) -> None:
        self._groups = [
            (group, unit is root) for unit in units if isinstance(unit, FSDPModule) for group in groups(unit)
        ]
        self._sharded = [param for group, _ in self._groups for param in group.fsdp_params]
        self._replicated, self._device = replicated, device
        self._used: set[Any] = set()  # torch's records of parameters
        self._filled: dict[Any, bool] = {}  # by record, whether it had a gradient before
        self._nodes: dict[Any, Node] = {}  # of autograd's graph
        self._is_begun = False

    @contextmanager
    def in_pass(self, outputs: Iterable[Any]) -> Iterator[None]:
        """Context of a backward pass that begins with `outputs` and accumulates gradients. Collective."""
        if dist.get_world_size() == 1:
            yield
            return
        self._is_begun = False
        tensors = [one for one in outputs if isinstance(one, Tensor) and one.requires_grad]
        hooks = [one.register_hook(self._fill) for one in tensors]  # type: ignore[no-untyped-call]  # in torch
        yield  # no try/finally: an error ends the run
        for hook in hooks:
            hook.remove()
        self._agree()

    def _fill(self, _: Tensor) -> None:
        """Give zeros to the parameters of which the pass that has begun will compute no gradient.

        Units of which it reaches nothing are left out: all ranks leave them out, as those of another optimizer.
        """
        if self._is_begun:
            return
        self._is_begun = True
        for group, is_root in self._groups:
            # those that have not been gathered yet have no gathered parameter
            params = [one for one in group.fsdp_params if hasattr(one, "_unsharded_param")]
            trained = [one for one in params if one.unsharded_param.requires_grad]
            missing = [one for one in trained if not self._is_reached(one)]
            if group.reduce_grads and missing and (is_root or len(missing) < len(trained)):
                for one in missing:
                    self._filled.setdefault(one, one.sharded_param.grad is not None)
                    parameter = one.unsharded_param
                    parameter.grad = torch.zeros_like(parameter)

    def _is_reached(self, param: Any) -> bool:
        """Return whether a parameter has a gradient that is not reduced yet, or the running pass will compute one."""
        gathered = param.unsharded_param
        if param not in self._nodes:  # finding one takes longer than asking for it
            self._nodes[param] = get_gradient_edge(gathered).node
            gathered.register_post_accumulate_grad_hook(lambda _: self._used.add(param))
        is_kept = gathered.grad is not None or param.unsharded_accumulated_grad is not None
        return is_kept or torch._C._will_engine_execute_node(self._nodes[param])

    def _agree(self) -> None:
        """Average replicated parameters, and take away the gradients of sharded ones that no rank has used.

        Replicated gradients that earlier passes of the step have averaged are equal on all ranks, so another average
        leaves them unchanged.
        """
        replicated = [one for one in self._replicated if one.requires_grad and one.numel()]
        is_last = all(group.reduce_grads and group.all_reduce_grads for group, _ in self._groups)
        sharded = self._sharded if is_last else []
        here = [one.grad is not None for one in replicated]
        here += [one in self._used or one not in self._filled for one in sharded]
        if not here:
            return
        anywhere = self._largest(here)
        for parameter, is_used in zip(replicated, anywhere[: len(replicated)], strict=True):
            if is_used:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                dist.all_reduce(parameter.grad.div_(dist.get_world_size()))
        for one, is_used in zip(sharded, anywhere[len(replicated) :], strict=True):
            if not is_used and not self._filled[one]:
                parameter = one.sharded_param
                parameter.grad = None
        if is_last:
            self._used.clear()
            self._filled.clear()

    def _largest(self, here: Sequence[bool]) -> Sequence[bool]:
        """Return which values are true on any rank. A rank on which all are does not wait for the device."""
        is_all = all(here)
        # a copy from the host would wait for the device
        found = (
            torch.ones(len(here), dtype=torch.int64, device=self._device)
            if is_all
            else torch.tensor(here, dtype=torch.int64, device=self._device)
        )
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return here if is_all else [bool(one) for one in found.tolist()]
