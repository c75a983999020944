"""Which errors are an outage, which mean "again", and which are somebody's bug."""

import sqlite3
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import psycopg
import psycopg.errors
import psycopg_pool
import pytest
from django.db import (
    DatabaseError,
    Error,
    InterfaceError,
    InternalError,
    OperationalError,
    ProgrammingError,
    connection,
    connections,
    transaction,
)
from django.db.utils import DatabaseErrorWrapper

from django_forgejobs import faults
from tests.sessions import session


def as_django_raises(error: Exception, driver: Any = psycopg) -> Error:
    """Return what Django makes of a driver's error."""
    wrapper = DatabaseErrorWrapper(SimpleNamespace(Database=driver, errors_occurred=False))
    with pytest.raises(Error) as caught, wrapper:
        raise error
    return caught.value


def kind(error: BaseException) -> str:
    """Say what the one place that classifies makes of an error."""
    outage, again = faults.is_outage(error), faults.is_again(error)
    assert not (outage and again)
    return "outage" if outage else "again" if again else "bug"


CODES = [
    ("08000", "outage", OperationalError),
    ("08001", "outage", OperationalError),
    ("08003", "outage", OperationalError),
    ("08006", "outage", OperationalError),
    ("08007", "outage", OperationalError),
    ("08P01", "outage", OperationalError),
    ("53000", "outage", OperationalError),
    ("53100", "outage", OperationalError),
    ("53200", "outage", OperationalError),
    ("53300", "outage", OperationalError),
    ("55000", "outage", OperationalError),
    ("55006", "outage", OperationalError),
    ("55P03", "outage", OperationalError),
    ("57000", "outage", OperationalError),
    ("57014", "outage", OperationalError),
    ("57P01", "outage", OperationalError),
    ("57P02", "outage", OperationalError),
    ("57P03", "outage", OperationalError),
    ("57P05", "outage", OperationalError),
    ("58000", "outage", OperationalError),
    ("58030", "outage", OperationalError),
    ("25P02", "outage", InternalError),
    ("25P03", "outage", InternalError),
    ("25P04", "outage", InternalError),
    ("25006", "outage", InternalError),
    ("42P05", "outage", ProgrammingError),
    ("26000", "outage", ProgrammingError),
    ("40001", "again", OperationalError),
    ("40P01", "again", OperationalError),
    ("22P02", "bug", DatabaseError),
    ("23505", "bug", DatabaseError),
    ("23514", "bug", DatabaseError),
    ("25001", "bug", InternalError),
    ("42501", "bug", ProgrammingError),
    ("42601", "bug", ProgrammingError),
    ("42P01", "bug", ProgrammingError),
    ("P0001", "bug", DatabaseError),
    ("XX000", "bug", InternalError),
]


@pytest.mark.parametrize(("code", "expected", "class_"), CODES)
def test_an_error_of_postgresql_is_judged_by_its_sqlstate(
    code: str, expected: str, class_: type[Exception]
) -> None:
    # With the words of another kind, since only the code counts.
    error = as_django_raises(psycopg.errors.lookup(code)("database is locked; unable to open"))
    assert isinstance(error, class_)
    assert faults.sqlstate(error) == code
    assert kind(error) == expected


WITHOUT_CODE = [
    (psycopg, psycopg.OperationalError("the connection is lost"), "outage"),
    (psycopg, psycopg.OperationalError("server closed the connection unexpectedly"), "outage"),
    (psycopg, psycopg.InterfaceError("the cursor is closed"), "outage"),
    (psycopg, psycopg_pool.PoolTimeout("couldn't get a connection after 30.00 sec"), "outage"),
    (psycopg, psycopg.ProgrammingError("the query has 1 placeholder"), "bug"),
    (psycopg, psycopg.DataError("PostgreSQL text fields cannot contain NUL"), "bug"),
    (sqlite3, sqlite3.OperationalError("database is locked"), "again"),
    (sqlite3, sqlite3.OperationalError("database table is locked: forgejobs_job"), "again"),
    (sqlite3, sqlite3.OperationalError("database schema is locked: main"), "again"),
    (sqlite3, sqlite3.OperationalError("unable to open database file"), "outage"),
    (sqlite3, sqlite3.OperationalError("disk I/O error"), "outage"),
    (sqlite3, sqlite3.OperationalError("database or disk is full"), "outage"),
    (sqlite3, sqlite3.OperationalError("attempt to write a readonly database"), "outage"),
    (sqlite3, sqlite3.OperationalError("no such table: forgejobs_job"), "bug"),
    (sqlite3, sqlite3.OperationalError('near "SELEC": syntax error'), "bug"),
    (sqlite3, sqlite3.IntegrityError("UNIQUE constraint failed"), "bug"),
    (sqlite3, sqlite3.ProgrammingError("Incorrect number of bindings"), "bug"),
]


@pytest.mark.parametrize(("driver", "error", "expected"), WITHOUT_CODE, ids=lambda value: str(value)[:40])
def test_an_error_without_a_code_is_judged_by_its_class_and_words(
    driver: Any, error: Exception, expected: str
) -> None:
    assert kind(as_django_raises(error, driver)) == expected


