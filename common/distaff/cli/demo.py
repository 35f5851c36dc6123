"""`distaff demo`: a real small model plays a real environment through the real queue, in RL and in SFT mode, on this machine.

Invariant: what it shows is read from the archive it wrote. Needs no key, no GPU and no network; leaves nothing running.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distaff.cli.demo_report import Summary, print_report, read_groups, summarize
from distaff.cli.screen import Screen
from distaff.cli.signals import INTERRUPTED, StopSignal
from distaff.cli.supervise import Farm, sink_of, standing, with_readable_logs
from distaff.cli.tree import Child, Tree
from distaff.clients import connect
from distaff.errors import ConfigurationError
from distaff.runs import RunState
from distaff.settings import RUNS_DIRECTORY, Settings
from distaff.types import Mode

MODES: tuple[Mode, ...] = ("rl", "sft")
ENGINE_START_S = 120.0
GROUPS, QUICK_GROUPS, GROUP_SIZE = 6, 2, 4


@dataclass(frozen=True, slots=True)
class Engine:
    """The running model server."""

    url: str
    model: str
    tokenizer: str
    """Folder."""


def demo(settings: Settings, *, quick: bool) -> int:
    """Run it all and print the table. Raises ConfigurationError when an extra is missing."""
    tokenizer = _tokenizer_folder()
    settings = with_readable_logs(settings)
    folder = RUNS_DIRECTORY / "demo" / time.strftime("%Y%m%d-%H%M%S")
    lines: list[str] = []

    def keep(name: str, line: str) -> None:
        lines.append(f"{name} | {line}")
        del lines[:-200]

    with (
        Screen(settings.log) as screen,
        StopSignal(raise_on_second=False) as stop,
        Tree(keep if settings.log.level == "warning" else sink_of(screen, settings)) as tree,
    ):
        farm = Farm(tree, stop, url=settings.redis_url)
        engine = _start_engine(tree, stop, tokenizer)
        if engine is None:
            return INTERRUPTED
        screen.line(
            "the engine is ready; it samples for all rollouts at once on the CPU: the first group takes a while"
        )
        plans = {mode: demo_settings(settings, mode, engine, folder, quick=quick) for mode in MODES}
        code = _play(farm, plans, screen)
        farm.end()
        if code:
            for line in [] if stop.event.is_set() else lines[-40:]:
                screen.line(line)
            return code
    print_report({mode: _summary(plan) for mode, plan in plans.items()}, Path(tokenizer))
    return 0


def _play(farm: Farm, plans: dict[Mode, Settings], screen: Screen) -> int:
    with connect(farm.url, client_name="distaff-demo") as client:
        farm.start_workers(plans["rl"])
        for plan in plans.values():
            began = time.monotonic()
            code = farm.play(
                client,
                plan,
                ["archive", "--quiet"],
                show=_shower(screen, plan, began),
            )
            if code:
                return code
    return 0


def _shower(screen: Screen, plan: Settings, began: float) -> Callable[[RunState], None]:
    return lambda state: screen.show(standing(plan, state, began))


def demo_settings(settings: Settings, mode: Mode, engine: Engine, folder: Path, *, quick: bool) -> Settings:
    """What one half of the demo plays."""
    stamp = folder.name
    data = settings.model_dump(exclude={"redis_url"})
    data |= {
        "run": {"name": f"demo-{mode}-{stamp}", "pool": f"demo-{stamp}", "mode": mode},
        "environment": {"id": "guess-number"},
        "engine": {
            "kind": "llamacpp" if mode == "rl" else "openai",
            "base_urls": [engine.url],
            "model": engine.model,
        },
        "tokenizer": {"name": engine.tokenizer},
        "sampling": {"temperature": 1.0, "max_tokens": 16, "seed": 7},
        "rollouts": {"group_size": GROUP_SIZE},
        "producer": {"limit": QUICK_GROUPS if quick else GROUPS},
        "archive": {"directory": str(folder / mode)},
    }
    data["worker"] |= {"slots": 8}
    return Settings.model_validate(data).model_copy(update={"redis_url": settings.redis_url})


def _summary(plan: Settings) -> Summary:
    return summarize(read_groups(Path(plan.archive.directory)), Path(plan.archive.directory))


def _tokenizer_folder() -> str:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "distaff"
    try:
        make: Callable[[Path], Path] = importlib.import_module(
            "distaff_worker.demo_engine.gguf_tokenizer"
        ).demo_tokenizer_dir
        return str(make(cache))
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f'distaff demo needs the extras "all" ({error.name} is not installed): pip install "distaff[all]"'
        ) from None


def _start_engine(tree: Tree, stop: StopSignal, tokenizer: str) -> Engine | None:
    """Start the model server and wait for its line; None when interrupted."""
    child = tree.start("engine", [sys.executable, "-m", "distaff_worker.demo_engine", "--port", "0"])
    end = time.monotonic() + ENGINE_START_S
    while not stop.event.is_set():
        ready = _ready_line(child)
        if ready is not None:
            return Engine(str(ready["url"]), str(ready["model"]), tokenizer)
        if child.code is not None or time.monotonic() > end:
            child.drained()
            raise ConfigurationError("the demo engine did not start:\n" + "\n".join(list(child.tail)[-15:]))
        time.sleep(0.05)
    return None


def _ready_line(child: Child) -> dict[str, Any] | None:
    for line in list(child.tail):
        if line.startswith('{"url"'):
            ready: dict[str, Any] = json.loads(line)
            return ready
    return None
