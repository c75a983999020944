"""The jobs in Django's admin: seen by all who may view, moved by all who may change, edited by nobody."""

from __future__ import annotations

from django_forgejobs.admin.jobs import ArchivedJobAdmin, DeadLetterAdmin, JobAdmin

__all__ = ["ArchivedJobAdmin", "DeadLetterAdmin", "JobAdmin"]
