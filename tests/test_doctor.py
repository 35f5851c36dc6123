"""`distaff doctor` on engine, tokenizer and environment: what is right passes, what is wrong is named with its mend, nothing hides what can still be seen."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from distaff.cli.main import main
from distaff_worker.doctor import CHECKS
from distaff_worker.doctor_checks import Examiner, Found, Skip
from tests.demo_engine_support import demo_engine
from tests.doctor_support import findings, statuses
from tests.engines_support import free_port, in_choice
from tests.farm_support import says
from tests.harness.servers import RedisServer
from tests.scripted_engine import Answer, Ask, Fault, Reply, ScriptedEngine, status
from tests.tokens_support import TEMPLATES

Capture = pytest.CaptureFixture[str]
RL = (
    "settings",
    "mode",
    "reachable",
    "model",
    "tokens",
    "stop",
    "bridge",
    "ready",
)


@pytest.fixture
async def server() -> AsyncIterator[ScriptedEngine]:
    async with ScriptedEngine(script=lambda ask: says("number 7")) as started:
        yield started


async def test_a_sound_rl_run_has_no_finding_to_mend(server: ScriptedEngine) -> None:
    """Every check passes but those for which this engine has no route; the facts are the run's."""
    found = await findings(server.url)
    assert statuses(found, *(f"engine.{name}" for name in RL), "tokenizer", "environment") == {"ok"}, found
    assert {check for check, finding in found.items() if finding.status == "skipped"} == {
        "engine.tokenizer",
        "engine.template",
    }
    assert set(found) == set(CHECKS) - {"engine.chat"}
    assert "8 rows in the train split; columns question, answer" in found["environment.rows"].fact
    assert found["environment.scores"].fact.startswith("reward 7")
    assert "2 turns" in found["environment.plays"].fact
    assert "context 4096 tokens" in found["engine.ready"].fact
    assert "'<|im_end|>'" in found["engine.stop"].fact


@pytest.mark.parametrize("mode", ["sft", "eval"])
async def test_a_sound_chat_run_has_no_finding_to_mend(mode: str, server: ScriptedEngine) -> None:
    """Any chat API; an evaluation needs no tokenizer and makes no samples."""
    found = await findings(server.url, run={"mode": mode}, engine={"kind": "openai"})
    assert statuses(found) == {"ok"}, found
    assert ("tokenizer.loads" in found, "environment.samples" in found) == ((mode == "sft"),) * 2


def _broken(kind: str, server: ScriptedEngine) -> tuple[dict[str, Any], str, str, str]:
    """(settings, the check that fails, what it says, its mend) of a run with one thing wrong."""
    args: dict[str, Any]
    match kind:
        case "no engine":
            url = {"base_urls": [f"http://127.0.0.1:{free_port()}"]}
            return {"engine": url}, "engine.reachable", "no connection", "engine.base_urls"
        case "unknown model":
            return {"engine": {"model": "other"}}, "engine.model", "serves: scripted", "Correct engine.model"
        case "no logprobs":
            server.script = lambda ask: Answer(mangle=in_choice(logprobs=None))
            return {}, "engine.ready", "log-probabilities", "An RL run needs token ids"
        case "no token route":
            server.script = lambda ask: status(404, "Not Found")
            return {}, "engine.ready", "404", "An RL run needs token ids"
        case "other tokenizer":
            server.documents["/tokenize"] = {"tokens": [1, 2, 3]}
            return {}, "engine.tokenizer", "disagree on code", "tokenizer.name"
        case "no tokenizer":
            return {"tokenizer": {"name": "./nowhere"}}, "tokenizer.loads", "does not exist", "give tokenizer.name"
        case "rl on a chat api":
            return {"engine": {"kind": "openai"}}, "engine.mode", "cannot be used in RL mode", "Use engine.kind"
        case "no key":
            key = {"api_key_var": "DOCTORS_MISSING_KEY"}
            return {"engine": key}, "engine.settings", "which is not set", "export DOCTORS_MISSING_KEY"
        case "no environment":
            return {"environment": {"id": "not-there"}}, "environment.loads", "not-there", ""
        case "no rows":
            return {"environment": {"args": {"rows": 0}}}, "environment", "", ""
        case "reward raises":
            args = {"args": {"fault": "raise"}}
            return (
                {"environment": args},
                "environment.scores",
                "row 0 is cursed",
                "Mend the environment's reward functions",
            )
        case "step raises":
            args = {"args": {"fault": "raise", "where": "step"}}
            return {"environment": args}, "environment.plays", "row 0 is cursed", "Mend the environment"
        case "reward hangs":
            hanging = {"id": "tests.fault_env", "args": {"faults": {"0": "spin"}}}
            return {"environment": hanging}, "environment.scores", "blocked", "Mend the environment's reward functions"
        case "reward crashes":
            args = {"args": {"fault": "abort"}}
            return {"environment": args}, "environment.scores", "SIGABRT", ""
    raise ValueError(kind)


