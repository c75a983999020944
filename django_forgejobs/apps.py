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
        """Connect checks and log lines, then discover jobs."""
        from importlib import import_module

        for module in ("checks", "logs"):
            import_module(f"django_forgejobs.{module}")
        autodiscover_modules("jobs")
