"""The soak: a whole farm of real processes under seeded random faults, and what must be true when they stop.

python -m tests.soak --minutes 30 --seed 7
"""
