"""The setting: defaults, what is refused and how the refusal reads."""

import math
from dataclasses import astuple
from datetime import timedelta
from typing import Any

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.test import override_settings
from hypothesis import example, given, settings
from hypothesis import strategies as st

from django_forgejobs import conf


def test_the_defaults_are_those_of_the_reference() -> None:
    with override_settings(FORGEJOBS={}):
        current = conf.current()
    assert (current.LEASE, current.HEARTBEAT, current.POLL_INTERVAL) == (900, 60, 1)
    assert (current.RECLAIM_INTERVAL, current.GRACE, current.DEFAULT_MAX_ATTEMPTS) == (60, 25, 1)
    assert (current.MAX_LEASE_EXPIRATIONS, current.UNKNOWN_TYPE_GRACE) == (3, 900)
    assert (current.PAYLOAD_MAX_BYTES, current.DATABASE) == (1048576, "default")
    assert current.LISTEN_DATABASE == "default"
    assert astuple(current.BACKOFF) == (5, 2, 3600, 0.5)
    week = 7 * 86400
    ages = dict(current.RETENTION)
    assert ages == {"done": week, "cancelled": week, "failed": None, "dead": None}


def test_a_change_of_the_setting_counts_at_once() -> None:
    with override_settings(FORGEJOBS={"LEASE": 30}):
        assert (conf.current().LEASE, conf.current().HEARTBEAT) == (30, 10)
    with override_settings(FORGEJOBS={"LEASE": timedelta(minutes=1)}):
        assert conf.current().LEASE == 60


def test_the_age_of_one_status_can_be_set_alone() -> None:
    with override_settings(FORGEJOBS={"RETENTION": {"done": timedelta(days=1), "dead": 5}}):
        assert conf.current().RETENTION == {
            "done": 86400,
            "cancelled": 7 * 86400,
            "failed": None,
            "dead": 5,
        }


@example(3.1)
@settings(deadline=None)
@given(st.floats(min_value=0.001, max_value=1e6))
def test_any_lease_goes_with_the_heartbeat_that_follows_from_it(lease: float) -> None:
    loaded, wrong = conf._parse({"LEASE": lease})
    assert wrong == []
    assert 0 < loaded.HEARTBEAT <= lease / 3


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ([], "FORGEJOBS must be a dict, not []"),
        ({"LAESE": 5}, "FORGEJOBS['LAESE'] is not a setting. Did you mean 'LEASE'?"),
        ({"lease": 5}, "FORGEJOBS['lease'] is not a setting. Did you mean 'LEASE'?"),
        ({7: 5}, "FORGEJOBS[7] is not a setting."),
        ({"LEASE": 0}, "FORGEJOBS['LEASE'] = 0: it must be more than zero"),
        ({"LEASE": "900"}, "FORGEJOBS['LEASE'] = '900': expected a number of seconds"),
        ({"LEASE": True}, "FORGEJOBS['LEASE'] = True: expected a number of seconds"),
        ({"GRACE": -1}, "FORGEJOBS['GRACE'] = -1: it must not be negative"),
        ({"GRACE": math.nan}, "FORGEJOBS['GRACE'] = nan: expected a number of seconds"),
        ({"GRACE": math.inf}, "FORGEJOBS['GRACE'] = inf: expected a number of seconds"),
        ({"GRACE": 10**400}, "it is longer than a hundred years"),
        ({"GRACE": timedelta(days=-1)}, "it must not be negative"),
        ({"LEASE": 30, "HEARTBEAT": 11}, "Raise LEASE to 33 or lower HEARTBEAT to 10"),
        ({"HEARTBEAT": 0}, "FORGEJOBS['HEARTBEAT'] = 0: it must be more than zero"),
        ({"DEFAULT_MAX_ATTEMPTS": 0}, "expected a whole number, 1 or more"),
        ({"DEFAULT_MAX_ATTEMPTS": 1.0}, "expected a whole number, 1 or more"),
        ({"MAX_LEASE_EXPIRATIONS": True}, "expected a whole number, 1 or more"),
        ({"DATABASE": "queue"}, "'queue': it is not one of DATABASES (default)"),
        ({"LISTEN_DATABASE": ["default"]}, "it is not one of DATABASES (default)"),
        ({"RETENTION": 5}, "expected a dict of seconds (or None for never) by status"),
        ({"RETENTION": {"ready": 5}}, "'ready' is not one of done, cancelled, failed, dead"),
        ({"RETENTION": {"done": -5}}, "it must not be negative"),
        ({"BACKOFF": 5}, "expected a dict with base, factor, cap, jitter"),
        ({"BACKOFF": {"bass": 5}}, "'bass' is not one of base, factor, cap, jitter"),
        ({"BACKOFF": {"factor": 0.5}}, "factor must be 1 or more"),
        ({"BACKOFF": {"base": 10, "cap": 5}}, "cap 5 is below base 10"),
        ({"BACKOFF": {"base": -1}}, "base: it must not be negative"),
        ({"BACKOFF": {"cap": math.inf}}, "cap: expected a number"),
        ({"BACKOFF": {"base": math.nan}}, "base: expected a number"),
        ({"BACKOFF": {"jitter": 1.5}}, "jitter is a share between 0 and 1"),
        ({"BACKOFF": {"jitter": None}}, "jitter: expected a number"),
    ],
)
def test_a_bad_setting_is_refused_with_its_value_and_the_remedy(setting: Any, said: str) -> None:
    with override_settings(FORGEJOBS=setting):
        assert said in " ".join(conf.problems())
        with pytest.raises(ImproperlyConfigured) as caught:
            conf.current()
        assert said in str(caught.value)


def test_every_problem_is_told_at_once() -> None:
    with override_settings(FORGEJOBS={"LEASE": -1, "GRACE": "soon", "COLOUR": "red"}):
        assert len(conf.problems()) == 3


def test_nothing_set_is_no_problem(settings: Any) -> None:
    del settings.FORGEJOBS
    assert conf.problems() == []
