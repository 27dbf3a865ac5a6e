"""What this rank itself keeps of a tensor that is spread over ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import transform_subclass

from lightswitch.checkpoints.piece import Piece, Stored


@torch.no_grad()
def local(stored: Stored) -> Tensor:
    """Return this rank's part, in whose memory the tensor lies."""
    if isinstance(stored, Piece):
        return stored.values
    return stored.to_local() if isinstance(stored, DTensor) else stored.detach()


def with_local(stored: Stored, part: Tensor) -> Stored:
    """Return a tensor that is spread in the same way, and of which this rank keeps another part, on any device."""
    if isinstance(stored, Piece):
        return stored.with_values(part)
    if not isinstance(stored, DTensor):
        return part

    def replaced(_: str, inner: Any) -> Any:
        return part if isinstance(inner, Tensor) else inner  # a mesh, for one

    whole: Tensor = transform_subclass(stored.detach(), replaced)  # type: ignore[no-untyped-call]  # torch's
    return whole
