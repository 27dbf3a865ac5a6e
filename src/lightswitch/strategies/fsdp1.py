"""Sharding by torch's older FullyShardedDataParallel, on CUDA and the CPU: Lightning's FSDPStrategy with fixes."""

from __future__ import annotations

import logging
import secrets
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, Literal

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.plugins import FSDPPrecision, HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.strategies import FSDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from torch.distributed.constants import default_pg_timeout
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp import MixedPrecision as Dtypes
from torch.distributed.fsdp._runtime_utils import _reshard
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.optim import Optimizer

from lightswitch.checkpoints import names
from lightswitch.checkpoints.shards import Stored
from lightswitch.errors import Refused
from lightswitch.mixins import Mixin, with_mixin
from lightswitch.strategies.elementwise import refuse_in_pieces
from lightswitch.strategies.gathered_writes import GatheredWrites, PortableFSDP1, handles, of_fsdp1, write_back
from lightswitch.strategies.replicas import broadcast_metric_states, broadcast_weights
from lightswitch.strategies.sharded import (
    Sharded,
    average_replicated,
    checkpoint_activations,
    clip_shards_by_norm,
    in_full_shape,
    replicated_parameters,
    set_timeouts,
)
from lightswitch.strategies.trained import Trained, Unused, WatchedForward
from lightswitch.strategies.units import find_units

log = logging.getLogger(__name__)


