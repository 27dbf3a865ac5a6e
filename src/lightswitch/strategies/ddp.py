"""Strategies for one device, and for a replica of the model on each device with averaged gradients."""

from __future__ import annotations

import re
from datetime import timedelta
from inspect import signature
from typing import Any, Literal

import torch
from lightning.fabric.utilities.device_parser import _select_auto_accelerator
from lightning.pytorch import Trainer
from lightning.pytorch.accelerators import AcceleratorRegistry, CUDAAccelerator
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, Strategy
from lightning.pytorch.strategies.ddp import _DDPForwardRedirection
from torch import Tensor, nn
from torch.distributed.constants import default_pg_timeout
from torch.nn.parallel import DistributedDataParallel

from lightswitch.checkpoints.portable import PortableCheckpoints
from lightswitch.errors import Refused, listed
from lightswitch.strategies.agreement import broadcast_in_place


class Single(PortableCheckpoints, SingleDeviceStrategy):
    """Lightning's single-device strategy on the Trainer's device; Lightning's own requires the device's name.

    Attributes:
        parallel_devices: the one device; the Trainer sets an attribute of this name if it exists.
    """

    parallel_devices: list[torch.device] | None = None

    def __init__(self) -> None:
        super().__init__(device="cpu")

    @property
    def root_device(self) -> torch.device:
        return self.parallel_devices[0] if self.parallel_devices else self._root_device


_NAMES = ("forward_sync_buffers", "broadcast_buffers")  # from torch 2.13, which warns of the other, and before
_BROADCASTS_BUFFERS = next(name for name in _NAMES if name in signature(DistributedDataParallel).parameters)
_WITHOUT_GRADIENT = re.compile(r"did not receive grad for rank \d+: ([\d ]+)")  # in torch's long error message


class _Redirection(_DDPForwardRedirection):
    """Redirection of a step through DDP's forward pass that replaces the module's `forward` in its `__dict__`.

    Lightning sets it twice a step as an attribute, for which nn.Module searches parameters, buffers and modules.
    """

    def __call__(
        self, wrapper_module: nn.Module, original_module: Any, method_name: str, *args: Any, **kwargs: Any
    ) -> Any:
        own = vars(original_module)
        before = own.get("forward")

        def redirected(*args: Any, **kwargs: Any) -> Any:
            del own["forward"]  # the step may call it
            if before is not None:
                own["forward"] = before
            output = getattr(original_module, method_name)(*args, **kwargs)
            self.on_after_inner_forward(wrapper_module, original_module)
            return output

        own["forward"] = redirected
        output = wrapper_module(*args, **kwargs)
        self.on_after_outer_forward(wrapper_module, original_module)
        return output


