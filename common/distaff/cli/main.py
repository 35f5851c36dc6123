"""The command `distaff`.

Invariant: every error distaff raises on purpose is shown as a message that fits on a screen, without a traceback (--log.level debug
shows it), and redacted. Exit codes: 0 done; 1 failed after work had begun; 2 settings, arguments or surroundings are
wrong, found before work began; 130 interrupted.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from redis.exceptions import RedisError

from distaff.cli import streams
from distaff.cli.flags import Parser, add_flags, collect, normalized, unknown_flag
from distaff.cli.loading import Loaded, load
from distaff.cli.roles import FailedLater
from distaff.cli.screen import complain, say
from distaff.cli.showing import effective_toml
from distaff.cli.signals import INTERRUPTED
from distaff.clients import explained
from distaff.errors import ConfigurationError, DistaffError, FatalRun, WorkerBroken
from distaff.settings import DEFAULT_REDIS_URL, Settings

FAILED, WRONG = 1, 2
_RUN = ("run", "environment", "engine", "tokenizer", "sampling", "rollouts", "advantage", "producer", "wire")
_REDIS = ("redis_url", "allow_unprotected")
_NAMES: Mapping[str, str] = {"--run": "run.name", "--pool": "run.pool"}
_PLAY: Mapping[str, str] = {"--mode": "run.mode", "--limit": "producer.limit"}
_WORK: Mapping[str, str] = {"--workers": "worker.processes", "--slots": "worker.slots"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A subcommand that reads settings. `call`: "module:function" of (settings, arguments), imported when it runs."""

    help: str
    call: str
    shown: tuple[str, ...]
    shortcuts: Mapping[str, str] = field(default_factory=dict)
    switches: Mapping[str, str] = field(default_factory=dict)
    """Flags without a value that are not settings, and their help."""
    embeds_redis: bool = False
    declare: str = ""
    """As `call`, of (the parser): adds arguments that are not settings."""
    usage: str = ""
    """What stands before FILE."""


