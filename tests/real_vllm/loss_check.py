"""The example's loss on made-up samples of a random model: prints one JSON object. Run with .venv-vllm/bin/python -m tests.real_vllm.loss_check MODEL_FOLDER.

The samples' log-probabilities come from one forward pass for each sampled token, which knows nothing of masks and offsets.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
import torch
from examples.grpo_cpu.loss import batch_of, policy_loss, score

from distaff import TrainingSample

ROWS, PROMPT, STEPS = 6, 5, 20


def main() -> None:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
    samples = [_sample(model, row) for row in range(ROWS)]
    batch = batch_of(samples)
    before = score(model, batch).logprobs.detach()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(STEPS):
        optimizer.zero_grad()
        policy_loss(score(model, batch), batch).backward()
        optimizer.step()
    change = ((score(model, batch).logprobs.detach() - before) * batch.trained).sum(-1)
    difference = (before - batch.sampled_with).abs()[batch.trained].max()
    answer = {"difference": float(difference), "trained": int(batch.trained.sum()), "change": change.tolist()}
    json.dump(answer | {"advantages": [sample.advantage for sample in samples]}, sys.stdout)


@torch.no_grad()  # type: ignore[untyped-decorator]
def _sample(model: Any, row: int) -> TrainingSample:
    """A prompt of its own, then row + 2 sampled tokens; rows in turn good and bad."""
    ids, logprobs = [1, *range(60 + row, 60 + row + PROMPT - 1)], [0.0] * PROMPT
    for _ in range(row + 2):
        distribution = model(input_ids=torch.tensor([ids])).logits[0, -1].log_softmax(-1)
        token = int(torch.multinomial(distribution.exp(), 1))
        ids.append(token)
        logprobs.append(float(distribution[token]))
    return TrainingSample(
        token_ids=np.array(ids, np.int32),
        loss_mask=np.arange(len(ids)) >= PROMPT,
        logprobs=np.array(logprobs, np.float32),
        advantage=1.0 if row % 2 else -1.0,
        rollout=row,
        branch=0,
    )


if __name__ == "__main__":
    main()
