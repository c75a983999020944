"""The Django app: label ``forgejobs``. ``ready()`` connects and discovers; it asks no database."""

from __future__ import annotations

from django.apps import AppConfig
from django.utils.module_loading import autodiscover_modules
from django.utils.translation import gettext_lazy as _


class ForgejobsConfig(AppConfig):
    """Registers checks and log lines, and imports the ``jobs.py`` of the installed apps."""

    name = "django_forgejobs"
    label = "forgejobs"
    verbose_name = _("Background jobs")
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        """Connect checks, log lines and counts, then discover jobs."""
        from django_forgejobs import checks, logs, tally

        checks.connect()
        logs.connect()
        tally.connect()
        autodiscover_modules("jobs")