class FSDP1(PortableFSDP1, Sharded, FSDPStrategy):
    """Sharding by FullyShardedDataParallel: Lightning's FSDPStrategy, with its documented options as plain values.

    Args:
        device_mesh: for the two HYBRID strategies, [replicas, devices of each]; None for [nodes, devices of a node].
        auto_wrap_policy: modules that are each gathered as one, by class name or path; None for the model's repeated
            blocks.
        activation_checkpointing: recompute a block's activations in the backward pass instead of storing them.
        cpu_offload: store parameters, gradients and optimizer state in the host's memory.
        mixed_precision: dtypes by name, ``{param_dtype: bfloat16, reduce_dtype: float32, buffer_dtype: float32}``;
            None for the run's precision, with the same meaning as under every other strategy.
        timeout_seconds: how long a rank waits for another in a collective.
    """

    def __init__(
        self,
        sharding_strategy: Literal[
            "FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"
        ] = "FULL_SHARD",
        device_mesh: list[int] | None = None,
        auto_wrap_policy: list[str] | None = None,
        activation_checkpointing: bool = False,
        cpu_offload: bool = False,
        mixed_precision: dict[str, str] | None = None,
        process_group_backend: Literal["nccl", "gloo", "mpi"] | None = None,
        timeout_seconds: float = default_pg_timeout.total_seconds(),
    ) -> None:
        super().__init__(
            process_group_backend=process_group_backend,
            timeout=timedelta(seconds=timeout_seconds),
            cpu_offload=cpu_offload,
            mixed_precision=_dtypes(mixed_precision),
        )
        self.sharding_strategy = ShardingStrategy[sharding_strategy]
        self.mesh_shape = device_mesh
        self.units = auto_wrap_policy
        self.activation_checkpointing = activation_checkpointing
        self._mesh: DeviceMesh | None = None
        self._root: FullyShardedDataParallel | None = None
        self._shapes: dict[nn.Parameter, torch.Size] = {}
        self._replicated: set[nn.Parameter] = set()

    # Precision: with FSDPPrecision, "mixed" would also sum gradients in 16 bits

    @property  # type: ignore[override]  # Lightning's narrows it to FSDPPrecision
    def precision_plugin(self) -> Precision:
        return self._precision_plugin or Precision()

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        if isinstance(plugin, FSDPPrecision):  # Lightning makes it from a precision's name
            plugin = _plain(plugin.precision, on_cpu=isinstance(self.accelerator, CPUAccelerator))
        self._precision_plugin = plugin

    def setup_precision_plugin(self) -> None:
        self.precision_plugin = plugin = with_mixin(_ClipsShards, self.precision_plugin)
        plugin.ask(self)
        super().setup_precision_plugin()

    @property
    def mixed_precision_config(self) -> Dtypes | None:
        return self.mixed_precision

    # Processes

    def setup_environment(self) -> None:
        super().setup_environment()
        if self._root is None:  # a test after fit uses the mesh of the sharded parameters
            self._mesh = self._made_mesh()

    def _made_mesh(self) -> DeviceMesh | None:
        """Return the device mesh; None if nothing is sharded.

        Without a mesh, the two HYBRID strategies would train replicas that are never averaged, and the DTensors that
        checkpoints are written from could not be made.
        """
        if self.sharding_strategy == ShardingStrategy.NO_SHARD:
            return None
        if "HYBRID" not in self.sharding_strategy.name:
            return init_device_mesh(self.root_device.type, (self.world_size,))
        replicas, devices = self.mesh_shape or (self.num_nodes, self.num_processes)
        return init_device_mesh(self.root_device.type, (replicas, devices), mesh_dim_names=("replicate", "shard"))

    # The model

    @contextmanager
    def model_sharded_context(self) -> Generator[None, None, None]:
        yield  # Lightning's context is for modules that wrap themselves, which are refused

    def setup(self, trainer: Trainer) -> None:
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        if self._root is None:  # it exists in a test after fit
            self._root = self._sharded()
        self.model = self._root
        set_timeouts(self._timeout)
        self.barrier()
        if trainer.state.fn == TrainerFn.FITTING:
            with in_full_shape(self._shapes):
                self.setup_optimizers(trainer)
            self._check_optimizers()
        self.setup_precision_plugin()

    def _sharded(self) -> FullyShardedDataParallel:
        model = self.prepared()
        done: set[nn.Module] = set()
        for path, unit in reversed(find_units(model, self.units).items()):  # inner before outer
            broadcast_weights(unit.modules(), self.root_device, done)
            if self.activation_checkpointing:
                checkpoint_activations(unit)
            model.set_submodule(path, self._wrapped(unit))
        broadcast_weights(model.modules(), self.root_device, done)
        root = self._wrapped(model)
        broadcast_metric_states(model, self.root_device)
        self._check(root)
        self._unused = self._watched(root)
        average_replicated(self._replicated)
        self._trained = Trained(model)
        self._forward_redirection = WatchedForward(self._trained)
        own_names = {parameter: name for name, parameter in names.parameters(root.module).items()}
        self._writes = GatheredWrites(of_fsdp1(root, own_names), self.looks)
        return root

    def prepared(self) -> nn.Module:
        """Return the module, ready to be sharded.

        Raises:
            Refused: the module wraps itself or uses manual optimization, or a sharded strategy does not support it.
        """
        assert self.lightning_module is not None
        if not self.lightning_module.automatic_optimization:
            raise Refused(
                f"{type(self.lightning_module).__name__} uses manual optimization, but fsdp1 still has its parameters "
                "gathered when the optimizer steps; use strategy=fsdp or ddp"
            )
        if any(isinstance(part, FullyShardedDataParallel) for part in self.lightning_module.modules()):
            raise Refused(
                f"{type(self.lightning_module).__name__} wraps itself in configure_model; leave "
                "FullyShardedDataParallel to the strategy"
            )
        return super().prepared()

    def _wrapped(self, module: nn.Module) -> FullyShardedDataParallel:
        self._replicated |= replicated_parameters(module, self._shapes)
        for parameter in module.parameters():
            self._shapes.setdefault(parameter, parameter.shape)
        with warnings.catch_warnings():  # all of FSDP1 is deprecated, not only NO_SHARD
            warnings.filterwarnings("ignore", "The `NO_SHARD` sharding strategy is deprecated", FutureWarning)
            warnings.filterwarnings("ignore", "FSDP is switching to use `NO_SHARD`")  # the only choice on one device
            return FullyShardedDataParallel(
                module,
                sharding_strategy=self.sharding_strategy,
                device_mesh=self._mesh,
                device_id=self.root_device,
                cpu_offload=self.cpu_offload if self.root_device.type != "cpu" else None,  # it pins memory
                mixed_precision=self.mixed_precision,
                ignored_states=[part for part in module.parameters() if part in self._replicated],
                use_orig_params=True,
            )

    def _check(self, root: FullyShardedDataParallel) -> None:
        if self.world_size > 1 and self.sharding_strategy != ShardingStrategy.NO_SHARD and not list(handles(root)):
            raise Refused(f"there is nothing to shard in {type(root.module).__name__}; use strategy=ddp")
        if self.is_global_zero:
            log.warning("fsdp1 is torch's older FSDP, which is deprecated; strategy=fsdp is its successor")
            if self.cpu_offload.offload_params and self.root_device.type == "cpu":
                log.warning("cpu_offload does nothing on the CPU: parameters are in its memory")

    def _check_optimizers(self) -> None:
        for optimizer in self.optimizers:
            if optimizer.state:
                raise Refused(
                    f"{type(optimizer).__name__} creates its state before the first step, when it would not be "
                    "sharded; use strategy=fsdp, or another optimizer"
                )
            if self.world_size > 1 and self.sharding_strategy != ShardingStrategy.NO_SHARD:
                refuse_in_pieces(optimizer, "fsdp1")

    # Steps

    @contextmanager
    def whole_weights(self, hook: str) -> Iterator[None]:
        yield
        assert self._root is not None
        self._writes.follow()
        write_back(self._root)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.looks.step():
            return super().training_step(*args, **kwargs)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        assert self.lightning_module is not None
        if batch_idx % self.lightning_module.trainer.accumulate_grad_batches == 0:  # gradients are laid out then
            self._trained.changes()

    def _watched(self, root: FullyShardedDataParallel) -> Unused:
        """Return a record of the parameters without a gradient, which hooks on views of flat parameters fill in."""
        assert self._timeout is not None
        key = self.broadcast(secrets.token_hex(8))
        unused = Unused(names.parameters(root.module), self._timeout.total_seconds(), key)
        for unit in FullyShardedDataParallel.fsdp_modules(root):
            if unit._handle is not None:
                hook = partial(_mark_used, unused, unit._handle.flat_param)
                unit.module.register_forward_pre_hook(hook)
        for parameter in self._replicated:
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(unused.mark_used)  # type: ignore[no-untyped-call]  # untyped in torch
        return unused

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
        """Step, and skip parameters without a gradient, as one process does; FSDP has zeros for them."""

        def closure_without_zeros() -> Any:
            output = closure()
            for parameter in self._unused.of_step().values():
                parameter.grad = None
            return output

        return super().optimizer_step(optimizer, closure_without_zeros, *args, **kwargs)

    def clip_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        """Clip by the norm over all ranks' shards; torch's function uses one rank's, and FSDP's sums in 32 bits."""
        assert self._root is not None
        assert self._root.process_group is not None
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        sharded = {parameter for _, handle in handles(self._root) for parameter in handle.flat_param._params}
        clip_shards_by_norm(parameters, sharded, clip_val, self._root.process_group, self.root_device)

    def free_gathered(self) -> None:
        """Free the gathered parameters."""
        assert self._root is not None
        for module, handle in handles(self._root):
            if hasattr(handle.flat_param, "_local_shard"):  # before the first forward pass, nothing is gathered
                _reshard(module, handle, True)

    # Checkpoints

    def local_parameters(self) -> dict[str, Stored]:
        self.free_gathered()
        return super().local_parameters()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        self.free_gathered()  # after validation, gathered tensors still stand in for the modules' parameters
        return super().lightning_module_state_dict()

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        super().load_model_state_dict(checkpoint, strict)
        self.free_gathered()


class _ClipsShards(Mixin, Precision):
    def ask(self, strategy: FSDP1) -> None:
        self.strategy = strategy

    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        self.strategy.clip_by_norm(optimizer, clip_val)


def _mark_used(unused: Unused, flat: Any, *_: Any) -> None:
    """Forward pre-hook of a unit, in which autograd tracks views of the flat parameter instead of parameters."""
    for parameter, part in zip(flat._params, flat._tensors, strict=True):
        if part is not None and part.requires_grad:
            part.register_hook(lambda gradient, of=parameter: unused.mark_used(of) if gradient is not None else None)


def _dtypes(by_use: dict[str, str] | None) -> Dtypes | None:
    return Dtypes(**{key: getattr(torch, name) for key, name in by_use.items()}) if by_use else None


def _plain(precision: Any, on_cpu: bool) -> Precision:
    """Return Lightning's precision plugin for a strategy that shards nothing."""
    if precision in ("16-true", "bf16-true"):
        return HalfPrecision(precision)
    if precision in ("16-mixed", "bf16-mixed"):
        device = "cpu" if on_cpu else "cuda"
        scaler = ShardedGradScaler(device) if precision == "16-mixed" else None
        return MixedPrecision(precision, device, scaler)
    return Precision()
