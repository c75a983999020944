"""The task that django-ox's worker runs."""

from django.tasks import task

from tests.benchmarks.effects import effect


@task
def noop(number: int) -> None:
    """Leave the effect of job ``number``."""
    effect(number)
