"""One job that does nothing but leave its effect."""

from django_forgejobs import job
from tests.benchmarks.effects import effect


@job("bench.noop", max_attempts=5)
def noop(payload: int) -> None:
    """Leave the effect of job number ``payload``."""
    effect(payload)
