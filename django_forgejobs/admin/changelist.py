"""Lists whose cost does not grow with the table: no full count, no scan, no sort of millions."""

from __future__ import annotations

from datetime import datetime, timedelta
from itertools import chain
from typing import TYPE_CHECKING, Any

from django.contrib.admin.views.main import ChangeList
from django.core.paginator import Paginator
from django.db.models import QuerySet
from django.db.models.functions import Left
from django.utils.functional import cached_property

from django_forgejobs.admin.filters import NameFilter, StatusFilter
from django_forgejobs.admin.shown import Rows

if TYPE_CHECKING:
    from django.http import HttpRequest

    _Paginator = Paginator[Any]
else:
    _Paginator = Paginator

#: A list ends here; whoever looks for more filters or searches.
LISTED = 10_000

#: A filter that no index serves looks at so many of the newest rows.
SEARCHED = 100_000

#: Characters of the last error that a list reads.
ERROR_READ = 200


#: SQLite compares times as text, and those of its own clock have three digits where Python's have six.
_MARGIN = timedelta(milliseconds=1)


class CappedPaginator(_Paginator):
    """Counts no further than ``LISTED``; ``more`` says whether there is more."""

    more = False

    @cached_property
    def count(self) -> int:
        """The number of rows, ``LISTED`` at most."""
        rows: Any = self.object_list
        found: int = rows.values("pk")[: LISTED + 1].count()
        self.more = found > LISTED
        return min(found, LISTED)


class JobChangeList(ChangeList):
    """Reads only what a line shows, in the order of the index that finds it.

    ``searched`` is the number of newest rows that a filter looked at, when it did not look at all.
    """

    searched: int | None = None

    @property
    def rows(self) -> Rows:
        """How the rows of the chosen state are found."""
        state = next(spec.value() for spec in self.filter_specs if isinstance(spec, StatusFilter))
        rows: Rows = self.model_admin.rows(state)  # type: ignore[attr-defined]
        return rows

    def get_ordering(self, request: HttpRequest, queryset: QuerySet[Any]) -> list[Any]:
        """Return the order of the index, whatever the URL asks for."""
        return list(self.rows.order)

    def get_queryset(
        self, request: HttpRequest, exclude_parameters: list[str | None] | None = None
    ) -> QuerySet[Any]:
        """Return the rows of the list, without the columns that may be large."""
        found = super().get_queryset(request, exclude_parameters)
        found = found.annotate(error=Left("last_error", ERROR_READ))
        found = found.defer("payload", "result", "history", "last_error")
        return found if self.query else self._bounded(found)

    def _bounded(self, found: QuerySet[Any]) -> QuerySet[Any]:
        """Cut ``found`` off where a page would otherwise read, or sort, millions of rows."""
        rows = self.rows
        named = any(spec.value() for spec in self.filter_specs if isinstance(spec, NameFilter))
        filtered = named or bool(rows.also)
        if rows.whole or not (filtered or len(rows.walks) > 1):
            return found
        size = SEARCHED if filtered else LISTED
        field = rows.order[0].removeprefix("-")
        # The newest `size` rows of all walks together lie above the highest of their single ends.
        ends = (
            self.root_queryset.filter(walk)
            .order_by(f"-{field}")
            .values_list(field, flat=True)[size : size + 1]
            for walk in rows.walks
        )
        end = max(chain.from_iterable(ends), default=None)
        if end is None:
            return found
        if isinstance(end, datetime):
            end -= _MARGIN
        self.searched = size if filtered else None
        return found.filter(**{f"{field}__gte": end})
