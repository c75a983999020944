"""The three entries of the admin: jobs, dead letters, archived jobs; and the moves that people make."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, ClassVar

from django.contrib import admin, messages
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.contrib.admin.utils import quote, unquote
from django.core.exceptions import PermissionDenied
from django.db.models import Q
from django.http import Http404, HttpResponseRedirect
from django.urls import path
from django.utils.translation import gettext_lazy as _
from django.views.decorators.http import require_POST

from django_forgejobs import queue
from django_forgejobs.admin import display
from django_forgejobs.admin.moves import BY_HAND, ByHand
from django_forgejobs.admin.rows import RowAdmin
from django_forgejobs.admin.shown import JOBS, Rows, Shown, ended
from django_forgejobs.exceptions import JobError
from django_forgejobs.models import ArchivedJob, DeadLetter, Job
from django_forgejobs.states import DEAD_LETTERS

if TYPE_CHECKING:
    from django.db.models import QuerySet
    from django.http import HttpRequest, HttpResponse
    from django.urls import URLPattern


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
            try:
                moved = move(job.pk, by=request.user.get_username())
            except JobError as error:  # its row is held; the next might be too, and each takes seconds
                self.message_user(request, str(error), messages.ERROR)
                break
            if moved:
                done += 1
                running += words.warns(job)
                # As a job, also from the dead letters: there it is none any more.
                after = Job(pk=job.pk, type=job.type, status=words.move.target)
                self.log_change(request, after, str(words.label))
        for count, text, level in (
            (done, words.done, messages.SUCCESS),
            (running, words.interrupted, messages.WARNING),
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
            return HttpResponseRedirect(self.address(request, "change", quote(job.pk)))
        return HttpResponseRedirect(self.address(request, "changelist"))

    def buttons(self, request: HttpRequest, job: Any) -> list[dict[str, Any]]:
        """Return the moves that the job can make now."""
        if not self.has_operate_permission(request):
            return []
        return [
            {
                "name": name,
                "label": words.label,
                "address": self.address(request, name, quote(job.pk)),
                "warning": words.warning if words.warns(job) else "",
            }
            for name, words in BY_HAND.items()
            if name in self.actions and words.offered(job)
        ]

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
    list_display: Any = ("id", "state", "type", "queue", "attempts_made", "end", "error")

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
    list_display: Any = ("id", "state", "type", "queue", "attempts_made", "end", "error")
    fieldsets: ClassVar[Any] = (*RowAdmin.fieldsets, (_("Archive"), {"fields": ("archived",)}))

    @admin.display(description=_("archived"))
    def archived(self, job: Any) -> str:
        """Return when the job was moved to the archive."""
        return display.when(job.archived_at, job.now)

    def rows(self, state: str | None) -> Rows:
        """Return the archived jobs, the highest id first, or those that ended in ``state``."""
        return Rows() if state is None else Rows(also=Q(status=state))
