"""Hours of the week in which a host lends: `Mon-Fri 20:00-07:00`, `Sat 00:00-24:00`."""

from __future__ import annotations

import re
from typing import NamedTuple

DAY_MINUTES = 24 * 60
WEEK_MINUTES = 7 * DAY_MINUTES
DAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
_FORM = re.compile(r"(?:([A-Z][a-z]{2})(?:-([A-Z][a-z]{2}))? )?(\d\d):(\d\d)-(\d\d):(\d\d)")


class Hours(NamedTuple):
    """Days (0 is Monday) and minutes of the day; an end at or before its start is on the next day."""

    days: tuple[int, ...]
    start: int
    end: int

    @classmethod
    def parse(cls, text: str) -> Hours:
        """Raises ValueError with what is wrong."""
        match = _FORM.fullmatch(text)
        if match is None:
            raise ValueError(f"{text!r} is no hours of the week, such as 'Mon-Fri 20:00-07:00'")
        first, last, *clock = match.groups()
        for day in (first, last):
            if day is not None and day not in DAYS:
                raise ValueError(f"{text!r}: {day} is no day: one of {', '.join(DAYS)}")
        start_hour, start_minute, end_hour, end_minute = map(int, clock)
        start, end = start_hour * 60 + start_minute, end_hour * 60 + end_minute
        if max(start_minute, end_minute) > 59 or start >= DAY_MINUTES or end > DAY_MINUTES:
            raise ValueError(f"{text!r}: times run from 00:00 to 24:00")
        if first is None:
            days = tuple(range(7))
        else:
            begin = DAYS.index(first)
            count = (DAYS.index(last or first) - begin) % 7 + 1
            days = tuple((begin + offset) % 7 for offset in range(count))
        return cls(days, start, end)

    def hold(self, minute_of_week: int) -> bool:
        """Whether a minute of the week (0: Monday, 00:00) lies in them."""
        length = (self.end - self.start) % DAY_MINUTES or DAY_MINUTES
        return any(
            (minute_of_week - day * DAY_MINUTES - self.start) % WEEK_MINUTES < length for day in self.days
        )
