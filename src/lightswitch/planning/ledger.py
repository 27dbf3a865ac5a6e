"""Record what a simulated step holds in memory at each moment, and replace the values that it reads."""

from __future__ import annotations

import sys
import traceback
import weakref
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count
from torchmetrics import Metric

from lightswitch.errors import Unplanned, shown
from lightswitch.failures.classify import is_of_others

FORWARD, BACKWARD, UPDATE = "forward", "backward", "optimizer"  # phases of a step
_KIND_BY_PHASE = {FORWARD: "activations", BACKWARD: "temporary", UPDATE: "update"}  # of what has no other kind
_COUNTED = ("batch", "activations", "casts", "temporary", "buffers", "update", "gradients")
MOST_ELEMENTS = 2**20  # of a tensor with real values
_MOST_READS = 10_000  # by one line of code in a step
_PASSED = ("torch.", "lightswitch.")
aten = torch.ops.aten
_BY_SECOND_ARGUMENT = (aten.index.Tensor, aten.masked_select.default, aten._pack_padded_sequence.default)  # alone
_FUSED_STEPS = (aten._fused_adam_.default, aten._fused_adamw_.default)  # in place: nothing to record
_OF_UNUSUAL_VALUES = (aten.isnan.default, aten.isinf.default)


@dataclass(frozen=True)
class Trace:
    """What one device holds after each allocation of a step, beside parameters and optimizer state.

    Attributes:
        phases, places: phase and path of the running module, by moment.
        units: index of the running unit, by moment; 0 if none runs.
        held: bytes by moment, by kind. ``of_root`` and ``of_unit`` are the gradients of this backward pass of
            parameters without a unit, and of the unit that was last in it; ``newest`` is the last gradient.
    """

    phases: np.ndarray[Any, Any]
    places: Sequence[str]
    units: np.ndarray[Any, Any]
    held: Mapping[str, np.ndarray[Any, Any]]


class Block:
    """A storage.

    Attributes:
        kind: what it holds; set again once that is known, as for gradients.
        phase, place: phase, and path of the running module, when it was allocated.
        unit: of a gradient: the unit of its parameter.
    """

    __slots__ = ("bytes", "kind", "phase", "place", "unit")

    def __init__(self, bytes: int, phase: str, place: str) -> None:
        self.bytes, self.phase, self.place, self.unit = bytes, phase, place, 0
        self.kind = _KIND_BY_PHASE[phase]


Change = tuple[Block, int, str, str]  # of a storage, by bytes, with the phase and the place


