"""The app object that procrastinate's command line wants."""

from tests.benchmarks.queues.procrastinate import make_app

app = make_app()
