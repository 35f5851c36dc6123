"""Log-probabilities by torch alone, in float32: standard input is JSON [[token id, ...], ...], standard output [[log-probability, ...], ...].

Position t of an answer is about token t + 1. Run with .venv-vllm/bin/python -m tests.real_vllm.rescore MODEL_FOLDER.
"""

from __future__ import annotations

import json
import sys

import torch


def main() -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()
    answers = []
    torch.set_grad_enabled(False)
    for sequence in json.load(sys.stdin):
        ids = torch.tensor([sequence])
        distribution = model(input_ids=ids).logits[0, :-1].log_softmax(-1)
        answers.append(distribution.gather(-1, ids[0, 1:, None]).squeeze(-1).tolist())
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    main()
