"""Times of --since and --until: each text has one meaning."""

from datetime import UTC, datetime
from zoneinfo import ZoneInfo

import pytest

from loglib.cli.moments import parse_moment

NOW = datetime(2024, 5, 2, 0, 30, tzinfo=UTC)
PRAGUE, NEW_YORK = ZoneInfo("Europe/Prague"), ZoneInfo("America/New_York")


@pytest.mark.parametrize(
    ("text", "zone", "meaning"),
    [
        ("now", UTC, "2024-05-02T00:30:00Z"), ("15m", UTC, "2024-05-02T00:15:00Z"),
        ("-1h30m", UTC, "2024-05-01T23:00:00Z"), ("today", UTC, "2024-05-02T00:00:00Z"),
        ("yesterday", UTC, "2024-05-01T00:00:00Z"), ("today", NEW_YORK, "2024-05-01T04:00:00Z"),
        ("yesterday", NEW_YORK, "2024-04-30T04:00:00Z"), ("today", PRAGUE, "2024-05-01T22:00:00Z"),
        ("2024-05-01", UTC, "2024-05-01T00:00:00Z"), ("2024-05-01", PRAGUE, "2024-04-30T22:00:00Z"),
        ("2024-05-01T12:00", PRAGUE, "2024-05-01T10:00:00Z"),
        ("2024-05-01 12:00:00.5Z", PRAGUE, "2024-05-01T12:00:00.5Z"),
        ("2024-05-01T12:00+02:00", UTC, "2024-05-01T10:00:00Z"), ("12:00", UTC, "2024-05-02T12:00:00Z"),
        ("12:00", NEW_YORK, "2024-05-01T16:00:00Z"), ("12:00Z", NEW_YORK, "2024-05-01T12:00:00Z"),
    ],
)  # fmt: skip
def test_text_means_one_time(text: str, zone: ZoneInfo, meaning: str) -> None:
    expected = datetime.fromisoformat(meaning)
    assert parse_moment(text, now=NOW, zone=zone) == round(expected.timestamp() * 1_000_000)


@pytest.mark.parametrize("text", ["", "tomorrow", "2024", "20", "20240501", "15", "5 m", "2024-13-01", "25:00"])
def test_text_that_is_no_time_is_refused_with_the_forms_to_write(text: str) -> None:
    with pytest.raises(ValueError, match="is no time; write 15m"):
        parse_moment(text, now=NOW, zone=UTC)
