"""Any of the generators of the `reasoning-gym` package (classic API, single turn).

Invariant: the whole entry of the generator is in the row, so that scoring needs neither the producer's dataset nor its seed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import verifiers.legacy as vf
from datasets import Dataset

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_SYSTEM = "Think briefly, then give the final answer as <answer>...</answer>."


def load_environment(
    gym: str = "leg_counting",
    train_size: int = 512,
    eval_size: int = 64,
    seed: int = 0,
    config: dict[str, Any] | None = None,
) -> vf.Environment:
    """`gym`: a generator's name. `config`: its own settings."""
    try:
        import reasoning_gym
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "the reasoning-gym package is not installed; pip install 'reasoning-gym>=0.1.25'"
        ) from error
    settings = config or {}
    scorer = reasoning_gym.create_dataset(gym, size=1, seed=seed, **settings)

    def score(completion: vf.Messages, info: dict[str, Any], parser: vf.Parser) -> float:
        """The generator's own score of the answer, 0 to 1."""
        return scored(scorer, parser.parse_answer(completion), unpacked(json.loads(info["entry"])))

    parser = vf.Parser(extract_fn=extract)
    return vf.SingleTurnEnv(
        dataset=lambda: _entries(reasoning_gym.create_dataset(gym, size=train_size, seed=seed, **settings)),
        eval_dataset=lambda: _entries(
            reasoning_gym.create_dataset(gym, size=eval_size, seed=seed + 1_000_003, **settings)
        ),
        system_prompt=_SYSTEM,
        parser=parser,
        rubric=vf.Rubric(funcs=[score], parser=parser),
    )


def extract(text: str) -> str:
    """The text between the answer tags, the whole reply without tags."""
    found = _ANSWER.findall(text)
    return str(found[-1] if found else text).strip()


def scored(generator: Any, answer: str, entry: Mapping[str, Any]) -> float:
    """The generator's own score of `answer`, 0 where the answer is such that its scorer fails (some convert it without a check).
    Raises what the scorer raises when it fails at its own answer too."""
    try:
        return float(generator.score_answer(answer=answer, entry=entry))
    except Exception:  # noqa: BLE001 - the generator's code, given what a model wrote
        generator.score_answer(answer=str(entry["answer"]), entry=entry)
        return 0.0


def _entries(dataset: Any) -> Dataset:
    return Dataset.from_list(
        [
            {"question": e["question"], "answer": str(e["answer"]), "info": {"entry": json.dumps(packed(e))}}
            for e in dataset
        ]
    )


def packed(value: Any) -> Any:
    """`value` for JSON, tuples and the keys of mappings kept as what they are: scorers compare with them. A tuple is {"t": [...]}, a
    mapping {"d": [[key, value], ...]}."""
    if isinstance(value, Mapping):
        return {"d": [[packed(key), packed(inner)] for key, inner in value.items()]}
    if isinstance(value, tuple):
        return {"t": [packed(inner) for inner in value]}
    return [packed(inner) for inner in value] if isinstance(value, list) else value


def unpacked(value: Any) -> Any:
    """What `packed` was given."""
    if isinstance(value, list):
        return [unpacked(inner) for inner in value]
    if not isinstance(value, dict):
        return value
    if "t" in value:
        return tuple(unpacked(inner) for inner in value["t"])
    return {unpacked(key): unpacked(inner) for key, inner in value["d"]}
