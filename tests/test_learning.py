"""A policy of eighty numbers learns from the stream: what a trainer does with our samples, without a model server or torch.

The real thing is examples/grpo_cpu, tested by `make test-vllm`. Here a scripted engine samples from a table of logits, and a trainer that
reads nothing but the stream makes policy-gradient steps on it.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator, Sequence

import numpy as np
import redis
from numpy.typing import NDArray

from distaff import GroupConsumer, TrainingSample, publish_policy_version
from distaff.clients import connect
from tests.farm_support import EOS, make_worker, produce, run_config, tokenizer
from tests.harness.oracle import check_settled
from tests.letters_env import ANSWERS
from tests.scripted_engine import Answer, Ask, ScriptedEngine

GROUPS, GROUP_SIZE, STEPS, RATE = 4, 8, 12, 12.0


class TablePolicy:
    """Logits of the next token given the question and the token before it: four letters and the stop token can be said.

    A letter is as likely as another at first, and after one letter the end is likelier than a second one.
    """

    def __init__(self) -> None:
        letters = [_only(tokenizer()(letter, add_special_tokens=False).input_ids) for letter in "abcd"]
        self.tokens = [*letters, EOS]
        self.questions = [_only(tokenizer()(question, add_special_tokens=False).input_ids) for question in ANSWERS]
        self.logits = np.zeros((len(self.questions), len(self.tokens) + 1, len(self.tokens)))
        self.logits[:, -1, -1] = -3.0  # the last row is for what stands before an answer
        self.logits[:, :-1, -1] = 2.0

    def place(self, context: Sequence[int]) -> tuple[int, int]:
        """The row of the table for the token after `context`."""
        question = next(self.questions.index(token) for token in context if token in self.questions)
        before = context[-1]
        return question, self.tokens.index(before) if before in self.tokens else len(self.tokens)

    def logprobs(self, place: tuple[int, int]) -> NDArray[np.float64]:
        row = self.logits[place]
        logprobs: NDArray[np.float64] = row - row.max() - np.log(np.exp(row - row.max()).sum())
        return logprobs

    def sample(self, prompt: Sequence[int], *, max_tokens: int, rng: random.Random) -> Answer:
        ids: list[int] = list(prompt)
        logprobs: list[float] = []
        while len(logprobs) < max_tokens and not (logprobs and ids[-1] == EOS):
            row = self.logprobs(self.place(ids))
            choice = rng.choices(range(len(row)), weights=np.exp(row).tolist())[0]
            ids.append(self.tokens[choice])
            logprobs.append(float(row[choice]))
        return Answer(
            token_ids=ids[len(prompt) :],
            logprobs=logprobs,
            finish_reason="stop" if ids[-1] == EOS else "length",
            text=None,
        )


class TableTrainer:
    """Policy gradient with importance ratios. `worst`: the largest difference between a stored log-probability and the policy's own."""

    def __init__(self, policy: TablePolicy) -> None:
        self.policy = policy
        self.rewards: list[float] = []
        self.worst = 0.0
        self.settled: list[int] = []

    def run(self, url: str, run: str) -> None:
        """Until the run is over; a group is acknowledged after its step, so nothing is sampled ahead of it."""
        with connect(url) as client, GroupConsumer(run, client, group="trainer") as consumer:
            for step, batch in enumerate(consumer.batches(GROUPS), start=1):
                groups = [delivery.group for delivery in batch]
                assert all(group.policy.start == group.policy.end == step - 1 for group in groups)
                self._step([sample for group in groups for sample in group.samples])
                self.rewards.append(float(np.mean([group.statistics.reward_mean for group in groups])))
                publish_policy_version(client, run, step)
                consumer.ack(*batch)
                self.settled += [group.seq for group in groups]

    def _step(self, samples: Sequence[TrainingSample]) -> None:
        gradient = np.zeros_like(self.policy.logits)
        count = 0
        for sample in samples:
            for place, choice, sampled_with in self._trained(sample):
                row = self.policy.logprobs(place)
                logprob = row[choice] if choice is not None else -np.inf
                self.worst = max(self.worst, abs(logprob - sampled_with))
                if choice is not None:
                    one = np.arange(len(row)) == choice
                    gradient[place] += np.exp(logprob - sampled_with) * sample.advantage * (one - np.exp(row))
                count += 1
        self.policy.logits += RATE * GROUPS * gradient / count

    def _trained(self, sample: TrainingSample) -> Iterator[tuple[tuple[int, int], int | None, float]]:
        """(place, index of the token or None for one the policy cannot say, stored log-probability) of each trained token."""
        assert sample.logprobs is not None
        ids = sample.token_ids.tolist()
        for at in np.flatnonzero(sample.loss_mask):
            choice = self.policy.tokens.index(ids[at]) if ids[at] in self.policy.tokens else None
            yield self.policy.place(ids[:at]), choice, float(sample.logprobs[at])


def _only(ids: Sequence[int]) -> int:
    (token,) = ids
    return token


async def test_a_policy_learns_from_the_stream_and_its_log_probabilities_are_the_stored_ones(
    redis_url: str, client: redis.Redis
) -> None:
    """Every trained token is one the policy said, with its own log-probability; the reward rises from chance to nearly always right."""
    policy, rng = TablePolicy(), random.Random(1)

    async def script(ask: Ask) -> Answer:
        if ask.sampling["max_tokens"] == 1:
            return Answer(token_ids=[EOS], logprobs=[-0.5])
        return policy.sample(ask.prompt_ids, max_tokens=int(ask.sampling["max_tokens"]), rng=rng)

    trainer = TableTrainer(policy)
    async with ScriptedEngine(script=script) as engine:
        config = run_config(
            engine.url,
            environment={"id": "tests.letters_env"},
            sampling={"max_tokens": 3},
            rollouts={"group_size": GROUP_SIZE},
            producer={"limit": STEPS * GROUPS, "epochs": STEPS * GROUPS // len(ANSWERS), "window": GROUPS},
        )
        service, _ = make_worker(redis_url)
        working = asyncio.create_task(service.run())
        producing = asyncio.create_task(produce(redis_url, config))
        await asyncio.wait_for(asyncio.to_thread(trainer.run, redis_url, config.run.name), 100)
        service._stop("test")
        await asyncio.wait_for(asyncio.gather(working, producing), 30)
    check_settled(client, "run-1", emitted=trainer.settled)
    print([round(reward, 2) for reward in trainer.rewards])
    assert trainer.worst < 1e-5
    assert len(trainer.rewards) == STEPS
    assert trainer.rewards[0] < 0.4
    assert np.mean(trainer.rewards[-3:]) > 0.7
