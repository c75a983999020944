"""``python -m tests.benchmarks.queues NAME prepare | enqueue LOAD | trickle LOAD EVERY``: run an adapter."""

import importlib
import json
import sys
import time
from collections.abc import Iterator

from tests.benchmarks import effects
from tests.benchmarks.queues import Load


def moments(load: Load, every: float) -> Iterator[int]:
    """Yield the number of a job when its moment has come, one every ``every`` seconds from the gate on."""
    effects.wait_for_gate()
    began = time.monotonic()
    for turn, number in enumerate(load.numbers, 1):
        time.sleep(max(0.0, began + turn * every - time.monotonic()))
        yield number


if __name__ == "__main__":
    name, what, *arguments = sys.argv[1:]
    adapter = importlib.import_module(f"tests.benchmarks.queues.{name}")
    if what == "prepare":
        adapter.prepare()
    elif what == "enqueue":
        print(json.dumps(adapter.enqueue(Load(**json.loads(arguments[0])))))
    else:
        load = Load(**json.loads(arguments[0]))
        print(json.dumps(adapter.trickle(load, moments(load, float(arguments[1])))))
