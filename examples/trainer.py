"""A trainer: reads batches of scored groups, "trains", acknowledges, publishes its policy version.

python examples/trainer.py redis://127.0.0.1:6379/0 RUN
"""

from __future__ import annotations

import sys

import numpy as np

from distaff import GroupConsumer, publish_policy_version, read_policy_version
from distaff.clients import connect

GROUPS_PER_STEP = 4


def main(url: str, run: str) -> None:
    with connect(url) as client, GroupConsumer(run, client, group="trainer") as consumer:
        first_step = read_policy_version(client, run) + 1
        for step, batch in enumerate(consumer.batches(GROUPS_PER_STEP), start=first_step):
            samples = [delivery.group.samples for delivery in batch]
            token_ids = np.concatenate([arrays.token_ids for arrays in samples])
            loss_mask = np.concatenate([arrays.loss_mask for arrays in samples])
            # ... forward and backward over token_ids where loss_mask, with arrays.logprobs and arrays.advantages ...
            rollouts = [rollout for delivery in batch for rollout in delivery.group.rollouts]
            rewards = [rollout.reward for rollout in rollouts if rollout.reward is not None]
            print(
                f"step {step}: {len(batch)} groups, {sum(map(len, samples))} samples, {len(token_ids)} tokens, "
                f"{loss_mask.sum()} trained, mean reward {np.mean(rewards) if rewards else 0.0:.3f}"
            )
            publish_policy_version(client, run, step)
            consumer.ack(*batch)  # after the step: a crash before this line brings the batch back
        print(f"run {run} is over")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
