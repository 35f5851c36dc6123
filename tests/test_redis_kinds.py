"""Every kind of Redis that can run here: refused where it would lose data or let strangers in, and settling the same everywhere."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from hashlib import sha1
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import redis
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from distaff import scripts
from distaff.clients import connect, ping
from distaff.errors import ConfigurationError, RedisUnavailable
from distaff.policy import publish_policy_version
from distaff.runs import delete_run
from distaff.safety import check_redis
from distaff_producer.admit import Admission
from tests import test_admit, test_consumer, test_consumer_faults, test_faults, test_producer, test_service
from tests.harness.servers import KINDS, Kind, RedisServer
from tests.producer_support import config
from tests.settlement_machine import Settlement
from tests.worker_support import open_run

EVICTING = (
    "allkeys-lru",
    "allkeys-lfu",
    "allkeys-random",
    "volatile-lru",
    "volatile-lfu",
    "volatile-random",
    "volatile-ttl",
)
BORROWED: tuple[Callable[..., Any], ...] = (
    test_admit.test_a_batch_is_queued_and_counted_in_one_step,
    test_admit.test_a_batch_sent_twice_is_admitted_once,
    test_admit.test_only_what_fits_the_window_is_admitted,
    test_admit.test_a_full_redis_refuses_a_batch_whole,
    test_admit.test_a_closed_or_deleted_run_admits_nothing,
    test_admit.test_a_run_closes_only_at_the_expected_cursor,
    test_producer.test_the_window_holds_exactly_and_the_run_drains,
    test_service.test_a_settlement_sent_twice_writes_once,
    test_service.test_a_dead_letter_is_a_failed_job_that_rq_requeue_brings_back,
    test_service.test_items_that_may_kill_workers_are_played_one_at_a_time,
    test_faults.test_a_full_redis_costs_no_lease_and_no_result,
    test_faults.test_a_sum_out_of_range_does_not_end_a_settlement_half_way,
    test_consumer.test_a_slow_second_consumer_group_loses_nothing,
    test_consumer_faults.test_a_group_that_kills_every_consumer_is_parked_after_max_deliveries,
    test_consumer_faults.test_acknowledged_groups_are_freed_while_redis_is_full,
)
"""What settles, tested elsewhere on the first kind. The state machine below adds every step of delivery, in any order."""


async def borrow(test: Callable[..., Any], client: redis.Redis, url: str) -> None:
    """Run a test of another file on this server, which is emptied first."""
    client.flushall()
    wanted = inspect.signature(test).parameters
    offered: dict[str, Any] = {"client": client, "redis_url": url, "full_memory": None}
    if "admission" in wanted:
        offered["admission"] = Admission(client, config(shuffle=False, window=6))
        offered["admission"].open(target=20)
    if "full_memory" in wanted:
        client.config_set("maxmemory", "1")
    try:
        outcome = test(**{name: offered[name] for name in wanted})
        if inspect.isawaitable(outcome):
            await outcome
    except Exception as error:
        error.add_note(f"in {test.__module__}.{test.__name__}")
        raise
    finally:
        client.config_set("maxmemory", "0")


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS[1:])
async def test_settlement_is_the_same_on_every_kind(kind: Kind, tmp_path: Path) -> None:
    """The tests of settlement, admission and acknowledgement pass on the other kinds as on the first."""
    with RedisServer(tmp_path, kind=kind) as server:
        for test in BORROWED:
            await borrow(test, server.client(), server.url)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS[1:])
def test_any_order_of_steps_settles_every_item_once_on_every_kind(kind: Kind, tmp_path: Path) -> None:
    """The state machine of `test_settlement_machine`, for a while: claim, beat, emit, bury, release, sweep, acknowledge, free, ..."""
    with RedisServer(tmp_path, kind=kind) as server:
        Settlement.server = server.client()
        run_state_machine_as_test(
            Settlement,
            settings=settings(
                max_examples=12,
                stateful_step_count=40,
                deadline=None,
                print_blob=True,
                suppress_health_check=list(HealthCheck),
            ),
        )


@pytest.mark.parametrize("kind", KINDS)
def test_every_script_is_taken_by_every_kind(kind: Kind, tmp_path: Path) -> None:
    """None of them is refused for a flag or for its syntax, and each keeps its name, which is its hash."""
    names = [entry.name.removesuffix(".lua") for entry in files("distaff").joinpath("lua").iterdir()]
    assert len(names) > 10
    with RedisServer(tmp_path, kind=kind) as server:
        for name in names:
            text = scripts.load(name)
            assert server.client().script_load(text) == sha1(text.encode(), usedforsecurity=False).hexdigest(), name


@pytest.mark.parametrize("kind", KINDS)
def test_scripts_that_nothing_else_here_runs(kind: Kind, tmp_path: Path) -> None:
    """Deleting a run and publishing a version."""
    with RedisServer(tmp_path, kind=kind) as server:
        client = server.client()
        assert publish_policy_version(client, "r", 3)
        open_run(client, "r")
        client.rpush("rq:queue:default", "r-000000000", "other-000000000")
        assert delete_run(client, "r")
        assert not client.exists("distaff:run:r:policy")


@pytest.mark.parametrize("kind", KINDS)
def test_a_redis_that_may_evict_is_refused(kind: Kind, tmp_path: Path) -> None:
    """P8: by its configuration or by CONFIG SET, whichever policy it is, with the mend; the mend mends it."""
    with RedisServer(tmp_path, kind=kind, config={"maxmemory-policy": "allkeys-lru"}) as server:
        client = server.client()
        with pytest.raises(
            ConfigurationError, match=r"maxmemory-policy allkeys-lru.*CONFIG SET maxmemory-policy noeviction"
        ):
            check_redis(client, server.url)
        for policy in EVICTING:
            client.config_set("maxmemory-policy", policy)
            with pytest.raises(ConfigurationError, match=f"maxmemory-policy {policy}"):
                check_redis(client, server.url)
        client.config_set("maxmemory-policy", "noeviction")
        check_redis(client, server.url)


@pytest.mark.parametrize("kind", KINDS)
def test_a_redis_that_others_reach_is_refused_without_a_password(kind: Kind, tmp_path: Path) -> None:
    """P27: a real server, reached by an address that is not the loopback's; a password in the URL, or saying so, lets it pass."""
    with RedisServer(tmp_path / "open", kind=kind, tcp=True) as server:
        check_redis(server.client(), server.url)
        url = server.url.replace("127.0.0.1", "0.0.0.0")
        with connect(url) as client:
            with pytest.raises(ConfigurationError, match="without a password"):
                check_redis(client, url)
            check_redis(client, url, allow_unprotected=True)
    with RedisServer(tmp_path / "closed", kind=kind, tcp=True, config={"requirepass": "secret"}) as server:
        url = server.url.replace("127.0.0.1", "0.0.0.0")
        with connect(url) as client:
            check_redis(client, url)
        without = server.url.replace(":secret@", "")
        with (
            connect(without) as client,
            pytest.raises(RedisUnavailable, match=r"refuses the credentials.*Put the password"),
        ):
            ping(client, without)


@pytest.mark.parametrize("kind", KINDS)
def test_a_user_who_may_not_ask_is_taken_at_its_word(kind: Kind, tmp_path: Path) -> None:
    """What an ACL hides is reported in the log and not guessed, on every kind's idea of an ACL."""
    with RedisServer(tmp_path, kind=kind, config={"maxmemory-policy": "allkeys-lru"}) as server:
        server.client().acl_setuser(
            "quiet", enabled=True, passwords=["+pw"], categories=["+@all"], commands=["-info"], keys=["*"]
        )
        url = server.url.replace("unix://", "unix://quiet:pw@")
        with connect(url) as client:
            check_redis(client, url)
