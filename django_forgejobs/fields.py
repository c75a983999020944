"""The JSON columns: strict about what goes in, tolerant of what comes out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from django.db import models

from django_forgejobs.payloads import StrictEncoder


@dataclass(frozen=True)
class Unreadable:
    """What stands for a value that Python cannot read back, such as a number of 5,000 digits.

    Only plain SQL can store one. Reading must not fail for it: the claim reads many rows at a time, and
    one bad row would cost its neighbours a lease.
    """

    problem: str


def entries(history: Any) -> list[dict[str, Any]]:
    """Return the entries of ``history``, without what only plain SQL can have put there."""
    return [entry for entry in history if isinstance(entry, dict)] if isinstance(history, list) else []


class StrictJSONField(models.JSONField):
    """A ``JSONField`` that writes by the rules of ``payloads`` and never raises when it reads."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("encoder", StrictEncoder)
        super().__init__(*args, **kwargs)

    def deconstruct(self) -> Any:
        """Leave the encoder out of migrations: it is always the same."""
        name, path, args, kwargs = super().deconstruct()
        kwargs.pop("encoder", None)
        return name, path, args, kwargs

    def from_db_value(self, value: Any, expression: Any, connection: Any) -> Any:
        """Return the value, or ``Unreadable``."""
        try:
            return super().from_db_value(value, expression, connection)
        except (ValueError, RecursionError) as error:
            return Unreadable(f"{type(error).__name__}: {error}")
