"""What the worker counts, for /metrics and for its own registration.

Invariant: one registry per worker object, nothing global; recording never fails and never blocks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from distaff_worker.leases import Counts

LAG_WINDOW = 1200
PREFIX_WINDOW = 2000
SECONDS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)


class Metrics:
    """All metrics of one worker, in their own registry."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        r = self.registry
        self.running = Gauge("distaff_items_running", "Items in play", registry=r)
        self._groups = Counter("distaff_groups_emitted", "Groups appended to the stream", registry=r)
        self._rollouts = Counter("distaff_rollouts_emitted", "Rollouts in emitted groups", registry=r)
        self._samples = Counter("distaff_samples_emitted", "Samples in emitted groups", registry=r)
        self._tokens = Counter("distaff_tokens_emitted", "Tokens in emitted groups", registry=r)
        self._trained = Counter("distaff_trained_tokens_emitted", "Tokens under the loss mask", registry=r)
        self._bytes = Counter("distaff_bytes_emitted", "Encoded bytes appended to the stream", registry=r)
        self.dead = Counter("distaff_items_dead", "Dead letters", ["kind"], registry=r)
        self.retried = Counter("distaff_items_retried", "Attempts that failed and were put back", registry=r)
        self.fenced = Counter("distaff_executions_fenced", "Results thrown away: the lease was lost", registry=r)
        self.redis_errors = Counter("distaff_redis_errors", "Claims that Redis did not answer", registry=r)
        self.replayed = Counter(
            "distaff_groups_replayed", "Groups played again: another's code ended their process", registry=r
        )
        self.environments_ended = Counter(
            "distaff_environment_processes_ended", "Environment processes replaced", ["reason"], registry=r
        )
        self.floored = Counter(
            "distaff_floored_logprobs", "Sampled tokens without a finite log-probability, in groups played", registry=r
        )
        self.turns = Counter("distaff_turns", "Model turns", ["prompt"], registry=r)
        self.rollout_errors = Counter(
            "distaff_rollout_errors", "Rollouts without a usable reward", ["kind"], registry=r
        )
        self._seconds = Histogram("distaff_group_seconds", "From claim to settled", buckets=SECONDS, registry=r)
        self.stage = Counter("distaff_stage_seconds", "Seconds spent by stage", ["stage"], registry=r)
        self._lag = Histogram(
            "distaff_loop_lag_seconds",
            "Delay of the event loop",
            buckets=(0.001, 0.005, 0.02, 0.05, 0.1, 0.25, 1, 5),
            registry=r,
        )
        self._recent: deque[float] = deque(maxlen=LAG_WINDOW)
        self.prefix_breaks = Counter(
            "distaff_prefix_breaks", "Turns whose prompt did not extend the tokens of one before", ["cause"], registry=r
        )
        self._prefixes: deque[bool] = deque(maxlen=PREFIX_WINDOW)

    def emitted(self, counts: Counts, *, size_bytes: int, seconds: float) -> None:
        self._groups.inc()
        self._rollouts.inc(counts.rollouts)
        self._samples.inc(counts.samples)
        self._tokens.inc(counts.tokens)
        self._trained.inc(counts.trained_tokens)
        self._bytes.inc(size_bytes)
        self._seconds.observe(seconds)

    def loop_lag(self, seconds: float) -> None:
        self._lag.observe(seconds)
        self._recent.append(seconds)

    @property
    def recent_lag_s(self) -> float:
        """99th percentile of the loop's delay over about the last minute, seconds."""
        ordered = sorted(self._recent)
        return ordered[int(0.99 * (len(ordered) - 1))] if ordered else 0.0

    def count_turns(self, *, turns: int, bridged: int, breaks: Sequence[str] = ()) -> None:
        """bridged: turns whose prompt extended the exact tokens before. The first turn of a rollout has nothing to extend; breaks: why
        later ones did not."""
        self.turns.labels("bridged").inc(bridged)
        self.turns.labels("rendered").inc(max(0, turns - bridged))
        for cause in breaks:
            self.prefix_breaks.labels(cause).inc()
        self._prefixes.extend([True] * bridged + [False] * len(breaks))

    @property
    def recent_prefix_share(self) -> float | None:
        """Of the last PREFIX_WINDOW turns that had one before, those that extended its exact tokens; None before there was one."""
        recent = list(self._prefixes)  # the beat thread reads what the loop writes
        return sum(recent) / len(recent) if recent else None
