"""The moves that a person makes, in words. The manager decides whether a job can make them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from django.utils.translation import gettext_lazy as _
from django.utils.translation import ngettext_lazy

from django_forgejobs.states import CANCEL, REQUEUE, RUN_NOW, Move, Status


def _never(row: Any) -> bool:
    return False


@dataclass(frozen=True)
class ByHand:
    """One move. ``name`` is that of the manager's method, of the action and in addresses; ``offers`` says
    whether a button makes sense for a row. ``done``, ``refused`` and ``interrupted`` take a ``count``; the
    last, and ``warning``, tell what it means for rows that ``warns`` says yes to.
    """

    name: str
    label: Any
    of_selected: Any
    done: Any
    refused: Any
    offers: Callable[[Any], bool]
    warns: Callable[[Any], bool] = _never
    warning: Any = ""
    interrupted: Any = ""


def _running(job: Any) -> bool:
    return bool(job.status == Status.RUNNING)


def _can(move: Move) -> Callable[[Any], bool]:
    return lambda job: job.status in move.sources and not (move is RUN_NOW and job.run_at <= job.now)


#: The moves that people make with jobs.
MOVES = {move.name: move for move in (REQUEUE, RUN_NOW, CANCEL)}

BY_HAND = {
    words.name: words
    for words in (
        ByHand(
            REQUEUE.name,
            _("Requeue"),
            _("Requeue selected %(verbose_name_plural)s"),
            ngettext_lazy("%(count)d job was requeued.", "%(count)d jobs were requeued.", "count"),
            ngettext_lazy(
                "%(count)d job was left as it is: only failed, dead and cancelled jobs can be requeued.",
                "%(count)d jobs were left as they are: only failed, dead and cancelled jobs can be requeued.",
                "count",
            ),
            _can(REQUEUE),
        ),
        ByHand(
            RUN_NOW.name,
            _("Run now"),
            _("Run selected %(verbose_name_plural)s now"),
            ngettext_lazy("%(count)d job is due now.", "%(count)d jobs are due now.", "count"),
            ngettext_lazy(
                "%(count)d job was left as it is: only jobs that wait for a later time can be made due.",
                "%(count)d jobs were left as they are: only jobs that wait for a later time can be made due.",
                "count",
            ),
            _can(RUN_NOW),
        ),
        ByHand(
            CANCEL.name,
            _("Cancel"),
            _("Cancel selected %(verbose_name_plural)s"),
            ngettext_lazy("%(count)d job was cancelled.", "%(count)d jobs were cancelled.", "count"),
            ngettext_lazy(
                "%(count)d job was left as it is: only jobs that wait or run can be cancelled.",
                "%(count)d jobs were left as they are: only jobs that wait or run can be cancelled.",
                "count",
            ),
            _can(CANCEL),
            _running,
            _(
                "It is running: its handler is told at its next heartbeat, what it has done stays done, "
                "and its result will be refused."
            ),
            ngettext_lazy(
                "%(count)d of them was running: its handler is told at its next heartbeat, what it has done "
                "stays done, and its result will be refused.",
                "%(count)d of them were running: their handlers are told at their next heartbeat, what they "
                "have done stays done, and their results will be refused.",
                "count",
            ),
        ),
    )
}


#: The moves that people make with schedules.
OF_SCHEDULES = {
    words.name: words
    for words in (
        ByHand(
            "run_now",
            _("Run now"),
            _("Run selected %(verbose_name_plural)s now"),
            ngettext_lazy("%(count)d schedule was run.", "%(count)d schedules were run.", "count"),
            ngettext_lazy("%(count)d schedule was not run.", "%(count)d schedules were not run.", "count"),
            lambda schedule: True,
        ),
        ByHand(
            "pause",
            _("Pause"),
            _("Pause selected %(verbose_name_plural)s"),
            ngettext_lazy("%(count)d schedule was paused.", "%(count)d schedules were paused.", "count"),
            ngettext_lazy(
                "%(count)d schedule was left as it is: it is paused already.",
                "%(count)d schedules were left as they are: they are paused already.",
                "count",
            ),
            lambda schedule: schedule.enabled and schedule.gone_at is None,
        ),
        ByHand(
            "resume",
            _("Resume"),
            _("Resume selected %(verbose_name_plural)s"),
            ngettext_lazy(
                "%(count)d schedule was resumed: it fires from its next future slot.",
                "%(count)d schedules were resumed: they fire from their next future slots.",
                "count",
            ),
            ngettext_lazy(
                "%(count)d schedule was left as it is: only paused ones can be resumed.",
                "%(count)d schedules were left as they are: only paused ones can be resumed.",
                "count",
            ),
            lambda schedule: not schedule.enabled,
        ),
        ByHand(
            "skip_next",
            _("Skip next"),
            _("Skip the next slot of selected %(verbose_name_plural)s"),
            ngettext_lazy(
                "%(count)d schedule leaves out its next slot.",
                "%(count)d schedules leave out their next slots.",
                "count",
            ),
            ngettext_lazy(
                "%(count)d schedule was left as it is: it has no next slot.",
                "%(count)d schedules were left as they are: they have no next slot.",
                "count",
            ),
            lambda schedule: schedule.enabled and schedule.gone_at is None,
        ),
    )
}
