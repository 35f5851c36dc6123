"""Any order of the steps of delivery, on a real server, next to a model: nothing is lost, nothing is doubled, nothing is stuck."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from distaff.clients import connect
from tests.redis_support import running_redis
from tests.settlement_machine import Settlement


def run(*, examples: int, steps: int) -> None:
    profile = settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        print_blob=True,
        suppress_health_check=list(HealthCheck),
    )
    with running_redis() as url, connect(url) as client:
        Settlement.server = client
        run_state_machine_as_test(Settlement, settings=profile)


@pytest.mark.slow
def test_any_order_of_steps_settles_every_item_once() -> None:
    """P1, P2, P3, P5, P6, P9: every step of delivery and everything an operator may do to it, held against the model."""
    run(examples=80, steps=40)


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
def test_very_many_orders_of_steps_settle_every_item_once() -> None:
    """As above, for many minutes."""
    run(examples=3000, steps=80)
