"""Attributes that Lightning sets past the declarations of its classes, with their types."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning.pytorch import Callback, Trainer


def callbacks_of(trainer: Trainer) -> list[Callback]:
    """Return the Trainer's own list of its callbacks: what is put into it is called as well."""
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]  # a connector of Lightning's sets it
    return callbacks
