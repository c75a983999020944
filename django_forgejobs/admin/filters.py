"""Filters whose choices come from code and small tables: none counts, none asks the jobs for DISTINCT."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.contrib.admin import SimpleListFilter
from django.contrib.admin.options import IncorrectLookupParameters
from django.utils.translation import gettext_lazy as _

from django_forgejobs import lanes, registry
from django_forgejobs.models import AnnouncedType, Job

if TYPE_CHECKING:
    from django.contrib.admin import ModelAdmin
    from django.db.models import QuerySet
    from django.http import HttpRequest

#: Names offered at most; others are reached by a link from a job or by the address.
NAMES = 500


class StatusFilter(SimpleListFilter):
    """By the state that is shown, in the fixed order of a job's life."""

    title = _("status")
    parameter_name = "status"

    def lookups(self, request: HttpRequest, model_admin: ModelAdmin[Any]) -> list[tuple[Any, Any]]:
        """Return the states that this list can show."""
        self.rows = model_admin.rows  # type: ignore[attr-defined]
        return [(state.value, state.label) for state in model_admin.states]  # type: ignore[attr-defined]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        """Return the rows in the chosen state."""
        if self.value() not in {None, *(state for state, _label in self.lookup_choices)}:
            raise IncorrectLookupParameters(f"status={self.value()!r}")
        return queryset.filter(self.rows(self.value()).condition)


class NameFilter(SimpleListFilter):
    """By a name that is compared exactly; the chosen one is offered even if nobody knows it."""

    def names(self, db: str) -> set[str]:
        raise NotImplementedError

    def lookups(self, request: HttpRequest, model_admin: ModelAdmin[Any]) -> list[tuple[Any, Any]]:
        names = self.names(Job.objects.alias(None))
        if chosen := self.value():
            names.add(chosen)
        return [(name, name) for name in sorted(names)]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        name = self.value()
        if name is None:
            return queryset
        if "\0" in name:  # PostgreSQL would refuse it
            return queryset.none()
        return queryset.filter(**{str(self.parameter_name): name})


class TypeFilter(NameFilter):
    """By type: those registered here and those that workers have announced."""

    title = _("type")
    parameter_name = "type"

    def names(self, db: str) -> set[str]:
        """Return the known types."""
        announced = AnnouncedType.objects.using(db).values_list("type", flat=True)[:NAMES]
        return {*registry.types(), *announced}


class QueueFilter(NameFilter):
    """By queue: those of registered types and those where something waits."""

    title = _("queue")
    parameter_name = "queue"

    def names(self, db: str) -> set[str]:
        """Return the known queues."""
        policies = {definition.queue or "default" for definition in registry.definitions(None).values()}
        return {"default", *policies, *lanes.ready_queues(db)[:NAMES]}
