"""The benchmark: seven goals of speed, ratios measured side by side in one run. See docs/performance.md.

    make bench                           a look, two to three minutes
    make bench ARGS=--full               everything, at most 25 minutes
    make bench ARGS="--only drain,idle"  some parts

`machine` starts the server and the processes, `effects` is what every handler does, `queues/` has an adapter
for each queue, a module for each part measures, `report` compares and prints.
"""
