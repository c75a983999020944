"""The tables: fields, constraints, indexes, nothing else. Transitions are in ``managers``."""

from __future__ import annotations

from datetime import UTC, datetime
from functools import reduce
from operator import and_

from django.conf import settings
from django.db import models
from django.db.models import F, Q, Value
from django.db.models.functions import Length, Now
from django.db.models.lookups import Exact, LessThanOrEqual
from django.utils.translation import gettext_lazy as _

from django_forgejobs.announcements import AnnouncedTypeManager, AnnouncementManager
from django_forgejobs.dialect import JsonType
from django_forgejobs.fields import StrictJSONField
from django_forgejobs.managers import JobManager
from django_forgejobs.slots import Fate, OnMissed, OnOverlap, Source
from django_forgejobs.states import ENDED, Status
from django_forgejobs.timetable import ScheduleManager


def _words(statuses: frozenset[Status]) -> list[str]:
    return sorted(status.value for status in statuses)


def timezone_of_project() -> str:
    """Return the name of the zone that a new schedule is in."""
    return settings.TIME_ZONE


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


class Schedule(models.Model):
    """Work that recurs: a job of ``job_type`` for each slot of ``cron`` in ``timezone``, once.

    ``next_run_at`` is the bare slot, UTC; its job is due ``timetable.offset`` seconds later, within
    ``spread``. The ``planned_…`` columns say what ``next_run_at`` was computed for: where they differ from
    the rest, whoever wrote it, the next tick plans anew. So it does after ``enabled`` was switched, since a
    trigger empties ``planned_cron`` then. An empty queue, and no priority or max_attempts, stand for those
    of the type.
    """

    id = models.BigAutoField(_("id"), primary_key=True)
    name = models.CharField(_("name"), max_length=200, unique=True)
    job_type = models.CharField(_("job type"), max_length=200)
    payload = StrictJSONField(
        _("payload"), default=dict, blank=True, db_default=Value({}, models.JSONField())
    )
    queue = models.CharField(_("queue"), max_length=64, blank=True, default="", db_default="")
    priority = models.SmallIntegerField(_("priority"), null=True, blank=True)
    max_attempts = models.IntegerField(_("max attempts"), null=True, blank=True)
    cron = models.CharField(_("cron"), max_length=255)
    timezone = models.CharField(_("time zone"), max_length=64, default=timezone_of_project, db_default="UTC")
    enabled = models.BooleanField(_("enabled"), default=True, db_default=True)
    next_run_at = models.DateTimeField(_("next run at"), null=True, blank=True)
    last_slot = models.DateTimeField(_("last slot"), null=True, blank=True)
    last_job_id = models.BigIntegerField(_("last job"), null=True, blank=True)
    spread = models.IntegerField(_("spread"), default=0, db_default=0)
    on_missed = models.CharField(
        _("on missed slots"), max_length=10, choices=OnMissed, default=OnMissed.LATEST, db_default="latest"
    )
    on_overlap = models.CharField(
        _("on overlap"), max_length=10, choices=OnOverlap, default=OnOverlap.ALLOW, db_default="allow"
    )
    starts_at = models.DateTimeField(_("starts at"), null=True, blank=True)
    ends_at = models.DateTimeField(_("ends at"), null=True, blank=True)
    source = models.CharField(
        _("source"), max_length=10, choices=Source, default=Source.ADMIN, db_default="admin"
    )
    disabled_reason = models.TextField(_("disabled because"), blank=True, default="", db_default="")
    declared_at = models.DateTimeField(_("declared at"), null=True, blank=True)
    gone_at = models.DateTimeField(_("gone from the code since"), null=True, blank=True)
    planned_cron = models.CharField(max_length=255, blank=True, default="", db_default="")
    planned_timezone = models.CharField(max_length=64, blank=True, default="", db_default="")
    planned_starts_at = models.DateTimeField(null=True, blank=True)
    planned_ends_at = models.DateTimeField(null=True, blank=True)
    planned_at = models.DateTimeField(null=True, blank=True)
    created_at = models.DateTimeField(_("created at"), db_default=Now())

    objects = ScheduleManager()

    class Meta:
        verbose_name = _("schedule")
        verbose_name_plural = _("schedules")
        constraints = [
            models.CheckConstraint(
                name="forgejobs_schedule_names",
                condition=~Q(name="") & ~Q(job_type="") & ~Q(cron="") & ~Q(timezone=""),
            ),
            models.CheckConstraint(
                name="forgejobs_schedule_lengths",
                condition=Q(
                    LessThanOrEqual(Length("name"), 200),
                    LessThanOrEqual(Length("job_type"), 200),
                    LessThanOrEqual(Length("queue"), 64),
                    LessThanOrEqual(Length("cron"), 255),
                    LessThanOrEqual(Length("timezone"), 64),
                ),
            ),
            models.CheckConstraint(
                name="forgejobs_schedule_words",
                condition=Q(
                    on_missed__in=OnMissed.values,
                    on_overlap__in=OnOverlap.values,
                    source__in=Source.values,
                ),
            ),
            models.CheckConstraint(
                name="forgejobs_schedule_numbers",
                condition=Q(spread__gte=0)
                & (Q(priority__isnull=True) | Q(priority__range=(-100, 100)))
                & (Q(max_attempts__isnull=True) | Q(max_attempts__gte=1)),
            ),
            models.CheckConstraint(
                name="forgejobs_schedule_times",
                condition=_in_our_era(
                    "next_run_at",
                    "last_slot",
                    "starts_at",
                    "ends_at",
                    "declared_at",
                    "gone_at",
                    "planned_starts_at",
                    "planned_ends_at",
                    "planned_at",
                    "created_at",
                ),
            ),
        ]

    def __str__(self) -> str:
        return self.name


