"""What may be stored: the same answer on every database, before any of them is asked."""

import datetime
import decimal
import enum
import json
import math
import os
import pathlib
import uuid
from typing import Any

import pytest
from django.contrib.auth.models import Group
from django.utils.safestring import mark_safe
from django.utils.translation import gettext_lazy
from hypothesis import given, settings
from hypothesis import strategies as st

from django_forgejobs import JobError
from django_forgejobs.payloads import MAX_DEPTH, StrictEncoder, dumps, in_words, storable, written
from tests.json_values import json_values

SURROGATE = os.fsdecode(b"\xff.txt")


class Colour(enum.Enum):
    RED = "red"


class Level(enum.IntEnum):
    HIGH = 3


@settings(deadline=None)
@given(json_values)
def test_what_is_accepted_comes_back_equal_and_of_the_same_type(value: Any) -> None:
    back = json.loads(dumps(value))
    assert back == value
    assert repr(back) == repr(value)


_anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(exclude_categories=()))
    # At the edges of what is plain: floats that are written without exponent, integers of 64 bits.
    | st.sampled_from([1e-4, 9.9e-5, 1e16, 9999999999999998.0, -0.0, 2**63, 2**63 - 1, -(2**63), 10**4000])
    | st.sampled_from([b"", Level.HIGH, mark_safe("s"), decimal.Decimal(1), "\\u0000", "\0", SURROGATE]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner)
        | st.dictionaries(st.text(max_size=3) | st.sampled_from([1, None, mark_safe("k")]), inner, max_size=3)
    ),
    max_leaves=12,
)


@settings(deadline=None)
@given(_anything, st.none() | st.integers(1, 60))
def test_a_value_is_answered_alike_whether_it_looks_plain_or_not(value: Any, max_bytes: int | None) -> None:
    def answer(write: Any) -> str:
        try:
            return str(write(value, max_bytes=max_bytes))
        except JobError as error:
            return f"refused: {error}"

    assert answer(dumps) == answer(written)


def test_tuples_become_lists() -> None:
    assert dumps({"a": (1, (2,), ())}) == '{"a":[1,[2],[]]}'


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (1.2345e25, "12345000000000000000000000.0"),
        (1e-7, "0.0000001"),
        (1.0, "1.0"),
        (-0.0, "-0.0"),
        (1, "1"),
        (True, "true"),
    ],
)
def test_a_float_is_written_so_that_no_database_reads_it_as_an_integer(number: float, text: str) -> None:
    assert dumps(number) == text


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({1: "a", "1": "b"}, "payload has the key 1 (int); JSON keys are strings."),
        ({1: "a"}, "payload has the key 1 (int)"),
        ({None: 1}, "payload has the key None (NoneType)"),
        ({True: 1}, "payload has the key True (bool)"),
        ({(1, 2): 1}, "payload has the key (1, 2) (tuple)"),
        ({mark_safe("k"): 1}, "payload has the key 'k' (SafeString)"),
        ({"a": {"b": [{2.5: 1}]}}, 'payload["a"]["b"][0] has the key 2.5 (float)'),
        ({"m": math.nan}, 'payload["m"] is nan, which JSON does not have. Pass None or a string.'),
        ([0, math.inf], "payload[1] is inf"),
        ([-math.inf], "payload[0] is -inf"),
        ("a\0b", "payload contains a NUL character, which PostgreSQL cannot store. Remove it."),
        ({"a\0": 1}, "a key of payload contains a NUL character"),
        ({"f": [SURROGATE]}, "payload[\"f\"][0] contains a lone surrogate ('\\udcff')"),
        ({SURROGATE: 1}, "a key of payload contains a lone surrogate"),
        ({"a": datetime.datetime(2026, 1, 1)}, 'payload["a"] is datetime.datetime, which JSON'),
        ({"a": datetime.date(2026, 1, 1)}, 'payload["a"] is datetime.date'),
        ({"a": datetime.timedelta(1)}, 'payload["a"] is datetime.timedelta'),
        ({"a": decimal.Decimal("1.5")}, 'payload["a"] is decimal.Decimal'),
        ([decimal.Decimal("NaN")], "payload[0] is decimal.Decimal"),
        ([uuid.uuid4()], "payload[0] is uuid.UUID"),
        ([{1, 2}], "payload[0] is builtins.set"),
        ([frozenset()], "payload[0] is builtins.frozenset"),
        ([b"x"], "payload[0] is builtins.bytes"),
        ([range(3)], "payload[0] is builtins.range"),
        ([iter([])], "payload[0] is builtins.list_iterator"),
        ([gettext_lazy("yes")], "payload[0] is django.utils.functional."),
        ([mark_safe("<b>")], "payload[0] is django.utils.safestring.SafeString"),
        ([pathlib.Path("/")], "payload[0] is pathlib."),
        ([Colour.RED], "payload[0] is tests.test_payloads.Colour"),
        ([Level.HIGH], "payload[0] is tests.test_payloads.Level"),
        ([Group(name="g")], "payload[0] is django.contrib.auth.models.Group"),
        ([complex(1, 2)], "payload[0] is builtins.complex"),
        ([10**4000], "payload[0] is an integer of more than 4,000 digits; pass it as a string."),
    ],
)
def test_what_json_would_change_is_refused_with_its_path(value: Any, said: str) -> None:
    with pytest.raises(JobError) as caught:
        dumps(value)
    assert said in str(caught.value)


