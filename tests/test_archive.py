"""The archiver against a real Redis: every group once, on disk before it is acknowledged. P23, P24."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis
from structlog.testing import capture_logs

from distaff.errors import ConfigurationError, RedisUnavailable
from distaff.keys import RunKeys
from distaff.runs import delete_run
from distaff.settings import ArchiveSection
from distaff.types import ScoredGroup
from distaff_consumer import archive_command
from distaff_consumer.archive import Progress
from distaff_consumer.archive_command import ArchiveReport
from distaff_consumer.jsonl import JsonlWriter, read_archive
from distaff_consumer.records import group_to_record, record_to_group
from tests.archive_process import start_archiver
from tests.archive_support import mounted_disk
from tests.group_support import append_groups, assert_same_group, make_group
from tests.harness.servers import RedisServer
from tests.worker_support import wait_until

KEYS = RunKeys("run")


def groups(first: int, last: int, **options: Any) -> list[ScoredGroup]:
    return [make_group(seq=seq, rollouts=2, tokens=16, **options) for seq in range(first, last)]


def archive(url: str, directory: Path, **options: Any) -> ArchiveReport:
    """Archive run "run" in this thread, to its end unless `stop` is among the options."""
    settings = {name: options.pop(name) for name in list(options) if name in ArchiveSection.model_fields}
    section = ArchiveSection(directory=str(directory), **settings)
    return archive_command.run("run", redis_url=url, archive=section, **options)


@contextmanager
def archiving(url: str, directory: Path, **options: Any) -> Iterator[tuple[threading.Event, list[ArchiveReport]]]:
    """Archive in a thread; it is stopped and joined at the end of the block. Gives `stop` and where the report goes."""
    stop, reports = threading.Event(), list[ArchiveReport]()
    thread = threading.Thread(target=lambda: reports.append(archive(url, directory, stop=stop, **options)))
    thread.start()
    try:
        yield stop, reports
    finally:
        stop.set()
        thread.join(20)
        assert not thread.is_alive()


def archived(directory: Path) -> list[int]:
    return [record["seq"] for record in read_archive(directory)] if directory.is_dir() else []


def unacknowledged(client: redis.Redis) -> list[int]:
    """Seqs of the groups that the archive's consumer group still has to acknowledge: an acknowledged group is freed."""
    entries: Any = client.xrange(KEYS.groups)
    return [int(fields[b"seq"]) for _, fields in entries]


def test_a_run_is_archived_to_its_end_and_freed(redis_url: str, client: redis.Redis, tmp_path: Path) -> None:
    """Every group comes back from the files as it was sent, and Redis keeps none of them."""
    sent = groups(0, 40)
    append_groups(client, sent)
    report = archive(redis_url, tmp_path, batch=7, rotate_bytes=10_000, compression="zstd")
    assert (report.groups, report.archived, report.duplicates, report.parked) == (40, 40, 0, 0)
    assert report.ended
    assert report.files > 1
    for group, record in zip(sent, read_archive(tmp_path), strict=True):
        assert_same_group(record_to_group(record), group)
    assert client.xlen(KEYS.groups) == 0
    assert "40 groups" in report.summary()


def test_a_run_may_be_opened_after_its_archiver(redis_url: str, client: redis.Redis, tmp_path: Path) -> None:
    """The archiver waits for a run that is not there yet and says so; small numbers of groups are written without waiting for more."""
    progress: list[Progress] = []
    with (
        capture_logs() as events,
        archiving(redis_url, tmp_path, progress=progress.append) as (_, reports),
    ):
        wait_until(lambda: client.exists(KEYS.groups))
        append_groups(client, groups(0, 1), close=False)
        wait_until(lambda: client.xlen(KEYS.groups) == 0)
        assert archived(tmp_path) == [0]
        append_groups(client, groups(1, 3), close=False)
        client.hset(KEYS.state, "status", "closed")
        wait_until(lambda: reports)
    assert archived(tmp_path) == [0, 1, 2]
    assert (progress[-1].done, progress[-1].total) == (3, 3)
    assert [(event["run"], event["known"]) for event in events if event["event"] == "run.awaited"] == [("run", [])]


