"""The tables: fields, constraints, indexes, nothing else. Transitions are in ``managers``."""

from __future__ import annotations

from datetime import UTC, datetime
from functools import reduce
from operator import and_

from django.db import models
from django.db.models import F, Q, Value
from django.db.models.functions import Length, Now
from django.db.models.lookups import Exact, LessThanOrEqual
from django.utils.translation import gettext_lazy as _

from django_forgejobs.announcements import AnnouncedTypeManager
from django_forgejobs.dialect import JsonType
from django_forgejobs.fields import StrictJSONField
from django_forgejobs.managers import JobManager
from django_forgejobs.states import ENDED, Status


def _words(statuses: frozenset[Status]) -> list[str]:
    return sorted(status.value for status in statuses)


#: A count beyond this was not counted.
MOST = 2_000_000_000


def _in_our_era(*times: str) -> Q:
    first, last = datetime(1900, 1, 1, tzinfo=UTC), datetime(9001, 1, 1, tzinfo=UTC)
    within = [Q(**{f"{time}__isnull": True}) | Q(**{f"{time}__range": (first, last)}) for time in times]
    return reduce(and_, within)


class JobFields(models.Model):
    """The columns a job has while it lives and when it is archived."""

    id = models.BigAutoField(_("id"), primary_key=True)
    queue = models.CharField(_("queue"), max_length=64, db_default="default")
    type = models.CharField(_("type"), max_length=200)
    payload = StrictJSONField(_("payload"), db_default=Value({}, models.JSONField()))
    priority = models.SmallIntegerField(_("priority"), db_default=0)
    idempotency_key = models.CharField(_("idempotency key"), max_length=255, null=True, blank=True)  # noqa: DJ001 (unique, so absent is NULL)
    status = models.CharField(_("status"), max_length=10, choices=Status, db_default=Status.READY.value)
    run_at = models.DateTimeField(_("run at"), db_default=Now())
    attempts = models.IntegerField(_("attempts"), db_default=0)
    max_attempts = models.IntegerField(_("max attempts"), db_default=1)
    claims = models.IntegerField(_("claims"), db_default=0)
    lease_expirations = models.IntegerField(_("lease expirations"), db_default=0)
    claim_token = models.UUIDField(_("claim token"), null=True, blank=True)
    locked_by = models.CharField(_("locked by"), max_length=200, blank=True, db_default="")
    locked_until = models.DateTimeField(_("locked until"), null=True, blank=True)
    created_at = models.DateTimeField(_("created at"), db_default=Now())
    started_at = models.DateTimeField(_("started at"), null=True, blank=True)
    finished_at = models.DateTimeField(_("finished at"), null=True, blank=True)
    last_error = models.TextField(_("last error"), blank=True, db_default="")
    result = StrictJSONField(_("result"), null=True, blank=True)
    history = StrictJSONField(_("history"), db_default=Value([], models.JSONField()))

    class Meta:
        abstract = True

    def __str__(self) -> str:
        return f"{self.type} #{self.pk} ({self.status})"