def test_the_longest_integer_is_as_long_as_the_message_says() -> None:
    for number in (10**4000 - 1, 1 - 10**4000):
        assert json.loads(dumps(number)) == number


def test_deep_nesting_is_accepted_up_to_the_limit_and_refused_beyond() -> None:
    value: Any = "x"
    for _ in range(MAX_DEPTH):
        value = [value]
    assert json.loads(dumps(value)) == value
    with pytest.raises(JobError, match="nested deeper than 100 levels"):
        dumps([value])


def test_a_payload_that_holds_itself_is_refused() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(JobError, match="nested deeper"):
        dumps(value)


def test_a_payload_over_the_limit_is_refused_with_both_sizes() -> None:
    assert dumps("é" * 10, max_bytes=22) == '"éééééééééé"'
    with pytest.raises(JobError, match=r"payload is 22 bytes of JSON, more than .*\(21\)"):
        dumps("é" * 10, max_bytes=21)


def test_a_message_about_a_huge_key_stays_short() -> None:
    with pytest.raises(JobError) as caught:
        dumps({"k" * 1000: {"l" * 1000: {b"x" * 10_000: 1}}})
    assert len(str(caught.value)) < 500


def test_a_key_that_cannot_be_shown_is_refused_like_any_other() -> None:
    class Unshowable:
        def __repr__(self) -> str:
            raise RuntimeError

    with pytest.raises(JobError, match="a Unshowable whose repr raises RuntimeError"):
        dumps({Unshowable(): 1})
    assert in_words(10**5000) == "<a int whose repr raises ValueError>"


def test_the_encoder_of_the_columns_has_the_same_rules() -> None:
    assert json.dumps({"a": (1.0, None)}, cls=StrictEncoder) == '{"a":[1.0,null]}'
    with pytest.raises(JobError, match=r'value\["a"\] is nan'):
        json.dumps({"a": math.nan}, cls=StrictEncoder)


@settings(deadline=None)
@given(st.text(st.characters(exclude_categories=()), max_size=60), st.integers(40, 80))
def test_any_text_can_be_made_storable(text: str, limit: int) -> None:
    stored = storable(text, limit)
    assert len(stored) <= limit
    assert "\0" not in stored
    assert stored.encode().decode() == stored


def test_what_is_cut_keeps_its_head_and_tail_and_says_so() -> None:
    stored = storable("head" + "x" * 10_000 + "tail", 100)
    assert len(stored) == 100
    assert stored.startswith("headx")
    assert stored.endswith("xtail")
    assert "[9,908 characters cut]" in stored


def test_a_value_that_would_be_huge_as_text_is_refused_before_it_is_written() -> None:
    value: list[Any] = ["x" * 100]
    for _ in range(60):
        value = [value, value]
    with pytest.raises(JobError, match="more than PAYLOAD_MAX_BYTES"):
        dumps(value, max_bytes=10_000)


def test_bytes_count_not_characters() -> None:
    assert dumps("é" * 4, max_bytes=10)
    with pytest.raises(JobError, match="12 bytes of JSON, more than"):
        dumps("é" * 5, max_bytes=10)
