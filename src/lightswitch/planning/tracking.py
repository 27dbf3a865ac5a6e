"""Callback that records a Trainer's steps in a ledger, with fake tensors (to plan a run) or real ones."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torchmetrics import Metric

from lightswitch.planning.collectives import Collective
from lightswitch.planning.ledger import Block, Ledger, Mark
from lightswitch.planning.timeline import Kind, Timeline

_OF_PARAMETERS = ("parameters", "gradients", "gathered", "buffers")  # independent of the micro-batch size
# Attributes of DeepSpeedZeroOptimizer (stages 1 and 2) and DeepSpeedZeroOptimizer_Stage3, in DeepSpeed 0.19
_COPIES = ("single_partition_of_fp32_groups", "fp32_partitioned_groups_flat")  # updated by the optimizer
_GRADIENTS = ("averaged_gradients", "all_grad_tensors", "grad_partitions_flat_buffer")
_ON_HOST = (
    *("accumulated_grads_in_cpu", "offload_gradient_dict", "param_buffer_of_bit16_for_cpu_offload_groups"),
    "temp_grad_buffer_for_cpu_offload",
)
_ON_DEVICE = ("temp_grad_buffer_for_gpu_offload",)


@dataclass(frozen=True)
class TrackedStep:
    """A recorded optimizer step.

    Attributes:
        collectives: collectives of each micro-batch; the last one includes gradient clipping and the optimizer step.
        flops: floating-point operations of this device.
    """

    timeline: Timeline
    collectives: tuple[tuple[Collective, ...], ...]
    flops: int


class Tracking(Callback):
    """Callback that keeps a ledger open from before the strategy places the model until training ends.

    Args:
        fake: fake tensor mode to train in; None if tensors are real.
        inner: dispatch modes that see each operator before the ledger does.
    """

    def __init__(self, fake: FakeTensorMode | None = None, inner: Sequence[TorchDispatchMode] = ()) -> None:
        self._fake, self._inner = fake, inner
        self._modules = Modules()
        self.ledger = Ledger(fake, self._modules.at_work)
        self._marks: list[list[Mark]] = []  # by step: its start, and the end of each micro-batch
        self._batches: list[list[Block]] = []  # by step: the storages of its micro-batches
        self._read: set[Block] = set()  # the storages of all micro-batches
        self._open = ExitStack()

    def steps(self) -> list[TrackedStep]:
        """Return all recorded steps, in order."""
        return [self.step(number) for number in range(len(self._marks))]

    def step(self, number: int) -> TrackedStep:
        """Return one recorded step; steps are numbered from 0."""
        marks = self._marks[number]
        collectives = tuple(
            tuple(self.ledger.collectives[start.collectives : end.collectives]) for start, end in pairwise(marks)
        )
        timeline = self.ledger.between(marks[0], marks[-1])
        return TrackedStep(timeline, collectives, marks[-1].flops - marks[0].flops)

    def resized(self, other: int, at: int) -> Timeline | None:
        """Return the timeline that step ``at`` would have at the micro-batch size of the earlier step ``other``.

        Storages of the forward and backward passes get the bytes that they have in ``other``. Those of the optimizer
        step are unchanged: they depend only on parameters, and ``other`` may be the first step, which also creates the
        optimizer state.

        Args:
            other, at: numbers of the two steps, from 0.

        Returns:
            None if the two steps do not allocate corresponding storages; then a step of that size must be run.
        """
        earlier, own = self._marks[other], self._marks[at]
        pairs = list(zip_longest(self._passes(earlier), self._passes(own)))
        if any(a is None or b is None or not a.is_like(b) for a, b in pairs):
            return None
        pairs += zip(self._batches[other], self._batches[at], strict=True)
        times = {b: a.first_bytes / b.first_bytes for a, b in pairs if a.first_bytes != b.first_bytes}
        left = self.ledger.held(own[0])
        if any(a in left for a, b in pairs if b in times and b not in self._batches[at]):
            return None
        return self.ledger.between(own[0], own[-1], times)

    def _passes(self, marks: list[Mark]) -> list[Block]:
        """Return the storages of a step's forward and backward passes that may grow with the number of samples."""
        made = (block for block in self.ledger.made(marks[0], marks[-1]) if block not in self._read)
        return [b for b in made if b.phase in ("forward", "backward") and b.role not in _OF_PARAMETERS]

    def name_batch(self, batch: Any) -> list[Block]:
        """Name the tensors of a micro-batch as activations; the batch may be prefetched before its step."""
        named = (self.ledger.name(tensor, "activations") for tensor in _tensors(batch))
        found = [block for block in named if block is not None]
        self._read.update(found)
        return found

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self._fake is not None:
            self._open.enter_context(self._fake)
        if not pl_module.automatic_optimization:  # it may run another forward pass after an optimizer's step
            next_pass = register_optimizer_step_post_hook(lambda *_: self.ledger.enter_phase("forward"))
            self._open.callback(next_pass.remove)
        self._open.enter_context(self._modules)
        self._open.enter_context(self.ledger)
        for mode in self._inner:
            self._open.enter_context(mode)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._modules.know(pl_module)
        self._name_buffers(pl_module)
        for parameter in pl_module.parameters():
            self.ledger.name(parameter, "parameters")

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx % trainer.accumulate_grad_batches == 0:
            self._marks.append([self.ledger.mark()])
            self._batches.append([])
        self.ledger.enter_phase("forward")
        self.ledger.values.restart()
        self._batches[-1] += self.name_batch(batch)
        self._name_of_zero(trainer)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        self.ledger.enter_phase("backward")
        self._name_of_zero(trainer)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        self.ledger.enter_phase("optimizer")
        for parameter in pl_module.parameters():
            if parameter.grad is not None:
                self.ledger.name(parameter.grad, "gradients")
        self._name_of_zero(trainer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._marks[-1].append(self.ledger.mark())
        self._name_buffers(pl_module)  # metrics may have new or longer states
        for optimizer in trainer.optimizers:
            for state in optimizer.state.values():
                for tensor in _tensors(state):
                    self.ledger.name(tensor, "optimizer")

    def _name_buffers(self, module: nn.Module) -> None:
        for buffer in (*module.buffers(), *_metric_states(module)):
            self.ledger.name(buffer, "buffers")

    def _name_of_zero(self, trainer: Trainer) -> None:
        """Name DeepSpeed's internal tensors, which it allocates and frees during a step."""
        if isinstance(trainer.strategy, DeepSpeedStrategy):
            for kind, tensor in zero_kinds(trainer.optimizers[0], trainer.lightning_module.parameters()):
                self.ledger.name(tensor, kind)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.close()

    def close(self) -> None:
        """Exit the dispatch modes."""
        self._open.close()


class Modules:
    """Tracker of the running module: in a backward pass, the module whose operations are being differentiated."""

    def __init__(self) -> None:
        self._paths: dict[int, str] = {}  # by id: a metric's hash changes with its states
        self._running: list[str] = []
        self._starts: list[int] = []  # sequence numbers of autograd nodes at which the running module changed, in order
        self._after: list[str] = []  # the module from each of these numbers on

    def know(self, model: nn.Module) -> None:
        """Record the paths of a model's modules."""
        for path, module in model.named_modules():
            self._paths[id(module)] = path.replace("_fsdp_wrapped_module.", "").replace("._fsdp_wrapped_module", "")

    def at_work(self) -> str:
        """Return the path of the running module; empty if there is none."""
        if self._running:
            return self._running[-1]
        node: Any = torch._C._current_autograd_node()  # None outside of a backward pass
        if node is None or not self._starts:
            return ""
        at = bisect_right(self._starts, node._sequence_nr()) - 1
        return self._after[at] if at >= 0 else ""

    def __enter__(self) -> Modules:
        self._hooks = (
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        )
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _enter(self, module: nn.Module, arguments: Any) -> None:
        if id(module) in self._paths:
            self._running.append(self._paths[id(module)])
            self._note()

    def _leave(self, module: nn.Module, arguments: Any, output: Any) -> None:
        if id(module) in self._paths:
            self._running.pop()
            self._note()

    def _note(self) -> None:
        number = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]  # torch's, untyped
        if self._starts and number < self._starts[-1]:
            return  # sequence numbers are counted per thread
        self._starts.append(number)
        self._after.append(self._running[-1] if self._running else "")


