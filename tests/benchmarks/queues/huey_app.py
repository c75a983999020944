"""The object that huey's consumer wants."""

from tests.benchmarks.queues.huey import make_app

app, noop = make_app()
