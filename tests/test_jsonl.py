"""P24: the archive always parses, and nothing is told to be on disk that is not."""

from __future__ import annotations

import json
import random
import resource
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from distaff.errors import ConfigurationError
from distaff_consumer.errors import ArchiveError
from distaff_consumer.ids import GroupIds, SeqRanges
from distaff_consumer.jsonl import JsonlWriter, read_archive
from distaff_consumer.segments import Compression, segments
from tests.archive_process import start_writer
from tests.archive_support import mounted_disk

COMPRESSIONS: list[Compression] = ["none", "zstd"]
every_compression = pytest.mark.parametrize("compression", COMPRESSIONS)
AWKWARD = "a\u2028b\u2029c\x85d\x0be\x0cf\x1cg\x00h\r\ni\ud800j\U0001f600"


def ids_of(directory: Path) -> list[str]:
    return [record["group_id"] for record in read_archive(directory)]


def write(directory: Path, *group_ids: str, rotate_bytes: int = 1 << 20, compression: Compression = "none") -> None:
    with JsonlWriter(directory, rotate_bytes=rotate_bytes, compression=compression) as writer:
        for group_id in group_ids:
            writer.append(group_id, {"text": "x" * 100})
            assert writer.sync()


@every_compression
def test_texts_with_line_separators_nul_and_surrogates_round_trip(tmp_path: Path, compression: Compression) -> None:
    """One group is one line, whatever its texts hold, and comes back as it went in."""
    with JsonlWriter(tmp_path, rotate_bytes=1 << 20, compression=compression) as writer:
        writer.append("run-000000000", {"text": AWKWARD, AWKWARD: [AWKWARD]})
        writer.append("run-000000001", {"text": "plain"})
        assert writer.sync()
    first, second = read_archive(tmp_path)
    assert first == {"group_id": "run-000000000", "text": AWKWARD, AWKWARD: [AWKWARD]}
    assert second["text"] == "plain"


def test_a_line_is_strict_json(tmp_path: Path) -> None:
    """A number JSON does not have becomes null, so that every reader of JSON can read the archive."""
    with JsonlWriter(tmp_path, rotate_bytes=1 << 20) as writer:
        writer.append("run-000000000", {"task": {"a": float("nan"), "b": [1.5, float("-inf")]}})
        assert writer.sync()
    text = writer.path.read_text()
    assert json.loads(text, parse_constant=lambda name: pytest.fail(name))["task"] == {"a": None, "b": [1.5, None]}


@every_compression
def test_files_are_rotated_and_read_in_order(tmp_path: Path, compression: Compression) -> None:
    """No file grows past the limit, and the reader gives the records in the order they were written."""
    ids = [f"run-{n:09d}" for n in random.Random(1).sample(range(100), 100)]
    write(tmp_path, *ids, rotate_bytes=1000, compression=compression)
    files = segments(tmp_path)
    assert len(files) > 5
    assert all(file.path.stat().st_size <= 1000 for file in files)
    assert ids_of(tmp_path) == ids


def test_a_reopened_archive_knows_its_groups_and_goes_on_in_its_newest_file(tmp_path: Path) -> None:
    """Membership survives a restart: from the index for finished files, from the newest file itself, and without an index."""
    ids = [f"run-{n:09d}" for n in range(30)]
    write(tmp_path, *ids, rotate_bytes=1000)
    files = len(segments(tmp_path))
    for unlink in (False, True):
        if unlink:
            (tmp_path / "index.json").unlink()
        with JsonlWriter(tmp_path, rotate_bytes=1000) as writer:
            assert all(group_id in writer for group_id in ids)
            assert "run-000000030" not in writer
            assert len(writer) == 30
    write(tmp_path, "run-000000030", rotate_bytes=1000)
    assert len(segments(tmp_path)) <= files + 1
    assert ids_of(tmp_path) == [*ids, "run-000000030"]


def test_a_stale_index_is_not_believed(tmp_path: Path) -> None:
    """An index entry made for a file of another size, or one that does not parse, costs a scan and nothing else."""
    write(tmp_path, *[f"run-{n:09d}" for n in range(30)], rotate_bytes=1000)
    first = segments(tmp_path)[0].path
    first.write_bytes(first.read_bytes() + b'{"group_id":"run-000000099"}\n')
    with JsonlWriter(tmp_path, rotate_bytes=1000) as writer:
        assert "run-000000099" in writer
    (tmp_path / "index.json").write_text("[1, 2")
    with JsonlWriter(tmp_path, rotate_bytes=1000) as writer:
        assert len(writer) == 31


