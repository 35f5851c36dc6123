"""The trainer: reads scored groups from the stream, makes one optimizer step of each batch, gives the engine the new weights.

    .venv-vllm/bin/python -m examples.grpo_cpu.trainer --run RUN --model FOLDER --engine URL --log FILE   (Redis: DISTAFF_REDIS_URL)

Invariant: knows nothing of environments, queues or workers. Version n is published while generation stands still with the weights
after step n, so a group whose policy span is (n, n) was sampled with exactly those.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from distaff import GroupConsumer, ScoredGroup, TrainingSample, publish_policy_version
from distaff.clients import connect
from examples.grpo_cpu.loss import CLIP_HIGH, CLIP_LOW, Batch, Scores, batch_of, policy_loss, score
from examples.grpo_cpu.vllm_server import Control

Record = dict[str, Any]


class Trainer:
    """The policy, its optimizer, and the number of steps made so far, which is the policy's version."""

    def __init__(self, model: Any, *, learning_rate: float) -> None:
        self.model = model.train()
        self.version = 0
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0)

    def step(self, groups: Sequence[ScoredGroup]) -> Record:
        """One step on samples that can teach something; what is worth knowing about it."""
        samples = [sample for group in groups for sample in group.samples if sample.advantage]
        fresh = [sample for group in groups if _sampled_with(group, self.version) for sample in group.samples]
        record: Record = {"reward": _mean_reward(groups), "samples": len(samples), **self._agreement(fresh)}
        if samples:
            batch = batch_of(samples)
            scores = score(self.model, batch)
            record |= _ratios(scores, batch)
            self._optimizer.zero_grad()
            policy_loss(scores, batch).backward()
            norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self._optimizer.step()
            record["gradient_norm"] = float(norm)
        self.version += 1
        return record

    def _agreement(self, samples: Sequence[TrainingSample]) -> Record:
        """How far the engine's log-probabilities are from ours, over samples of exactly these weights."""
        if not samples:
            return {"fresh": 0, "difference_max": None, "difference_mean": None}
        batch = batch_of(samples)
        with torch.no_grad():
            difference = (score(self.model, batch).logprobs - batch.sampled_with).abs()[batch.trained]
        return {
            "fresh": len(samples),
            "difference_max": float(difference.max()),
            "difference_mean": float(difference.mean()),
        }

    def save(self, folder: Path) -> None:
        """The weights as float32 safetensors, whole or not at all."""
        from safetensors.torch import save_file

        weights = {name: tensor.detach().contiguous() for name, tensor in self.model.state_dict().items()}
        partial = folder / "model.safetensors.part"
        save_file(weights, partial, metadata={"format": "pt"})
        partial.replace(folder / "model.safetensors")


def _sampled_with(group: ScoredGroup, version: int) -> bool:
    return group.policy.start == group.policy.end == version


def _mean_reward(groups: Sequence[ScoredGroup]) -> float:
    rewards = [rollout.reward for group in groups for rollout in group.rollouts if rollout.reward is not None]
    return sum(rewards) / max(len(rewards), 1)


def _ratios(scores: Scores, batch: Batch) -> Record:
    ratio = (scores.logprobs.detach() - batch.sampled_with).exp()[batch.trained]
    return {
        "ratio_mean": float(ratio.mean()),
        "clipped": float(((ratio < 1 - CLIP_LOW) | (ratio > 1 + CLIP_HIGH)).float().mean()),
        "entropy": float(scores.entropies.detach()[batch.trained].mean()),
    }


def train(arguments: argparse.Namespace) -> None:
    """Until the run is over."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(arguments.seed)
    torch.set_num_threads(arguments.threads)
    trainer = Trainer(
        AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32),
        learning_rate=arguments.learning_rate,
    )
    folder = Path(shutil.copytree(arguments.model, arguments.weights, dirs_exist_ok=True)).absolute()
    control = Control(arguments.engine)
    began = time.monotonic()
    with (
        connect(os.environ["DISTAFF_REDIS_URL"]) as client,
        GroupConsumer(arguments.run, client, group="trainer", messages=False) as consumer,
        arguments.log.open("a", encoding="utf-8") as log,
    ):
        waiting = time.monotonic()
        for batch in consumer.batches(arguments.groups):
            got = time.monotonic()
            groups = [delivery.group for delivery in batch]
            lag = sum(trainer.version - group.policy.start for group in groups) / len(groups)
            record = trainer.step(groups)
            trained = time.monotonic()
            trainer.save(folder)
            with control.new_weights(folder, version=trainer.version):
                publish_policy_version(client, arguments.run, trainer.version)
            consumer.ack(*batch)
            pushed = time.monotonic()
            record = {"step": trainer.version, **record, "lag": lag, "wait_s": got - waiting, "train_s": trained - got}
            record |= {"push_s": pushed - trained, "seconds": pushed - began}
            log.write(json.dumps(record) + "\n")
            log.flush()
            print(_line(record), flush=True)
            waiting = pushed


def _line(record: Record) -> str:
    worst = record["difference_max"]
    agreement = "no sample of these weights" if worst is None else f"{worst:.1e}"
    return (
        f"step {record['step']:3d}  reward {record['reward']:.3f}  |trainer - engine| {agreement}  "
        f"ratio {record.get('ratio_mean', 1.0):.3f}  clipped {record.get('clipped', 0.0):.3f}  lag {record['lag']:.2f}  "
        f"wait {record['wait_s']:.1f} s  train {record['train_s']:.1f} s  push {record['push_s']:.2f} s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", required=True)
    parser.add_argument("--model", type=Path, required=True, help="folder of the model to begin with")
    parser.add_argument("--engine", required=True, help="URL of vLLM, which must see the folder of --weights")
    parser.add_argument("--weights", type=Path, required=True, help="folder to write new weights to")
    parser.add_argument("--log", type=Path, required=True, help="JSON lines, one for each step")
    parser.add_argument("--groups", type=int, default=24, help="groups of one step")
    parser.add_argument("--learning-rate", type=float, default=5e-4)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    train(parser.parse_args())


if __name__ == "__main__":
    main()
