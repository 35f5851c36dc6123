"""Settings: one declaration for file, environment and flags; mistakes named with the nearest key; secrets never shown."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from distaff.cli.declared import declared_keys
from distaff.cli.flags import add_flags, collect, normalized
from distaff.cli.loading import Loaded, load
from distaff.cli.showing import effective_toml, reference
from distaff.config import RunConfig
from distaff.errors import ConfigurationError
from distaff.settings import Settings, WorkerSection

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in [name for name in os.environ if name.startswith("DISTAFF_")]:
        monkeypatch.delenv(name)


def from_flags(*argv: str, file: Path | None = None) -> Loaded:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_flags(parser, shown=(), shortcuts={"--limit": "producer.limit"})
    return load(file=file, flags=collect(parser.parse_args(normalized(argv, {"--limit": "producer.limit"}))))


def toml(folder: Path, text: str) -> Path:
    path = folder / "run.toml"
    path.write_text(text, "utf-8")
    return path


def message(file: Path | None = None, *argv: str) -> str:
    with pytest.raises(ConfigurationError) as caught:
        from_flags(*argv, file=file)
    return str(caught.value)


def test_defaults_yield_to_file_to_environment_to_flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each key is decided on its own by the strongest source that names it, and its origin is known."""
    file = toml(tmp_path, "[worker]\nslots = 1\nlease_s = 12\n[producer]\nlimit = 1\n")
    monkeypatch.setenv("DISTAFF_WORKER__SLOTS", "2")
    monkeypatch.setenv("DISTAFF_PRODUCER__LIMIT", "2")
    loaded = from_flags("--limit", "3", file=file)
    settings = loaded.settings
    assert (settings.producer.limit, settings.worker.slots, settings.worker.lease_s) == (3, 2, 12)
    assert settings.worker.drain_s == Settings().worker.drain_s
    assert loaded.origins["producer.limit"] == "--producer.limit"
    assert loaded.origins["worker.slots"] == "DISTAFF_WORKER__SLOTS"
    assert loaded.origins["worker.lease_s"] == str(file)
    assert loaded.origins["worker.drain_s"] == "default"


@pytest.mark.parametrize(
    "text",
    ['["http://a:1", "http://b:2"]', "http://a:1,http://b:2", " http://a:1 , http://b:2/v1 "],
)
def test_a_list_may_be_written_with_or_without_json(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Environment and flags read lists alike."""
    assert from_flags("--engine.base-urls", text).settings.engine.base_urls == ["http://a:1", "http://b:2"]
    monkeypatch.setenv("DISTAFF_ENGINE__BASE_URLS", text)
    assert load().settings.engine.base_urls == ["http://a:1", "http://b:2"]


def test_flags_may_be_repeated_hyphened_negated_and_dotted() -> None:
    """All spellings people try first."""
    settings = from_flags(
        *("--engine.base_urls", "http://a", "--engine.base-urls=http://b"),
        *("--environment.args.size", "3", "--environment.args", 'name="x"', "--environment.args", '{"deep": [1]}'),
        *("--worker.burst", "--no-archive.fsync", "--advantage.divide-by-std", "true", "--producer.seed", "-5"),
    ).settings
    assert settings.engine.base_urls == ["http://a", "http://b"]
    assert settings.environment.args == {"size": 3, "name": "x", "deep": [1]}
    assert settings.worker.burst
    assert not settings.archive.fsync
    assert settings.advantage.divide_by_std
    assert settings.producer.seed == -5


def test_an_empty_variable_counts_as_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compose files pass on variables that nobody set."""
    monkeypatch.setenv("DISTAFF_WORKER__SLOTS", "")
    assert load().settings.worker.slots == 64


@pytest.mark.parametrize(
    ("text", "wrong", "meant"),
    [
        ("[engine]\nbase_url = ['http://a']", "engine.base_url", "engine.base_urls"),
        ("[enigne]\nmodel = 'x'", "enigne", "engine"),
        ("[producer]\ngroup_size = 4", "producer.group_size", "rollouts.group_size"),
        ("reddis_url = 'x'", "reddis_url", "redis_url"),
        ("[sampling]\nmax_token = 4", "sampling.max_token", "sampling.max_tokens"),
    ],
)
def test_an_unknown_key_in_the_file_names_the_nearest(tmp_path: Path, text: str, wrong: str, meant: str) -> None:
    """The message has the file, the key and what was probably meant."""
    file = toml(tmp_path, text)
    assert f"{file}: unknown key {wrong}; did you mean {meant}?" in message(file)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("DISTAFF_ENGINE_BASE_URLS", "DISTAFF_ENGINE__BASE_URLS"),
        ("DISTAFF_ENGINE__BASEURLS", "DISTAFF_ENGINE__BASE_URLS"),
        ("DISTAFF_REDIS_URI", "DISTAFF_REDIS_URL"),
        ("DISTAFF_GROUP_SIZE", "DISTAFF_ROLLOUTS__GROUP_SIZE"),
    ],
)
def test_an_unknown_variable_names_the_nearest(monkeypatch: pytest.MonkeyPatch, name: str, meant: str) -> None:
    """Only variables with our prefix are ours to refuse."""
    monkeypatch.setenv(name, "x")
    monkeypatch.setenv("DISTAFFED", "not ours")
    said = message()
    assert f"{name} is no setting; did you mean {meant}?" in said
    assert "DISTAFFED" not in said