def test_compression_may_change_between_openings(tmp_path: Path) -> None:
    """A directory may hold plain and compressed files; the order stays."""
    write(tmp_path, "run-000000000")
    write(tmp_path, "run-000000001", compression="zstd")
    write(tmp_path, "run-000000002")
    assert ids_of(tmp_path) == [f"run-{n:09d}" for n in range(3)]
    assert [file.path.suffix for file in segments(tmp_path)] == [".jsonl", ".zst", ".jsonl"]


@every_compression
def test_a_torn_tail_is_skipped_by_readers_and_cut_at_every_byte(tmp_path: Path, compression: Compression) -> None:
    """Wherever the last write was torn, the records before it are read, and a writer cuts the tail, says so, and goes on."""
    write(tmp_path, "run-000000000", "run-000000001", compression=compression)
    [file] = segments(tmp_path)
    whole = file.path.read_bytes()
    write(tmp_path, "run-000000002", compression=compression)
    torn = file.path.read_bytes()
    for size in range(len(whole) + 1, len(torn)):
        file.path.write_bytes(torn[:size])
        assert ids_of(tmp_path) == ["run-000000000", "run-000000001"]
        if size % 7 == 0:
            with capture_logs() as logs, JsonlWriter(tmp_path, rotate_bytes=1 << 20, compression=compression) as writer:
                assert "run-000000002" not in writer
            [event] = [entry for entry in logs if entry["event"] == "archive.tail_cut"]
            assert event["cut_bytes"] == size - len(whole)
            assert file.path.read_bytes() == whole


@every_compression
def test_zeros_left_by_a_power_cut_are_a_torn_tail(tmp_path: Path, compression: Compression) -> None:
    """A file whose size was made durable before its last blocks ends in zeros; they are cut."""
    write(tmp_path, "run-000000000", compression=compression)
    [file] = segments(tmp_path)
    with file.path.open("ab") as handle:
        handle.write(b"\0" * 5000)
    assert ids_of(tmp_path) == ["run-000000000"]
    write(tmp_path, "run-000000001", compression=compression)
    assert ids_of(tmp_path) == ["run-000000000", "run-000000001"]


@every_compression
def test_damage_before_the_end_is_an_error_that_names_file_and_byte(tmp_path: Path, compression: Compression) -> None:
    """A damaged record in the middle was acknowledged once: neither reader nor writer passes over it."""
    write(tmp_path, *[f"run-{n:09d}" for n in range(3)], compression=compression)
    [file] = segments(tmp_path)
    content = bytearray(file.path.read_bytes())
    content[len(content) // 2] = 0
    file.path.write_bytes(content)
    with pytest.raises(ArchiveError, match=rf"{file.path.name} is damaged at byte \d+"):
        ids_of(tmp_path)
    with pytest.raises(ArchiveError):
        JsonlWriter(tmp_path, rotate_bytes=1 << 20, compression=compression)


@every_compression
def test_a_torn_file_that_is_not_the_newest_is_an_error(tmp_path: Path, compression: Compression) -> None:
    """Only the newest file may end in the middle of a record."""
    write(tmp_path, *[f"run-{n:09d}" for n in range(30)], rotate_bytes=1000, compression=compression)
    first = segments(tmp_path)[0].path
    first.write_bytes(first.read_bytes()[:-3])
    with pytest.raises(ArchiveError, match=first.name):
        ids_of(tmp_path)


def test_a_second_writer_is_refused_in_one_line_that_names_the_first(tmp_path: Path) -> None:
    """Another process gets one line with the holder's pid and host; the directory is free again when the holder is gone."""
    holder = start_writer(tmp_path, "none")
    try:
        assert holder.promised()
        with pytest.raises(ConfigurationError) as refused:
            JsonlWriter(tmp_path, rotate_bytes=1 << 20)
        message = str(refused.value)
        assert f"process {holder.process.pid} on " in message
        assert "\n" not in message
    finally:
        holder.kill()
    JsonlWriter(tmp_path, rotate_bytes=1 << 20).close()


def test_a_directory_that_cannot_be_made_is_a_configuration_error(tmp_path: Path) -> None:
    """A file in the way of the directory is named."""
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match="file"):
        JsonlWriter(tmp_path / "file", rotate_bytes=1)
    with pytest.raises(ConfigurationError, match="nowhere"):
        list(read_archive(tmp_path / "nowhere"))


