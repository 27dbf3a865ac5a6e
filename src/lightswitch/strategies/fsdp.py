"""Fully sharded data parallelism by torch's `fully_shard` (FSDP2), for a LightningModule without code for it."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import Any, Literal

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightswitch import patches
from lightswitch.checkpoints import names
from lightswitch.checkpoints.portable import PortableCheckpoints
from lightswitch.checkpoints.shards import Stored
from lightswitch.errors import Refused
from lightswitch.hooked_strategy import with_mixin
from lightswitch.strategies.agreement import (
    broadcast_in_place,
    broadcast_metric_states,
    broadcast_weights,
)
from lightswitch.strategies.elementwise import refuse_sharded
from lightswitch.strategies.sharded import (
    ClipsOverMeshes,
    Originals,
    UnevenUse,
    checkpoint_activations,
    first_name,
    gathered_parts,
    initialize,
    is_mostly_rounded,
    refuse_hooks,
    refuse_scripted,
    replicated_parameters,
)
from lightswitch.strategies.units import called_parts, find_units
from lightswitch.strategies.weights import (
    GatheredCopies,
    ShardsInHook,
    WatchedWeights,
    let_shards_be_used,
)

log = logging.getLogger(__name__)

_ROUNDS_TO = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}

Sharding = Literal["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD"]
Dtype = Literal["float32", "bfloat16", "float16"]


class FSDP(WatchedWeights, PortableCheckpoints, ModelParallelStrategy):
    """Sharding of parameters, gradients and optimizer state (FSDP2), with one unit of the model gathered at a time.

    Runs on CUDA and on the CPU. Modules built in `configure_model` are built once, on the CPU of global rank 0, and
    broadcast unit by unit, so that no device ever holds the whole model.

    Args:
        sharding_strategy: FULL_SHARD; SHARD_GRAD_OP, which keeps parameters gathered until the backward pass;
            NO_SHARD, a replica on each device; HYBRID_SHARD, replicas that are each sharded over ``shard_size``
            devices.
        shard_size: devices of a replica under HYBRID_SHARD; None for the devices of a node.
        units: modules that are each gathered as one, by class name or path; None for the model's repeated blocks.
        activation_checkpointing: recompute a unit's activations in the backward pass instead of storing them.
        cpu_offload: store parameters, gradients and optimizer state in the host's memory.
        param_dtype: dtype in which parameters are gathered and computed with; None for their own dtype, except that
            bf16-mixed and 16-mixed take 16 bits for the linear layers and convolutions of units that consist mostly of
            these, because autocast would round them anyway. float32 gathers them in full precision.
        reduce_dtype: dtype in which gradients are summed; None for ``param_dtype``, and for float32 where autocast's
            rounding is taken for the parameters.
        gather: step, in which a training step may read every weight that belongs to no unit, and write none; or parts,
            in which each submodule that the step calls gathers its own, so that the step may write to weights outside
            of these calls, and read none there.
        process_group_backend: backend of torch.distributed; None for the device's default.
        timeout_seconds: how long a rank waits for another in a collective.
    """

    def __init__(
        self,
        sharding_strategy: Sharding = "FULL_SHARD",
        shard_size: int | None = None,
        units: list[str] | None = None,
        activation_checkpointing: bool = False,
        cpu_offload: bool = False,
        param_dtype: Dtype | None = None,
        reduce_dtype: Dtype | None = None,
        gather: Literal["step", "parts"] = "step",
        process_group_backend: str | None = None,
        timeout_seconds: float = 1800,
    ) -> None:
        super().__init__(1, 1, process_group_backend=process_group_backend, timeout=timedelta(seconds=timeout_seconds))
        self.sharding_strategy = sharding_strategy
        self.shard_size = shard_size
        self.units = units
        self.activation_checkpointing = activation_checkpointing
        self.cpu_offload = cpu_offload
        self.gather = gather
        self._sharded: nn.Module | None = None
        self.mixed_precision = MixedPrecisionPolicy(
            param_dtype=getattr(torch, param_dtype) if param_dtype else None,
            reduce_dtype=getattr(torch, reduce_dtype) if reduce_dtype else None,
        )

    # Processes

    def setup_environment(self) -> None:
        self._setup_distributed()
        if self._device_mesh is None:  # a test after fit uses the mesh of the sharded parameters
            self._device_mesh = self._mesh()
        patches.replace(self.lightning_module, "_device_mesh", self._device_mesh)

    def _mesh(self) -> DeviceMesh:
        tensor_parallel = int(self._tensor_parallel_size)
        shards = self.world_size // tensor_parallel
        if self.sharding_strategy == "NO_SHARD":
            shards = 1
        elif self.sharding_strategy == "HYBRID_SHARD":
            shards = self.shard_size or self.num_processes // tensor_parallel
        replicas = self.world_size // shards // tensor_parallel
        sizes = {"replicate": replicas, "shard": shards, "tensor_parallel": tensor_parallel}
        # each dimension is a process group, and torch 2.8 can't make groups with two kinds of backends (pytorch#159200)
        sizes = {name: size for name, size in sizes.items() if size > 1 or name == "shard"}
        return init_device_mesh(self.root_device.type, (*sizes.values(),), mesh_dim_names=(*sizes,))

    @property
    def _data_parallel_mesh(self) -> DeviceMesh:
        """The mesh to shard over, one-dimensional for a single replica: a second dimension would add an all-reduce."""
        is_replicated = "replicate" in (self.device_mesh.mesh_dim_names or ())
        return self.device_mesh["replicate", "shard"] if is_replicated else self.device_mesh["shard"]

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        tensor_parallel = int(self._tensor_parallel_size)  # consecutive ranks read the same samples
        return {"num_replicas": self.world_size // tensor_parallel, "rank": self.global_rank // tensor_parallel}

    def _get_process_group_backend(self) -> str:
        backend: str = super()._get_process_group_backend()
        # gradients that are offloaded to the host have their norm summed over ranks there
        return "cpu:gloo,cuda:nccl" if backend == "nccl" and self.cpu_offload else backend

    @property
    def only_sums(self) -> bool:
        """True if gradients have to be summed and then divided: gloo may sum for an average (pytorch#162338)."""
        return "nccl" not in self._get_process_group_backend()

    # The model

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        """Build on the CPU on rank 0, and on the meta device on other ranks, whose values would be discarded."""
        with torch.device("cpu" if self.global_rank == 0 else "meta"):
            yield

    def setup(self, trainer: Trainer) -> None:
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        if self.model is not self._sharded:
            self.model = self._sharded = self._shard()
        assert self._timeout is not None
        for group in self.device_mesh.get_all_groups():  # NCCL's default of 10 minutes ends the ranks that wait
            group.set_timeout(self._timeout)
        self.barrier()
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
            for optimizer in self.optimizers:
                refuse_sharded(optimizer, self.device_mesh["shard"])
                if not self.lightning_module.automatic_optimization:  # it may have run `loss.backward()`
                    optimizer.register_step_pre_hook(lambda *_: self.uses.settle())
        self.setup_precision_plugin()

    def _shard(self) -> nn.Module:
        model = self.prepared()
        originals = Originals(model)
        units = find_units(model, self.units)
        # in parts, each submodule that the step calls gathers its own parameters; others are whole on each device
        roots = called_parts(model) if self._gathers_parts else [model]
        self._replicated: set[nn.Parameter] = set()
        # roots before units, because they gather parameters of units that stay in 32 bits; inner units before outer
        sharded = list(dict.fromkeys([*roots, *reversed(units.values())]))
        inner = [unit for unit in units.values() if unit not in roots]
        # matrices to be gathered in 16 bits, to which autocast would round them anyway
        rounds = self._autocast_dtype is not None and self.mixed_precision.param_dtype is None
        self._halved = {unit for unit in inner if rounds and is_mostly_rounded(unit)}
        of, done = gathered_parts(model, roots, sharded, self._halved), set[nn.Module]()
        for module in dict.fromkeys([*sharded, model]):
            broadcast_weights(of[module], self.root_device, done)
            if module in sharded:
                self._shard_unit(module, of[module], is_root=module in roots)
        initialize(one for one in dict.fromkeys([*roots, *units.values()]) if isinstance(one, FSDPModule))
        originals.hand_over()
        self._replicated |= {one for one in model.parameters() if not isinstance(one, DTensor)}
        broadcast_metric_states(model, self.root_device)
        replicated = [one for one in model.parameters() if one in self._replicated]
        self.uses = UnevenUse(model, sharded, replicated, self.root_device, self._own_weight)
        own_names = {parameter: name for name, parameter in names.parameters(model).items()}
        self._in_shards = [(name, one) for one, name in own_names.items() if isinstance(one, DTensor)]
        if not self._in_shards:
            raise Refused(f"there is nothing to shard in {first_name(model)}; use strategy=ddp")
        if self.is_global_zero:
            self._report(module for module in dict.fromkeys([*roots, *units.values()]) if module is not model)
        let_shards_be_used()
        instead = "" if self._gathers_parts else "type trainer.strategy.gather=parts, "
        GatheredCopies(model, own_names, self, instead)
        return model

    @property
    def _gathers_parts(self) -> bool:
        """True as well under manual optimization, where the optimizer steps within the training step, when nothing may
        be gathered."""
        return self.gather == "parts" or not self.lightning_module.automatic_optimization

    def prepared(self) -> nn.Module:
        """Return the module, ready to be sharded.

        Raises:
            Refused: the module shards itself, or a sharded strategy does not support a part of it.
        """
        module = self.lightning_module
        if any(isinstance(parameter, DTensor) for parameter in module.parameters()):
            raise Refused(
                f"{type(module).__name__} shards itself in configure_model; leave fully_shard and parallelize_module "
                "to the strategy"
            )
        refuse_hooks(module.named_parameters())
        refuse_scripted(module)
        model = self.precision_plugin.convert_module(module)
        return self._layer_sync.apply(model) if self._layer_sync else model

    def _shard_unit(self, module: nn.Module, parts: Sequence[nn.Module], is_root: bool) -> None:
        """Shard the direct parameters of `parts`, which a module gathers before its forward pass."""
        if self.activation_checkpointing and not is_root:
            checkpoint_activations(module)
        own = {parameter for part in parts for parameter in part.parameters(recurse=False)}
        others = {parameter for parameter in module.parameters() if parameter not in own}
        cut = {parameter for parameter in own if isinstance(parameter, DTensor)}
        self._replicated |= replicated_parameters(module, others | cut | self._replicated)
        frees = self.sharding_strategy in ("FULL_SHARD", "HYBRID_SHARD")
        shards = fully_shard(
            module,
            mesh=self._data_parallel_mesh,
            # the backward pass begins with the root's parameters, but a part may be stepped or written before it
            reshard_after_forward=self._gathers_parts or (frees and not is_root),
            mp_policy=self._policy(module),
            offload_policy=CPUOffloadPolicy() if self._offloads else OffloadPolicy(),
            ignored_params=self._replicated | others,
        )
        shards.set_force_sum_reduction_for_comms(self.only_sums)

    def _policy(self, module: nn.Module) -> MixedPrecisionPolicy:
        if self._autocast_dtype is None:
            return self.mixed_precision
        dtype, reduced = self._autocast_dtype if module in self._halved else None, self.mixed_precision.reduce_dtype
        # autocast casts the inputs of a forward pass
        return MixedPrecisionPolicy(dtype, reduced or (dtype and torch.float32), cast_forward_inputs=False)

    @property
    def _autocast_dtype(self) -> torch.dtype | None:
        plugin = self.precision_plugin
        return _ROUNDS_TO[plugin.precision] if isinstance(plugin, MixedPrecision) else None

    def _report(self, units: Iterable[nn.Module]) -> None:
        kinds = Counter(map(first_name, units))
        found = ", ".join(f"{count} {name}" for name, count in kinds.items()) or "the whole model"
        mesh = zip(self.device_mesh.mesh_dim_names or (), self.device_mesh.shape, strict=True)
        over = " × ".join(f"{name} {size}" for name, size in mesh if size > 1) or "one device"
        log.info("units      %s over %s", found, over)
        if self.cpu_offload and not self._offloads:
            log.warning("cpu_offload does nothing on the CPU: parameters are in its memory")

    @property
    def _offloads(self) -> bool:
        return self.cpu_offload and self.root_device.type != "cpu"

    def setup_precision_plugin(self) -> None:
        self.precision_plugin = plugin = with_mixin(ClipsOverMeshes, self.precision_plugin)
        plugin.scale_over_meshes()
        super().setup_precision_plugin()

    # Steps

    def on_train_start(self) -> None:
        super().on_train_start()
        refuse_hooks(self._in_shards)  # of a hook such as on_fit_start

    def whole_weights(self, hook: str) -> AbstractContextManager[Any]:
        """Return a context in which a hook computes with shards."""
        self.free_gathered()  # what is still gathered after a forward pass is a copy, and writes to it would be lost
        return ShardsInHook(hook, self._in_shards)

    def run_step(self, step: str, *args: Any, **kwargs: Any) -> Any:
        """Call a step through the root's forward pass, whose hooks gather the parameters that belong to no unit."""
        if self._gathers_parts:
            return getattr(self.lightning_module, step)(*args, **kwargs)
        return super().run_step(step, *args, **kwargs)

    def post_backward(self, closure_loss: Tensor) -> None:
        super().post_backward(closure_loss)
        self.uses.settle()

    def _own_weight(self) -> float | Tensor:
        """Return the weight of this rank's loss in a pass that the module has started: Lightning has not seen it."""
        weight: Callable[[], float | Tensor] | None = getattr(self, "loss_weight", None)  # of HookedStrategy
        return 1.0 if weight is None or self.is_in_backward else weight()

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
        assert self.model is not None
        with self.outside_of_hooks():
            output = super().optimizer_step(optimizer, closure, *args, **kwargs)
            # as under ddp: batch norm statistics depend on a rank's samples
            broadcast_in_place(self.model.buffers())
        self.free_gathered()  # after a step without a backward pass, the old values are still gathered
        return output

    def on_validation_end(self) -> None:
        self.free_gathered()

    on_test_end = on_predict_end = on_validation_end

    def local_parameters(self) -> dict[str, Stored]:
        self.free_gathered()
        return super().local_parameters()

    def free_gathered(self) -> None:
        """Free the gathered parameters of every unit and the root.

        Without a backward pass, the root stays gathered, and with SHARD_GRAD_OP every unit. Loading a checkpoint makes
        gathered values stale.
        """
        assert self.model is not None
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
