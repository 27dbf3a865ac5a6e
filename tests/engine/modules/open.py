"""Cells of docs/modules.md that are to hold, or to be refused, and do not yet: those that differ or fail.

The night expects each of them to fail: one that is mended has to be taken out of here, and its row made anew.
"""

from __future__ import annotations

OPEN: dict[str, tuple[str, ...]] = {  # ways, by module
    # weights that are written outside of the optimizer's step: momentum encoders, averages, prototypes, norms
    "MoCo": ("fsdp", "fsdp1", "ZeRO 3"),
    "BYOL": ("fsdp", "ZeRO 3"),
    "DINO": ("ZeRO 3",),
    "SwAV": ("fsdp", "ZeRO 1", "ZeRO 2", "ZeRO 3"),
    "CLIP": ("ZeRO 1", "ZeRO 2", "ZeRO 3"),
    "LatentDiffusion": ("ZeRO 3",),
    "DDPM": ("ZeRO 3",),
    "EmaCopy": ("fsdp",),
    "DQN": ("ZeRO 3",),
    "MaxNorm": ("ZeRO 1", "ZeRO 2", "ZeRO 3"),
    # weights that are set from the first batch, by each device from its own
    "VQDataInit": ("ddp", "fsdp", "fsdp1", "ZeRO 1", "ZeRO 2", "ZeRO 3"),
    "Glow": ("ddp", "fsdp", "fsdp1", "ZeRO 1", "ZeRO 2", "ZeRO 3"),
    # several backward passes, or several batches, to a step by hand under DeepSpeed
    "AccumulatesByHand": ("ZeRO 1", "ZeRO 2"),
    "TwoBackward": ("ZeRO 1", "ZeRO 2"),
    # steps past Lightning's wrapper: they are not counted, and nothing is saved
    "Sharpness": ("ddp",),
    # a closure that devices evaluate as often as their own loss asks: they wait for one another for ever
    "LBFGS": ("ddp", "fsdp"),
    # hooks on a parameter's gradient, or a module's own clipping by value: not called, or not on whole gradients
    "GradientHooks": ("fsdp", "fsdp1", "ZeRO 1", "ZeRO 2", "ZeRO 3"),
}
