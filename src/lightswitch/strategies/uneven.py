"""Gradients under fsdp of parameters that not all ranks use in a step, which count as zero where they are not used."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from lightswitch import patches
from lightswitch.errors import Refused
from lightswitch.strategies.gathered_writes import groups

_COMPARED_PASSES = 10  # in which ranks wait to hear whether all have used the same units


class UnevenUse:
    """Record of which parameters the backward passes of a step use, on this rank and on others.

    Replicated parameters are averaged after each pass. Sharded ones are reduced by torch, unit by unit, and without
    those that have no gradient: sizes would differ between ranks that use different ones, and the reduction fail, or
    add up gradients of different parameters. They get zeros before it, which are taken away after the pass if no rank
    has used the parameter.

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
        self._groups: list[Any] = []  # torch's, of parameters that are gathered together
        self._replicated, self._device = replicated, device
        self._used: set[Any] = set()  # torch's records of parameters
        self._filled: dict[Any, bool] = {}  # by record, whether it had a gradient before
        self._reduced = 0  # digest of the units that the pass has reduced, in order
        self._passes = 0
        for unit in units if dist.get_world_size() > 1 else ():
            for group in groups(unit) if isinstance(unit, FSDPModule) else ():
                reduce = partial(self._reduce, len(self._groups), group, unit is root, group.post_backward)
                patches.replace(group, "post_backward", reduce)
                self._groups.append(group)
        self._sharded = [param for group in self._groups for param in group.fsdp_params]

    def _reduce(self, index: int, group: Any, is_root: bool, reduce: Callable[..., None], *args: Any) -> None:
        """Reduce the gradients of a unit, with zeros for parameters that have none.

        A unit without any gradient is left out, as the pass is one of another optimizer.
        """
        if group.reduce_grads:
            # those that have not been gathered yet have no gathered parameter
            params = [one for one in group.fsdp_params if hasattr(one, "_unsharded_param")]
            trained = [one for one in params if one.unsharded_param.requires_grad]
            here = {one for one in trained if _has_gradient(one)}
            self._used |= here
            reduces = bool(here) or is_root
            if reduces:
                self._reduced = zlib.crc32(index.to_bytes(4, "big"), self._reduced)
            for one in trained if reduces else ():
                if one not in here:
                    self._filled.setdefault(one, one.sharded_param.grad is not None)
                    parameter = one.unsharded_param
                    parameter.grad = torch.zeros_like(parameter)
        reduce(*args)

    @contextmanager
    def in_pass(self) -> Iterator[None]:
        """Context of a backward pass that accumulates gradients. Collective.

        Raises:
            Refused: the ranks have used different units, in one of the first passes.
        """
        self._reduced = 0
        yield  # no try/finally: an error ends the run
        if dist.get_world_size() > 1:
            self._agree()

    def _agree(self) -> None:
        """Average replicated parameters, and take away the gradients of sharded ones that no rank has used.

        Replicated gradients that earlier passes of the step have averaged are equal on all ranks, so another average
        leaves them unchanged.
        """
        replicated = [one for one in self._replicated if one.requires_grad and one.numel()]
        is_last = all(group.reduce_grads and group.all_reduce_grads for group in self._groups)
        sharded = self._sharded if is_last else []
        here = [int(one.grad is not None) for one in replicated]
        here += [int(one in self._used or one not in self._filled) for one in sharded]
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

    def _largest(self, here: Sequence[int]) -> Sequence[int]:
        """Return the largest of each number over all ranks, and check that all have reduced the same units.

        A rank on which all numbers are 1 does not wait for the device, after the first passes.
        """
        self._passes += 1
        waits = not all(here) or self._passes <= _COMPARED_PASSES
        digests = [self._reduced, -self._reduced]
        # a copy from the host would wait for the device
        found = (
            torch.tensor([*digests, *here], device=self._device)
            if waits
            else torch.ones(2 + len(here), dtype=torch.int64, device=self._device)
        )
        dist.all_reduce(found, dist.ReduceOp.MAX)
        if not waits:
            return here
        most, least, *anywhere = found.tolist()
        if self._passes <= _COMPARED_PASSES and most != -least:
            raise Refused(
                "the ranks run different blocks of the model in one step, and fsdp gathers and reduces those of all "
                "ranks together, so that their weights would mix; run the same ones on all ranks, or use strategy=ddp "
                "with trainer.strategy.find_unused_parameters=true"
            )
        return anywhere


def _has_gradient(param: Any) -> bool:
    return param.unsharded_param.grad is not None or param.unsharded_accumulated_grad is not None
