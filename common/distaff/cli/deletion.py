"""`distaff runs delete NAME`.

Invariant: deletes nothing that belongs to another run.
"""

from __future__ import annotations

from distaff.cli.screen import say
from distaff.clients import connect, ping
from distaff.errors import ConfigurationError
from distaff.keys import RUN_NAME
from distaff.runs import delete_run, list_runs


def delete(url: str, run: str, *, force: bool) -> int:
    """Remove the run. Raises ConfigurationError when there is none or workers play it, RedisUnavailable."""
    if not RUN_NAME.fullmatch(run):
        raise ConfigurationError(f"{run!r} is no run name: 1 to 64 letters, digits, '_' or '-'")
    with connect(url, client_name="distaff-runs") as client:
        ping(client, url)
        if not delete_run(client, run, force=force):
            known = ", ".join(list_runs(client)) or "none"
            raise ConfigurationError(f"there is no run {run!r}; runs here: {known}")
    say(f"deleted run {run}")
    return 0
