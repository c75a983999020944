"""Which slots fire: the decision of a tick, without a database."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from django_forgejobs import cron, slots
from django_forgejobs.slots import Decision, Stretch

MINUTES = cron.parse("* * * * *", "UTC")
DAILY = cron.parse("0 9 * * *", "UTC")
NOON = datetime(2026, 6, 1, 12, tzinfo=UTC)


def minute(number: int) -> datetime:
    return NOON + timedelta(minutes=number)


def decide(now: datetime, *, cron: cron.Cron = MINUTES, **options: Any) -> Decision:
    values: dict[str, Any] = {"due": NOON, "last_slot": None, "ends_at": None, "on_missed": "latest"}
    return slots.decide(cron, now=now, **values | options)


def test_a_due_slot_fires_and_the_next_one_follows() -> None:
    assert decide(NOON) == Decision((NOON,), None, minute(1))


@pytest.mark.parametrize("on_missed", ["latest", "all", "skip"])
def test_a_tick_that_is_late_has_missed_nothing(on_missed: str) -> None:
    """Also hours late, while the next slot has not come."""
    assert decide(NOON + timedelta(seconds=59.9), on_missed=on_missed) == Decision((NOON,), None, minute(1))
    nine = datetime(2026, 6, 1, 9, tzinfo=UTC)
    late = decide(nine + timedelta(hours=23), cron=DAILY, due=nine, on_missed=on_missed)
    assert late == Decision((nine,), None, nine + timedelta(days=1))


def test_of_missed_slots_the_latest_fires_once() -> None:
    decision = decide(minute(3))
    assert decision == Decision((minute(3),), Stretch(NOON, minute(2), 3), minute(4))
    assert decision.due == Stretch(NOON, minute(3), 4)


def test_with_skip_no_missed_slot_fires() -> None:
    decision = decide(minute(3), on_missed="skip")
    assert decision == Decision((), Stretch(NOON, minute(3), 4), minute(4))


def test_with_all_every_missed_slot_fires_oldest_first() -> None:
    assert decide(minute(3), on_missed="all") == Decision(tuple(map(minute, range(4))), None, minute(4))


def test_with_all_the_newest_hundred_fire_and_the_rest_is_recorded() -> None:
    decision = decide(minute(249), on_missed="all")
    assert decision.fire == tuple(map(minute, range(150, 250)))
    assert decision.missed == Stretch(NOON, minute(149), 150)


def test_ten_years_of_missed_minutes_are_one_stretch() -> None:
    since = NOON - timedelta(days=3652)
    decision = decide(NOON, due=since)
    assert decision.fire == (NOON,)
    assert decision.missed == Stretch(since, minute(-1), 3652 * 1440)


def test_a_slot_up_to_the_last_one_does_not_fire_again() -> None:
    assert decide(NOON, last_slot=NOON) == Decision(next=minute(1))
    assert decide(minute(2), last_slot=minute(1)) == Decision((minute(2),), None, minute(3))


def test_nothing_fires_after_the_end() -> None:
    assert decide(minute(5), ends_at=minute(1), on_missed="all") == Decision((NOON, minute(1)), None, None)
    assert decide(NOON, ends_at=NOON) == Decision((NOON,), None, None)
    assert decide(NOON, last_slot=NOON, ends_at=NOON) == Decision()


def test_a_stored_slot_fires_also_where_the_rules_of_its_zone_have_changed() -> None:
    """It was computed with an older tz database, and is no slot any more."""
    odd = NOON + timedelta(seconds=30)
    assert decide(odd, due=odd) == Decision((odd,), None, minute(1))
    assert decide(minute(2), due=odd) == Decision((minute(2),), Stretch(odd, minute(1), 2), minute(3))


def test_the_first_slot_is_in_the_future_and_not_before_the_start() -> None:
    """C047."""
    daily = cron.parse("0 15 * * *", "UTC")
    now = datetime(2026, 6, 1, 14, 2, tzinfo=UTC)
    today = datetime(2026, 6, 1, 15, tzinfo=UTC)
    assert slots.first(daily, now, None, None) == today
    assert slots.first(daily, now, now - timedelta(minutes=2), None) == today
    assert slots.first(daily, now, datetime(1970, 1, 1, tzinfo=UTC), None) == today
    start = datetime(2026, 7, 1, 15, tzinfo=UTC)
    assert slots.first(daily, now, start, None) == start
    assert slots.first(daily, now, start + timedelta(seconds=1), None) == start + timedelta(days=1)
    assert slots.first(daily, now, None, today) == today
    assert slots.first(daily, now, None, today - timedelta(seconds=1)) is None
    assert slots.first(daily, now, None, datetime(1999, 1, 1, tzinfo=UTC)) is None
