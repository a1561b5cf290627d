"""Transactions on a topic that has several names."""

from __future__ import annotations

from pathlib import Path

import pytest

from conftest import values_of
from loglib import Topic, transaction


@pytest.mark.parametrize("linked", ["topic", "directory of topics"])
@pytest.mark.parametrize("mode", ["a", "r"])
def test_topic_under_two_names_gets_what_was_appended_to_both(tmp_path: Path, linked: str, mode: str) -> None:
    """The part under the second name was committed, and dropped without a word."""
    path, link = tmp_path / "real" / "orders", tmp_path / "link" / "orders"
    Topic.open(path, create=True).close()
    Topic.open(tmp_path / "real" / "others", create=True).close()
    if linked == "topic":
        link.parent.mkdir()
        link.symlink_to(path)
    else:
        link.parent.symlink_to(path.parent)
    with (
        Topic.open(path, mode=mode) as one,  # type: ignore[arg-type]
        Topic.open(link, mode="r") as other,
        Topic.open(tmp_path / "real" / "others", mode="r") as third,
    ):
        with transaction("app") as work:
            work.append(third, b"of another topic")
            work.append(one, b"by one name")
            work.append(other, b"by the other")
            work.append(one, b"again")
        assert values_of(other) == [b"by one name", b"by the other", b"again"]
        assert values_of(third) == [b"of another topic"]
