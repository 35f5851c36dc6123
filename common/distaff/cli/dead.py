"""`distaff dead list|show|retry|drop RUN`.

Invariant: list and show only read. drop forgets a letter only after it is safely in the file it was asked to be written to. What is shown
is redacted; what is written to a file is the letter as it is stored, readable by its owner only.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO

import redis
from rich.table import Table
from rich.text import Text

from distaff.cli.dead_arguments import Selection, chosen
from distaff.cli.roles import FailedLater
from distaff.cli.screen import complain, results, say
from distaff.clients import connect, ping, redact_url
from distaff.dead import Retrier, Summary, forget, read, summaries, unsettled
from distaff.errors import ConfigurationError
from distaff.redaction import MASK, redact
from distaff.runs import RunState, list_runs, read_state

MESSAGE_CHARS = 100


def run(url: str, arguments: argparse.Namespace) -> int:
    """Do what was asked. Raises ConfigurationError for what is not there or makes no sense, RedisUnavailable."""
    selection, name = chosen(arguments), arguments.dead_run
    with connect(url, client_name="distaff-dead") as client:
        ping(client, url)
        state = read_state(client, name)
        if state is None:
            known = ", ".join(list_runs(client)) or "none"
            raise ConfigurationError(f"there is no run {name!r} at {redact_url(url)}; runs here: {known}")
        match arguments.action:
            case "list":
                return _list(client, name, state, selection, as_json=arguments.json)
            case "show":
                return _show(client, name, selection)
            case "retry":
                return _retry(client, name, state, selection)
        return _drop(client, name, selection, arguments.to)


def _list(client: redis.Redis, run: str, state: RunState, selection: Selection, *, as_json: bool) -> int:
    every = summaries(client, run)
    letters = [letter for letter in every if selection.matches(letter)]
    kinds = dict(Counter(letter.kind for letter in letters).most_common())
    forgotten = max(state.dead - len(every), 0)
    if as_json:
        rows = [{**asdict(letter), "message": redact(letter.message)} for letter in letters]
        say(json.dumps({"run": run, "dead": state.dead, "forgotten": forgotten, "by_kind": kinds, "letters": rows}))
        return 0
    if letters:
        results().print(_table(letters))
    parts = [f"{kind} {count}" for kind, count in kinds.items()]
    shown = f"{len(letters)} dead letters" + (f": {', '.join(parts)}" if parts else "")
    others = f"; {len(every) - len(letters)} more do not match" if len(every) > len(letters) else ""
    say(f"run {run}: {shown}{others}" + (f"; {forgotten} were dropped" if forgotten else ""))
    return 0


def _table(letters: Sequence[Summary]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("seq", "attempts"):
        table.add_column(name, justify="right")
    for name in ("kind", "boundary", "given up", "worker", "message"):
        table.add_column(name)
    for letter in letters:
        stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(letter.last))
        message = " ".join(redact(letter.message).split())
        message = message if len(message) <= MESSAGE_CHARS else message[: MESSAGE_CHARS - 1] + "…"
        texts = (letter.kind, letter.boundary, stamp, letter.worker, message)
        table.add_row(str(letter.seq), str(letter.attempts), *map(Text, texts))
    return table


def _show(client: redis.Redis, run: str, selection: Selection) -> int:
    _check_there(client, run, selection)
    for some in read(client, run, selection.seqs):
        for letter in some:
            content = _redacted(letter.content) if letter.content else redact(letter.text.decode("utf-8", "replace"))
            say(json.dumps({"seq": letter.seq, "letter": content}, indent=2, ensure_ascii=False))
    return 0


def _redacted(value: Any, name: str = "") -> Any:
    if isinstance(value, dict):
        return {key: _redacted(inner, key) for key, inner in value.items()}
    if isinstance(value, list):
        return [_redacted(inner, name) for inner in value]
    text = redact(value) if isinstance(value, str) else str(value)
    hidden = name and redact(f"{name}={text}") != f"{redact(name)}={text}"
    return MASK if hidden else text if isinstance(value, str) else value


def _retry(client: redis.Redis, run: str, state: RunState, selection: Selection) -> int:
    retrier, answers = Retrier(client, run), Counter[str]()
    seqs, left_out = _chosen_for_retry(client, run, selection)
    for some in read(client, run, seqs):
        answers.update(retrier.retry(letter) for letter in some)
    underway = len(seqs) - answers["queued"] - answers["gone"]
    text = f"run {run}: {answers['queued']} back on the queue of pool {retrier.pool}"
    text += f", {underway} on their way already" if underway else ""
    text += f"; {left_out} of kind dropped left out, other items took their place (--kind dropped)" if left_out else ""
    say(text)
    if answers["queued"] and state.status == "closed":
        say("start consumers that had come to the end of the run again: they get the new groups and nothing twice")
    if answers["gone"]:
        raise FailedLater(
            ConfigurationError(
                f"{answers['gone']} cannot be played again: their job is gone from Redis, and what was on the queue was no item of the run"
            )
        )
    return 0


def _chosen_for_retry(client: redis.Redis, run: str, selection: Selection) -> tuple[list[int], int]:
    """Numbers, and how many dropped groups were left out."""
    if selection.seqs:
        _check_there(client, run, selection, or_underway=True)
        return sorted(selection.seqs), 0
    letters = [letter for letter in summaries(client, run) if selection.matches(letter)]
    taken = [letter.seq for letter in letters if letter.kind != "dropped" or "dropped" in selection.kinds]
    return taken, len(letters) - len(taken)


def _check_there(client: redis.Redis, run: str, selection: Selection, *, or_underway: bool = False) -> None:
    """Raise ConfigurationError for numbers without a letter (which for a retry may also be on their way)."""
    found = {letter.seq for some in read(client, run, selection.seqs) for letter in some}
    missing = [seq for seq in selection.seqs if seq not in found]
    if or_underway:
        underway = unsettled(client, run, missing)
        missing = [seq for seq in missing if seq not in underway]
    if missing:
        few = ", ".join(map(str, missing[:10])) + (", …" if len(missing) > 10 else "")
        raise ConfigurationError(f"run {run!r} has no dead letter {few}; `distaff dead list {run}` shows what there is")


def _drop(client: redis.Redis, run: str, selection: Selection, to: Path | None) -> int:
    if selection.seqs:
        _check_there(client, run, selection)
        seqs = sorted(selection.seqs)
    else:
        seqs = [letter.seq for letter in summaries(client, run) if selection.matches(letter)]
    forgotten = 0
    with ExitStack() as stack:
        file = stack.enter_context(_created(to)) if to is not None else None
        for some in read(client, run, seqs):
            if file is not None:
                file.writelines(_line(letter.text) for letter in some)
                file.flush()
                os.fsync(file.fileno())
            forgotten += forget(client, run, some)
    where = f", written to {to}" if to is not None else ""
    say(f"run {run}: {forgotten} dead letters dropped{where}; their items stay settled")
    if changed := len(seqs) - forgotten:
        complain(f"{changed} were retried or dropped by somebody else meanwhile, and are as they were")
    return 0


def _line(text: bytes) -> bytes:
    return text.replace(b"\n", b" ").replace(b"\r", b" ") + b"\n"


def _created(path: Path) -> BinaryIO:
    """A new file for its owner only."""
    try:
        return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")
    except FileExistsError:
        raise ConfigurationError(
            f"--to {path}: the file exists; nothing was dropped. Give the name of a new one"
        ) from None
    except OSError as error:
        raise ConfigurationError(f"--to {path}: cannot be written: {error.strerror}; nothing was dropped") from None
