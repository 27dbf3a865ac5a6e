"""Loss scale of DeepSpeed in a checkpoint, in the form of torch's GradScaler: a run goes on under either."""

from __future__ import annotations

from typing import Any

from lightswitch.mixins import Mixin, with_mixin

KEY = "MixedPrecision"  # Lightning's, for the state of the GradScaler


def state_of(scaler: Any) -> dict[str, Any]:
    """Return the `GradScaler.state_dict` that grows at the same step; empty where the scale is fixed, or there is none.

    Args:
        scaler: a `DynamicLossScaler`, which grows in a step with ``scale_window`` good ones, or a multiple, before it;
            GradScaler grows in the one that completes them.
    """
    if not getattr(scaler, "dynamic", False):
        return {}
    good_steps = scaler.cur_iter - scaler.last_overflow_iter - 1
    return {
        "scale": float(scaler.cur_scale),
        "growth_factor": scaler.scale_factor,
        "backoff_factor": 1 / scaler.scale_factor,
        "growth_interval": scaler.scale_window,
        "_growth_tracker": (good_steps - 1) % scaler.scale_window if good_steps else -1,
        "hysteresis": scaler.cur_hysteresis,  # overflows to take before the scale falls: GradScaler takes none
    }


def resumed(scaler: Any, state: dict[str, Any]) -> Any:
    """Return a scaler with a saved scale and progress to the next growth.

    By how much and how often it grows, the run's config says.
    """
    if not state or not getattr(scaler, "dynamic", False):
        return scaler
    scaler = with_mixin(_Resumed, scaler)
    scaler.load_state_dict(state)
    return scaler


class _Resumed(Mixin):
    """A `DynamicLossScaler` that goes on from a checkpoint: DeepSpeed's own does from one of DeepSpeed's alone."""

    cur_iter: int

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.cur_scale = state["scale"]
        self.last_overflow_iter = self.cur_iter - 2 - state["_growth_tracker"]
        if "hysteresis" in state:
            self.cur_hysteresis = state["hysteresis"]