COMMANDS: Mapping[str, Command] = {
    "run": Command(
        help="produce, play and archive a run, all in one process tree",
        call="distaff.cli.commands:run",
        shown=(*_RUN, *_REDIS, "worker", "archive", "log"),
        shortcuts={**_NAMES, **_PLAY, **_WORK, "--directory": "archive.directory"},
        embeds_redis=True,
    ),
    "produce": Command(
        help="put the items of an environment on the queue",
        call="distaff.cli.commands:produce",
        shown=(*_RUN, *_REDIS, "log"),
        shortcuts={**_NAMES, **_PLAY},
        switches={"--quiet": "no progress, no report"},
    ),
    "work": Command(
        help="play the items of a pool; needs a Redis URL and a pool and nothing else",
        call="distaff.cli.commands:work",
        shown=(*_REDIS, "worker", "log"),
        shortcuts={"--pool": "run.pool", "--slots": "worker.slots"},
    ),
    "archive": Command(
        help="write a run's groups to JSONL files",
        call="distaff.cli.commands:archive",
        shown=(*_REDIS, "archive", "log"),
        shortcuts={**_NAMES, "--directory": "archive.directory"},
        switches={"--quiet": "no progress, no report"},
    ),
    "evaluate": Command(
        help="play the eval split and write metrics.json and samples.jsonl",
        call="distaff.cli.commands:evaluate",
        shown=(*_RUN, *_REDIS, "worker", "evaluate", "log"),
        shortcuts={
            **_NAMES,
            **_WORK,
            "--limit": "producer.limit",
            "-n": "evaluate.n",
            "--directory": "evaluate.directory",
        },
        switches={
            "--attach": "start no producer and no worker: only collect a run that others play",
            "--quiet": "no progress",
        },
        embeds_redis=True,
    ),
    "doctor": Command(
        help="check Redis, engine, tokenizer and environment before a run, and say how to mend what is wrong",
        call="distaff.cli.commands:doctor",
        shown=(*_RUN, *_REDIS, "evaluate", "log"),
        shortcuts={**_NAMES, **_PLAY},
        switches={"--json": "one JSON object", "--evaluation": "look at what `distaff evaluate` would play"},
        embeds_redis=True,
        declare="distaff.cli.doctor:declare",
    ),
    "status": Command(
        help="what runs and workers are doing",
        call="distaff.cli.commands:status",
        shown=(*_REDIS,),
        shortcuts=_NAMES,
        switches={"--watch": "show it again every two seconds", "--json": "one JSON object (a line each with --watch)"},
    ),
    "demo": Command(
        help="a small model plays a small environment, in RL and in SFT mode; no key, no GPU",
        call="distaff.cli.commands:demo",
        shown=("log",),
        switches={"--quick": "fewer groups"},
        embeds_redis=True,
    ),
    "runs": Command(
        help="delete a run and everything it left in Redis",
        call="distaff.cli.commands:runs",
        shown=(*_REDIS,),
        switches={"--force": "even while workers play it"},
        usage="delete NAME ",
    ),
    "dead": Command(
        help="list, show, retry or drop a run's dead letters",
        call="distaff.cli.commands:dead",
        shown=(*_REDIS,),
        switches={
            "--all": "every letter; for retry, those of kind `dropped` left out",
            "--json": "list: one JSON object",
        },
        declare="distaff.cli.dead_arguments:declare",
        usage="list|show|retry|drop RUN [SEQ ...] ",
    ),
    "acl": Command(
        help="print Redis users with no more rights than each role needs",
        call="distaff.cli.commands:acl",
        shown=(),
        shortcuts={"--pool": "run.pool"},
        declare="distaff.cli.acl:declare",
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    streams.secure()
    # transformers advises installing torch, which no role has a use for. It says so when it is imported, by whoever comes first.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        code = _dispatch(arguments)
        if code == INTERRUPTED:
            complain("interrupted")
        return code
    except KeyboardInterrupt:
        complain("interrupted")
        return INTERRUPTED
    except FailedLater as later:
        return _fail(arguments, later.error, FAILED)
    except (FatalRun, WorkerBroken) as error:
        return _fail(arguments, error, FAILED)
    except DistaffError as error:
        return _fail(arguments, error, WRONG)
    except BrokenPipeError:
        return FAILED
    except Exception:  # noqa: BLE001 - the last boundary: a bug is shown whole, but redacted
        complain("distaff: this is a bug\n" + traceback.format_exc())
        return FAILED


def _fail(arguments: Sequence[str], error: DistaffError, code: int) -> int:
    if _debugging(arguments):
        complain("".join(traceback.format_exception(error)))
    command = arguments[0] if arguments and arguments[0] in COMMANDS else ""
    prefix = f"distaff {command}".rstrip()
    complain(str(error) if str(error).startswith(prefix) else f"{prefix}: {error}")
    return code


def _debugging(arguments: Sequence[str]) -> bool:
    words = " ".join(arguments).replace("=", " ")
    return "--log.level debug" in words


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        say(_overview())
        return 0 if arguments else WRONG
    if arguments[0] == "--version":
        say(f"distaff {importlib.import_module('importlib.metadata').version('distaff')}")
        return 0
    name = arguments[0]
    if name not in COMMANDS:
        raise ConfigurationError(_unknown_command(name))
    command = COMMANDS[name]
    parsed = _parse(name, command, arguments[1:])
    loaded = load(file=parsed.file, flags=collect(parsed))
    if parsed.print_config:
        say(effective_toml(loaded))
        return 0
    return _call(command, _with_redis(command, loaded, parsed), parsed, loaded)


def _parse(name: str, command: Command, arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser(
        prog=f"distaff {name}",
        usage=f"distaff {name} {command.usage}[FILE] [--section.key VALUE ...]",
        description=command.help,
        epilog="Every key can also stand in FILE or in the environment (DISTAFF_SECTION__KEY); flags win.",
        allow_abbrev=False,
    )
    if name == "runs":
        parser.add_argument("action", choices=["delete"])
        parser.add_argument("name", metavar="NAME", help="the run")
    if command.declare:
        _imported(command.declare)(parser)
    if name != "dead":
        parser.add_argument("file", nargs="?", type=Path, metavar="FILE", help="settings in TOML")
    parser.add_argument(
        "--print-config", action="store_true", help="print the settings in force and where each comes from"
    )
    for flag, text in command.switches.items():
        parser.add_argument(flag, action="store_true", help=text)
    add_flags(parser, shown=command.shown, shortcuts=command.shortcuts)
    parsed, unknown = parser.parse_known_args(normalized(arguments, command.shortcuts))
    if unknown:
        raise unknown_flag(unknown[0])
    return parsed


def _with_redis(command: Command, loaded: Loaded, parsed: argparse.Namespace) -> Settings:
    settings = loaded.settings
    if settings.redis_url or (command.embeds_redis and not getattr(parsed, "attach", False)):
        return settings
    return settings.model_copy(update={"redis_url": DEFAULT_REDIS_URL})


def _call(command: Command, settings: Settings, parsed: argparse.Namespace, loaded: Loaded) -> int:
    called: Callable[[Settings, argparse.Namespace, Mapping[str, str]], Any] = _imported(command.call)
    try:
        return int(called(settings, parsed, loaded.origins))
    except RedisError as error:
        raise explained(error, settings.redis_url) from error


def _imported(name: str) -> Any:
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)


def _overview() -> str:
    width = max(len(name) for name in COMMANDS)
    lines = [f"  {name:<{width}}  {command.help}" for name, command in COMMANDS.items()]
    return (
        "usage: distaff COMMAND [FILE] [--section.key VALUE ...]\n\n"
        + "\n".join(lines)
        + "\n\ndistaff COMMAND --help lists the keys."
    )


def _unknown_command(name: str) -> str:
    import difflib

    close = difflib.get_close_matches(name, COMMANDS, 1)
    return f"unknown command {name!r}" + (
        f"; did you mean {close[0]}?" if close else f"; known are {', '.join(COMMANDS)}"
    )


if __name__ == "__main__":
    sys.exit(main())