class Job(JobFields):
    """One job, from enqueue to its end; its row explains its state."""

    objects = JobManager()

    class Meta:
        verbose_name = _("job")
        verbose_name_plural = _("jobs")
        constraints = [
            models.UniqueConstraint(
                fields=["idempotency_key"],
                name="forgejobs_job_key",
                condition=Q(idempotency_key__isnull=False),
            ),
            models.CheckConstraint(name="forgejobs_job_status_known", condition=Q(status__in=Status.values)),
            models.CheckConstraint(
                name="forgejobs_job_claim_when_running",
                condition=Q(status="running", claim_token__isnull=False, locked_until__isnull=False)
                | (~Q(status="running") & Q(claim_token__isnull=True, locked_until__isnull=True)),
            ),
            models.CheckConstraint(
                name="forgejobs_job_finished_when_ended",
                condition=Q(status__in=_words(ENDED), finished_at__isnull=False)
                | (~Q(status__in=_words(ENDED)) & Q(finished_at__isnull=True)),
            ),
            models.CheckConstraint(
                name="forgejobs_job_attempts",
                condition=Q(attempts__gte=0, max_attempts__gte=1, attempts__lte=F("max_attempts")),
            ),
            # A ready row without an attempt left, or a count that cannot grow, would make every claim of its
            # batch fail.
            models.CheckConstraint(
                name="forgejobs_job_attempt_left",
                condition=~Q(status="ready") | Q(attempts__lt=F("max_attempts"), claims__lt=MOST),
            ),
            models.CheckConstraint(
                name="forgejobs_job_counts",
                condition=Q(claims__range=(0, MOST), lease_expirations__range=(0, MOST)),
            ),
            # Python knows no infinity and no year 0; one such row would make its whole batch unreadable.
            models.CheckConstraint(
                name="forgejobs_job_times",
                condition=_in_our_era("run_at", "created_at", "locked_until", "started_at", "finished_at"),
            ),
            models.CheckConstraint(
                name="forgejobs_job_history_is_a_list",
                condition=Q(Exact(JsonType("history"), Value("array"))),
            ),
            models.CheckConstraint(
                name="forgejobs_job_priority", condition=Q(priority__gte=-100, priority__lte=100)
            ),
            models.CheckConstraint(
                name="forgejobs_job_names",
                condition=~Q(type="") & ~Q(queue="") & ~Q(idempotency_key=""),
            ),
            # SQLite does not hold varchar(n) to its n.
            models.CheckConstraint(
                name="forgejobs_job_lengths",
                condition=Q(
                    LessThanOrEqual(Length("queue"), 64),
                    LessThanOrEqual(Length("type"), 200),
                    LessThanOrEqual(Length("locked_by"), 200),
                )
                & (Q(idempotency_key__isnull=True) | Q(LessThanOrEqual(Length("idempotency_key"), 255))),
            ),
        ]
        indexes = [
            # The claim: a lane is one (queue, type, priority), in claim order inside. See lanes.claim.
            models.Index(
                fields=["queue", "type", "priority", "run_at", "id"],
                name="forgejobs_job_lane",
                condition=Q(status="ready"),
            ),
            models.Index(
                fields=["-priority", "run_at", "id"],
                name="forgejobs_job_suspect",
                condition=Q(status="ready", lease_expirations__gt=0),
            ),
            # locked_until stands in no index, or no heartbeat would be an in-place update.
            models.Index(fields=["id"], name="forgejobs_job_running", condition=Q(status="running")),
            models.Index(
                fields=["status", "finished_at"],
                name="forgejobs_job_ended",
                condition=Q(finished_at__isnull=False),
            ),
        ]


class DeadLetter(Job):
    """Jobs that ended by failing, as an entry of their own in the admin."""

    class Meta:
        proxy = True
        verbose_name = _("dead letter")
        verbose_name_plural = _("dead letters")


class ArchivedJob(JobFields):
    """A finished job that ``archive_jobs`` has moved out of the queue's table; it keeps its id."""

    id = models.BigIntegerField(_("id"), primary_key=True)
    archived_at = models.DateTimeField(_("archived at"), db_default=Now())

    class Meta:
        verbose_name = _("archived job")
        verbose_name_plural = _("archived jobs")


class AnnouncedType(models.Model):
    """A job type that some worker serves. ``since`` is the start of its unbroken announcements."""

    type = models.CharField(_("type"), max_length=200, primary_key=True)
    since = models.DateTimeField(_("since"), db_default=Now())
    seen_at = models.DateTimeField(_("seen at"), db_default=Now())

    objects = AnnouncedTypeManager()

    class Meta:
        verbose_name = _("announced type")
        verbose_name_plural = _("announced types")

    def __str__(self) -> str:
        return self.type


class Tally(models.Model):
    """What one process saw happen to one type within about a minute; appended, never updated.

    For rates and charts: no state is kept here. ``waited`` and ``ran`` are sums of seconds.
    """

    id = models.BigAutoField(_("id"), primary_key=True)
    at = models.DateTimeField(_("at"), db_default=Now(), db_index=True)
    event = models.CharField(_("event"), max_length=20)
    type = models.CharField(_("type"), max_length=200)
    count = models.IntegerField(_("count"))
    waited = models.FloatField(_("seconds waited"), db_default=0.0)
    ran = models.FloatField(_("seconds run"), db_default=0.0)

    class Meta:
        verbose_name = _("tally")
        verbose_name_plural = _("tallies")

    def __str__(self) -> str:
        return f"{self.event} of {self.type}: {self.count}"
