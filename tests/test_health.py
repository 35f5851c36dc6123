"""The worker's health port: what it says, and that work goes on without it."""

from __future__ import annotations

import socket
import urllib.error
import urllib.request

import pytest

from distaff_worker.health import HealthServer
from distaff_worker.leases import Counts
from distaff_worker.metrics import Metrics


def get(port: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


@pytest.mark.parametrize("good", [True, False])
def test_health_and_readiness_are_status_codes(good: bool) -> None:
    """200 when it is well, 503 when it is not; anything else is 404."""
    server = HealthServer(registry=Metrics().registry, healthy=lambda: good, ready=lambda: not good)
    port = server.start("127.0.0.1", 0)
    assert port is not None
    assert get(port, "/healthz")[0] == (200 if good else 503)
    assert get(port, "/readyz")[0] == (503 if good else 200)
    assert get(port, "/nothing")[0] == 404
    server.stop()


def test_metrics_count_what_was_emitted() -> None:
    """Prometheus' text format with the counters of the groups."""
    metrics = Metrics()
    counts = Counts(rollouts=4, samples=5, tokens=100, trained_tokens=40, reward_sum=2.0, reward_count=4)
    metrics.emitted(counts, size_bytes=1000, seconds=0.2)
    server = HealthServer(registry=metrics.registry, healthy=lambda: True, ready=lambda: True)
    port = server.start("127.0.0.1", 0)
    assert port is not None
    _, text = get(port, "/metrics")
    server.stop()
    assert "distaff_groups_emitted_total 1.0" in text
    assert "distaff_tokens_emitted_total 100.0" in text


def test_a_taken_metrics_port_costs_nothing_but_the_metrics() -> None:
    """P30: the port is somebody else's; `start` says so and raises nothing."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        server = HealthServer(registry=Metrics().registry, healthy=lambda: True, ready=lambda: True)
        assert server.start("127.0.0.1", taken.getsockname()[1]) is None
        server.stop()
