"""How fast the farm is, as ratios from one run: `python -m benchmarks [NAME ...] [--write]`.

Invariant: every process that is compared runs on the same machine in the same run, and every process that was started is
ended. Nothing here is a test: a slow machine makes a worse table, not a failure.
"""