@every_compression
def test_a_writer_killed_at_random_moments_keeps_what_it_promised(tmp_path: Path, compression: Compression) -> None:
    """kill -9 ten times on one directory: it parses after each, holds every promised id, and no id twice."""
    moments = random.Random(compression)
    promised: set[str] = set()
    for _ in range(10):
        writing = start_writer(tmp_path, compression)
        promised.update(writing.promised())
        time.sleep(moments.random() * 0.02)
        writing.kill()
        promised.update(writing.promised())
        found = ids_of(tmp_path)
        assert len(found) == len(set(found))
        assert promised <= set(found)
    assert len(promised) >= 10
    assert len(segments(tmp_path)) > 1


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    yield from mounted_disk(tmp_path)


@every_compression
def test_a_full_disk_is_waited_for_and_writing_resumes(small_disk: Path, compression: Compression) -> None:
    """sync does not return while the disk is full, the archive parses meanwhile, and all is there once space is freed."""
    ballast = small_disk / "ballast"
    ballast.write_bytes(b"x" * 200_000)
    waits: list[float] = []
    waiting = threading.Event()

    def on_wait(waited_s: float) -> None:
        waits.append(waited_s)
        if len(waits) == 3:
            waiting.set()

    writer = JsonlWriter(small_disk, rotate_bytes=1 << 20, compression=compression, retry_s=0.01, on_wait=on_wait)
    synced: list[str] = []
    with capture_logs() as logs, writer:
        thread = threading.Thread(target=_fill, args=(writer, synced))
        thread.start()
        assert waiting.wait(20)
        written = list(synced)
        assert len(written) < 100
        assert ids_of(small_disk) == written
        ballast.unlink()
        thread.join(20)
        assert not thread.is_alive()
    assert ids_of(small_disk) == synced == [f"run-{n:09d}" for n in range(100)]
    events = [entry["event"] for entry in logs]
    assert events.count("archive.disk_full") == events.count("archive.disk_recovered") == 1


def test_a_stop_ends_the_wait_for_space_and_leaves_an_archive_that_parses(small_disk: Path) -> None:
    """A writer that is told to stop while the disk is full says that nothing was written, and the next one goes on."""
    ballast = small_disk / "ballast"
    ballast.write_bytes(b"x" * 200_000)
    stop = threading.Event()
    with JsonlWriter(small_disk, rotate_bytes=1 << 20, stop=stop, retry_s=0.01, on_wait=lambda _: stop.set()) as writer:
        writer.append("run-000000000", {})
        assert writer.sync()
        writer.append("run-000000001", {"text": "x" * 100_000})
        assert not writer.sync()
    assert ids_of(small_disk) == ["run-000000000"]
    ballast.unlink()
    write(small_disk, "run-000000001")
    assert ids_of(small_disk) == ["run-000000000", "run-000000001"]


def test_what_waiting_does_not_mend_is_an_error(tmp_path: Path) -> None:
    """An error other than a full disk ends the writer and names the file; the archive still parses."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    with JsonlWriter(tmp_path, rotate_bytes=1 << 20) as writer:
        writer.append("run-000000000", {"text": "x" * 1000})
        assert writer.sync()
        writer.append("run-000000001", {"text": "x" * 1000})
        resource.setrlimit(resource.RLIMIT_FSIZE, (1500, limit[1]))
        try:
            with pytest.raises(ArchiveError, match=r"groups-000001\.jsonl cannot be written: File too large"):
                writer.sync()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert ids_of(tmp_path) == ["run-000000000"]


def test_seq_ranges_are_an_exact_set() -> None:
    """Ranges hold what was added in any order and nothing else."""
    order = random.Random(3)
    seqs, expected = SeqRanges(), set()
    for _ in range(500):
        first = order.randrange(400)
        last = first + order.choice([0, 0, 0, 5])
        seqs.add_range(first, last)
        expected |= set(range(first, last + 1))
        assert len(seqs) == len(expected)
    assert {seq for seq in range(500) if seq in seqs} == expected
    assert SeqRanges(seqs.ranges()).ranges() == seqs.ranges()


def test_ids_keep_runs_apart_and_take_foreign_ids() -> None:
    """Equal seqs of two runs are two groups; an id that is not ours is kept as text."""
    ids = GroupIds()
    for group_id in ("a-000000001", "a-1-000000001", "a-0000000001", "else"):
        assert group_id not in ids
        ids.add(group_id)
        assert group_id in ids
    stored: Any = json.loads(json.dumps(ids.to_json()))
    copy = GroupIds.from_json(**stored)
    copy.update(ids)
    assert len(copy) == 4
    assert "else" in copy
    assert "a-1-000000002" not in copy


def _fill(writer: JsonlWriter, synced: list[str]) -> None:
    texts = random.Random(0)
    for n in range(100):
        group_id = f"run-{n:09d}"
        writer.append(group_id, {"text": texts.randbytes(600).hex()})
        if writer.sync():
            synced.append(group_id)