STILL_SEEN = {
    "no engine": ["environment.rows", "tokenizer.loads"],
    "unknown model": ["environment.rows", "engine.reachable"],
    "no logprobs": ["environment.rows", "engine.model"],
    "no token route": ["environment.rows", "engine.model"],
    "other tokenizer": ["environment.rows", "engine.model"],
    "no tokenizer": ["environment.rows", "engine.model"],
    "rl on a chat api": ["environment.rows", "engine.reachable", "engine.model"],
    "no key": ["environment.rows", "tokenizer.loads"],
    "no environment": ["engine.tokens", "engine.bridge"],
    "no rows": ["engine.ready"],
    "reward raises": ["environment.samples", "environment.tools"],
    "step raises": ["engine.ready"],
    "reward hangs": ["environment.plays"],
    "reward crashes": ["environment.plays"],
}
"""Checks that pass all the same."""


@pytest.mark.parametrize("kind", STILL_SEEN)
async def test_what_is_wrong_is_named_with_its_mend_and_hides_nothing_else(kind: str, server: ScriptedEngine) -> None:
    """One thing is wrong in each run: its check fails, what depends on it says so, everything else is still looked at."""
    sections, check, fact, mend = _broken(kind, server)
    found = await findings(server.url, **sections)
    wrong = [finding for finding in found.values() if finding.status == "failed"]
    assert wrong, found
    assert wrong[0].check.startswith(check)
    assert fact in f"{wrong[0].fact} {wrong[0].mend}"
    assert mend in wrong[0].mend
    assert wrong[0].mend
    assert {found[name].status for name in STILL_SEEN[kind]} == {"ok"}, found
    for finding in found.values():
        if finding.status == "skipped" and finding.fact.startswith("needs "):
            assert finding.fact.removeprefix("needs ") in {one.check for one in wrong}


async def test_an_environment_that_hangs_while_it_loads_costs_its_deadline(server: ScriptedEngine) -> None:
    """It is killed, the finding says how to wait longer, and the engine was looked at meanwhile."""
    faulty = {"id": "tests.fault_env", "args": {"faults": {"0": "sleep"}, "where": "load"}}
    found = await findings(server.url, within_s=12.0, environment=faulty)
    loads = found["environment.loads"]
    assert (loads.status, "--within" in loads.mend) == ("failed", True)
    assert "within 1" in loads.fact
    assert found["engine.ready"].status == "ok"
    assert found["environment.plays"].fact == "needs environment.loads"


async def test_an_engine_that_never_answers_costs_its_deadline(server: ScriptedEngine) -> None:
    """The token check ends; the environment is still loaded and gives a row."""
    server.script = lambda ask: Fault(hang="accept")
    found = await findings(server.url, engine={"request_timeout_s": 1.5})
    assert found["engine.ready"].status == "failed"
    assert "within 1.5 s" in found["engine.ready"].fact
    assert found["environment.rows"].status == "ok"


async def test_tools_that_the_chat_format_has_no_place_for_are_an_error(server: ScriptedEngine) -> None:
    """SmolLM2's template knows no tools: the model would never hear of them. With a template that shows them all is well."""
    without = (await findings(server.url, environment={"id": "calculator-tool"}))["environment.plays"]
    assert (without.status, "no place for them" in without.fact) == ("failed", True)
    assert "tokenizer.chat_template" in without.mend
    template = (TEMPLATES / "qwen3_style.jinja").read_text()
    shown = await findings(server.url, environment={"id": "calculator-tool"}, tokenizer={"chat_template": template})
    assert (shown["environment.tools"].status, shown["environment.tools"].fact) == (
        "ok",
        "add, multiply: in the prompt",
    )


async def test_a_chat_format_that_cannot_be_continued_is_a_warning(server: ScriptedEngine) -> None:
    """It marks no end of a turn, so that a prompt does not extend the one before."""
    template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    bridge = (await findings(server.url, tokenizer={"chat_template": template}))["engine.bridge"]
    assert (bridge.status, "cannot extend" in bridge.fact, "tokens.md" in bridge.mend) == ("warning", True, True), (
        bridge
    )


async def test_what_an_api_refuses_is_a_warning(server: ScriptedEngine) -> None:
    """A fixed temperature: the run works, and is not what was asked for."""
    text = "Unsupported value: 'temperature' does not support 0.5 with this model. Only the default (1) value is supported."

    def script(ask: Ask) -> Reply:
        return status(400, text) if "temperature" in ask.body else says("number 7")

    server.script = script
    found = await findings(server.url, run={"mode": "eval"}, engine={"kind": "openai"}, sampling={"temperature": 0.5})
    assert found["engine.chat"].status == "warning"
    assert "temperature 0.5 is refused" in found["engine.chat"].fact


