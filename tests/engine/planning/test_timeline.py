"""A peak, and how it grows with the samples of a micro batch, with the arithmetic by hand."""

from __future__ import annotations

from lightswitch.planning.timeline import Change, Growth, Timeline


def _timeline(before: int, *changes: tuple[str, int]) -> Timeline:
    return Timeline({"parameters": before}, tuple(Change(kind, bytes, "forward", "block") for kind, bytes in changes))


def test_a_peak_is_the_first_moment_at_which_most_is_held() -> None:
    step = _timeline(100, ("activations", 30), ("activations", -10), ("temporary", 10), ("temporary", -10))
    peak = step.peak()
    assert peak.bytes == 100 + 30  # and once more after 30 − 10 + 10
    assert peak.by_kind == {"parameters": 100, "activations": 30}
    assert (peak.phase, peak.where) == ("forward", "block")


def test_a_step_that_only_gives_back_is_highest_at_its_start() -> None:
    assert _timeline(100, ("parameters", -40)).peak().bytes == 100


def test_a_peak_is_found_anew_at_more_samples() -> None:
    one = _timeline(0, ("temporary", 50), ("temporary", -50), ("activations", 10))  # 50, then 10 a sample
    two = _timeline(0, ("temporary", 50), ("temporary", -50), ("activations", 20))
    growth = Growth((1, 2), (one, two))
    assert [growth.at(samples).peak().bytes for samples in (1, 5, 8)] == [50, 50, 80]  # 10 × 8 > 50
    assert [growth.peak_bytes(samples) for samples in (1, 5, 8)] == [50, 50, 80]


def test_growth_is_not_known_of_one_size() -> None:
    step = _timeline(0, ("activations", 1))
    growth = Growth((2, 2), (step, step))
    assert not growth.is_known
    assert growth.at(9) == step


def test_of_a_step_that_takes_another_path_the_peaks_are_extrapolated() -> None:
    """As of a loss that is computed in chunks: no storages correspond."""
    two = _timeline(5, ("activations", 20), ("temporary", 7))  # 32
    four = _timeline(5, ("activations", 40), ("temporary", 7), ("temporary", -7), ("temporary", 7))  # 52
    growth = Growth((2, 4), (two, four))
    peak = growth.at(8).peak()
    assert peak.by_kind == {"parameters": 5, "activations": 20 + 3 * 20, "temporary": 7}
    assert peak.bytes == growth.peak_bytes(8) == 32 + 3 * 20
    assert (peak.phase, peak.where) == ("forward", "block")
    assert growth.at(1).peak().bytes == growth.peak_bytes(1) == 32 - 10


def test_a_step_that_accumulates_keeps_its_gradients_and_adds_one_at_a_time() -> None:
    step = Timeline(
        {"gradients": 30},
        tuple(
            Change(kind, bytes, "backward", "")
            for kind, bytes in (("gradients", -30), ("gradients", 10), ("activations", 5), ("gradients", 20))
        ),
    )
    assert step.held() == [30, 0, 10, 15, 35]
    assert step.accumulating().held() == [30, 30, 30 + 10, 30 + 10 + 5, 30 + 5 + 20]
