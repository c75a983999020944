"""``@job``: handlers and their policies, by name. Filled by the ``jobs.py`` of installed apps."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Generic, ParamSpec, TypeVar

from django_forgejobs import conf, payloads
from django_forgejobs.backoff import Policy
from django_forgejobs.exceptions import JobError, PermanentError

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class Definition:
    """How jobs of one type are run. ``None`` means the project's default.

    ``timeout`` is seconds; ``wants`` the extra arguments among ``claim_token`` and ``context`` that the
    handler's signature asks for; ``is_async`` whether a call makes a coroutine, which needs no thread.
    """

    type: str
    handler: Callable[..., Any]
    queue: str | None = None
    priority: int | None = None
    max_attempts: int | None = None
    timeout: float | None = None
    backoff: Policy | None = None
    wants: frozenset[str] = frozenset()
    is_async: bool = field(init=False)

    def __post_init__(self) -> None:
        call = getattr(self.handler, "__call__", None)  # noqa: B004 # of an object: its class's method
        is_async = inspect.iscoroutinefunction(self.handler) or inspect.iscoroutinefunction(call)
        object.__setattr__(self, "is_async", is_async)


class Handler(Generic[P, R]):
    """What ``@job`` makes of a function: still callable, with ``.enqueue()`` beside it."""

    def __init__(self, function: Callable[P, R], definition: Definition) -> None:
        self.function = function
        self.definition = definition
        self.__wrapped__ = function
        self.__name__ = getattr(function, "__name__", definition.type)
        self.__qualname__ = getattr(function, "__qualname__", self.__name__)
        self.__module__ = function.__module__
        self.__doc__ = function.__doc__

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.function(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<job {self.definition.type!r}: {self.__module__}.{self.__qualname__}>"

    def enqueue(self, payload: Any = None, **options: Any) -> int:
        """Enqueue a job of this type; the arguments and the answer are those of ``enqueue``."""
        from django_forgejobs.queue import enqueue

        return enqueue(self.definition.type, payload, **options)

    async def aenqueue(self, payload: Any = None, **options: Any) -> int:
        """Like ``enqueue``, from async code."""
        from django_forgejobs.queue import aenqueue

        return await aenqueue(self.definition.type, payload, **options)


_definitions: dict[str, Definition] = {}


def job(
    type_: str,
    /,
    *,
    queue: str | None = None,
    priority: int | None = None,
    max_attempts: int | None = None,
    timeout: float | timedelta | None = None,
    backoff: Policy | Mapping[str, float] | timedelta | None = None,
) -> Callable[[Callable[P, R]], Handler[P, R]]:
    """Register the decorated function as the handler of jobs called ``type_``.

    ``queue``, ``priority`` and ``max_attempts`` are what ``enqueue`` uses when it is not told;
    ``timeout`` is seconds; ``backoff`` is seconds, a dict like ``FORGEJOBS["BACKOFF"]`` or a callable of
    (attempt, error) that returns seconds. Raises ``JobError`` for a name that another function has.

    A function may have several names, one ``@job`` each: after a rename the old one serves the jobs
    that are still queued.
    """
    if not isinstance(type_, str):
        raise JobError(f'@job needs a name: @job("app.{getattr(type_, "__name__", "task")}").')

    def decorate(function: Callable[P, R]) -> Handler[P, R]:
        definition = define(
            type_,
            function,
            queue=queue,
            priority=priority,
            max_attempts=max_attempts,
            timeout=timeout,
            backoff=backoff,
        )
        known = _definitions.get(type_)
        if known is not None and _origin(known.handler) != _origin(function):
            raise JobError(
                f'Job type "{type_}" is registered twice: by {_origin(known.handler)} and by '
                f"{_origin(function)}. Give one of them another name."
            )
        _definitions[type_] = definition
        return Handler(function, definition)

    return decorate


def define(
    type_: str,
    function: Callable[..., Any],
    *,
    queue: str | None = None,
    priority: int | None = None,
    max_attempts: int | None = None,
    timeout: float | timedelta | None = None,
    backoff: Any = None,
) -> Definition:
    """Return a checked ``Definition`` without registering it."""
    payloads.check_label("type", type_, 200)
    try:
        check(queue=queue, priority=priority, max_attempts=max_attempts)
    except JobError as error:
        raise JobError(f'@job("{type_}"): {error}') from None
    if not callable(function):
        raise JobError(
            f'The handler of "{type_}" is {payloads.in_words(function)}, which cannot be called. '
            "Pass the function."
        )
    if isinstance(backoff, Mapping):
        backoff = _read(type_, "backoff", conf.backoff, backoff)
    elif backoff is not None and not callable(backoff) and not isinstance(backoff, conf.Backoff):
        backoff = _read(type_, "backoff", conf.seconds, backoff)
    if timeout is not None:
        timeout = _read(type_, "timeout", conf.positive, timeout)
    wants = _wants(function)
    _check_signature(type_, function, wants)
    return Definition(
        type_,
        function,
        queue,
        priority,
        max_attempts,
        timeout,  # type: ignore[arg-type]
        backoff,
        wants,
    )


def check(*, queue: str | None, priority: int | None, max_attempts: int | None) -> None:
    """Raise ``JobError`` unless a row can hold these; ``None`` stands for what the project's default is."""
    if queue is not None:
        payloads.check_label("queue", queue, 64)
    if priority is not None:
        payloads.check_whole("priority", priority, -100, 100)
    if max_attempts is not None:
        payloads.check_whole("max_attempts", max_attempts, 1, 2**31 - 1)


