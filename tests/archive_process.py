"""Real processes to be killed: an archive's writer, and an archiver. Forked from a server that has imported everything, so they start at once."""

from __future__ import annotations

import multiprocessing
import os
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from distaff_consumer import archive_command
from distaff_consumer.jsonl import JsonlWriter
from distaff_consumer.segments import Compression


@dataclass
class Writing:
    """A writer process, and what it says."""

    process: ForkServerProcess
    promises: Connection

    def kill(self) -> None:
        self.process.kill()
        self.process.join(10)

    def promised(self) -> list[str]:
        """The ids it told to be durable until now, or until its end if it is dead; waits for the first."""
        ids: list[str] = []
        try:
            while not ids or not self.process.is_alive() or self.promises.poll():
                ids += self.promises.recv()
        except EOFError:
            pass
        return ids


@dataclass(frozen=True)
class PlainArchive:
    """Archive settings without pydantic, which takes long to import."""

    directory: Path
    batch: int = 3
    group: str = "archive"
    rotate_bytes: int = 1 << 20
    compression: Compression = "none"
    fsync: bool = True

    def folder(self, run: str) -> Path:
        return self.directory


def start_writer(directory: Path, compression: Compression) -> Writing:
    """A process that appends records until it dies."""
    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = _start(_write_for_ever, directory, compression, sender)
    sender.close()
    return Writing(process, receiver)


def start_archiver(url: str, directory: Path) -> ForkServerProcess:
    """A process that archives the run "run"."""
    return _start(_archive, url, directory)


def _start(target: Any, *args: Any) -> ForkServerProcess:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["__main__", __name__])
    process = context.Process(target=target, args=args, daemon=True)
    process.start()
    return process


def _archive(url: str, directory: Path) -> None:
    archive_command.run("run", redis_url=url, archive=PlainArchive(directory))


def _write_for_ever(directory: Path, compression: Compression, promises: Connection) -> None:
    with JsonlWriter(directory, rotate_bytes=20_000, compression=compression) as writer:
        number = len(writer)
        while True:
            ids = [f"run-{n:09d}" for n in range(number, number + 1 + number % 5)]
            for group_id in ids:
                writer.append(group_id, {"text": os.urandom(400).hex() + "\u2028"})
            if writer.sync():
                promises.send(ids)
            number += len(ids)
