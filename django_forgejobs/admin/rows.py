"""What all entries share: a list that reads little, a page that shows all of a row, and nothing to edit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from django.contrib import admin
from django.contrib.admin.utils import flatten_fieldsets
from django.db.models import Q
from django.db.models.functions import Now
from django.utils.html import format_html
from django.utils.http import urlencode
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from django_forgejobs.admin import display
from django_forgejobs.admin.changelist import CappedPaginator, JobChangeList
from django_forgejobs.admin.filters import QueueFilter, StatusFilter, TypeFilter
from django_forgejobs.admin.operated import OperatedAdmin
from django_forgejobs.admin.shown import Rows, Shown, shown
from django_forgejobs.models import Job
from django_forgejobs.states import Status

if TYPE_CHECKING:
    from django.db.models import QuerySet
    from django.http import HttpRequest, HttpResponse


class RowAdmin(OperatedAdmin):
    """A list and a page for rows that nobody edits; their cost does not grow with the table."""

    states: tuple[Shown, ...] = tuple(Shown)
    keyed = True  # whether an index finds an idempotency key

    list_display: Any = ("id", "state", "type", "queue", "attempts_made", "age", "error")
    list_filter: ClassVar[Any] = (StatusFilter, TypeFilter, QueueFilter)
    search_fields = ("=pk",)  # shows the box; get_search_results has the rule
    search_help_text: ClassVar[Any] = _("Exact id or idempotency key")
    sortable_by = ()
    show_full_result_count = False
    show_facets = admin.ShowFacets.NEVER
    paginator = CappedPaginator
    list_max_show_all = 0

    change_list_template = "admin/forgejobs/rows.html"
    change_form_template = "admin/forgejobs/row.html"
    fieldsets: ClassVar[Any] = (
        (None, {"fields": ("state", "type_link", "queue_link", "priority", "attempts_made", "key")}),
        (_("Times"), {"fields": ("created", "due", "started", "finished")}),
        (
            _("Claim"),
            {"fields": ("worker", "lease", "claims", "lease_expirations", "claim_token")},
        ),
    )

    class Media:
        css = {"all": ["django_forgejobs/admin.css"]}

    def rows(self, state: str | None) -> Rows:
        """Return how the rows shown in ``state``, or all, are found."""
        raise NotImplementedError

    # --- permissions -----------------------------------------------------------------------------

    def has_add_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Return False: jobs come from code."""
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Return False: a form saved over a row would undo what workers did meanwhile."""
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Return False: ``archive_jobs`` removes jobs."""
        return False

    def lookup_allowed(self, lookup: str, value: str, request: HttpRequest | None = None) -> bool:
        """Allow the filters' own parameters alone: any other could scan the table."""
        return lookup in {StatusFilter.parameter_name, TypeFilter.parameter_name, QueueFilter.parameter_name}

    # --- the list --------------------------------------------------------------------------------

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        """Return the rows in the queue's database, each with the time that its clock shows."""
        rows: QuerySet[Any] = super().get_queryset(request).using(Job.objects.alias(None))
        return rows.annotate(now=Now())  # type: ignore[no-any-return]

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[JobChangeList]:
        """Return the list that reads no more than it must."""
        return JobChangeList

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[Any], search_term: str
    ) -> tuple[QuerySet[Any], bool]:
        """Find one id or one idempotency key, by their indexes."""
        term = search_term.strip()
        if not term:
            return queryset, False
        wanted = Q(idempotency_key=term) if self.keyed else Q(pk__in=())
        if term.isdecimal() and len(term) < 20:
            wanted |= Q(pk=int(term))
        return queryset.filter(wanted), False

    @admin.display(description=_("status"))
    def state(self, job: Any) -> str:
        """Return the status, with how long a waiting job still waits."""
        state = shown(job)
        name = format_html('<span class="forgejobs-state forgejobs-{}">{}</span>', state, state.label)
        if job.status != Status.READY or job.run_at <= job.now:
            return name
        return format_html("{} {}", name, display.moment(job.run_at, display.distance(job.run_at, job.now)))

    @admin.display(description=_("attempts"))
    def attempts_made(self, job: Any) -> str:
        """Return ``1 of 3``."""
        return gettext("%(made)d of %(most)d") % {"made": job.attempts, "most": job.max_attempts}

    @admin.display(description=_("last error"))
    def error(self, job: Any) -> str:
        """Return the beginning of the last error."""
        return display.line(job.error) or display.NONE

    @admin.display(description=_("age"))
    def age(self, job: Any) -> str:
        """Return the time since the job was enqueued."""
        return display.moment(job.created_at, display.span(job.created_at, job.now))

    @admin.display(description=_("ended"))
    def end(self, job: Any) -> str:
        """Return how long ago the job ended."""
        if job.finished_at is None:
            return display.NONE
        return display.moment(job.finished_at, display.distance(job.finished_at, job.now))

    # --- the page --------------------------------------------------------------------------------

    def get_readonly_fields(self, request: HttpRequest, obj: Any = None) -> Any:
        """Return everything that is shown."""
        return flatten_fieldsets(self.fieldsets)

    def render_change_form(
        self,
        request: HttpRequest,
        context: Any,
        add: bool = False,
        change: bool = False,
        form_url: str = "",
        obj: Any = None,
    ) -> HttpResponse:
        """Add to the page what is no single field."""
        context |= {
            "buttons": self.buttons(request, obj),
            "reasons": self.reasons(obj),
            "last_error": obj.last_error,
            "payload": display.pretty(obj.payload),
            "result": None if obj.result is None else display.pretty(obj.result),
            "history": list(display.history(obj.history, obj.now)),
        }
        return super().render_change_form(request, context, add, change, form_url, obj)

    def reasons(self, job: Any) -> list[str]:
        """Return why the job is where it is, as sentences."""
        return []

    def _filtered(self, name: str, value: str) -> str:
        address = self.address(None, "changelist")
        return format_html('<a href="{}?{}">{}</a>', address, urlencode({name: value}), value)

    @admin.display(description=_("type"))
    def type_link(self, job: Any) -> str:
        """Return the type, which leads to its jobs."""
        return self._filtered("type", job.type)

    @admin.display(description=_("queue"))
    def queue_link(self, job: Any) -> str:
        """Return the queue, which leads to its jobs."""
        return self._filtered("queue", job.queue)

    @admin.display(description=_("idempotency key"))
    def key(self, job: Any) -> str:
        """Return the idempotency key."""
        return job.idempotency_key or display.NONE

    @admin.display(description=_("worker"))
    def worker(self, job: Any) -> str:
        """Return who runs the job, or did so last."""
        return job.locked_by or display.NONE

    @admin.display(description=_("created"))
    def created(self, job: Any) -> str:
        """Return when the job was enqueued."""
        return display.when(job.created_at, job.now)

    @admin.display(description=_("due"))
    def due(self, job: Any) -> str:
        """Return when the job is due, or was last."""
        return display.when(job.run_at, job.now)

    @admin.display(description=_("started"))
    def started(self, job: Any) -> str:
        """Return when the last attempt began."""
        return display.when(job.started_at, job.now)

    @admin.display(description=_("finished"))
    def finished(self, job: Any) -> str:
        """Return when the job ended."""
        return display.when(job.finished_at, job.now)

    @admin.display(description=_("lease until"))
    def lease(self, job: Any) -> str:
        """Return when the lease runs out."""
        return display.when(job.locked_until, job.now)