def test_wrong_values_are_listed_together_with_what_is_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every mistake at once, each with its place, its value and what may stand there."""
    file = toml(tmp_path, '[run]\nmode = "foo"\n[producer]\nwindow = 0\nshuffle = "maybe"\n')
    monkeypatch.setenv("DISTAFF_WORKER__SLOTS", "many")
    lines = message(file, "--sampling.temperature", "hot").split("\n")
    assert f"{file}: run.mode = 'foo': must be rl, sft or eval" in lines
    assert f"{file}: producer.window = 0: must be a whole number, at least 1" in lines
    assert f"{file}: producer.shuffle = 'maybe': must be true or false" in lines
    assert "DISTAFF_WORKER__SLOTS: worker.slots = 'many': must be a whole number, at least 1" in lines
    assert "--sampling.temperature: sampling.temperature = 'hot': must be a number, at least 0, at most 10" in lines


@pytest.mark.parametrize(
    ("content", "said"),
    [(b"[run\n", "not valid TOML"), (b"\xff\xfe", "cannot be read"), (None, "there is no such file")],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, content: bytes | None, said: str) -> None:
    """Not TOML, not text, not there."""
    file = tmp_path / "run.toml"
    if content is not None:
        file.write_bytes(content)
    assert str(file) in message(file)
    assert said in message(file)


def test_beats_come_six_times_a_lease_and_never_too_late() -> None:
    """The default follows the lease; a beat that could lose it is refused."""
    assert from_flags("--worker.lease-s", "12").settings.worker.beat_s == 2
    assert WorkerSection().beat_s == 5
    assert "at most half of lease_s" in message(None, "--worker.lease-s", "3", "--worker.beat-s", "2")


def test_a_template_file_is_read_relative_to_the_settings_file(tmp_path: Path) -> None:
    """`@FILE` becomes its text; a missing one is named."""
    (tmp_path / "chat.jinja").write_text("{{ messages }}", "utf-8")
    file = toml(tmp_path, '[tokenizer]\nchat_template = "@chat.jinja"\n')
    assert load(file=file).settings.tokenizer.chat_template == "{{ messages }}"
    assert "missing.jinja" in message(None, "--tokenizer.chat-template", "@missing.jinja")


def test_no_secret_is_in_the_printed_settings_or_in_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Passwords of URLs, values of secret variables, keys people put where they do not belong."""
    monkeypatch.setenv("CANARY_API_KEY", "canary-in-variable")
    monkeypatch.setenv("DISTAFF_REDIS_URL", "redis://:canary-password@h:6379/0")
    file = toml(tmp_path, '[sampling.extra]\napi_key = "canary-extra"\nuser = "canary-in-variable"\n')
    shown = effective_toml(load(file=file))
    assert "canary" not in shown
    assert "redis://:***@h:6379/0" in shown
    wrong = toml(tmp_path, 'redis_url = ["redis://:canary-password@h"]\n[run]\nmode = "canary-in-variable"\n')
    monkeypatch.delenv("DISTAFF_REDIS_URL")
    assert "canary" not in message(wrong)