def get(type_: str) -> Definition | None:
    """Return the registered definition of ``type_``."""
    return _definitions.get(type_)


def types() -> list[str]:
    """Return the registered names, sorted."""
    return sorted(_definitions)


def has_async() -> bool:
    """Return whether a registered handler is ``async def``."""
    return any(definition.is_async for definition in _definitions.values())


class Definitions(dict[str, Definition]):
    """Definitions by type. A type that is not among them has one that fails its job for good."""

    def __missing__(self, type_: str) -> Definition:
        def unknown(payload: Any) -> None:
            raise PermanentError(
                f'Unknown type: no handler is given for "{type_}". Register it, then requeue the job.'
            )

        return Definition(type_, unknown)


def definitions(handlers: Mapping[str, Callable[..., Any]] | None) -> Definitions:
    """Return definitions by type: the registry's, or those of an explicit ``handlers`` dict.

    A type that is registered too keeps its registered policy under the handler given.
    """
    if handlers is not None and not isinstance(handlers, Mapping):
        raise JobError(
            f"handlers={payloads.in_words(handlers)} is no dict of functions by type, such as "
            '{"email.send": send}. None stands for what @job has registered.'
        )
    return Definitions(_definitions) if handlers is None else Definitions(_explicit(handlers))


def _explicit(handlers: Mapping[str, Callable[..., Any]]) -> Iterator[tuple[str, Definition]]:
    for type_, handler in handlers.items():
        function = handler.function if isinstance(handler, Handler) else handler
        known = _definitions.get(type_)
        policy = {"timeout": known.timeout, "backoff": known.backoff} if known else {}
        yield type_, define(type_, function, **policy)  # type: ignore[arg-type]


def _wants(function: Callable[..., Any]) -> frozenset[str]:
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return frozenset()
    # The first one is the payload, whatever its name.
    named = {one.name for one in parameters[1:] if one.kind is not one.POSITIONAL_ONLY}
    return frozenset({"claim_token", "context"} & named)


def _check_signature(type_: str, function: Callable[..., Any], wants: frozenset[str]) -> None:
    """Refuse, where it is declared, a handler that no call could run."""
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise JobError(
            f'The handler of "{type_}", {_origin(function)}, is a generator: it would be made and never run. '
            "Write a function that does the work and returns."
        )
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some built-in functions have none to show
        return
    try:
        signature.bind(None, **dict.fromkeys(wants))
    except TypeError as error:
        raise JobError(
            f'The handler of "{type_}" is {_origin(function)}{signature}, which cannot be called with one '
            f"payload ({error}). It takes the payload, and may take parameters named context and claim_token."
        ) from None


def _origin(function: Callable[..., Any]) -> str:
    return f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', function)}"


def _read(type_: str, name: str, read: Callable[[Any], Any], value: Any) -> Any:
    try:
        return read(value)
    except ValueError as error:
        raise JobError(f'@job("{type_}"): {name}={payloads.in_words(value)}: {error}.') from None
