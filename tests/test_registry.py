"""`@job`: names, policies, and what is refused when a module is imported, not when a job is due."""

import functools
from datetime import timedelta
from typing import Any

import pytest

from django_forgejobs import JobError, job, registry
from django_forgejobs.conf import Backoff


@pytest.fixture(autouse=True)
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each test register what it likes."""
    monkeypatch.setattr(registry, "_definitions", {})


def send(payload: Any) -> str:
    """Send something."""
    return f"sent {payload}"


def test_the_decorated_function_stays_what_it_was() -> None:
    handler = job("email.send")(send)
    assert handler("x") == "sent x"
    assert (handler.__name__, handler.__doc__) == ("send", "Send something.")
    assert (handler.__module__, handler.__wrapped__) == (__name__, send)
    assert repr(handler) == "<job 'email.send': tests.test_registry.send>"


def test_a_policy_is_kept_in_plain_numbers() -> None:
    job(
        "email.send",
        queue="mail",
        priority=5,
        max_attempts=4,
        timeout=timedelta(minutes=1),
        backoff={"base": 1, "cap": 9},
    )(send)
    definition = registry.get("email.send")
    assert definition == registry.Definition("email.send", send, "mail", 5, 4, 60, Backoff(base=1, cap=9))
    assert registry.types() == ["email.send"]


def test_a_backoff_may_be_seconds_a_timedelta_a_policy_or_a_callable() -> None:
    own = Backoff(base=1, cap=1)
    for backoff, kept in ((3, 3), (timedelta(minutes=1), 60), (own, own), (len, len)):
        assert registry.define("x", send, backoff=backoff).backoff == kept


@pytest.mark.parametrize(
    ("name", "policy", "said"),
    [
        ("", {}, "type is empty; name it."),
        ("x" * 201, {}, "is 201 characters, more than 200"),
        ("a\0", {}, "type contains a NUL character"),
        ("a\udcff", {}, "type contains a lone surrogate"),
        ("t", {"queue": ""}, '@job("t"): queue is empty; name it.'),
        ("t", {"queue": "q" * 65}, "is 65 characters, more than 64"),
        ("t", {"queue": 5}, "queue=5 is of type int, not a plain string"),
        ("t", {"priority": 101}, "priority=101 is not a whole number from -100 to 100."),
        ("t", {"priority": 1.5}, "priority=1.5 is not a whole number"),
        ("t", {"max_attempts": 0}, "max_attempts=0 is not a whole number from 1"),
        ("t", {"max_attempts": True}, "max_attempts=True is not a whole number"),
        ("t", {"timeout": 0}, '@job("t"): timeout=0: it must be more than zero.'),
        ("t", {"timeout": "1 min"}, "timeout='1 min': expected a number of seconds"),
        ("t", {"backoff": -1}, '@job("t"): backoff=-1: it must not be negative.'),
        ("t", {"backoff": "soon"}, "backoff='soon': expected a number of seconds"),
        ("t", {"backoff": {"factor": 0}}, "factor must be 1 or more"),
        ("t", {"backoff": {"fctor": 2}}, "'fctor' is not one of base, factor, cap, jitter"),
    ],
)
def test_a_bad_policy_is_refused_at_the_decorator(name: str, policy: dict[str, Any], said: str) -> None:
    with pytest.raises(JobError) as caught:
        job(name, **policy)(send)
    assert said in str(caught.value)
    assert registry.types() == []


def test_the_decorator_without_a_name_is_refused_with_an_example() -> None:
    bare: Any = job
    with pytest.raises(JobError, match=r'@job needs a name: @job\("app\.send"\)'):
        bare(send)


def test_a_name_of_two_functions_is_refused_naming_both() -> None:
    job("email.send")(send)
    with pytest.raises(JobError, match=r'"email\.send" is registered twice: by .*\.send and by'):
        job("email.send")(len)
    assert registry.get("email.send").handler is send  # type: ignore[union-attr]


def test_the_same_function_may_be_registered_again_as_a_reload_does() -> None:
    job("email.send")(send)
    job("email.send", priority=7)(send)
    assert registry.get("email.send").priority == 7  # type: ignore[union-attr]


def test_a_function_keeps_its_old_name_beside_a_new_one() -> None:
    handler = job("email.send")(job("mail.send")(send))
    assert registry.types() == ["email.send", "mail.send"]
    assert handler("x") == "sent x"
    assert registry.get("email.send").handler("y") == "sent y"  # type: ignore[union-attr]


def test_what_cannot_be_called_is_no_handler() -> None:
    with pytest.raises(JobError, match=r"The handler of \"t\" is 5, which cannot be called"):
        registry.definitions({"t": 5})  # type: ignore[dict-item]


def test_explicit_handlers_replace_the_registry_but_keep_a_registered_policy() -> None:
    job("email.send", timeout=9, backoff=3)(send)
    job("other")(send)
    found = registry.definitions({"email.send": len, "new": len})
    assert list(found) == ["email.send", "new"]
    assert (found["email.send"].handler, found["email.send"].timeout) == (len, 9)
    assert (found["email.send"].backoff, found["new"].backoff) == (3, None)


def test_a_decorated_function_works_as_an_explicit_handler() -> None:
    found = registry.definitions({"t": job("email.send")(send)})
    assert found["t"].handler is send


def _payload_only(payload: Any) -> None: ...
def _token(payload: Any, claim_token: Any) -> None: ...
def _both(payload: Any, *, context: Any, claim_token: Any = None) -> None: ...
def _first_called_context(context: Any) -> None: ...
def _positional_only(payload: Any, context: Any, /) -> None: ...
def _too_few() -> None: ...
def _too_many(payload: Any, ctx: Any) -> None: ...
def _generator(payload: Any) -> Any:
    yield payload


async def _async_generator(payload: Any) -> Any:
    yield payload


@functools.wraps(_both)
def _decorated(*args: Any, **kwargs: Any) -> None: ...


class _Callable:
    def __call__(self, payload: Any, context: Any) -> None: ...


@pytest.mark.parametrize(
    ("function", "wants"),
    [
        (_payload_only, set()),
        (_token, {"claim_token"}),
        (_both, {"claim_token", "context"}),
        (_first_called_context, set()),
        (_decorated, {"claim_token", "context"}),
        (functools.partial(_both, context=1), {"claim_token", "context"}),
        (_Callable(), {"context"}),
        (print, set()),
        (int, set()),
    ],
)
def test_a_handler_gets_what_its_signature_asks_for(function: Any, wants: set[str]) -> None:
    assert registry.define("t", function).wants == wants


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (_positional_only, "cannot be called with one payload"),
        (_too_few, "cannot be called with one payload"),
        (_too_many, "parameters named context and claim_token"),
        (_generator, "is a generator"),
        (_async_generator, "is a generator"),
    ],
)
def test_a_handler_that_no_call_could_run_is_refused_where_it_is_declared(function: Any, said: str) -> None:
    with pytest.raises(JobError, match=said):
        registry.define("t", function)
