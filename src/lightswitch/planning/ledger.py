"""The ledger of a step's memory over a Trainer's steps: each storage from when it is made until it is freed."""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from types import MappingProxyType
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count
from torchmetrics import Metric

from lightswitch import patches
from lightswitch.planning.estimate import Change, Collective, Kind, Timeline, collective
from lightswitch.planning.values import Repeats, Values, let_be_asked

Phase = Literal["setup", "forward", "backward", "optimizer"]


class Block:
    """A storage. What it is for may be known only later: gradients are named after the backward pass.

    Attributes:
        kind: None until it is named; see `role`.
        where: the path of the module at work when it was made.
        first_bytes: its size when it was made; ``bytes`` changes when it is resized.
    """

    __slots__ = ("bytes", "first_bytes", "kind", "phase", "where")

    def __init__(self, bytes: int, phase: Phase, where: str) -> None:
        self.bytes, self.first_bytes, self.phase, self.where = bytes, bytes, phase, where
        self.kind: Kind | None = None

    @property
    def role(self) -> Kind:
        """Kind of the storage; while it has no name, an activation if the forward pass has made it, else temporary."""
        return self.kind or ("activations" if self.phase == "forward" else "temporary")

    def is_like(self, other: Block) -> bool:
        """Return whether both have the same kind, phase and module, and are both empty or both not."""
        own, others = (self.role, self.phase, self.where), (other.role, other.phase, other.where)
        return own == others and bool(self.first_bytes) == bool(other.first_bytes)


@dataclass(frozen=True)
class Mark:
    """A moment: how many changes, collectives and floating-point operations had been noted."""

    changes: int
    collectives: int
    flops: int


