"""What the demo's jobs leave behind, and a row for each time that a handler ran."""

from django.db import models
from django.db.models.functions import Now


class ClockChange(models.Model):
    """The next clock changes of one zone; `changes` is a list of {at, before, after}."""

    zone = models.CharField(max_length=64, unique=True)
    after = models.DateTimeField()
    changes = models.JSONField()
    mailed_at = models.DateTimeField(null=True)
    created_at = models.DateTimeField(db_default=Now())

    def __str__(self) -> str:
        return self.zone


class Run(models.Model):
    """A handler began. Effects that are checked before acting would hide that a job ran twice."""

    job_id = models.BigIntegerField(db_index=True)
    type = models.CharField(max_length=200)
    claim = models.IntegerField()
    pid = models.IntegerField()
    started_at = models.DateTimeField(db_default=Now())

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["job_id", "claim"], name="clocks_one_run_a_claim"),
        ]

    def __str__(self) -> str:
        return f"run of job {self.job_id}, claim {self.claim}"
