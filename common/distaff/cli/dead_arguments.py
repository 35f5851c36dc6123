"""The arguments of `distaff dead`.

Invariant: what cannot be meant is refused before Redis is asked anything.
"""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from distaff.dead import Summary
from distaff.errors import ConfigurationError
from distaff.keys import RUN_NAME
from distaff.types import DeadKind

ACTIONS = ("list", "show", "retry", "drop")
MAX_RANGE = 1_000_000
_SEQ = re.compile(r"(\d{1,10})(?:-(\d{1,10}))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Which letters are meant."""

    seqs: tuple[int, ...]
    kinds: tuple[str, ...]
    boundaries: tuple[str, ...]
    all: bool

    @property
    def filtered(self) -> bool:
        return bool(self.kinds or self.boundaries)

    def matches(self, letter: Summary) -> bool:
        return (
            (not self.seqs or letter.seq in self.seqs)
            and (not self.kinds or letter.kind in self.kinds)
            and (not self.boundaries or letter.boundary in self.boundaries)
        )


class _Words(argparse.Action):
    """Numbers, ranges, and the settings file."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        seqs: list[int] = []
        for word in values:
            if match := _SEQ.fullmatch(word):
                first, last = int(match[1]), int(match[2] or match[1])
                if not first <= last < first + MAX_RANGE:
                    parser.error(f"SEQ {word}: give a range from low to high, of at most {MAX_RANGE} items")
                seqs += range(first, last + 1)
            elif word.endswith((".toml", ".json")) and namespace.file is None:
                namespace.file = Path(word)
            else:
                parser.error(
                    f"SEQ {word!r}: give the number of an item, or a range such as 3-7; `dead list RUN` shows them"
                )
        namespace.seqs = tuple(dict.fromkeys(seqs))


def declare(parser: argparse.ArgumentParser) -> None:
    """The command's own arguments; `chosen` makes a Selection of them."""
    parser.add_argument("action", choices=ACTIONS)
    parser.add_argument("dead_run", metavar="RUN", help="the run")
    parser.add_argument(
        "words", metavar="SEQ", nargs="*", action=_Words, help="numbers of items, ranges (3-7), and FILE"
    )
    parser.add_argument(
        "--kind", action="append", default=[], metavar="K", help="letters of this kind; may be given again"
    )
    parser.add_argument(
        "--boundary", action="append", default=[], metavar="B", help="letters of this boundary; likewise"
    )
    parser.add_argument("--to", type=Path, metavar="JSONL", help="drop: first write the letters to this new file")
    parser.set_defaults(file=None, seqs=())


def chosen(arguments: argparse.Namespace) -> Selection:
    """Raises ConfigurationError for arguments that do not go together."""
    action, run = arguments.action, arguments.dead_run
    if not RUN_NAME.fullmatch(run):
        raise ConfigurationError(f"{run!r} is no run name: 1 to 64 letters, digits, '_' or '-'")
    _check_kinds(arguments.kind)
    selection = Selection(
        seqs=arguments.seqs, kinds=tuple(arguments.kind), boundaries=tuple(arguments.boundary), all=arguments.all
    )
    ways = sum(map(bool, (selection.seqs, selection.filtered, selection.all)))
    if action == "show" and (not selection.seqs or ways > 1):
        raise ConfigurationError("show: give the numbers of the letters, and nothing else to choose by")
    if action in ("retry", "drop") and ways != 1:
        raise ConfigurationError(
            f"{action}: say which letters, in one way: their numbers, or --kind and --boundary, or --all; "
            f"`distaff dead list {run}` shows them"
        )
    _check_flags(arguments)
    return selection


def _check_kinds(kinds: Sequence[str]) -> None:
    known = get_args(DeadKind)
    for kind in kinds:
        if kind not in known:
            close = difflib.get_close_matches(kind, known, 1)
            hint = f"did you mean {close[0]}?" if close else f"known are {', '.join(known)}"
            raise ConfigurationError(f"--kind {kind!r}: there is no such kind; {hint}")


def _check_flags(arguments: argparse.Namespace) -> None:
    action = arguments.action
    if arguments.to is not None and action != "drop":
        raise ConfigurationError(f"{action}: --to belongs to drop")
    if arguments.json and action != "list":
        raise ConfigurationError(f"{action}: --json belongs to list")
