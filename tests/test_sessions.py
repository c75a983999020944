"""The tests' own listeners go when their test does: a later one must not find them."""

import pytest
from django.db import connection

from tests.sessions import connections_of, statements


@pytest.mark.django_db(transaction=True)
def test_a_connection_that_lives_on_is_no_longer_listened_to() -> None:
    before = list(connection.execute_wrappers)
    seen: list[str] = []
    connection.close()
    with connections_of("", before=seen.append):
        connection.cursor().execute("SELECT 1")
    assert seen == ["SELECT 1"]
    assert connection.execute_wrappers == before
    connection.cursor().execute("SELECT 2")
    assert seen == ["SELECT 1"]


@pytest.mark.django_db(transaction=True)
def test_a_connection_that_is_opened_while_another_listens_loses_neither() -> None:
    before = list(connection.execute_wrappers)
    seen: list[str] = []

    def reconnect_and_ask() -> None:
        connection.close()
        connection.cursor().execute("SELECT 1")

    with connections_of("", before=seen.append):
        statements(reconnect_and_ask)
        connection.cursor().execute("SELECT 2")
    assert seen == ["SELECT 1", "SELECT 2"]
    assert connection.execute_wrappers == before
