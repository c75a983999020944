"""``python -m tests.benchmarks.queues NAME prepare | enqueue LOAD``: an adapter, in a process of its own."""

import importlib
import json
import sys

from tests.benchmarks.queues import Load

if __name__ == "__main__":
    name, what, *load = sys.argv[1:]
    adapter = importlib.import_module(f"tests.benchmarks.queues.{name}")
    if what == "prepare":
        adapter.prepare()
    else:
        print(json.dumps(adapter.enqueue(Load(**json.loads(load[0])))))
