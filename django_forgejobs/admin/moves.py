"""The moves that a person makes, in words. The manager decides whether a job can make them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from django.utils.translation import gettext_lazy as _
from django.utils.translation import ngettext_lazy

from django_forgejobs.states import CANCEL, REQUEUE, RUN_NOW, Move, Status


@dataclass(frozen=True)
class ByHand:
    """One move. ``done``, ``refused`` and ``interrupted`` take a ``count``; the last, and ``warning``, tell
    what it means for jobs that run.
    """

    move: Move
    label: Any
    of_selected: Any
    done: Any
    refused: Any
    warning: Any = ""
    interrupted: Any = ""

    @property
    def name(self) -> str:
        """The name of the manager's method, of the action and in addresses."""
        return self.move.name

    def offered(self, job: Any) -> bool:
        """Whether a button makes sense for ``job``."""
        return bool(job.status in self.move.sources) and not (self.move is RUN_NOW and job.run_at <= job.now)

    def warns(self, job: Any) -> bool:
        """Whether the warning concerns ``job``."""
        return bool(self.warning) and job.status == Status.RUNNING


BY_HAND = {
    words.name: words
    for words in (
        ByHand(
            REQUEUE,
            _("Requeue"),
            _("Requeue selected %(verbose_name_plural)s"),
            ngettext_lazy("%(count)d job was requeued.", "%(count)d jobs were requeued.", "count"),
            ngettext_lazy(
                "%(count)d job was left as it is: only failed, dead and cancelled jobs can be requeued.",
                "%(count)d jobs were left as they are: only failed, dead and cancelled jobs can be requeued.",
                "count",
            ),
        ),
        ByHand(
            RUN_NOW,
            _("Run now"),
            _("Run selected %(verbose_name_plural)s now"),
            ngettext_lazy("%(count)d job is due now.", "%(count)d jobs are due now.", "count"),
            ngettext_lazy(
                "%(count)d job was left as it is: only jobs that wait for a later time can be made due.",
                "%(count)d jobs were left as they are: only jobs that wait for a later time can be made due.",
                "count",
            ),
        ),
        ByHand(
            CANCEL,
            _("Cancel"),
            _("Cancel selected %(verbose_name_plural)s"),
            ngettext_lazy("%(count)d job was cancelled.", "%(count)d jobs were cancelled.", "count"),
            ngettext_lazy(
                "%(count)d job was left as it is: only jobs that wait or run can be cancelled.",
                "%(count)d jobs were left as they are: only jobs that wait or run can be cancelled.",
                "count",
            ),
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
