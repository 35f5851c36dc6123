"""Makes the model of these tests: small, and good for nothing but the format of sums and of tool calls.

.venv-vllm/bin/python -m tests.real_vllm.make_model OUT
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import torch
from examples.grpo_cpu.tiny_model import Dialogue, Size, half_known_sum, make

STEPS = 200
_TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}


def teach(rng: random.Random, over: float) -> Dialogue:
    """A sum without tools, a tool call, or the answer after one."""
    a, b = rng.randint(0, 9), rng.randint(0, 9)
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": a, "b": b}}}
    asked: dict[str, Any] = {"role": "user", "content": f"{a}+{b}"}
    called: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": [call]}
    match rng.randrange(3):
        case 0:
            return half_known_sum(rng, over)
        case 1:
            return [asked, called], [_TOOL]
    result = str(a + b)
    said = [{"role": "tool", "content": result}, {"role": "assistant", "content": result}]
    return [asked, called, *said], [_TOOL]


if __name__ == "__main__":
    torch.set_num_threads(1)
    make(Path(sys.argv[1]), teach=teach, steps=STEPS, seed=0, size=Size(hidden=96, layers=2, heads=3))
