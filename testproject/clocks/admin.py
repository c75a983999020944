"""What the jobs left behind, to look at."""

from typing import Any

from django.contrib import admin
from django.http import HttpRequest

from testproject.clocks.models import ClockChange, Run


class ReadOnly(admin.ModelAdmin):
    """Rows that only jobs write."""

    def has_add_permission(self, request: HttpRequest) -> bool:
        """Refuse."""
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Refuse."""
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Refuse."""
        return False


@admin.register(ClockChange)
class ClockChangeAdmin(ReadOnly):
    """A row a zone."""

    list_display = ["zone", "after", "changes", "mailed_at"]
    search_fields = ["zone"]


@admin.register(Run)
class RunAdmin(ReadOnly):
    """A row for each time that a handler began."""

    list_display = ["job_id", "type", "claim", "pid", "started_at"]
    list_filter = ["type"]
    search_fields = ["=job_id"]