class ScheduleSlot(models.Model):
    """What became of one slot of a schedule; or of ``count`` slots, from ``slot`` to ``until``, that were
    settled as one. ``late`` is seconds after the slot and its offset. The job is no foreign key: it may be
    archived.
    """

    id = models.BigAutoField(_("id"), primary_key=True)
    schedule = models.ForeignKey(
        Schedule, models.CASCADE, related_name="slots", verbose_name=_("schedule"), db_index=False
    )
    slot = models.DateTimeField(_("slot"))
    until = models.DateTimeField(_("until"), null=True, blank=True)
    count = models.IntegerField(_("count"), default=1, db_default=1)
    fate = models.CharField(_("fate"), max_length=10, choices=Fate)
    job_id = models.BigIntegerField(_("job"), null=True, blank=True)
    late = models.FloatField(_("seconds late"), null=True, blank=True)
    reason = models.TextField(_("reason"), blank=True, default="", db_default="")
    at = models.DateTimeField(_("at"), db_default=Now(), db_index=True)

    class Meta:
        verbose_name = _("slot")
        verbose_name_plural = _("slots")
        constraints = [
            models.UniqueConstraint(fields=["schedule", "slot"], name="forgejobs_scheduleslot_once"),
            models.CheckConstraint(name="forgejobs_scheduleslot_fate", condition=Q(fate__in=Fate.values)),
            models.CheckConstraint(
                name="forgejobs_scheduleslot_run",
                condition=Q(count__gte=1) & _in_our_era("slot", "until", "at"),
            ),
        ]

    def __str__(self) -> str:
        return f"{self.slot:%Y-%m-%d %H:%M}Z ({self.fate})"


class Announcement(models.Model):
    """A name that somebody announces. ``since`` is the start of its unbroken announcements."""

    since = models.DateTimeField(_("since"), db_default=Now())
    seen_at = models.DateTimeField(_("seen at"), db_default=Now())

    class Meta:
        abstract = True

    def __str__(self) -> str:
        return str(self.pk)


class AnnouncedType(Announcement):
    """A job type that some worker serves."""

    type = models.CharField(_("type"), max_length=200, primary_key=True)

    objects = AnnouncedTypeManager()

    class Meta:
        verbose_name = _("announced type")
        verbose_name_plural = _("announced types")


class Liveness(Announcement):
    """A kind of process of which at least one is alive: ``scheduler``."""

    name = models.CharField(_("name"), max_length=40, primary_key=True)

    objects = AnnouncementManager()

    class Meta:
        verbose_name = _("liveness")
        verbose_name_plural = _("livenesses")


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
