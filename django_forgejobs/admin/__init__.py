"""Jobs and schedules in Django's admin: seen by all who may view, moved by all who may change. Jobs are
edited by nobody.
"""

from __future__ import annotations

from django_forgejobs.admin.jobs import ArchivedJobAdmin, DeadLetterAdmin, JobAdmin
from django_forgejobs.admin.schedules import ScheduleAdmin

__all__ = ["ArchivedJobAdmin", "DeadLetterAdmin", "JobAdmin", "ScheduleAdmin"]
