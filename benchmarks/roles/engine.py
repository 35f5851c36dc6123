"""A scripted engine (vLLM's token route) in a process of its own: answers of text in the demo model's tokens, after a latency."""

from __future__ import annotations

import argparse
import asyncio
import random
import signal

from tests.farm_support import EOS, tokenizer
from tests.scripted_engine import Answer, ScriptedEngine

from benchmarks.roles.talk import say

DISTINCT = 16
TEXT = (
    "The number of apples is the sum of what was there in the morning and what the children brought at noon; "
    "from this we subtract the seven that were eaten, so that fewer are left than before. "
)


def answers(tokens: int) -> list[Answer]:
    """Different answers of `tokens` tokens each, with log-probabilities of as many digits as engines send."""
    rng = random.Random(7)
    ids = tokenizer()(TEXT * (tokens // 20 + 1), add_special_tokens=False).input_ids
    return [
        Answer(
            token_ids=[*ids[start : start + tokens - 1], EOS], logprobs=[-rng.expovariate(2.0) for _ in range(tokens)]
        )
        for start in range(DISTINCT)
    ]


async def serve(tokens: int, latency_s: float) -> None:
    ready = answers(tokens)
    engine = ScriptedEngine(
        script=lambda ask: ready[ask.number % DISTINCT],
        latency_s=latency_s,
        max_model_len=131072,
        keep_records=False,
    )
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    async with engine:
        say(url=engine.url)
        await stopped.wait()
        say(requests=engine.count, max_in_flight=engine.max_in_flight)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--latency-s", type=float, default=0.0)
    arguments = parser.parse_args()
    asyncio.run(serve(arguments.tokens, arguments.latency_s))


if __name__ == "__main__":
    main()
