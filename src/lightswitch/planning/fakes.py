"""Stand-ins for other ranks, DDP, DeepSpeed's engine and real tensors in a planned step."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins import Precision
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, Strategy
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore, _compute_bucket_assignment_by_size
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torchmetrics import Metric

from lightswitch import patches
from lightswitch.mixins import Mixin, with_mixin

CPU = torch.device("cpu")  # fake tensors on another device need that device's driver
_AGREEING: dict[str, Callable[[list[int]], Any]] = {  # DeepSpeed functions that query rank 0 -> replacements
    "assert_lst_len_same_as_other_ranks": lambda numbers: None,
    "get_lst_from_rank0": lambda numbers: numbers,
}
_KEPT = (  # globals that a process's first engine sets and later ones reuse
    ("deepspeed.utils.groups", "_WORLD_GROUP"),
    ("deepspeed.runtime.torch_autocast", "TORCH_AUTOCAST_INITIALIZED"),
    ("deepspeed.runtime.torch_autocast", "TORCH_AUTOCAST_DTYPE"),
)
_WITH_32_BIT_COPIES = {"enabled": True, "bf16_master_weights_and_grads": False, "bf16_optimizer_states": False}
T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """Size of a run's world, and the rank that is simulated."""

    nodes: int
    devices_per_node: int
    rank: int = 0

    @property
    def size(self) -> int:
        """Total number of ranks."""
        return self.nodes * self.devices_per_node


def has_collectives() -> bool:
    """Return whether this torch has collectives for meta tensors; torch 2.8 has none."""
    return torch._C._dispatch_has_kernel_for_dispatch_key("c10d::broadcast_", "Meta")