def test_printed_settings_can_be_read_again(tmp_path: Path) -> None:
    """--print-config is TOML with the same meaning."""
    loaded = from_flags(
        *("--run.name", "again", "--environment.args", '{"a": {"b": [1, "x"]}, "t": "é\\u2028\\u007f\\n"}'),
        *("--engine.base-urls", "http://a:1,http://b:2", "--sampling.temperature", "0.25", "--worker.lease-s", "6"),
    )
    text = effective_toml(loaded)
    assert Settings.model_validate(tomllib.loads(text)) == loaded.settings
    assert 'name = "again"  # --run.name' in text


@pytest.mark.parametrize("path", list(declared_keys()))
def test_every_key_has_a_variable_and_a_flag_that_set_it(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is declared once works in all three places."""
    key = declared_keys()[path]
    text, value = {
        "bool": ("true", True),
        "list": ("http://x", ["http://x"]),
        "dict": ('{"a": 1}', {"a": 1}),
        "scalar": (str(max([1, *(limit.ge for limit in key.metadata if hasattr(limit, "ge"))])), None),
    }[key.kind]
    if "whole number" not in key.allowed and "a number" not in key.allowed and key.kind == "scalar":
        text = key.allowed.replace(" or ", ", ").split(", ")[-1] if "a text" not in key.allowed else "some_key"
    by_flag = from_flags(key.flag, text, *(["--worker.beat-s", "0.1"] if path == "worker.lease_s" else []))
    assert by_flag.origins[path] == key.flag
    monkeypatch.setenv(key.variable, text)
    if path == "worker.lease_s":
        monkeypatch.setenv("DISTAFF_WORKER__BEAT_S", "0.1")
    by_variable = load()
    assert by_variable.origins[path] == key.variable
    assert by_variable.settings == by_flag.settings
    if value is not None:
        node: object = by_flag.settings
        for part in path.split("."):
            node = getattr(node, part)
        assert node == value


def test_the_run_configuration_holds_no_part_of_this_process() -> None:
    """What travels through Redis has no URL with a password in it."""
    settings = Settings(redis_url="redis://:canary@h")
    assert settings.run_config() == RunConfig()
    assert "canary" not in settings.run_config().model_dump_json()


def test_an_evaluation_plays_its_own_split_count_and_temperature() -> None:
    """`for_evaluation` turns a training file into an evaluation of it."""
    settings = from_flags(
        "--evaluate.n", "4", "--run.mode", "rl", "--rollouts.min-rollouts", "3"
    ).settings.for_evaluation()
    assert (settings.run.mode, settings.environment.split) == ("eval", "eval")
    assert (settings.rollouts.group_size, settings.sampling.temperature) == (4, 0)
    assert settings.rollouts.required("eval") == 1


def test_the_documentation_lists_every_key_as_it_is() -> None:
    """docs/configuration.md is generated: `python -m distaff.cli.reference docs/configuration.md`."""
    text = (ROOT / "docs" / "configuration.md").read_text("utf-8")
    assert reference() in text, "run: python -m distaff.cli.reference docs/configuration.md"


def test_importing_the_settings_needs_no_role_and_no_rq() -> None:
    """`distaff status` works where only the command line is installed."""
    code = "import sys, distaff.cli.main, distaff.cli.status, distaff.settings; print(sorted(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert not re.findall(r"'(rq|verifiers|openai|transformers|distaff_\w+)'", loaded)
