"""DataLoaders made anew, by torch's constructor, from the arguments of others, whoever wrote those."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.utils.data import DataLoader

_TORCHDATA = ("torchdata.stateful_dataloader.stateful_dataloader", "StatefulDataLoader")
_Kind = TypeVar("_Kind", bound="RankLoader")


class OwnLength:
    """Loader whose length is that of the batches it reads, whatever the user's own class makes of its batch size."""

    def __len__(self) -> int:
        return DataLoader.__len__(self)  # type: ignore[arg-type]  # what this is mixed into is one


class RankLoader(DataLoader[Any]):
    """DataLoader that reads other samples than the one it was given, and is like it in all else.

    Args:
        given: whose arguments are taken, and what it has beside them.
        collate_fn: None for the given one.
        pins_for_gpu: batches are put into pinned memory, from which a GPU copies them while the process goes on.
        order: the sampler, as torch's constructor takes it.

    Attributes:
        before_own: classes whose methods come before those of the given loader's own class.
    """

    before_own: ClassVar[tuple[type, ...]] = (OwnLength,)

    def __init__(
        self,
        given: DataLoader[Any],
        dataset: Any,
        collate_fn: Callable[[Any], Any] | None = None,
        pins_for_gpu: bool = False,
        **order: Any,
    ) -> None:
        self._given = given
        # what torch's constructor sets to nothing beside a sampler of batches, and people ask for
        self._shown = {
            "sampler": order.get("sampler", order.get("batch_sampler")),
            "batch_size": given.batch_size,
            "drop_last": given.drop_last,
        }
        collate = collate_fn or given.collate_fn
        # Workers can't hold tensors of a GPU; a dataset in this process may, and torch fails to pin those.
        pins_here = pins_for_gpu and given.num_workers == 0
        super().__init__(
            dataset,
            collate_fn=_Pinning(collate) if pins_here else collate,
            pin_memory=(given.pin_memory or pins_for_gpu) and not pins_here,
            pin_memory_device=given.pin_memory_device,
            worker_init_fn=given.worker_init_fn,
            generator=given.generator,
            in_order=given.in_order,
            timeout=given.timeout,
            **_of_workers(given),
            **order,
        )

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, vars(self).get("_shown", {}).get(name, value))

    def __getattr__(self, name: str) -> Any:  # of the given loader's own class, whose constructor is not called
        kept = vars(vars(self).get("_given", self))
        if name not in kept:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return kept[name]


def made_anew(kind: type[_Kind], given: DataLoader[Any], *arguments: Any, **named: Any) -> _Kind:
    """Return a loader of a kind of the engine's, with the methods of the given one's own class before it.

    That class's constructor, which may take other arguments, is not called. A loader that keeps a state, as torchdata's
    does, keeps none here: Lightning would let it go on from there beside the position of the run.
    """
    own = type(given)
    if own is DataLoader or (own.__module__, own.__name__) == _TORCHDATA:
        return kind(given, *arguments, **named)
    without = dict.fromkeys(("state_dict", "load_state_dict"))  # None, which stands for what a class does not do
    both = type(own.__name__, (*kind.before_own, own, kind), {"__init__": kind.__init__, **without})
    made: _Kind = both(given, *arguments, **named)
    return made


def _of_workers(given: DataLoader[Any]) -> dict[str, Any]:
    if given.num_workers == 0:  # torch refuses the others
        return {}
    names = ("num_workers", "multiprocessing_context", "prefetch_factor", "persistent_workers")
    return {name: getattr(given, name) for name in names}


class _Pinning:
    """Collation into pinned memory."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self.collate = collate

    def __call__(self, samples: Any) -> Any:
        return apply_to_collection(self.collate(samples), Tensor, _pinned)


def _pinned(tensor: Tensor) -> Tensor:
    return dense(tensor).pin_memory() if tensor.device.type == "cpu" and tensor.layout == torch.strided else tensor


def dense(tensor: Tensor) -> Tensor:
    """Return a tensor without gaps between its elements, which CUDA copies at once: of a view with gaps, as
    `tokens[:, :-1]`, it would first make a copy in memory that is not pinned, and wait for that."""
    strides = torch.empty_like(tensor, device="meta").stride()  # those of a copy, which keeps a dense tensor's
    return tensor if tensor.stride() == strides else tensor.contiguous()