@contextmanager
def fake_group(world: World) -> Iterator[None]:
    """Set up a fake default process group of a world, in which collectives leave tensors unchanged."""
    told_by = sys.excepthook
    dist.init_process_group("fake", rank=world.rank, world_size=world.size, store=HashStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
        sys.excepthook = told_by  # torch's hook prefixes each line with this rank, once more for every group


class FakeCluster(ClusterEnvironment):
    """Cluster environment of a simulated world, for which Lightning starts no processes."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world

    creates_processes_externally = True
    main_address = "localhost"
    main_port = 0

    @staticmethod
    def detect() -> bool:
        """Return False: this environment is only passed explicitly."""
        return False

    def world_size(self) -> int:
        """Return the number of ranks."""
        return self._world.size

    def set_world_size(self, size: int) -> None:
        """Do nothing: the world size is fixed."""

    def global_rank(self) -> int:
        """Return the simulated rank."""
        return self._world.rank

    def set_global_rank(self, rank: int) -> None:
        """Do nothing: the rank is fixed."""

    def local_rank(self) -> int:
        """Return the rank within its node."""
        return self._world.rank % self._world.devices_per_node

    def node_rank(self) -> int:
        """Return the node of the rank."""
        return self._world.rank // self._world.devices_per_node


def fake_tensors(model: LightningModule, fake: FakeTensorMode) -> None:
    """Replace a module's parameters, buffers and metric states by fake CPU tensors.

    Args:
        model: may be on the meta device. Tied parameters stay tied.
    """
    replaced: dict[Tensor, Tensor] = {}
    for part in model.modules():
        if isinstance(part, Metric) and part.device.type == "meta":
            part._apply(lambda tensor: torch.empty_like(tensor, device=CPU))  # updates the metric's stored device
        kept = {name: value for name, value in vars(part).items() if name != "_modules"}
        vars(part).update(tree_map_only(Tensor, lambda tensor: _fake(tensor, fake, replaced), kept))


def _fake(tensor: Tensor, fake: FakeTensorMode, replaced: dict[Tensor, Tensor]) -> Tensor:
    if tensor not in replaced:
        plain = tensor.detach()
        if plain.is_meta:
            made = fake.fake_tensor_converter.from_meta_and_device(fake, plain, CPU)
        else:
            made = fake.from_tensor(plain)
        is_parameter = isinstance(tensor, nn.Parameter)
        replaced[tensor] = nn.Parameter(made, tensor.requires_grad) if is_parameter else made
    return replaced[tensor]


class FakeDDP(DistributedDataParallel):
    """Stand-in for DistributedDataParallel that uses the same memory and sends the same bytes.

    Gradients are grouped into buckets, and each bucket is averaged once it is full.

    Args:
        module: the module whose gradients are averaged.
        bucket_bytes: size of a bucket; the first has at most 1 MiB.
        gradient_as_bucket_view: whether gradients are views of the buckets instead of separate tensors.
        sent_dtype: dtype to which a communication hook casts; None for the gradients' dtype.
    """

    def __init__(
        self,
        module: nn.Module,
        bucket_bytes: float = 25 * 2**20,
        gradient_as_bucket_view: bool = False,
        sent_dtype: torch.dtype | None = None,
    ) -> None:
        nn.Module.__init__(self)  # skip DistributedDataParallel's, which creates the reducer
        self.module = module
        self.require_backward_grad_sync = True
        self.static_graph = False
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.sent_dtype = sent_dtype
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad][::-1]
        limits = [min(2**20, int(bucket_bytes)), int(bucket_bytes)]
        cut, _ = _compute_bucket_assignment_by_size(list[Tensor](trained), limits) if trained else ([], [])
        for indices in cut:
            parameters = [trained[index] for index in indices]
            bucket = _Bucket(self, parameters)
            for parameter in parameters:
                parameter.register_post_accumulate_grad_hook(bucket.take)  # type: ignore[no-untyped-call]  # untyped in torch

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.require_backward_grad_sync and torch.is_grad_enabled():
            for buffer in self.module.buffers():
                dist.broadcast(buffer.flatten().view(torch.uint8), src=0)
        return self.module(*args, **kwargs)


class _Bucket:
    """Bucket of gradients of one dtype, in the order in which the backward pass computes them."""

    def __init__(self, owner: FakeDDP, parameters: Sequence[nn.Parameter]) -> None:
        self._owner = owner
        sizes = [parameter.numel() for parameter in parameters]
        self._memory = parameters[0].new_empty(sum(sizes))
        views = torch.split(self._memory, sizes)
        self._views = {p: view.view(p.shape) for p, view in zip(parameters, views, strict=True)}
        self._missing = len(parameters)

    def take(self, parameter: Tensor) -> None:
        """Count a parameter's gradient and, once the bucket is full, average it. Gradient hook."""
        if not self._owner.require_backward_grad_sync:
            return
        if self._owner.gradient_as_bucket_view:
            parameter.grad = self._views[parameter].detach()  # type: ignore[index]  # the hook is a parameter's
        self._missing -= 1
        if self._missing == 0:
            self._missing = len(self._views)
            sent = self._owner.sent_dtype
            dist.all_reduce(self._memory if sent is None else self._memory.to(sent))


class Answers(TorchDispatchMode):  # type: ignore[no-untyped-call]  # untyped in torch
    """Dispatch mode in which DeepSpeed's code reads 0 from any tensor: no overflow, and a norm that is not clipped.

    Reads by other code, such as the model, are not answered. DeepSpeed's device `cpu:0` is replaced by `cpu`, where
    all other tensors are, including copies of real tensors.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.ops.aten._local_scalar_dense.default and _asker().startswith("deepspeed."):
            return _zero(args[0].dtype)
        if kwargs.get("device") == torch.device("cpu", 0):
            kwargs["device"] = CPU
        return func(*args, **kwargs)


def _zero(dtype: torch.dtype) -> bool | int | float:
    if dtype == torch.bool:
        return False
    return 0.0 if dtype.is_floating_point else 0


def _asker() -> str:
    """Return the name of the Python module that called torch."""
    frame = sys._getframe(2)
    while frame.f_back is not None and _module(frame).partition(".")[0] == "torch":
        frame = frame.f_back
    return _module(frame)


def _module(frame: Any) -> str:
    return str(frame.f_globals.get("__name__", ""))


@contextmanager
def fake_zero(strategy: Strategy, world: World) -> Iterator[None]:
    """Run DeepSpeed's engine as one rank of a world in this context, and undo its changes to the process at the end.

    Does nothing for other strategies.
    """
    if not isinstance(strategy, DeepSpeedStrategy):
        yield
        return
    from lightswitch.deepspeed.state import deepspeed

    environment, accelerator = os.environ, deepspeed.accelerator.get_accelerator()
    exported = environment.copy()
    asking = import_module("deepspeed.runtime.zero.utils")
    asked = {name: getattr(asking, name) for name in _AGREEING}
    kept = [(import_module(module), name) for module, name in _KEPT]
    before = [getattr(module, name) for module, name in kept]
    os.environ["LOCAL_RANK"] = str(world.rank % world.devices_per_node)  # from which DeepSpeed reads it
    for name, answer in _AGREEING.items():
        patches.replace(asking, name, answer)
    try:
        yield
    finally:
        strategy.release_engine()  # type: ignore[attr-defined]  # of lightswitch.deepspeed's
        for name, ask in asked.items():
            patches.replace(asking, name, ask)
        for (module, name), value in zip(kept, before, strict=True):
            patches.replace(module, name, value)
        deepspeed.accelerator.set_accelerator(accelerator)
        environment.clear()
        environment |= exported


def plan_in_bfloat16(strategy: DeepSpeedStrategy) -> None:
    """Plan DeepSpeed's float16 as bfloat16, because DeepSpeed has no float16 on CPUs.

    Both store weights in 16 bits beside 32-bit copies.
    """
    config = strategy.config or {}
    config.pop("fp16", None)
    config["bf16"] = dict(_WITH_32_BIT_COPIES)


def shards_gradients(strategy: Strategy) -> bool:
    """Return whether DeepSpeed reduces gradients in every micro-batch; stage 1 reduces only in the last of a step."""
    config = getattr(strategy, "config", None) or {}
    return isinstance(strategy, DeepSpeedStrategy) and config.get("zero_optimization", {}).get("stage", 0) > 1


def alone(strategy: Strategy) -> Strategy:
    """Return a copy of a strategy that neither moves fake tensors nor waits for other ranks."""
    has_reducer = isinstance(strategy, DDPStrategy) and not isinstance(strategy, DeepSpeedStrategy)
    return with_mixin(_DDPWithoutOtherRanks if has_reducer else _WithoutOtherRanks, strategy)


class _WithoutOtherRanks(Mixin, Strategy):
    def model_to_device(self) -> None:
        """Do nothing: fake tensors are created on the right device."""

    def teardown(self) -> None:
        """Do nothing: it would move the model."""

    def broadcast(self, obj: T, src: int = 0) -> T:
        return obj


class _DDPWithoutOtherRanks(_WithoutOtherRanks, DDPStrategy):
    def _setup_model(self, model: nn.Module) -> FakeDDP:
        """Return a stand-in for DistributedDataParallel, whose reducer would wait for other ranks."""
        options = self._ddp_kwargs
        sent = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(getattr(self, "comm_hook", None) or "")
        return FakeDDP(
            model,
            2**20 * (options.get("bucket_cap_mb") or 25),
            bool(options.get("gradient_as_bucket_view")),
            sent,
        )

    def pre_backward(self, closure_loss: Tensor) -> None:
        """Do nothing: Lightning would prepare the reducer for a module with manual optimization."""

    def post_backward(self, closure_loss: Tensor) -> None:
        """Do nothing: the stand-in has no reducer that could tell which gradients it waits for."""


class Converted(Mixin, Precision):
    """Precision plugin that skips the conversion of the module, which torch can't do with fake tensors.

    The module was converted before its tensors were replaced.
    """

    def convert_module(self, module: nn.Module) -> nn.Module:
        return module
