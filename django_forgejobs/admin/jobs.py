"""The three entries of the admin: jobs, dead letters, archived jobs; and the moves that people make."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, ClassVar

from django.contrib import admin, messages
from django.db.models import Q
from django.utils.translation import gettext_lazy as _

from django_forgejobs import queue
from django_forgejobs.admin import display
from django_forgejobs.admin.moves import BY_HAND, MOVES, ByHand
from django_forgejobs.admin.rows import RowAdmin
from django_forgejobs.admin.shown import JOBS, Rows, Shown, ended
from django_forgejobs.exceptions import JobError
from django_forgejobs.models import ArchivedJob, DeadLetter, Job
from django_forgejobs.states import DEAD_LETTERS

if TYPE_CHECKING:
    from django.db.models import QuerySet
    from django.http import HttpRequest


class LiveAdmin(RowAdmin):
    """Rows of the queue's own table, which can be moved by hand."""

    moves = BY_HAND

    @admin.action(permissions=["operate"], description=BY_HAND["requeue"].of_selected)
    def requeue(self, request: HttpRequest, queryset: QuerySet[Any]) -> None:
        """Requeue the selected jobs."""
        self.move_selected(request, BY_HAND["requeue"], queryset)

    @admin.action(permissions=["operate"], description=BY_HAND["run_now"].of_selected)
    def run_now(self, request: HttpRequest, queryset: QuerySet[Any]) -> None:
        """Make the selected jobs due now."""
        self.move_selected(request, BY_HAND["run_now"], queryset)

    @admin.action(permissions=["operate"], description=BY_HAND["cancel"].of_selected)
    def cancel(self, request: HttpRequest, queryset: QuerySet[Any]) -> None:
        """Cancel the selected jobs."""
        self.move_selected(request, BY_HAND["cancel"], queryset)

    def move(self, request: HttpRequest, words: ByHand, rows: Iterable[Any], asked: int) -> None:
        """Make the move with each job that can make it, and say how many did."""
        move: Callable[..., bool] = getattr(Job.objects, words.name)
        done = running = 0
        for job in rows:
            try:
                moved = move(job.pk, by=request.user.get_username())
            except JobError as error:  # its row is held; the next might be too, and each takes seconds
                self.message_user(request, str(error), messages.ERROR)
                break
            if moved:
                done += 1
                running += words.warns(job)
                # As a job, also from the dead letters: there it is none any more.
                after = Job(pk=job.pk, type=job.type, status=MOVES[words.name].target)
                self.log_change(request, after, str(words.label))
        for count, text, level in (
            (done, words.done, messages.SUCCESS),
            (running, words.interrupted, messages.WARNING),
            (asked - done, words.refused, messages.WARNING),
        ):
            if count:
                self.message_user(request, text % {"count": count}, level)

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