# -- the order of checks


async def test_a_check_ends_whatever_it_does() -> None:
    """It hangs, raises what nobody expects, cannot be made: each is a finding, and the next one is looked at."""
    examiner = Examiner(end=time.monotonic() + 5, progress=lambda check, done: None)

    async def hangs() -> Found[int]:
        await asyncio.Event().wait()
        return Found(value=1, fact="")

    async def breaks() -> Found[int]:
        raise ZeroDivisionError("by zero")

    async def cannot() -> Found[int]:
        raise Skip("not here")

    async def works() -> Found[int]:
        return Found(value=7, fact="seven")

    async with asyncio.timeout(10):
        assert await examiner.check("a", hangs, limit_s=0.1) is None
    assert await examiner.check("b", breaks) is None
    assert await examiner.check("c", cannot) is None
    assert await examiner.check("d", works, needs=("b",)) is None
    assert await examiner.check("e", works, needs=("d",)) is None
    assert await examiner.check("f", works) == 7
    assert [finding.status for finding in examiner.findings] == [
        "failed",
        "failed",
        "skipped",
        "skipped",
        "skipped",
        "ok",
    ]
    assert "ZeroDivisionError: by zero" in examiner.findings[1].fact
    assert [finding.fact for finding in examiner.findings[2:5]] == ["not here", "needs b", "needs b"]


# -- the command


def _run(capsys: Capture, *arguments: str) -> tuple[int, dict[str, Any]]:
    code = main(["doctor", "--json", *arguments])
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.timeout(240)
def test_everything_is_ok_with_the_real_engine(tmp_path: Path, capsys: Capture) -> None:
    """llama.cpp with its model's own tokenizer, a Redis as the compose file sets it, a shipped environment: no warning, no skip."""
    with demo_engine("--tokenizer", str(tmp_path)) as engine, RedisServer(tmp_path / "r", aof=True) as server:
        arguments = ["--redis-url", server.url, "--engine.kind", "llamacpp", "--engine.base-urls", engine.url]
        arguments += ["--tokenizer.name", engine.tokenizer, "--environment.id", "guess-number", "--within", "150"]
        code, document = _run(capsys, *arguments)
        assert {check["check"]: check["status"] for check in document["checks"] if check["status"] != "ok"} == {}
        assert (code, document["healthy"]) == (0, True)
        assert server.client().keys() == []


@pytest.mark.slow
def test_a_run_with_everything_wrong_is_told_all_of_it(capsys: Capture) -> None:
    """No Redis, no engine, no tokenizer, no environment: each once, exit code 1, no secret, nothing left to read between the lines."""
    url = f"redis://:canary-password@127.0.0.1:{free_port()}/0"
    engine = f"http://127.0.0.1:{free_port()}"
    arguments = ["--redis-url", url, "--engine.kind", "vllm", "--engine.base-urls", engine]
    code = main(["doctor", *arguments, "--tokenizer.name", "./nowhere", "--environment.id", "not-there"])
    shown = capsys.readouterr().out
    assert code == 1
    assert "canary" not in shown
    failed = {line.split()[1] for line in shown.splitlines() if line.startswith("failed")}
    assert failed == {"redis.reachable", "engine.reachable", "tokenizer.loads", "environment.loads"}
    assert "4 failed" in shown.splitlines()[-1]


@pytest.mark.slow
def test_an_evaluation_is_looked_at_as_it_would_be_played(capsys: Capture) -> None:
    """Its own split and temperature, no tokenizer; an engine that refuses temperature 0 is found before."""
    text = "Unsupported value: 'temperature' does not support 0.0 with this model. Only the default (1) value is supported."

    def script(ask: Ask) -> Reply:
        return status(400, text) if "temperature" in ask.body else says("word 1")

    with ScriptedEngine(script=script) as server:
        engine = ["--engine.kind", "openai", "--engine.base-urls", server.url, "--within", "100"]
        code, document = _run(capsys, "--evaluation", *engine, "--environment.id", "guess-number")
    checks = {check["check"]: check for check in document["checks"]}
    assert code == 0, checks
    assert "tokenizer.loads" not in checks
    assert "eval split" in checks["environment.rows"]["fact"]
    assert "temperature 0.0 is refused" in checks["engine.chat"]["fact"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--within", "1"], "give 5 to 3600 seconds"),
        (["--within", "soon"], "invalid float"),
        (["--redis-url", "http://x"], "the scheme must be one of"),
        (["--enigne.kind", "vllm"], "did you mean --engine.kind"),
        (["nowhere.toml"], "there is no such file"),
    ],
)
def test_wrong_usage_is_exit_code_2(arguments: list[str], said: str, capsys: Capture) -> None:
    """Found before anything is looked at."""
    assert main(["doctor", *arguments]) == 2
    assert said in capsys.readouterr().err
