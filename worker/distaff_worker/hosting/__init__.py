"""Environment code in child processes of the worker, so that what it blocks, leaks or crashes is not the worker.

The worker's side: `environment` (what the worker plays on), `process` (one host process), `launcher` (starts them).
The child's side: `zygote` (imported once, forked for each host), `host` (loads the environment, plays and scores), `remote` (the model as
seen from there), `watched` (whose code runs now). Both sides: `frames` and `board`.
"""
