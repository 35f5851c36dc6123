"""The transport of the reference system in small: JSON + gzip over HTTP, one server process that holds the queue.

A client POSTs each group as JSON lists (gzip, the default level of Python's `gzip.compress`); the server parses it and keeps it;
a trainer GETs /batch, JSON of BATCH groups, and makes arrays of it. No schema validation, which makes it faster than the original.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import json
import signal
import time
from collections import deque
from typing import Any

import aiohttp
import numpy as np
from aiohttp import web

from benchmarks.roles.groups import numbered_groups
from benchmarks.roles.talk import listen, say
from distaff.types import ScoredGroup

BATCH = 8
AT_ONCE = 4


def as_json(group: ScoredGroup) -> bytes:
    """The body the reference sends: lists of lists, masks as the token or -100."""
    samples = list(group.samples)
    return json.dumps(
        {
            "tokens": [sample.token_ids.tolist() for sample in samples],
            "masks": [np.where(sample.loss_mask, sample.token_ids, -100).tolist() for sample in samples],
            "scores": [group.rollouts[sample.rollout].reward for sample in samples],
            "advantages": [sample.advantage for sample in samples],
            "inference_logprobs": [[] if sample.logprobs is None else sample.logprobs.tolist() for sample in samples],
        }
    ).encode()


async def serve() -> None:
    waiting: deque[Any] = deque()

    async def scored_data(request: web.Request) -> web.Response:
        waiting.append(json.loads(await request.read()))
        return web.json_response({"status": "received"})

    async def batch(request: web.Request) -> web.Response:
        if len(waiting) < BATCH:
            return web.json_response({"batch": None})
        return web.json_response({"batch": [waiting.popleft() for _ in range(BATCH)]})

    app = web.Application(client_max_size=1 << 30)
    app.add_routes([web.post("/scored_data", scored_data), web.get("/batch", batch)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    say(url=f"http://127.0.0.1:{runner.addresses[0][1]}")
    await stopped.wait()
    await runner.cleanup()


async def produce(url: str, *, count: int, tokens: int) -> None:
    groups = deque(numbered_groups(count, tokens=tokens))
    async with aiohttp.ClientSession() as http:
        say(ready=True)
        listen()
        started = time.monotonic()

        async def send() -> None:
            while groups:
                body = gzip.compress(as_json(groups.popleft()))
                headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
                async with http.post(f"{url}/scored_data", data=body, headers=headers) as response:
                    response.raise_for_status()
                    await response.read()

        await asyncio.gather(*(send() for _ in range(AT_ONCE)))
    say(started=started, cpu_s=time.process_time())


async def consume(url: str, *, count: int) -> None:
    found = tokens = 0
    async with aiohttp.ClientSession() as http:
        say(ready=True)
        listen()
        while found < count:
            async with http.get(f"{url}/batch") as response:
                batch = (await response.json())["batch"]
            if batch is None:
                await asyncio.sleep(0.01)
                continue
            for group in batch:
                arrays = [np.array(ids, np.int32) for ids in group["tokens"]]
                tokens += sum(map(len, arrays))
                _ = [np.array(mask, np.int32) != -100 for mask in group["masks"]]
                _ = [np.array(values, np.float32) for values in group["inference_logprobs"]]
            found += len(batch)
        ended = time.monotonic()
    say(ended=ended, tokens=tokens, cpu_s=time.process_time())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("side", choices=["serve", "produce", "consume"])
    parser.add_argument("url", nargs="?", default="")
    parser.add_argument("count", type=int, nargs="?", default=0)
    parser.add_argument("tokens", type=int, nargs="?", default=0)
    arguments = parser.parse_args()
    match arguments.side:
        case "serve":
            asyncio.run(serve())
        case "produce":
            asyncio.run(produce(arguments.url, count=arguments.count, tokens=arguments.tokens))
        case _:
            asyncio.run(consume(arguments.url, count=arguments.count))


if __name__ == "__main__":
    main()
