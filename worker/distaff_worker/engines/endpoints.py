"""Which server a request goes to: sticky by session, away from a sick one, back when it has recovered.

Invariant: `choose` always names a server; with all of them sick it is the session's own, so a single server is
never given up. Never does I/O.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

SICK_AFTER_FAILURES = 3
"""Bad answers in a row; a failed connection counts as that many at once."""
FIRST_REST_S = 1.0
LONGEST_REST_S = 30.0
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


@dataclass(slots=True, kw_only=True, eq=False)
class Endpoint:
    """One server and how it has been doing."""

    url: str
    proxy: str | None
    failures: int = 0
    """In a row."""
    rests_until: float = 0.0
    """On the clock of `Endpoints`: requests avoid it before."""


class Endpoints:
    """The base URLs of an engine. `clock` gives monotonic seconds."""

    def __init__(self, urls: Sequence[str], *, clock: Callable[[], float], rng: random.Random) -> None:
        self.all = [Endpoint(url=url, proxy=proxy_for(url)) for url in dict.fromkeys(urls)]
        self._clock = clock
        self._rng = rng

    def choose(self, session: str, *, avoid: Endpoint | None = None) -> Endpoint:
        """The session's first healthy server in its own order of preference; `avoid` only when no other is healthy."""
        if len(self.all) == 1:
            return self.all[0]
        ranked = self._ranked(session)
        now = self._clock()
        healthy = [endpoint for endpoint in ranked if endpoint.rests_until <= now]
        chosen = next((endpoint for endpoint in healthy if endpoint is not avoid), None)
        if chosen is None:
            return healthy[0] if healthy else ranked[0]
        if chosen.failures >= SICK_AFTER_FAILURES:
            # One request finds out whether it has recovered; the others stay away until that one is answered.
            chosen.rests_until = now + self._rest(chosen.failures)
        return chosen

    def _ranked(self, session: str) -> list[Endpoint]:
        """Rendezvous hashing: a server that comes or goes moves only its own sessions; the same in every worker."""
        if not session:
            return self._rng.sample(self.all, len(self.all))

        def weight(endpoint: Endpoint) -> bytes:
            return hashlib.blake2b(f"{session} {endpoint.url}".encode(), digest_size=8).digest()

        return sorted(self.all, key=weight)

    def succeeded(self, endpoint: Endpoint) -> None:
        """The server answered, whatever it said."""
        endpoint.failures = 0
        endpoint.rests_until = 0.0

    def failed(self, endpoint: Endpoint, *, connection: bool) -> None:
        """The server did not answer (`connection`) or answered that it cannot."""
        endpoint.failures += SICK_AFTER_FAILURES if connection else 1
        if endpoint.failures >= SICK_AFTER_FAILURES:
            endpoint.rests_until = self._clock() + self._rest(endpoint.failures)

    def _rest(self, failures: int) -> float:
        doublings = min(failures // SICK_AFTER_FAILURES - 1, 10)
        return min(LONGEST_REST_S, FIRST_REST_S * 2.0**doublings) * self._rng.uniform(0.75, 1.25)


def proxy_for(url: str) -> str | None:
    """The proxy HTTP_PROXY, HTTPS_PROXY and NO_PROXY name for `url`; never one for this machine itself."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    proxy = getproxies().get(parts.scheme)
    return None if proxy is None or host in _LOOPBACK or proxy_bypass(host) else proxy