def _metric_states(model: nn.Module) -> Iterator[Tensor]:
    """Yield the states of metrics and their default values, which are on the device as well."""
    for part in model.modules():
        if isinstance(part, Metric):
            yield from _tensors([getattr(part, name) for name in part._defaults])
            yield from _tensors(part._defaults)


def _tensors(tree: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))


def zero_kinds(optimizer: Any, parameters: Iterable[nn.Parameter]) -> Iterator[tuple[Kind, Tensor]]:
    """Yield the tensors that a ZeRO optimizer holds now, with their kinds.

    If several tensors share memory, the last kind counts. If the optimizer is offloaded, its gradient shards are in the
    host's memory and count as optimizer state.

    Args:
        parameters: parameters of the model. At stage 3, a rank holds a shard of each and gathers the full tensor
            temporarily.
    """
    offloads = getattr(optimizer, "cpu_offload", False) or getattr(optimizer, "offload_optimizer", False)
    gradients: Kind = "optimizer" if offloads else "gradients"
    copies = _of_optimizer(optimizer, _COPIES)
    yield from (("communication", tensor) for tensor in _buffers(optimizer))
    yield from (("optimizer", tensor) for tensor in (*_of_optimizer(optimizer, _ON_HOST), *copies))
    yield from ((gradients, tensor) for tensor in _of_optimizer(optimizer, _GRADIENTS))
    yield from ((gradients, copy.grad) for copy in copies if copy.grad is not None)
    for parameter in parameters:
        if hasattr(parameter, "ds_tensor"):
            yield "gathered", parameter.data
            yield "parameters", parameter.ds_tensor


def _buffers(optimizer: Any) -> Iterator[Tensor]:
    yield from _of_optimizer(optimizer, _ON_DEVICE)
    for bucket in getattr(optimizer, "ipg_buckets", {}).values():
        yield from (leaf for leaf in tree_leaves(bucket.buffer) if isinstance(leaf, Tensor))


def _of_optimizer(optimizer: Any, names: Iterable[str]) -> list[Tensor]:
    leaves = tree_leaves([getattr(optimizer, name, None) for name in names])
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]