class Ledger(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's
    """Mode that notes storages made and freed, collectives and floating-point operations.

    What a kernel takes for itself, and gives back before it ends, is not seen.

    Args:
        fake: the mode whose tensors stand for real ones, entered before; None where tensors are real. Fake ones of
            other modes take no memory.
        where: returns the path of the module at work.
    """

    def __init__(self, fake: FakeTensorMode | None = None, where: Callable[[], str] = str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.fake = fake
        self.where = where
        self._repeats = None if fake is None else Repeats(fake)
        self.values = Values(where)
        self.phase: Phase = "setup"
        self.collectives: list[Collective] = []
        self.flops = 0
        self._changes: list[tuple[Block, int]] = []
        self._blocks: dict[int, tuple[weakref.ref[Any], Block]] = {}  # by the storage's address in C++

    def __enter__(self) -> Ledger:
        resize = _RESIZE

        def resize_and_note(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            self._note(storage, resized=True)
            return result

        patches.replace(torch.UntypedStorage, "resize_", resize_and_note)
        self._depth = 0
        if self.fake is not None:
            self._depth = len(self.fake.enter_stack)
            let_be_asked(self.values)
        super().__enter__()  # type: ignore[no-untyped-call]  # torch's
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]  # torch's
        patches.replace(torch.UntypedStorage, "resize_", _RESIZE)
        let_be_asked(None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE and isinstance(args[0], FakeTensor):  # the operator that comes most often
            return FakeTensor.__torch_dispatch__(func, types, args)
        if func.namespace == "profiler":  # of FSDP's record_function; it has no tensors
            with torch._C._DisableTorchDispatch():
                return func(*args, **(kwargs or {}))
        if any(issubclass(cls, DTensor) for cls in types):
            return NotImplemented  # it does the same with its local tensor, which comes here, too
        out = self._out(func, types, args, kwargs or {})
        if self.fake is not None and len(self.fake.enter_stack) > self._depth:
            return out  # the mode was entered once more, by DTensor, to work out shapes: they take no memory
        made = [tensor for tensor in tree_leaves(out) if isinstance(tensor, Tensor)]
        if self.fake is not None:
            self.values.follow(func, args, kwargs or {}, made)
        for tensor in made:
            self._note_tensor(tensor)
        if found := collective(func, args, made):
            self.collectives.append(found)
            for tensor in tree_leaves(args):
                if isinstance(tensor, Tensor):
                    self.name(tensor, "communication", only_unnamed=True)
        self.flops += _flops(func, args, kwargs or {}, out)
        return out

    def _out(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if self._repeats is not None and not self._is_real(types, args):
            try:
                return self._repeats.call(func, args, kwargs)
            except (DataDependentOutputException, DynamicOutputShapeException):
                return self.values.answer(func, args, kwargs)
        with unset_fake_temporarily() if self._is_real(types, args) else nullcontext():
            return func(*args, **kwargs)

    def _is_real(self, types: Any, args: Any) -> bool:
        """Return whether an operator among fake ones takes values that are there: the ranks of a device mesh."""
        if self.fake is None or FakeTensor in types:
            return False
        given = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
        return bool(given) and not any(tensor.is_meta for tensor in given)

    def enter_phase(self, phase: Phase) -> None:
        """Set the phase of the step from now on."""
        self.phase = phase

    def name(self, tensor: Tensor, kind: Kind, only_unnamed: bool = False) -> Block | None:
        """Set the kind of a tensor's storage and return the storage; None where it takes no memory.

        A storage that was made before the ledger was opened is entered now.
        """
        local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        block = self._note_tensor(local)
        if block is not None and (block.kind is None or not only_unnamed):
            block.kind = kind
        return block

    def mark(self) -> Mark:
        """Return this moment, for `between`."""
        return Mark(len(self._changes), len(self.collectives), self.flops)

    def between(self, start: Mark, end: Mark, times: Mapping[Block, float] = MappingProxyType({})) -> Timeline:
        """Return the bytes that were held at a moment, and how they changed until another.

        Args:
            times: factors for the bytes of storages; 1 for others.
        """
        held: dict[Kind, float] = defaultdict(float)
        for block, bytes in self._changes[: start.changes]:
            held[block.role] += bytes * times.get(block, 1)
        changes = tuple(
            Change(block.role, bytes * times.get(block, 1), phase, where)
            for block, bytes, phase, where in self._placed(start.changes, end.changes)
        )
        return Timeline(dict(held), changes)

    def made(self, start: Mark, end: Mark) -> list[Block]:
        """Return the storages that were made between two moments, in order."""
        before = {block for block, _ in self._changes[: start.changes]}
        return list(dict.fromkeys(b for b, _ in self._changes[start.changes : end.changes] if b not in before))

    def held(self, at: Mark) -> set[Block]:
        """Return the storages that were there at a moment."""
        bytes: Counter[Block] = Counter()
        for block, change in self._changes[: at.changes]:
            bytes[block] += change
        return {block for block, held in bytes.items() if held}

    def _placed(self, start: int, end: int) -> Iterator[tuple[Block, int, Phase, str]]:
        """Yield changes with the phase and the module at work, which are those of the newest block."""
        phase, where = "setup", ""
        for block, bytes in self._changes[start:end]:
            if bytes > 0:
                phase, where = block.phase, block.where
            yield block, bytes, phase, where  # type: ignore[misc]  # `phase` is one of Phase, which mypy widens to str

    def _note_tensor(self, tensor: Tensor) -> Block | None:
        if isinstance(tensor, DTensor) or tensor.layout != torch.strided:
            return None
        if isinstance(tensor, FakeTensor):
            is_elsewhere = tensor.fake_mode is not self.fake or tensor.fake_device.type == "meta"
        else:
            is_elsewhere = tensor.is_meta
        return None if is_elsewhere else self._note(tensor.untyped_storage())

    def _note(self, storage: torch.UntypedStorage, resized: bool = False) -> Block | None:
        key, bytes = storage._cdata, storage.nbytes()
        _, block = self._blocks.get(key, (None, None))
        if block is None:
            if resized:  # made before the ledger was opened, or none of its own
                return None
            block = Block(bytes, self.phase, self.where())
            self._blocks[key] = weakref.ref(storage, lambda _: self._forget(key)), block
            self._changes.append((block, bytes))
        elif block.bytes != bytes:
            self._changes.append((block, bytes - block.bytes))
            block.bytes, block.kind = bytes, block.kind or "gathered"
        return block

    def _forget(self, key: int) -> None:
        _, block = self._blocks.pop(key)
        self._changes.append((block, -block.bytes))


_DEVICE = torch.ops.prim.device.default
_RESIZE = torch.UntypedStorage.resize_
_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # torch counts those of GPUs alone
_ATTENTION_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def _flops(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    """Return the floating-point operations of an operator, of matrices alone, as torch counts them."""
    kind = func._overloadpacket
    if kind is _ATTENTION:
        return int(sdpa_flop_count(*(tensor.shape for tensor in args[:3])))  # type: ignore[no-untyped-call]  # torch's
    if kind is _ATTENTION_BACKWARD:
        return int(sdpa_backward_flop_count(*(tensor.shape for tensor in args[:4])))  # type: ignore[no-untyped-call]  # torch's
    count = flop_registry.get(kind)
    return 0 if count is None else int(count(*args, **kwargs, out_val=out))


_OF_PARAMETERS = ("parameters", "gradients", "gathered", "buffers")  # as large at any micro batch
# Attributes of DeepSpeedZeroOptimizer (stages 1 and 2) and DeepSpeedZeroOptimizer_Stage3, in DeepSpeed 0.19
_COPIES = ("single_partition_of_fp32_groups", "fp32_partitioned_groups_flat")  # which the optimizer steps
_GRADIENTS = ("averaged_gradients", "all_grad_tensors", "grad_partitions_flat_buffer")
_ON_HOST = (
    *("accumulated_grads_in_cpu", "offload_gradient_dict", "param_buffer_of_bit16_for_cpu_offload_groups"),
    "temp_grad_buffer_for_cpu_offload",
)
_ON_DEVICE = ("temp_grad_buffer_for_gpu_offload",)


@dataclass(frozen=True)
class TrackedStep:
    """An optimizer step.

    Attributes:
        collectives: of each of its micro batches; those of the last one with clipping and the optimizer's.
        flops: floating-point operations of this device.
    """

    timeline: Timeline
    collectives: tuple[tuple[Collective, ...], ...]
    flops: int


class Tracking(Callback):
    """Callback that keeps a ledger from before the strategy places the model until the training ends.

    Args:
        fake: the mode that training is to happen in; None where tensors are real.
        inner: modes that see each operator before it is noted.
    """

    def __init__(self, fake: FakeTensorMode | None = None, inner: Sequence[TorchDispatchMode] = ()) -> None:
        self._fake, self._inner = fake, inner
        self._modules = Modules()
        self.ledger = Ledger(fake, self._modules.at_work)
        self._marks: list[list[Mark]] = []  # of each step: its start, and the end of each micro batch
        self._batches: list[list[Block]] = []  # of each step: what its micro batches lie in
        self._read: set[Block] = set()  # what all micro batches lie in
        self._open = ExitStack()

    def steps(self) -> list[TrackedStep]:
        """Return the steps that were made, in order."""
        return [self.step(number) for number in range(len(self._marks))]

    def step(self, number: int) -> TrackedStep:
        """Return one of the steps, which are numbered from 0."""
        marks = self._marks[number]
        collectives = tuple(
            tuple(self.ledger.collectives[start.collectives : end.collectives]) for start, end in pairwise(marks)
        )
        timeline = self.ledger.between(marks[0], marks[-1])
        return TrackedStep(timeline, collectives, marks[-1].flops - marks[0].flops)

    def resized(self, other: int, at: int) -> Timeline | None:
        """Return the timeline that step ``at`` would have at the micro batch size of the earlier step ``other``.

        Storages of the forward and backward passes get the bytes that they have in ``other``. The optimizer's stay:
        they depend on parameters alone, and ``other`` may be the first step, in which the optimizer also makes its
        state.

        Args:
            other, at: numbers of the two steps, from 0.

        Returns:
            None where the two steps do not make the same storages; then a step of that size has to be made.
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
        """Return the storages of a step's forward and backward passes whose bytes may grow with the samples."""
        made = (block for block in self.ledger.made(marks[0], marks[-1]) if block not in self._read)
        return [b for b in made if b.phase in ("forward", "backward") and b.role not in _OF_PARAMETERS]

    def name_batch(self, batch: Any) -> list[Block]:
        """Name the tensors of a micro batch, which may be read before its turn, as activations."""
        named = (self.ledger.name(tensor, "activations") for tensor in _tensors(batch))
        found = [block for block in named if block is not None]
        self._read.update(found)
        return found

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self._fake is not None:
            self._open.enter_context(self._fake)
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
        self._name_buffers(pl_module)  # a metric has new states, or a longer list of them
        for optimizer in trainer.optimizers:
            for state in optimizer.state.values():
                for tensor in _tensors(state):
                    self.ledger.name(tensor, "optimizer")

    def _name_buffers(self, module: nn.Module) -> None:
        for buffer in (*module.buffers(), *_metric_states(module)):
            self.ledger.name(buffer, "buffers")

    def _name_of_zero(self, trainer: Trainer) -> None:
        """Name the tensors of DeepSpeed's own, which it makes and frees in the middle of a step."""
        if isinstance(trainer.strategy, DeepSpeedStrategy):
            for kind, tensor in zero_kinds(trainer.optimizers[0], trainer.lightning_module.parameters()):
                self.ledger.name(tensor, kind)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.close()

    def close(self) -> None:
        """Leave the modes."""
        self._open.close()


class Modules:
    """The module at work: the innermost in a forward pass, the one that is differentiated in a backward pass."""

    def __init__(self) -> None:
        self._paths: dict[int, str] = {}  # by id: a metric's hash changes with its states
        self._running: list[str] = []
        self._starts: list[int] = []  # numbers of autograd's nodes at which another module was at work, in order
        self._after: list[str] = []  # the module from there on

    def know(self, model: nn.Module) -> None:
        """Note the paths of a model's modules."""
        for path, module in model.named_modules():
            self._paths[id(module)] = path.replace("_fsdp_wrapped_module.", "").replace("._fsdp_wrapped_module", "")

    def at_work(self) -> str:
        """Return the path of the module at work; empty where none is."""
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
            return  # numbers are a thread's own
        self._starts.append(number)
        self._after.append(self._running[-1] if self._running else "")


def _metric_states(model: nn.Module) -> Iterator[Tensor]:
    """Yield the states of metrics, and the values that they are reset to, which lie on the device as well."""
    for part in model.modules():
        if isinstance(part, Metric):
            yield from _tensors([getattr(part, name) for name in part._defaults])
            yield from _tensors(part._defaults)


def _tensors(tree: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))


def zero_kinds(optimizer: Any, parameters: Iterable[nn.Parameter]) -> Iterator[tuple[Kind, Tensor]]:
    """Yield the tensors that a ZeRO optimizer holds now, with their kinds; where some share memory, the last kind
    counts.

    Where the optimizer is offloaded, its part of the gradients is in the host's memory beside its state, and is told
    with that.

    Args:
        parameters: of the model; at stage 3, a rank keeps a part of each, and now and then has the whole.
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