def test_an_error_that_django_itself_raises_for_a_closed_connection_is_an_outage() -> None:
    assert kind(InterfaceError("connection already closed")) == "outage"


@pytest.mark.parametrize(
    "error", [ValueError("database is locked"), ConnectionError(), SystemExit(1), TimeoutError()]
)
def test_what_no_database_raised_is_nothing_of_the_kind(error: BaseException) -> None:
    assert kind(error) == "bug"


def test_a_code_is_found_below_other_errors_and_a_circle_of_causes_ends() -> None:
    outer = OperationalError("could not")
    outer.__cause__ = as_django_raises(psycopg.errors.lookup("57P01")("bye"))
    assert faults.sqlstate(outer) == "57P01"
    circle = OperationalError("round and round")
    circle.__cause__ = ValueError()
    circle.__cause__.__cause__ = circle
    assert faults.sqlstate(circle) is None
    assert kind(circle) == "outage"


# --- Real ones -----------------------------------------------------------------------------------


def timed_out(cursor: Any) -> None:
    cursor.execute("SET LOCAL statement_timeout = 10")
    cursor.execute("SELECT pg_sleep(5)")


def terminated(cursor: Any) -> None:
    cursor.execute("SELECT pg_terminate_backend(pg_backend_pid())")


def idle_for_too_long(cursor: Any) -> None:
    cursor.execute("SET LOCAL idle_in_transaction_session_timeout = 1")
    with session("clock") as clock, clock.cursor() as waiting:
        waiting.execute("SELECT pg_sleep(0.1)")
    cursor.execute("SELECT 1")


def read_only(cursor: Any) -> None:
    cursor.execute("SET LOCAL transaction_read_only = on")
    cursor.execute("INSERT INTO forgejobs_job (type) VALUES ('t')")


def failed_before(cursor: Any) -> None:
    with pytest.raises(ProgrammingError):
        cursor.execute("SELECT nothing")
    cursor.execute("SELECT 1")


def prepared_twice(cursor: Any) -> None:
    cursor.execute("PREPARE forgejobs_twice AS SELECT 1")
    cursor.execute("PREPARE forgejobs_twice AS SELECT 1")


def never_prepared(cursor: Any) -> None:
    cursor.execute("EXECUTE forgejobs_never")


def no_such_table(cursor: Any) -> None:
    cursor.execute("SELECT * FROM forgejobs_nothing")


@pytest.mark.postgres_only
@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize(
    ("provoke", "code", "expected"),
    [
        (timed_out, "57014", "outage"),
        (terminated, "57P01", "outage"),
        (idle_for_too_long, "25P03", "outage"),
        (read_only, "25006", "outage"),
        (failed_before, "25P02", "outage"),
        (prepared_twice, "42P05", "outage"),
        (never_prepared, "26000", "outage"),
        (no_such_table, "42P01", "bug"),
    ],
)
def test_what_postgresql_really_raises_is_recognised(
    provoke: Callable[[Any], None], code: str, expected: str
) -> None:
    with session() as other:
        other.set_autocommit(False)
        with pytest.raises(Error) as caught, other.cursor() as cursor:
            provoke(cursor)
    assert faults.sqlstate(caught.value) == code
    assert kind(caught.value) == expected


@pytest.mark.postgres_only
@pytest.mark.django_db(transaction=True)
def test_a_server_that_is_not_there_is_an_outage() -> None:
    with session() as other:
        other.settings_dict = {**other.settings_dict, "HOST": "/nowhere"}
        with pytest.raises(OperationalError) as caught:
            other.ensure_connection()
    assert faults.sqlstate(caught.value) is None
    assert kind(caught.value) == "outage"


@pytest.mark.sqlite_only
@pytest.mark.django_db(transaction=True)
def test_a_locked_sqlite_means_again() -> None:
    with (
        session(timeout=0) as other,
        other.cursor() as cursor,
        transaction.atomic(),
        pytest.raises(OperationalError) as caught,
    ):
        cursor.execute("BEGIN IMMEDIATE")
    assert kind(caught.value) == "again"


@pytest.mark.sqlite_only
@pytest.mark.django_db
@pytest.mark.parametrize(
    ("name", "statement", "expected"),
    [
        ("file:/nowhere/at/all.sqlite3", "SELECT 1", "outage"),
        ("file:{path}?mode=ro", "CREATE TABLE t (a)", "outage"),
        ("{path}", "SELECT * FROM nothing", "bug"),
    ],
)
def test_what_sqlite_really_raises_is_recognised(
    name: str, statement: str, expected: str, tmp_path: Any
) -> None:
    path = tmp_path / "db.sqlite3"
    sqlite3.connect(path).close()
    other = connections.create_connection("default")
    other.settings_dict = {
        **connection.settings_dict,
        "NAME": name.format(path=path),
        "OPTIONS": {"uri": True},
    }
    with pytest.raises(OperationalError) as caught, other.cursor() as cursor:
        cursor.execute(statement)
    other.close()
    assert kind(caught.value) == expected
