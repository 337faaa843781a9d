"""Hours of the week."""

from __future__ import annotations

import pytest

from rose.core.hours import DAY_MINUTES, WEEK_MINUTES, Hours


def minute(day: int, hour: int, of_hour: int = 0) -> int:
    return day * DAY_MINUTES + hour * 60 + of_hour


@pytest.mark.parametrize(
    ("text", "inside", "outside"),
    [
        ("08:00-18:00", [minute(0, 8), minute(6, 17, 59)], [minute(0, 7, 59), minute(3, 18)]),
        (
            "Mon-Fri 20:00-07:00",
            [minute(0, 20), minute(5, 6, 59)],
            [minute(5, 7), minute(0, 6), minute(5, 21)],
        ),
        ("Sun 22:00-02:00", [minute(6, 23), minute(0, 1, 59)], [minute(0, 2), minute(6, 21)]),
        (
            "Fri-Mon 00:00-24:00",
            [minute(4, 0), minute(6, 12), minute(0, 23, 59)],
            [minute(1, 0), minute(3, 23)],
        ),
        ("Wed 09:30-09:30", [minute(2, 9, 30), minute(3, 9, 29)], [minute(2, 9, 29), minute(3, 9, 30)]),
    ],
)
def test_hours(text: str, inside: list[int], outside: list[int]) -> None:
    hours = Hours.parse(text)
    assert all(hours.hold(each) for each in inside)
    assert not any(hours.hold(each) for each in outside)


def test_always() -> None:
    assert all(Hours.parse("00:00-24:00").hold(each) for each in range(0, WEEK_MINUTES, 7))


@pytest.mark.parametrize(
    "text",
    ["", "always", "Mon", "Mo 08:00-09:00", "Monday 08:00-09:00", "08:00", "8:00-9:00", "24:00-08:00",
     "08:00-24:01", "08:60-09:00", "Mon-Fry 08:00-09:00", " 08:00-09:00", "08:00-09:00\n"],
)  # fmt: skip
def test_what_is_no_hours(text: str) -> None:
    with pytest.raises(ValueError, match=r"hours of the week|is no day|times run"):
        Hours.parse(text)
