"""Logs: one redacted pipe for everybody, that nobody waits for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from distaff.logpipe import LogPipe
from distaff.logs import Redactor
from distaff.redaction import redact

CANARY = 'canary"quo\\ted-é-value'
PROGRAM = """
import logging, sys, threading
from distaff.logs import adopt_loggers, configure_logging
from distaff.settings import LogSection
configure_logging(LogSection(format=sys.argv[1]))
import os, structlog
secret = os.environ["CANARY_TOKEN"]
log = structlog.get_logger("ours").bind(run="r", seq=7)
log.info("group.emitted", url="redis://:canary-pw@h/0", nested={"authorization": "canary-header", "list": [secret]}, key=secret)
log.debug("not.shown")
library = logging.getLogger("verifiers.inner")
library.addHandler(logging.StreamHandler())
library.propagate = False
adopt_loggers()
library.warning("from %s", "Bearer canary-bearer")
logging.getLogger("httpx").info("chatty")
try:
    raise ValueError("sk-canary-123456 " + secret)
except ValueError:
    log.exception("rollout.failed")
thread = threading.Thread(target=lambda: int(secret))
thread.start(); thread.join()
raise RuntimeError(secret)
"""


def run_program(form: str) -> str:
    environment = {**os.environ, "CANARY_TOKEN": CANARY}
    done = subprocess.run([sys.executable, "-c", PROGRAM, form], env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stdout == ""
    return done.stderr


def test_every_line_is_json_in_a_pipe_and_holds_no_secret() -> None:
    """P28: Our events, a library's records, tracebacks and crashes: redacted, one object a line, bound fields kept."""
    text = run_program("auto")
    records = [json.loads(line) for line in text.splitlines()]
    events = [record["event"] for record in records]
    assert events == ["group.emitted", "from Bearer ***", "rollout.failed", "thread.crashed", "process.crashed"]
    assert (records[0]["run"], records[0]["seq"], records[0]["level"]) == ("r", 7, "info")
    assert records[0]["url"] == "redis://:***@h/0"
    assert records[0]["nested"] == {"authorization": "***", "list": ["***"]}
    assert "Traceback" in records[2]["exception"]
    assert "canary" not in text.replace("CANARY", "")


def test_the_console_form_is_redacted_too() -> None:
    """The same lines for a person."""
    text = run_program("console")
    assert "group.emitted" in text
    assert "canary" not in text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("redis://user:p@ss/word@h:6379/0", "redis://user:***@h:6379/0"),
        ("https://u:pw@h/path?x=1 me@example.org", "https://u:***@h/path?x=1 me@example.org"),
        ("{'Authorization': 'Bearer abcdef1234', 'x': 1}", "{'Authorization': '***', 'x': 1}"),
        ("[(b'authorization', b'Bearer abcdef')]", "[(b'authorization', b'***')]"),
        ('\\"api_key\\": \\"abc\\"', '\\"api_key\\": \\"***\\"'),
        ("?api_key=abc&n=1", "?api_key=***&n=1"),
        ("key sk-proj-abc_DEF-123456 given", "key *** given"),
        ("hf_abcdefghijklmnop", "***"),
        ("api_key_var='OPENAI_API_KEY'", "api_key_var='OPENAI_API_KEY'"),
        ("token: 5, tokens=70, task-abcdefghij", "token: 5, tokens=70, task-abcdefghij"),
        ("http://127.0.0.1:8000/v1", "http://127.0.0.1:8000/v1"),
    ],
)
def test_known_shapes_are_redacted_and_others_are_not(text: str, expected: str) -> None:
    """By shape alone, and a second time changes nothing."""
    assert redact(text, environ={}) == expected
    assert redact(expected, environ={}) == expected


def test_values_of_secret_variables_are_redacted_in_every_spelling() -> None:
    """As they are, percent-encoded, and the password inside a URL; short ones are left alone."""
    environ = {"MY_KEY": "s3cr3t/x", "A_TOKEN": "short", "URL": "redis://:pw123456@h", "PLAIN": "visible-value"}
    text = "s3cr3t/x s3cr3t%2Fx pw123456 short visible-value extra-secret"
    assert redact(text, environ=environ, secrets=["extra-secret"]) == "*** *** *** short visible-value ***"


def test_a_value_that_cannot_be_shown_costs_nothing_but_its_text() -> None:
    """Objects are shown by their repr, redacted; numbers stay numbers."""
    event = Redactor({"X_SECRET": "hidden-1"})(None, "info", {"n": 3, "e": ValueError("hidden-1"), "none": None})
    assert event == {"n": 3, "e": "ValueError('***')", "none": None}


def test_a_reader_that_stopped_reading_holds_nobody_up_and_the_loss_is_counted() -> None:
    """P30: lines are dropped while the pipe is full; when it is read again the count is reported."""
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as stream:
        pipe = LogPipe(stream, max_lines=100)
        for number in range(5_000):
            pipe.put(f"{number:04d} " + "x" * 200)
        assert pipe.dropped > 4_000
        lines = _read_until(reading, b"log.lines_dropped")
        assert lines[0].startswith(b"0000 ")
        assert any(line.startswith(b"log.lines_dropped count=") for line in lines)
        pipe.close()
    os.close(reading)


def test_a_reader_that_is_gone_costs_lines_and_nothing_else() -> None:
    """A closed pipe raises nowhere."""
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as stream:
        pipe = LogPipe(stream)
        pipe.put("lost")
        assert pipe.flush(timeout_s=5)
        assert pipe.dropped == 1
        pipe.close()


def test_a_process_whose_log_pipe_is_full_still_ends() -> None:
    """P30: 10 MB of log lines into a pipe nobody reads, then an exit."""
    code = (
        "from distaff.logs import configure_logging; from distaff.settings import LogSection; import structlog\n"
        "configure_logging(LogSection(format='json')); log = structlog.get_logger()\n"
        "for n in range(1000): log.info('line.written', n=n, text='x' * 10000)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE)
    try:
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        if process.stderr is not None:
            process.stderr.close()


def test_a_disk_that_is_full_costs_lines_and_nothing_else() -> None:
    """/dev/full refuses every write."""
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    with open("/dev/full", "w") as stream:
        pipe = LogPipe(stream)
        pipe.put("lost")
        assert pipe.flush(timeout_s=5)
        assert pipe.dropped == 1
        pipe.close()


def _read_until(descriptor: int, mark: bytes) -> list[bytes]:
    data = b""
    end = time.monotonic() + 10
    while mark not in data and time.monotonic() < end:
        data += os.read(descriptor, 65536)
    return data.split(b"\n")
