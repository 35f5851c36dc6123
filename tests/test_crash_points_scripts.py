"""P5: a Redis that forgets its scripts (SCRIPT FLUSH, a failover) costs repetitions and nothing else."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import redis

from distaff import GroupConsumer
from distaff.clients import connect
from distaff_producer.produce import Producer
from tests.crash_processes import RUN
from tests.crash_support import Farm, Place, Scene
from tests.producer_support import Numbers, config
from tests.test_crash_points_consumers import a_trainer, an_archiver, check_empty, lay_out
from tests.test_crash_points_producer import ITEMS, a_producer, check_admitted_once
from tests.test_crash_points_worker import a_worker
from tests.worker_support import POOL

PAUSE_S = 0.005


@pytest.fixture(scope="module")
def farm() -> Iterator[Farm]:
    """A server and the process that victims are forked from."""
    with Farm() as opened:
        yield opened


@contextmanager
def forgetting(place: Place) -> Iterator[list[int]]:
    """Scripts are forgotten all the time; how often is counted."""
    over, flushed = threading.Event(), [0]

    def forget() -> None:
        with connect(place.url) as client:
            while not over.wait(PAUSE_S):
                client.script_flush()
                flushed[0] += 1

    thread = threading.Thread(target=forget)
    thread.start()
    try:
        yield flushed
    finally:
        over.set()
        thread.join(10)


@pytest.mark.parametrize("scene", [a_worker, a_producer, a_trainer, an_archiver])
def test_scripts_that_are_forgotten_all_the_time_cost_nothing_but_time(farm: Farm, scene: Scene) -> None:
    """Each role plays its scene to the end as if nothing had happened."""
    with farm.place() as place:
        with forgetting(place) as flushed:
            scene(place, None)
        assert flushed[0] > 5
        assert place.words.count("SCRIPT LOAD") > 1


@pytest.fixture
def forgetful(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Each script is forgotten once right after it was loaded and before it is run; the scripts it befell."""
    load, befallen = redis.Redis.script_load, list[str]()

    def load_and_forget(self: redis.Redis, script: Any) -> Any:
        sha = load(self, script)
        if script not in befallen:
            befallen.append(script)
            self.script_flush()
        return sha

    monkeypatch.setattr(redis.Redis, "script_load", load_and_forget)
    return befallen


def test_a_script_forgotten_between_loading_and_running_it_is_loaded_again(
    client: redis.Redis, redis_url: str, forgetful: list[str]
) -> None:
    """redis-py tries twice and then raises NoScriptError, which is an outage like any other: producer, worker and trainer go on."""
    client.script_flush()
    settings = config(run={"name": RUN, "pool": POOL}, shuffle=False, batch=50)
    assert Producer(settings, redis_url, Numbers(rows=ITEMS)).run().admitted == ITEMS
    assert len(forgetful) == 3, "open, admit, close"
    check_admitted_once(client)
    client.flushall()
    lay_out(client)
    with GroupConsumer(RUN, client, block_s=0.05) as consumer:
        for delivery in consumer:
            assert consumer.ack(delivery) == 1
    check_empty(client, "trainer")
