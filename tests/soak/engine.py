"""The engine of the soak as a process of its own: good answers, and a seeded share of every bad one.

python -m tests.soak.engine --port 0 --answers FILE --seed 7 --rate 0.06

Prints its URL when it listens, and then the kind of each fault it commits, one a line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from tests.harness.canaries import ENGINE_KEY_VAR
from tests.scripted_engine import Answer, Ask, Fault, Reply, ScriptedEngine, status

LATENCY_S = (0.02, 0.3)
VOCABULARY = 1 << 30


def _without_choices(body: dict[str, object]) -> dict[str, object]:
    return {**body, "choices": []}


FAULTS: dict[str, Callable[[Answer], Reply]] = {
    "hang": lambda answer: Fault(hang="accept"),
    "hang after headers": lambda answer: Fault(hang="headers"),
    "drip": lambda answer: Fault(hang="drip", body=b'{"choices": [', drip_s=0.2),
    "reset": lambda answer: Fault(hang="reset"),
    "cut": lambda answer: Fault(hang="cut"),
    "429": lambda answer: status(429, "too many", retry_after="1"),
    "500": lambda answer: status(500, "oops"),
    "503": lambda answer: status(503, "loading"),
    "not json": lambda answer: Fault(body=b"<html>not json"),
    "empty object": lambda answer: Fault(body=b"{}", headers={"Content-Type": "application/json"}),
    "no choices": lambda answer: replace(answer, mangle=_without_choices),
    "nan logprob": lambda answer: replace(answer, logprobs=[float("nan")] * len(answer.token_ids)),
    "infinite logprob": lambda answer: replace(answer, logprobs=[float("-inf")] * len(answer.token_ids)),
    "short logprobs": lambda answer: replace(answer, logprobs=[-0.25] * (len(answer.token_ids) - 1)),
    "foreign token": lambda answer: replace(answer, token_ids=[VOCABULARY, *answer.token_ids[1:]]),
    "wrong model": lambda answer: replace(answer, model="somebody-else"),
}
_CHEAP = ("reset", "cut", "429", "500", "503")


def script(answers: list[Answer], *, seed: int, rate: float) -> Callable[[Ask], object]:
    """Answers one of `answers`, or with probability `rate` a fault; the two hangs are rarer, they cost a deadline each."""
    rng = random.Random(seed)
    names = [name for name in FAULTS for _ in range(3 if name in _CHEAP else 1)]

    async def reply(ask: Ask) -> Reply:
        answer = rng.choice(answers)
        if ask.sampling.get("max_tokens") == 1:
            return answer
        await asyncio.sleep(rng.uniform(*LATENCY_S))
        if rng.random() >= rate:
            return answer
        name = rng.choice(names)
        print(name, flush=True)
        return FAULTS[name](answer)

    return reply


async def _serve(arguments: argparse.Namespace) -> None:
    answers = [Answer(**fields) for fields in json.loads(Path(arguments.answers).read_text())]
    engine = ScriptedEngine(
        script=script(answers, seed=arguments.seed, rate=arguments.rate),  # type: ignore[arg-type]
        port=arguments.port,
        api_key=os.environ.get(ENGINE_KEY_VAR, ""),
        keep_records=False,
    )
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    async with engine:
        print(engine.url, flush=True)
        await stopped.wait()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.soak.engine")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--answers", required=True, help="a JSON file: a list of the fields of answers")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rate", type=float, default=0.0)
    asyncio.run(_serve(parser.parse_args()))


if __name__ == "__main__":
    main()
