"""Ledger of a step's memory: records when each storage, real or fake, is allocated, resized and freed."""

from __future__ import annotations

import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from lightswitch import patches
from lightswitch.planning.collectives import Collective, collective
from lightswitch.planning.timeline import Change, Kind, Timeline
from lightswitch.planning.values import Repeats, Values, patch_value_reads

Phase = Literal["setup", "forward", "backward", "optimizer"]
_UNNAMED: Mapping[Phase, Kind] = {"forward": "activations", "optimizer": "update"}


class Block:
    """A tensor storage. Its kind may be set later: gradients, for example, are named after the backward pass.

    Attributes:
        kind: None until it is named; see `role`.
        where: path of the module that was running when it was allocated.
        first_bytes: its size when it was allocated; ``bytes`` changes when it is resized.
    """

    __slots__ = ("bytes", "first_bytes", "kind", "phase", "where")

    def __init__(self, bytes: int, phase: Phase, where: str) -> None:
        self.bytes, self.first_bytes, self.phase, self.where = bytes, bytes, phase, where
        self.kind: Kind | None = None

    @property
    def role(self) -> Kind:
        """Kind of the storage; if unnamed, that of the phase in which it was allocated."""
        return self.kind or _UNNAMED.get(self.phase, "temporary")

    def is_like(self, other: Block) -> bool:
        """Return whether both have the same kind, phase and module, and are both empty or both not."""
        own, others = (self.role, self.phase, self.where), (other.role, other.phase, other.where)
        return own == others and bool(self.first_bytes) == bool(other.first_bytes)


@dataclass(frozen=True)
class Mark:
    """Point in time, as the number of changes, collectives and floating-point operations recorded so far."""

    changes: int
    collectives: int
    flops: int


class Ledger(TorchDispatchMode):  # type: ignore[no-untyped-call]  # untyped in torch
    """Dispatch mode that records allocated and freed storages, collectives and floating-point operations.

    Memory that a kernel allocates and frees internally is not recorded.

    Args:
        fake: the mode whose fake tensors are counted as real memory, entered before this mode; None if tensors are
            real. Fake tensors of other modes take no memory.
        where: returns the path of the running module.
    """

    def __init__(self, fake: FakeTensorMode | None = None, where: Callable[[], str] = str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch
        self.fake = fake
        self.where = where
        self._repeats = None if fake is None else Repeats(fake)
        self.values = Values(where)
        self.phase: Phase = "setup"
        self.collectives: list[Collective] = []
        self.flops = 0
        self._changes: list[tuple[Block, int]] = []
        self._blocks: dict[int, tuple[weakref.ref[Any], Block]] = {}  # by the address of the C++ storage

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
            patch_value_reads(self.values)
        super().__enter__()  # type: ignore[no-untyped-call]  # untyped in torch
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]  # untyped in torch
        patches.replace(torch.UntypedStorage, "resize_", _RESIZE)
        patch_value_reads(None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE and isinstance(args[0], FakeTensor):  # the most frequent operator
            return FakeTensor.__torch_dispatch__(func, types, args)
        if func.namespace == "profiler":  # from FSDP's record_function; it has no tensors
            with torch._C._DisableTorchDispatch():
                return func(*args, **(kwargs or {}))
        if any(issubclass(cls, DTensor) for cls in types):
            return NotImplemented  # DTensor then runs the operator on its local tensor, which this mode sees
        out = self._out(func, types, args, kwargs or {})
        if self.fake is not None and len(self.fake.enter_stack) > self._depth:
            return out  # DTensor has entered the mode again to compute shapes, which takes no memory
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
        """Return whether an operator in a simulated step runs on real tensors, such as the ranks of a device mesh."""
        if self.fake is None or FakeTensor in types:
            return False
        given = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
        return bool(given) and not any(tensor.is_meta for tensor in given)

    def enter_phase(self, phase: Phase) -> None:
        """Set the current phase of the step."""
        self.phase = phase

    def name(self, tensor: Tensor, kind: Kind, only_unnamed: bool = False) -> Block | None:
        """Set the kind of a tensor's storage and return the storage, or None if it takes no memory.

        A storage that was allocated before the ledger was entered is added now.
        """
        local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        block = self._note_tensor(local)
        if block is not None and (block.kind is None or not only_unnamed):
            block.kind = kind
        return block

    def mark(self) -> Mark:
        """Return the current point in time, to pass to `between`."""
        return Mark(len(self._changes), len(self.collectives), self.flops)

    def between(self, start: Mark, end: Mark, times: Mapping[Block, float] = MappingProxyType({})) -> Timeline:
        """Return the bytes in use at ``start`` and their changes until ``end``.

        Args:
            times: factors by which to multiply the bytes of storages; 1 if missing.
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
        """Return the storages that were allocated between two points in time, in order."""
        before = {block for block, _ in self._changes[: start.changes]}
        return list(dict.fromkeys(b for b, _ in self._changes[start.changes : end.changes] if b not in before))

    def held(self, at: Mark) -> set[Block]:
        """Return the storages in use at a point in time."""
        bytes: Counter[Block] = Counter()
        for block, change in self._changes[: at.changes]:
            bytes[block] += change
        return {block for block, held in bytes.items() if held}

    def _placed(self, start: int, end: int) -> Iterator[tuple[Block, int, Phase, str]]:
        """Yield changes with the phase and path of the most recently allocated block."""
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
            if resized:  # allocated before the ledger was entered, or not tracked
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
_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # torch counts only the GPU kernels
_ATTENTION_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def _flops(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    """Return the floating-point operations of an operator as torch counts them: matrix operations only."""
    kind = func._overloadpacket
    if kind is _ATTENTION:
        return int(sdpa_flop_count(*(tensor.shape for tensor in args[:3])))  # type: ignore[no-untyped-call]  # untyped in torch
    if kind is _ATTENTION_BACKWARD:
        return int(sdpa_backward_flop_count(*(tensor.shape for tensor in args[:4])))  # type: ignore[no-untyped-call]  # untyped in torch
    count = flop_registry.get(kind)
    return 0 if count is None else int(count(*args, **kwargs, out_val=out))