class Ledger(TorchDispatchMode):  # type: ignore[no-untyped-call]  # untyped in torch
    """Dispatch mode that records storages and floating-point operations, and replaces values that are read.

    Memory that a kernel allocates and frees internally is not recorded.
    """

    def __init__(self, fake: FakeTensorMode) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch
        self.fake, self.places, self.values = fake, Places(), Values()
        self.phase = FORWARD
        self._flops: Counter[str] = Counter()  # floating-point operations of the step, by place
        self.steps: list[tuple[int, int]] = []  # by step: the number of changes at its start and at its end
        self._rounded: set[nn.Parameter] = set()  # parameters of which autocast makes copies that fsdp does not need
        self.changes: list[Change] = []
        self._parameters: dict[Block, dict[nn.Parameter, None]] = {}  # by the storage of their gradients
        self.repeated: Counter[str] = Counter()  # how often modules stand for others in the step, by path
        self._uneven = 0  # bytes that repeated passes have allocated and not freed
        self._blocks: dict[int, tuple[weakref.ref[Any], Block]] = {}  # by the address of the C++ storage

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # its wrapper would take a third of the time, and nothing is compiled here

    def follow(
        self,
        model: LightningModule,
        optimizers: Sequence[Optimizer],
        units: Mapping[str, nn.Module],
        rounded: set[nn.Parameter],
    ) -> None:
        """Begin to name the storages of a module and of its optimizers."""
        self._rounded = rounded
        self._model, self._optimizers, self._numbers = model, optimizers, {path: n for n, path in enumerate(units, 1)}
        self.places.know(model)
        unit_of = {p: number for number, unit in enumerate(units.values(), 1) for p in unit.parameters()}
        for parameter in model.parameters():
            self._name(parameter, "parameters")
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(partial(self._take_gradient, unit_of.get(parameter, 0)))  # type: ignore[no-untyped-call]  # untyped in torch
        self._name_persistent()

    def _take_gradient(self, unit: int, parameter: nn.Parameter) -> None:
        if parameter.grad is not None and (block := self._name(parameter.grad, "gradients")) is not None:
            block.unit = unit
            self._parameters.setdefault(block, {})[parameter] = None

    def _name_persistent(self) -> None:
        for optimizer in self._optimizers:
            for tensor in tensors_in(list(optimizer.state.values())):
                self._name(tensor, "optimizer")
        for tensor in self._model.buffers():
            self._name(tensor, "buffers")
        for part in self._model.modules():
            if isinstance(part, Metric):
                for tensor in tensors_in([part._defaults, [getattr(part, name) for name in part._defaults]]):
                    self._name(tensor, "buffers")

    def begin_step(self, batch: Any) -> None:
        """Begin a step that reads this batch."""
        self._start = len(self.changes)
        self._flops.clear()
        self.repeated.clear()
        self.values.replaced.clear()
        for tensor in tensors_in(batch):
            self._name(tensor, "batch")

    def end_step(self) -> None:
        """End a step."""
        self._name_persistent()
        self.steps.append((self._start, len(self.changes)))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):  # the most frequent operator
            return FakeTensor.__torch_dispatch__(func, types, args)
        if func in _FUSED_STEPS:
            return None
        kwargs = kwargs or {}
        out = self._run(func, args, kwargs)
        made = [self.block_of(tensor) for tensor in tensors_in(out)]
        if func is aten._to_copy.default and args[0] in self._rounded and made[0] is not None:
            made[0].kind = "casts"
        if flops := _flops(func, args, kwargs, out):
            self._flops[self._now()[1]] += flops
        return out

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        given = tensors_in((args, kwargs))
        if given and not any(isinstance(one, FakeTensor) for one in given):  # the batch's integers, and what follows
            with unset_fake_temporarily():
                out = func(*args, **kwargs)
            return tree_map_only(Tensor, self._kept_if_small, out)
        if func in _OF_UNUSUAL_VALUES and given[0].numel() <= MOST_ELEMENTS:
            with unset_fake_temporarily():
                return torch.zeros(given[0].shape, dtype=torch.bool)
        try:
            return func(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            read = tensors_in(args[1] if func in _BY_SECOND_ARGUMENT else (args, kwargs))
            if self.phase != UPDATE and any(isinstance(one, FakeTensor) for one in read):  # Adam reads its counters
                self.values.count()
            out = self.values.replace(func, args, kwargs)
            return tree_map_only(Tensor, lambda one: one if isinstance(one, FakeTensor) else self._known(one), out)

    def _kept_if_small(self, tensor: Tensor) -> Tensor:
        return tensor if tensor.numel() <= MOST_ELEMENTS else self.fake.from_tensor(tensor)

    def _known(self, tensor: Tensor) -> Tensor:
        """Keep the values of small integers alone: C++ code reads the batch sizes of a packed sequence."""
        return self.fake.from_tensor(tensor) if tensor.is_floating_point() else self._kept_if_small(tensor)

    def _name(self, tensor: Tensor, kind: str) -> Block | None:
        block = self.block_of(tensor)
        if block is not None:
            block.kind = kind
        return block

    def block_of(self, tensor: Tensor) -> Block | None:
        """Return the storage of a tensor, recorded now if it is new; None if it takes no memory."""
        if tensor.layout != torch.strided or (tensor.is_meta and not isinstance(tensor, FakeTensor)):
            return None
        storage = tensor.untyped_storage()
        key, bytes = storage._cdata, storage.nbytes()
        _, block = self._blocks.get(key, (None, None))
        if block is None:
            block = Block(bytes, *self._now())
            self._blocks[key] = weakref.ref(storage, lambda _: self._forget(key)), block
            self._change(block, bytes)
        elif block.bytes != bytes:  # resized
            self._change(block, bytes - block.bytes)
            block.bytes = bytes
        return block

    def _forget(self, key: int) -> None:
        _, block = self._blocks.pop(key)
        self._change(block, -block.bytes)

    def _change(self, block: Block, bytes: int) -> None:
        self.changes.append((block, bytes, *self._now()))

    def _now(self) -> tuple[str, str]:
        """Return the phase of the step, and the path of the running module."""
        node: Any = torch._C._current_autograd_node()  # None outside of a backward pass
        return (self.phase if node is None else BACKWARD), self.places.running(node)

    @property
    def flops(self) -> int:
        """Floating-point operations of the step."""
        return sum(
            count * (1 + sum(times for path, times in self.repeated.items() if _is_in(place, path)))
            for place, count in self._flops.items()
        )

    @property
    def is_in_forward(self) -> bool:
        """Whether neither a backward pass nor an optimizer runs."""
        return self.phase == FORWARD and torch._C._current_autograd_node() is None

    @property
    def is_uneven(self) -> bool:
        """Whether modules whose passes were recorded again free other memory than they allocate."""
        return self._uneven != 0

    def backward_changes(self, path: str, since: int) -> Sequence[Change]:
        """Return the changes of a module's last backward pass, of those that are not older than a number of changes."""
        end = len(self.changes)
        while end > since and not _is_in(self.changes[end - 1][3], path):
            end -= 1
        start = end
        while start > since and _is_in(self.changes[start - 1][3], path):
            start -= 1
        return self.changes[start:end]

    def repeat(
        self, changes: Sequence[Change], path: str, twin: str, gradients: Callable[[Iterable[nn.Parameter]], int]
    ) -> None:
        """Record the changes of a module's pass again, as those of its twin.

        Args:
            gradients: allocates a storage for the gradients of the twin's parameters that correspond to the module's,
                and returns its bytes.
        """
        for block, bytes, phase, place in changes:
            at = twin + place.removeprefix(path) if _is_in(place, path) else place
            if block not in self._parameters:
                self._uneven += bytes
                self.changes.append((block, bytes, phase, at))
            elif bytes > 0:
                with self.places.at(at):
                    self._uneven += bytes - gradients(self._parameters[block])

    def of_passes(self, step: int) -> list[Block]:
        """Return the storages that a step's passes allocate and that may grow with the samples, in order."""
        start, end = self.steps[step]
        made = [b for b, bytes, phase, _ in self.changes[start:end] if bytes > 0 and phase != UPDATE]
        return [b for b in made if b.kind in ("activations", "temporary")]

    def trace(self, step: int, sizes: Mapping[Block, float] = MappingProxyType({})) -> Trace:
        """Return what is held in a step.

        Args:
            sizes: bytes of storages where they are not their own.
        """
        start, end = self.steps[step]
        held, rows, at = dict.fromkeys(_COUNTED, 0.0), [], []
        in_pass, unit, newest = [0.0, 0.0], 0, 0.0
        for number, (block, bytes, phase, place) in enumerate(self.changes[:end]):
            times = sizes[block] / block.bytes if block in sizes and block.bytes else 1
            times = 2 if sizes and block.kind == "batch" else times
            if block.kind in held:
                held[block.kind] += bytes * times
            if number < start:
                continue
            if block.kind == "gradients" and bytes > 0:
                if block.unit not in (0, unit):
                    unit, in_pass[1] = block.unit, 0
                in_pass[block.unit > 0] += bytes
                newest = bytes
            if phase != BACKWARD and bytes > 0:
                in_pass, newest = [0.0, 0.0], 0.0
            rows.append((*held.values(), *in_pass, newest))
            at.append((phase, place))
        columns = np.array(rows).T
        unit_at = {place: self._unit_of(place) for _, place in at}
        return Trace(
            np.array([phase for phase, _ in at]),
            [place for _, place in at],
            np.array([unit_at[place] for _, place in at]),
            dict(zip((*_COUNTED, "of_root", "of_unit", "newest"), columns, strict=True)),
        )

    def _unit_of(self, place: str) -> int:
        paths = accumulate(place.split("."), "{}.{}".format)  # of the modules around it, the outermost first
        return next((self._numbers[path] for path in paths if path in self._numbers), 0)


class Places:
    """Tracker of the running module: in a backward pass, the module whose operations are being differentiated."""

    def __init__(self) -> None:
        self._paths: dict[int, str] = {}  # by id: a metric's hash changes with its states
        self._running: list[str] = []
        self._starts: list[int] = []  # sequence numbers of autograd nodes at which the running module changed, in order
        self._after: list[str] = []  # the module from each of these numbers on

    def know(self, model: nn.Module) -> None:
        """Record the paths of a model's modules."""
        self._paths = {id(module): path for path, module in model.named_modules()}

    def running(self, node: Any) -> str:
        """Return the path of the running module, given the autograd node that runs; empty if there is none."""
        if self._running:
            return self._running[-1]
        if node is None or not self._starts:
            return ""
        at = bisect_right(self._starts, node._sequence_nr()) - 1
        return self._after[at] if at >= 0 else ""

    @contextmanager
    def at(self, path: str) -> Iterator[None]:
        """Context manager in which the module at a path runs."""
        self._running.append(path)
        yield
        self._running.pop()

    def __enter__(self) -> None:
        self._hooks = (
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        )

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
        if not self._starts or number >= self._starts[-1]:  # they are counted per thread
            self._starts.append(number)
            self._after.append(self._running[-1] if self._running else "")


class Values(TorchFunctionMode):
    """Mode that replaces the values of fake tensors that a step reads, by one rule: each element is 1.

    So a bool is True, and what a mask selects has its largest size. The batch's small integers and bools, and what is
    computed from them alone, are exact, and no number is NaN or infinite.

    Attributes:
        replaced: number of values that the step has read, by line of code.
    """

    def __init__(self) -> None:
        super().__init__()
        self.replaced: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.numpy, Tensor.__format__) and isinstance(args[0], FakeTensor):
            self.count()
            with _disable_current_modes():
                return func(_stand_in(args[0]), *args[1:], **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def count(self) -> None:
        """Count a value that is read.

        Raises:
            Unplanned: the same line has read more than 10,000.
        """
        place = _reader()
        self.replaced[place] += 1
        if self.replaced[place] > _MOST_READS:
            what = f"a step reads tensor values at {place} more than {_MOST_READS} times"
            raise Unplanned([f"{what}, probably in a loop that depends on them"])

    def replace(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the result of an operator whose output, or its size, depends on values."""
        if func is aten.index.Tensor:  # the tensor may be large, and its values do not matter
            return func(args[0], [part for index in args[1] for part in _as_numbers(index)])
        if func is aten.masked_select.default:
            shape = torch.broadcast_shapes(args[0].shape, args[1].shape)  # type: ignore[no-untyped-call]  # untyped in torch
            return args[0].new_empty(shape.numel())
        with unset_fake_temporarily():
            out = func(*tree_map_only(FakeTensor, _stand_in, args), **tree_map_only(FakeTensor, _stand_in, kwargs))
        return out


def _stand_in(tensor: Tensor) -> Tensor:
    return torch.ones(tensor.shape, dtype=tensor.dtype)


def _as_numbers(index: Tensor | None) -> list[Tensor | None]:
    """Replace a mask in an index by index tensors, one for each of the mask's dimensions."""
    if index is None or index.dtype != torch.bool:
        return [index]
    with unset_fake_temporarily():
        count = index.numel() if isinstance(index, FakeTensor) else int(index.count_nonzero())
    return [torch.empty(count, dtype=torch.long) for _ in index.shape]


def _reader() -> str:
    """Return the file and line of the user's code that reads a value, or of a library if there is none."""
    frames = [frame for frame, _ in traceback.walk_stack(sys._getframe(1))]
    own = [frame for frame in frames if not is_of_others(frame.f_code.co_filename)]
    others = [frame for frame in frames if not frame.f_globals.get("__name__", "torch.").startswith(_PASSED)]
    frame = (own or others or frames)[0]
    return f"{shown(Path(frame.f_code.co_filename))}:{frame.f_lineno}"


def _is_in(place: str, path: str) -> bool:
    return place == path or place.startswith(f"{path}.")


def tensors_in(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _flops(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    """Return the floating-point operations of an operator as torch counts them: matrix operations only."""
    kind = func._overloadpacket
    if kind is aten._scaled_dot_product_flash_attention_for_cpu:  # torch counts only the GPU kernels
        return int(sdpa_flop_count(*(tensor.shape for tensor in args[:3])))  # type: ignore[no-untyped-call]  # untyped in torch
    if kind is aten._scaled_dot_product_flash_attention_for_cpu_backward:
        return int(sdpa_backward_flop_count(*(tensor.shape for tensor in args[:4])))  # type: ignore[no-untyped-call]  # untyped in torch
    count = flop_registry.get(kind)
    return 0 if count is None else int(count(*args, **kwargs, out_val=out))
