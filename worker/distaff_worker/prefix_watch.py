"""Warns when prompts stop extending each other.

Invariant: one warning for each fall below the run's bound, with the cause of the last break; the next one only after a recovery. Looks at values only,
never at tokens.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import structlog

from distaff_worker.steps import PrefixBreak

log = structlog.get_logger(__name__)
WINDOW, FEWEST, MOST_RUNS = 200, 20, 16
"""Turns that are looked at, turns without which nothing is said, runs that are remembered."""
MENDS: dict[PrefixBreak, str] = {
    "messages_changed": "the environment rewrites earlier messages or the model's answers; each such turn opens a new sample",
    "tools_changed": "the environment changes its tools during a rollout; each change opens a new sample",
    "format_not_continued": "the chat template cannot be continued behind an answer: set tokenizer.renderer or tokenizer.chat_template",
}


@dataclass(slots=True)
class _Window:
    turns: deque[bool] = field(default_factory=lambda: deque(maxlen=WINDOW))
    low: bool = False
    last: PrefixBreak | None = None


class PrefixWatch:
    """The share of each run's turns on the exact-prefix path, over its last WINDOW turns that had one before."""

    def __init__(self) -> None:
        self._runs: OrderedDict[str, _Window] = OrderedDict()

    def observe(self, run: str, *, bridged: int, breaks: Sequence[PrefixBreak], least: float) -> None:
        """Count the turns of one rollout; `least`: the share below which it is said. Logs `prefix.fell` and `prefix.recovered`."""
        window = self._window(run)
        window.turns.extend([True] * bridged + [False] * len(breaks))
        window.last = breaks[-1] if breaks else window.last
        if len(window.turns) < FEWEST:
            return
        share = sum(window.turns) / len(window.turns)
        if share < least and not window.low and window.last is not None:
            log.warning(
                "prefix.fell",
                run=run,
                share=round(share, 3),
                least=least,
                cause=window.last,
                mend=MENDS[window.last],
            )
        elif share >= least and window.low:
            log.info("prefix.recovered", run=run, share=round(share, 3), least=least)
        window.low = share < least

    def _window(self, run: str) -> _Window:
        window = self._runs.pop(run, None) or _Window()
        self._runs[run] = window
        while len(self._runs) > MOST_RUNS:
            self._runs.popitem(last=False)
        return window