def test_a_group_that_is_on_disk_is_not_written_again(redis_url: str, client: redis.Redis, tmp_path: Path) -> None:
    """An archiver that died between fsync and acknowledgement: its successor acknowledges without writing."""
    sent = groups(0, 5)
    with JsonlWriter(tmp_path, rotate_bytes=1 << 20) as writer:
        for group in sent[1:3]:
            writer.append(group.group_id, group_to_record(group))
        assert writer.sync()
    append_groups(client, sent)
    report = archive(redis_url, tmp_path)
    assert report.duplicates == 2
    assert sorted(archived(tmp_path)) == [0, 1, 2, 3, 4]
    assert client.xlen(KEYS.groups) == 0


def test_a_group_that_is_twice_in_the_stream_is_written_once(
    redis_url: str, client: redis.Redis, tmp_path: Path
) -> None:
    """Also when the second copy comes after a restart."""
    append_groups(client, groups(0, 2), close=False)
    with archiving(redis_url, tmp_path):
        wait_until(lambda: client.xlen(KEYS.groups) == 0)
    append_groups(client, groups(0, 2))
    report = archive(redis_url, tmp_path)
    assert report.duplicates == 2
    assert archived(tmp_path) == [0, 1]


def test_a_stopped_archiver_has_acknowledged_what_it_read_and_goes_on(
    redis_url: str, client: redis.Redis, tmp_path: Path
) -> None:
    """stop ends the wait for more groups; the next call continues in the same files."""
    append_groups(client, groups(0, 5), close=False)
    with archiving(redis_url, tmp_path) as (stop, reports):
        wait_until(lambda: client.xlen(KEYS.groups) == 0)
        stop.set()
        wait_until(lambda: reports)
    assert not reports[0].ended
    assert "run the same command again" in reports[0].summary()
    append_groups(client, groups(5, 8))
    assert archive(redis_url, tmp_path).archived == 8
    assert archived(tmp_path) == list(range(8))
    assert client.xinfo_consumers(KEYS.groups, "archive") == []


def test_an_archiver_killed_again_and_again_loses_and_doubles_nothing(
    redis_url: str, client: redis.Redis, tmp_path: Path
) -> None:
    """kill -9 at random moments: what is not in the archive is still in Redis, and in the end each group is there once."""
    append_groups(client, groups(0, 200))
    moments = random.Random(5)
    killed = 0
    for _ in range(4):
        enough = len(archived(tmp_path)) + moments.randrange(30)
        process = start_archiver(redis_url, tmp_path)
        wait_until(lambda n=enough, p=process: len(archived(tmp_path)) > n or not p.is_alive())  # type: ignore[misc]
        process.kill()
        process.join(10)
        killed += process.exitcode == -signal.SIGKILL
        assert set(archived(tmp_path)) | set(unacknowledged(client)) == set(range(200))
    assert killed
    report = archive(redis_url, tmp_path)
    assert report.parked == 0
    assert sorted(archived(tmp_path)) == list(range(200))
    assert client.xlen(KEYS.groups) == 0


