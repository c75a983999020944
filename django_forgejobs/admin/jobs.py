"""The three entries of the admin: jobs, dead letters, archived jobs. Everything about them is read-only
but the moves by hand, which the manager decides on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, ClassVar

from django.contrib import admin, messages
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.contrib.admin.utils import flatten_fieldsets, quote, unquote
from django.core.exceptions import PermissionDenied
from django.db.models import Q
from django.db.models.functions import Now
from django.http import Http404, HttpResponseRedirect
from django.urls import path, reverse
from django.utils.html import format_html
from django.utils.http import urlencode
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _
from django.views.decorators.http import require_POST

from django_forgejobs import queue
from django_forgejobs.admin import display
from django_forgejobs.admin.changelist import LISTED, CappedPaginator, JobChangeList
from django_forgejobs.admin.filters import QueueFilter, StatusFilter, TypeFilter
from django_forgejobs.admin.moves import BY_HAND, ByHand
from django_forgejobs.admin.shown import JOBS, Rows, Shown, ended, shown
from django_forgejobs.models import ArchivedJob, DeadLetter, Job
from django_forgejobs.states import DEAD_LETTERS, Status

if TYPE_CHECKING:
    from django.db.models import QuerySet
    from django.http import HttpRequest, HttpResponse
    from django.urls import URLPattern

    _ModelAdmin = admin.ModelAdmin[Any]
else:
    _ModelAdmin = admin.ModelAdmin

#: The largest id, 2**63 - 1; PostgreSQL refuses to compare a larger one.
_MAX_ID = 9_223_372_036_854_775_807


class RowAdmin(_ModelAdmin):
    """A list and a page for rows that nobody edits; their cost does not grow with the table."""

    states: tuple[Shown, ...] = tuple(Shown)
    keyed = True  # whether an index finds an idempotency key

    list_display: Any = ("id", "state", "type", "queue", "attempts_made", "error", "age")
    list_filter: ClassVar[Any] = (StatusFilter, TypeFilter, QueueFilter)
    search_fields = ("=pk",)  # shows the box; get_search_results has the rule
    search_help_text: ClassVar[Any] = _("Exact id or idempotency key")
    sortable_by = ()
    show_full_result_count = False
    show_facets = admin.ShowFacets.NEVER
    paginator = CappedPaginator
    list_max_show_all = 0
    actions: Any = ()

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

    def has_operate_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Return whether the user may make moves by hand: Django's permission to change."""
        return super().has_change_permission(request, obj)

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
        if term.isdecimal() and len(term) < 20 and int(term) <= _MAX_ID:
            wanted |= Q(pk=int(term))
        return queryset.filter(wanted), False

    def changelist_view(self, request: HttpRequest, extra_context: Any = None) -> Any:
        """Show the list; the page says where it ends."""
        return super().changelist_view(request, {"listed": LISTED, **(extra_context or {})})

    @admin.display(description=_("status"))
    def state(self, job: Any) -> str:
        """Return the status, with how long a waiting job still waits."""
        state = shown(job)
        wait = display.distance(job.run_at, job.now) if _waits(job) else ""
        return format_html(
            '<span class="forgejobs-state forgejobs-{}">{}</span> {}', state, state.label, wait
        )

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

    def buttons(self, request: HttpRequest, job: Any) -> list[dict[str, Any]]:
        """Return the moves offered for ``job``, for the template."""
        return []

    def _filtered(self, name: str, value: str) -> str:
        address = reverse(f"admin:{self.opts.app_label}_{self.opts.model_name}_changelist")
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


