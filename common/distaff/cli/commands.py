"""What each subcommand calls, with its settings, its switches and where each setting came from.

Invariant: imports nothing that another subcommand needs and this one does not.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from distaff.settings import Settings

Origins = Mapping[str, str]


def produce(settings: Settings, switches: argparse.Namespace, _origins: Origins) -> int:
    from distaff.cli import roles

    return roles.produce(settings, quiet=switches.quiet)


def work(settings: Settings, _switches: argparse.Namespace, _origins: Origins) -> int:
    from distaff.cli import roles

    return roles.work(settings)


def archive(settings: Settings, switches: argparse.Namespace, _origins: Origins) -> int:
    from distaff.cli import roles

    return roles.archive(settings, quiet=switches.quiet)


def run(settings: Settings, _switches: argparse.Namespace, origins: Origins) -> int:
    from distaff.cli import supervise

    return supervise.run(_quieter(settings, origins))


def evaluate(settings: Settings, switches: argparse.Namespace, origins: Origins) -> int:
    from distaff.cli import roles, supervise

    if switches.attach:
        return roles.report(settings, quiet=switches.quiet)
    return supervise.evaluate(_quieter(settings, origins).for_evaluation())


def status(settings: Settings, switches: argparse.Namespace, origins: Origins) -> int:
    from distaff.cli import status as module

    run_name = settings.run.name if origins["run.name"] != "default" else None
    return module.show(settings.redis_url, run=run_name, watch=switches.watch, as_json=switches.json)


def doctor(settings: Settings, switches: argparse.Namespace, origins: Origins) -> int:
    from distaff.cli import doctor as module

    looked_at = settings.for_evaluation() if switches.evaluation else settings
    return module.examine(_quieter(looked_at, origins), within_s=switches.within, as_json=switches.json)


def demo(settings: Settings, switches: argparse.Namespace, origins: Origins) -> int:
    from distaff.cli import demo as module

    return module.demo(_quieter(settings, origins), quick=switches.quick)


def runs(settings: Settings, switches: argparse.Namespace, _origins: Origins) -> int:
    from distaff.cli import deletion

    return deletion.delete(settings.redis_url, switches.name, force=switches.force)


def dead(settings: Settings, switches: argparse.Namespace, _origins: Origins) -> int:
    from distaff.cli import dead as module

    return module.run(settings.redis_url, switches)


def acl(settings: Settings, switches: argparse.Namespace, origins: Origins) -> int:
    from distaff.cli import acl as module

    pool = settings.run.pool if origins["run.pool"] != "default" else ""
    return module.show(pool=pool, runs=switches.runs)


def _quieter(settings: Settings, origins: Origins) -> Settings:
    """What shows its own progress or findings shows events of its processes when they are asked for."""
    if origins["log.level"] != "default":
        return settings
    return settings.model_copy(update={"log": settings.log.model_copy(update={"level": "warning"})})
