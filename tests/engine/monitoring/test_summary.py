from datetime import timedelta

import pytest

from lightswitch.monitoring.display import clock, compact, table


def test_names_stand_left_and_values_right() -> None:
    rows = {"train/loss": 2.30258, "steps": 1000, "samples": 64_000, "time": timedelta(seconds=21.4)}
    assert table(rows).splitlines() == [
        "train/loss   2.303",
        "steps        1,000",
        "samples     64,000",
        "time          0:21",
    ]


def test_what_is_not_known_is_left_out() -> None:
    assert table({"val/loss": None, "device": "cpu"}) == "device  cpu"
    assert table({}) == ""


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0"),
        (3.14159, "3.14"),
        (42.06, "42.1"),
        (370, "370"),
        (999.7, "1k"),
        (45_213, "45.2k"),
        (1.23e6, "1.23M"),
    ],
)
def test_numbers_get_three_digits_and_a_magnitude(number: float, text: str) -> None:
    assert compact(number) == text


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (59.6, "1:00"), (3723, "1:02:03"), (183_600, "51:00:00")])
def test_durations_read_as_a_clock(seconds: float, text: str) -> None:
    assert clock(seconds) == text
