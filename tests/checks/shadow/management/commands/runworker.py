"""Not the job queue's."""

from django.core.management.base import BaseCommand


class Command(BaseCommand):
    """Does nothing."""