def test_sigterm_ends_the_command_with_exit_code_0(redis_url: str, client: redis.Redis, tmp_path: Path) -> None:
    """`distaff archive`, told to stop while it waits for groups: all it read is on disk and acknowledged."""
    append_groups(client, groups(0, 20), close=False)
    process = subprocess.Popen(
        [sys.executable, "-m", "distaff", "archive", "--run.name", "run", "--archive.directory", str(tmp_path)],
        env={**os.environ, "DISTAFF_REDIS_URL": redis_url},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_until(lambda: len(archived(tmp_path)) == 20)
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
    finally:
        process.kill()
        process.wait(10)
    assert client.xlen(KEYS.groups) == 0


def test_nothing_is_acknowledged_while_the_disk_is_full(redis_url: str, client: redis.Redis, small_disk: Path) -> None:
    """Groups stay in Redis until space is freed, the wait is shown, and the archiver goes on by itself."""
    ballast = small_disk / "ballast"
    ballast.write_bytes(b"x" * 180_000)
    append_groups(client, [make_group(seq=seq, rollouts=2, tokens=300) for seq in range(20)])
    progress: list[Progress] = []
    with (
        capture_logs() as logs,
        archiving(redis_url, small_disk / "a", batch=2, progress=progress.append) as (_, reports),
    ):
        wait_until(lambda: progress and "disk full" in progress[-1].note)
        held = archived(small_disk / "a")
        assert 0 < len(held) < 20
        assert set(held) | set(unacknowledged(client)) == set(range(20))
        assert len(unacknowledged(client)) == 20 - len(held)
        ballast.unlink()
        wait_until(lambda: reports)
    assert reports[0].ended
    assert archived(small_disk / "a") == list(range(20))
    assert client.xlen(KEYS.groups) == 0
    assert [e["event"] for e in logs if e["event"].startswith("archive.disk")] == [
        "archive.disk_full",
        "archive.disk_recovered",
    ]


def test_a_stop_on_a_full_disk_leaves_the_groups_in_redis(
    redis_url: str, client: redis.Redis, small_disk: Path
) -> None:
    """An archiver that cannot write when it is told to stop acknowledges nothing more and ends."""
    (small_disk / "ballast").write_bytes(b"x" * 240_000)
    append_groups(client, [make_group(seq=seq, rollouts=2, tokens=300) for seq in range(5)])
    stop = threading.Event()

    def on_progress(progress: Progress) -> None:
        if progress.note:
            stop.set()

    report = archive(redis_url, small_disk / "a", batch=2, stop=stop, progress=on_progress)
    assert not report.ended
    assert sorted(set(archived(small_disk / "a")) | set(unacknowledged(client))) == list(range(5))
    assert len(unacknowledged(client)) > 0


def test_a_second_archiver_on_a_directory_is_refused(redis_url: str, client: redis.Redis, tmp_path: Path) -> None:
    """P23: one line, with the process that has the directory; the first one goes on."""
    with archiving(redis_url, tmp_path):
        wait_until(lambda: client.exists(KEYS.groups))
        with pytest.raises(ConfigurationError, match=rf"written by process {os.getpid()} on ") as refused:
            archive(redis_url, tmp_path)
        assert "\n" not in str(refused.value)
        append_groups(client, groups(0, 2), close=False)
        wait_until(lambda: client.xlen(KEYS.groups) == 0)


def test_archivers_with_groups_of_their_own_each_get_everything(
    redis_url: str, client: redis.Redis, tmp_path: Path
) -> None:
    """Two directories, two consumer groups: the slower one finds every group still there."""
    client.xgroup_create(KEYS.groups, "second", "0", mkstream=True)
    append_groups(client, groups(0, 6))
    archive(redis_url, tmp_path / "a", group="first")
    archive(redis_url, tmp_path / "b", group="second")
    assert archived(tmp_path / "a") == archived(tmp_path / "b") == list(range(6))


def test_a_directory_of_another_run_is_refused(redis_url: str, client: redis.Redis, tmp_path: Path) -> None:
    """One run per directory, and one life of it: a new run of the same name would be taken for duplicates."""
    append_groups(client, groups(0, 2))
    archive(redis_url, tmp_path)
    with pytest.raises(ConfigurationError, match="holds groups of run 'run', not of 'other'"):
        archive_command.run("other", redis_url=redis_url, archive=ArchiveSection(directory=str(tmp_path)))
    delete_run(client, "run")
    client.hset(KEYS.state, "opened", "1790000123.5")
    append_groups(client, groups(0, 4))
    with pytest.raises(ConfigurationError, match="opened 2026-09-21"):
        archive(redis_url, tmp_path)
    assert archived(tmp_path) == [0, 1]
    assert unacknowledged(client) == [0, 1, 2, 3]


def test_a_directory_without_a_group_is_anyones(redis_url: str, client: redis.Redis, tmp_path: Path) -> None:
    """A run that failed before its first group, begun again under its name or another, finds its directory free."""
    for name, opened in [("run", "1790000000.0"), ("run", "1790000123.5"), ("other", "1790000200.5")]:
        client.hset(RunKeys(name).state, mapping={"opened": opened, "status": "closed"})
        archive_command.run(name, redis_url=redis_url, archive=ArchiveSection(directory=str(tmp_path)))
        delete_run(client, name)
    append_groups(client, groups(0, 2))
    archive(redis_url, tmp_path)
    assert archived(tmp_path) == [0, 1]


def test_a_run_that_begins_anew_while_it_is_archived_ends_the_archiver(
    redis_url: str, client: redis.Redis, tmp_path: Path
) -> None:
    """Its groups stay in Redis: nothing of the new life is acknowledged against the archive of the old one."""
    append_groups(client, groups(0, 2), close=False)
    failure: list[Exception] = []

    def archive_and_catch() -> None:
        try:
            archive(redis_url, tmp_path)
        except ConfigurationError as error:
            failure.append(error)

    thread = threading.Thread(target=archive_and_catch)
    thread.start()
    wait_until(lambda: client.exists(KEYS.groups) and client.xlen(KEYS.groups) == 0)
    delete_run(client, "run")
    client.hset(KEYS.state, "opened", "1790000123.5")
    append_groups(client, groups(0, 2))
    thread.join(20)
    assert not thread.is_alive()
    assert "move the old one away" in str(failure[0])
    assert unacknowledged(client) == [0, 1]


def test_groups_freed_before_the_archiver_came_are_said_to_be_missing(
    redis_url: str, client: redis.Redis, tmp_path: Path
) -> None:
    """A trainer that runs alone frees what it has acknowledged; a later archiver is not silent about it."""
    client.xdel(KEYS.groups, *append_groups(client, groups(0, 3), close=False))
    append_groups(client, groups(3, 5))
    report = archive(redis_url, tmp_path)
    assert (report.archived, report.missing) == (2, 3)
    assert "3 groups of the run are not in this directory" in report.summary()


def test_a_group_that_cannot_be_read_is_reported_as_missing(
    redis_url: str, client: redis.Redis, tmp_path: Path
) -> None:
    """Bytes that are no group do not stop the archive, and are not passed over in silence."""
    append_groups(client, groups(0, 2), close=False)
    client.xadd(KEYS.groups, {"schema": "1.0", "seq": "2", "group": b"\xc1 not msgpack"})
    client.hincrby(KEYS.state, "admitted", 1)
    client.hincrby(KEYS.state, "emitted", 1)
    append_groups(client, groups(3, 4))
    report = archive(redis_url, tmp_path)
    assert (report.parked, report.missing) == (1, 0)
    assert "1 groups could not be read" in report.summary()
    assert archived(tmp_path) == [0, 1, 3]


def test_a_redis_that_is_not_there_is_named(tmp_path: Path) -> None:
    """An error with the mend, and no directory is made."""
    with pytest.raises(RedisUnavailable, match="cannot be reached"):
        archive(f"unix://{tmp_path}/no.sock", tmp_path / "a")
    assert not (tmp_path / "a").exists()


def test_a_stop_while_redis_is_away_ends_the_archiver(tmp_path: Path) -> None:
    """The archiver waits for a Redis that went away, and being told to stop ends that wait; what is on disk stays."""
    with RedisServer(tmp_path / "r") as server, archiving(server.url, tmp_path / "a") as (stop, reports):
        append_groups(server.client(), groups(0, 3), close=False)
        wait_until(lambda: server.client().xlen(KEYS.groups) == 0)
        server.stop()
        assert not reports
        stop.set()
        wait_until(lambda: reports)
    assert not reports[0].ended
    assert archived(tmp_path / "a") == [0, 1, 2]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    yield from mounted_disk(tmp_path)