class LiveAdmin(RowAdmin):
    """Rows of the queue's own table, which can be moved by hand."""

    # --- moves by hand ---------------------------------------------------------------------------

    @admin.action(permissions=["operate"], description=BY_HAND["requeue"].of_selected)
    def requeue(self, request: HttpRequest, queryset: QuerySet[Any]) -> None:
        """Requeue the selected jobs."""
        self._move_selected(request, BY_HAND["requeue"], queryset)

    @admin.action(permissions=["operate"], description=BY_HAND["run_now"].of_selected)
    def run_now(self, request: HttpRequest, queryset: QuerySet[Any]) -> None:
        """Make the selected jobs due now."""
        self._move_selected(request, BY_HAND["run_now"], queryset)

    @admin.action(permissions=["operate"], description=BY_HAND["cancel"].of_selected)
    def cancel(self, request: HttpRequest, queryset: QuerySet[Any]) -> None:
        """Cancel the selected jobs."""
        self._move_selected(request, BY_HAND["cancel"], queryset)

    def _move_selected(self, request: HttpRequest, words: ByHand, queryset: QuerySet[Any]) -> None:
        # What was on the page, not all that matches: a request cannot move a million rows.
        selected = request.POST.getlist(ACTION_CHECKBOX_NAME)[: self.list_per_page]
        # A row that has left the list since is no longer in the queryset, and counts as refused.
        self._move(request, words, queryset.filter(pk__in=selected), len(selected))

    def _move(self, request: HttpRequest, words: ByHand, jobs: Iterable[Any], asked: int) -> None:
        """Make the move with each job that can make it, and say how many did."""
        move: Callable[..., bool] = getattr(Job.objects, words.name)
        done = running = 0
        for job in jobs:
            if move(job.pk, by=request.user.get_username()):
                done += 1
                running += words.warns(job)
                # As a job, also from the dead letters: there it is none any more.
                after = Job(pk=job.pk, type=job.type, status=words.move.target)
                self.log_change(request, after, str(words.label))
        for count, text, level in (
            (done, words.done, messages.SUCCESS),
            (running, words.warning, messages.WARNING),
            (asked - done, words.refused, messages.WARNING),
        ):
            if count:
                self.message_user(request, text % {"count": count}, level)

    def get_urls(self) -> list[URLPattern]:
        """Add one address for each move by hand."""
        name = f"{self.opts.app_label}_{self.opts.model_name}"
        view = self.admin_site.admin_view(require_POST(self.move_view))
        moves = [
            path(f"<path:object_id>/{move}/", view, {"move": move}, name=f"{name}_{move}")
            for move in self.actions
        ]
        return [*moves, *super().get_urls()]

    def move_view(self, request: HttpRequest, object_id: str, move: str) -> HttpResponse:
        """Make one move with one job, and go back to its page, or to the list if it has left that."""
        if not self.has_operate_permission(request):
            raise PermissionDenied
        job = self.get_object(request, unquote(object_id))
        if job is None:
            raise Http404(f"There is no job {object_id}.")
        self._move(request, BY_HAND[move], [job], 1)
        if self.get_object(request, str(job.pk)) is not None:
            return HttpResponseRedirect(self._address("change", quote(job.pk)))
        return HttpResponseRedirect(self._address("changelist"))

    def buttons(self, request: HttpRequest, job: Any) -> list[dict[str, Any]]:
        """Return the moves that the job can make now."""
        if not self.has_operate_permission(request):
            return []
        return [
            {
                "name": name,
                "label": words.label,
                "address": self._address(name, quote(job.pk)),
                "warning": words.warning if words.warns(job) else "",
            }
            for name, words in BY_HAND.items()
            if name in self.actions and words.offered(job)
        ]

    def _address(self, view: str, *args: Any) -> str:
        name = f"{self.opts.app_label}_{self.opts.model_name}_{view}"
        return reverse(f"admin:{name}", args=args, current_app=self.admin_site.name)

    def reasons(self, job: Any) -> list[str]:
        """Return what ``explain`` says."""
        return [str(reason) for reason in queue.explain(job.pk)]


@admin.register(Job)
class JobAdmin(LiveAdmin):
    """All jobs of the queue."""

    actions: Any = ("requeue", "run_now", "cancel")

    def rows(self, state: str | None) -> Rows:
        """Return all jobs, the newest first, or those in ``state``."""
        return Rows() if state is None else JOBS[state]


@admin.register(DeadLetter)
class DeadLetterAdmin(LiveAdmin):
    """Jobs that ended by failing, the latest first."""

    states = (Shown.FAILED, Shown.DEAD)
    actions: Any = ("requeue",)
    list_display: Any = ("id", "state", "type", "queue", "attempts_made", "error", "end")

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        """Return the dead letters."""
        return super().get_queryset(request).filter(status__in=DEAD_LETTERS)

    def rows(self, state: str | None) -> Rows:
        """Return the dead letters, or those in ``state``."""
        return ended(*self.states) if state is None else JOBS[state]


@admin.register(ArchivedJob)
class ArchivedJobAdmin(RowAdmin):
    """What ``archive_jobs`` has moved away. The archive has no index but its ids."""

    states = (Shown.DONE, Shown.FAILED, Shown.DEAD, Shown.CANCELLED)
    keyed = False
    search_help_text: ClassVar[Any] = _("Exact id")
    list_display: Any = ("id", "state", "type", "queue", "attempts_made", "error", "end")

    def rows(self, state: str | None) -> Rows:
        """Return the archived jobs, the highest id first, or those that ended in ``state``."""
        return Rows() if state is None else Rows(also=Q(status=state))


def _waits(job: Any) -> bool:
    return bool(job.status == Status.READY and job.run_at > job.now)