class DDP(PortableCheckpoints, DDPStrategy):
    """Data parallelism: a replica of the model on each device, with averaged gradients.

    Args:
        find_unused_parameters: find the parameters that each backward pass does not reach, because ranks would wait
            for their gradients; None to do so only for a module with several optimizers, whose losses each reach only
            some parameters, or with trained parameters that no optimizer has, as a copy that averages the weights.
        gradient_as_bucket_view: make gradients views of the communication buckets, instead of copies that take memory
            beside them.
        broadcast_buffers: broadcast rank 0's buffers before each forward pass; without that, only before an evaluation.
        bucket_cap_mb: size of the buckets in which gradients are sent, in MiB; None for torch's 25.
        process_group_backend: backend of torch.distributed; None for the device's default.
        comm_hook: 16-bit format to which the gradients that are sent are rounded; None to send them as they are.
        timeout_seconds: how long a rank waits for another in a collective.
        start_method: popen starts each other rank by the command of the run, spawn all ranks by torch.multiprocessing
            (lightswitch.launch.spawn, which reads it from the config).
    """

    def __init__(
        self,
        find_unused_parameters: bool | None = None,
        gradient_as_bucket_view: bool = False,
        broadcast_buffers: bool = True,
        bucket_cap_mb: float | None = None,
        comm_hook: Literal["fp16", "bf16"] | None = None,
        process_group_backend: Literal["nccl", "gloo", "mpi"] | None = None,
        timeout_seconds: float = default_pg_timeout.total_seconds(),
        start_method: Literal["popen", "spawn"] = "popen",
    ) -> None:
        super().__init__(
            process_group_backend=process_group_backend,
            timeout=timedelta(seconds=timeout_seconds),
            find_unused_parameters=bool(find_unused_parameters),
            gradient_as_bucket_view=gradient_as_bucket_view,
            bucket_cap_mb=bucket_cap_mb,
        )
        self._forward_redirection = _Redirection()
        self.broadcast_buffers = broadcast_buffers
        if not broadcast_buffers:
            self._ddp_kwargs[_BROADCASTS_BUFFERS] = False
        self.comm_hook = comm_hook
        self.find_unused_parameters = find_unused_parameters

    def configure_ddp(self) -> None:
        """Wrap the model in DistributedDataParallel, which averages gradients of what is trained now.

        Lightning wraps it on another CUDA stream than that of the steps, with which torch's backward passes would then
        synchronize (Lightning-AI/pytorch-lightning#21567), and ignores `comm_hook` on devices other than CUDA.
        """
        module = self.lightning_module
        self._parameters = list(module.parameters())
        self._are_trained = [one.requires_grad for one in self._parameters]
        self.model = wrapped = DistributedDataParallel(
            module, device_ids=self.determine_ddp_device_ids(), **self._ddp_kwargs
        )
        if self.comm_hook is not None:
            from torch.distributed.algorithms.ddp_comm_hooks import default_hooks  # slow, and rarely asked for

            compress = getattr(default_hooks, f"{self.comm_hook}_compress_hook")
            # in a lambda: torch refuses bfloat16's by its name without NCCL, although gloo adds bfloat16 as well
            wrapped.register_comm_hook(None, lambda group, bucket: compress(group, bucket))

    def setup_optimizers(self, trainer: Trainer) -> None:
        super().setup_optimizers(trainer)
        trained = {one for one in self.lightning_module.parameters() if one.requires_grad}
        optimized = {
            one for optimizer in self.optimizers for group in optimizer.param_groups for one in group["params"]
        }
        needs_to = len(self.optimizers) > 1 or not trained <= optimized
        if self.find_unused_parameters is None and needs_to and isinstance(self.model, DistributedDataParallel):
            self._ddp_kwargs["find_unused_parameters"] = True
            self.configure_ddp()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        is_first = batch_idx % self.lightning_module.trainer.accumulate_grad_batches == 0
        if is_first and [one.requires_grad for one in self._parameters] != self._are_trained:
            self.configure_ddp()

    def on_validation_start(self) -> None:
        """Give every rank rank 0's buffers, which a checkpoint has, unless each forward pass does so. Collective."""
        if not self.broadcast_buffers:
            broadcast_in_place(self.lightning_module.buffers())

    on_test_start = on_predict_start = on_validation_start

    def post_backward(self, closure_loss: Tensor) -> None:
        """Check that the backward pass has averaged all gradients that DDP waits for.

        Raises:
            Refused: a parameter took no part in the loss. torch fails in the next forward pass alone, after a step.
        """
        super().post_backward(closure_loss)
        if not isinstance(self.model, DistributedDataParallel):
            return
        try:
            self.model._check_reducer_finalized()  # type: ignore[no-untyped-call]  # torch has no types for it
        except RuntimeError as error:
            named = zip(self.lightning_module.named_parameters(), self._are_trained, strict=True)
            waits = [name for (name, _), was_trained in named if was_trained]
            indices = _WITHOUT_GRADIENT.search(str(error))
            unused = [waits[int(index)] for index in indices[1].split()] if indices else waits
            raise Refused(
                f"{listed(unused, 'parameters')} did not contribute to the loss, but ddp waits for every gradient; "
                "freeze unused parameters (requires_grad=False), or type trainer.strategy.find_unused_parameters=true"
            ) from error


def auto(accelerator: Any, devices: Any, num_nodes: Any) -> Strategy:
    """Return the strategy for a number of devices: Single for one device, DDP for several.

    The arguments have no types, because the Trainer's are checked: a mistake in one would be reported twice.

    Args:
        accelerator, devices, num_nodes: the Trainer's values.
    """
    return DDP() if num_nodes > 1 or _devices(accelerator, devices) > 1 else Single()


def _devices(accelerator: str, devices: int | str | list[int]) -> int:
    """Return the number of devices on a node, counted as the Trainer counts them."""
    name = {"auto": _select_auto_accelerator(), "gpu": "cuda" if CUDAAccelerator.is_available() else "mps"}
    kind = AcceleratorRegistry.get(name.get(accelerator, accelerator))
    count = kind.auto_device_count() if devices == "auto" else devices
    return len(kind.get_parallel_devices(kind.parse_devices(count)))
