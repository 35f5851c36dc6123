"""What a run is: everything a worker must know to play its items, stored in Redis by the producer.

Invariant: no secrets. API keys travel as the *name* of an environment variable that the worker reads.
Not part of `import distaff` (it needs pydantic); the roles import it.
"""

from __future__ import annotations

import hashlib
import json
import re
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, JsonValue, field_validator, model_validator

from distaff.keys import RUN_NAME
from distaff.plain import find_unplain
from distaff.redaction import NAMES_OF_SECRETS, is_secret_name
from distaff.types import MAX_ITEM_BYTES, Mode, Split

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]
LossMask = Literal["each_turn", "last_turn", "all_turns"]
VARIABLE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class Section(BaseModel):
    """A block of settings; unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    @model_validator(mode="after")
    def _storable(self) -> Self:
        """What is stored for the workers must come back as it is: TOML has nan, and an argument any bytes."""
        values = {name: value for name, value in self if not isinstance(value, BaseModel)}
        found = find_unplain(values, "")
        if found:
            raise ValueError(f"{found.path.removeprefix('.')} {found.problem}")
        return self


class RunSection(Section):
    name: str = "run"
    """Name of the run: letters, digits, "_" and "-". The same name again continues the run."""
    pool: str = "default"
    """The queue the items go to, and so the workers that play them."""
    mode: Mode = "rl"
    """rl: exact ids and log-probabilities from the engine. sft: any chat API, tokenized here. eval: no tokens."""

    @field_validator("name", "pool")
    @classmethod
    def _plain(cls, value: str) -> str:
        if not RUN_NAME.fullmatch(value):
            raise ValueError("use 1 to 64 letters, digits, '_' or '-', beginning with a letter or digit")
        return value


class EnvironmentSection(Section):
    id: str = ""
    """An importable environment: a classic verifiers module (`load_environment`) or a v1 taskset; "owner/name" is accepted."""
    args: dict[str, JsonValue] = {}
    """Arguments of the environment."""
    api: Literal["auto", "classic", "v1"] = "auto"
    """Which verifiers API the environment speaks; found out from the module unless set."""
    split: Split = "train"
    """The dataset to walk; an environment that has only one split gives that one."""
    load_timeout_s: Seconds = 600.0
    """Deadline of loading the environment in a worker."""

    def args_hash(self) -> str:
        """First 16 hex digits of the SHA-256 of the arguments' canonical JSON."""
        canonical = json.dumps(self.args, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()[:16]


class EngineSection(Section):
    kind: Literal["vllm", "sglang", "llamacpp", "openai"] = "openai"
    """vllm, sglang and llamacpp return token ids and log-probabilities (RL); openai is any OpenAI-compatible chat API."""
    base_urls: list[str] = ["http://127.0.0.1:8000"]
    """One or more servers, without or with a trailing /v1. A rollout stays on one of them."""
    model: str = ""
    """The model's name on the server; the only model it serves when empty."""
    api_key_var: str = ""
    """Name of the environment variable with the API key; none is sent when empty. It ends in KEY, TOKEN, SECRET, PASSWORD or AUTH:
    the values of such variables are masked wherever text leaves a process."""
    connect_timeout_s: Seconds = 5.0
    request_timeout_s: Seconds = 300.0
    """Bound on one request, from sending it to the last byte."""
    max_retries: Annotated[int, Field(ge=0)] = 5
    """Of one request, on 429, 5xx and connection failures, with full jitter; Retry-After is honoured."""
    retry_budget_s: Seconds = 120.0
    """No retry begins later than this after the request was first sent."""
    start_timeout_s: Seconds = 60.0
    """How long a worker waits for an engine that does not answer yet."""

    @field_validator("api_key_var")
    @classmethod
    def _masked(cls, value: str) -> str:
        if value and not (VARIABLE_NAME.fullmatch(value) and is_secret_name(value)):
            raise ValueError(
                f"give the NAME of an environment variable, never the key; it must end in {NAMES_OF_SECRETS}, which is what "
                "keeps its value out of logs and dead letters"
            )
        return value

    @field_validator("base_urls")
    @classmethod
    def _urls(cls, value: list[str]) -> list[str]:
        if not value:
            raise ValueError("give at least one URL")
        for url in value:
            if not url.startswith(("http://", "https://")):
                raise ValueError(f"{url!r} is not an http:// or https:// URL")
        return [url.rstrip("/").removesuffix("/v1") for url in value]


class TokenizerSection(Section):
    name: str = ""
    """A folder or hub id of the training tokenizer; engine.model when empty."""
    renderer: str = "auto"
    """auto: the `renderers` package where it knows the model, otherwise the tokenizer's chat template. template: always the template."""
    chat_template: str = ""
    """Jinja text used instead of the tokenizer's own template; "@FILE" is replaced by that file's text when the settings are read."""


class SamplingSection(Section):
    temperature: Annotated[float, Field(ge=0, le=10)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    max_tokens: Count = 512
    """Of one turn."""
    seed: int | None = None
    """Base seed: rollout r of item s samples with a seed derived from (seed, s, r, turn). None: the engine's randomness."""
    extra: dict[str, JsonValue] = {}
    """Further sampling parameters, passed to the engine as they are (top_k, min_p, reasoning_effort, ...)."""


class RolloutSection(Section):
    group_size: Annotated[int, Field(ge=1, le=4096)] = 8
    """Rollouts of each item."""
    min_rollouts: Annotated[int, Field(ge=0)] = 0
    """A group with fewer usable rollouts is played again. 0: two in RL mode (or group_size if smaller), else one."""
    max_attempts: Count = 3
    """Failed attempts after which an item becomes a dead letter."""
    max_lost: Annotated[int, Field(ge=2)] = 5
    """Times an item may be lost with its worker before it becomes a dead letter. An item lost twice is played apart from others like it."""
    rollout_retries: Annotated[int, Field(ge=0)] = 1
    """Further plays of one rollout that failed for a reason that may pass, inside the group."""
    max_turns: Annotated[int, Field(ge=0)] = 0
    """Bound on the model turns of a rollout; 0: the environment decides."""
    max_context_tokens: Annotated[int, Field(ge=0)] = 0
    """Bound on prompt + completion of a turn; 0: the engine's context."""
    max_total_completion_tokens: Annotated[int, Field(ge=0)] = 0
    """Bound on the tokens a rollout samples over all its turns (of one seat); 0: none. The last turn is cut to what is left."""
    min_prefix_share: Annotated[float, Field(ge=0, le=1)] = 0.9
    """RL: a worker warns, with the cause, when fewer of the later turns extend the exact tokens of the one before. 0: never."""
    timeout_s: Seconds = 600.0
    """Deadline of one rollout."""
    group_timeout_s: Seconds = 1800.0
    """Deadline of the whole group, scoring included."""
    score_timeout_s: Seconds = 60.0
    """Deadline of scoring a group."""
    block_timeout_s: Seconds = 60.0
    """How long environment code may keep its process from doing anything else (a synchronous call, an endless loop). Then the process is
    killed, the item to blame has lost an attempt, and the others in it are played again."""
    zero_variance: Literal["keep", "drop"] = "keep"
    """drop: an RL group whose rewards are all equal becomes a dead letter of kind `dropped` and is replaced by another item."""

    @model_validator(mode="after")
    def _fits(self) -> RolloutSection:
        if self.min_rollouts > self.group_size:
            raise ValueError(f"min_rollouts ({self.min_rollouts}) is larger than group_size ({self.group_size})")
        return self

    def required(self, mode: Mode) -> int:
        """Usable rollouts a group must have."""
        return self.min_rollouts or min(2 if mode == "rl" else 1, self.group_size)


class SftSection(Section):
    loss_mask: LossMask = "each_turn"
    """What of a chat is trained. each_turn: every turn, behind the context it was generated in; where the template drops earlier reasoning
    that is a sample for each. last_turn: the last turn only. all_turns: every turn, in one rendering of the whole chat, where earlier
    reasoning is missing if the template drops it."""


class AdvantageSection(Section):
    divide_by_std: bool = False
    """False: reward - group mean (Dr. GRPO). True: divided by the group's standard deviation (GRPO)."""
    epsilon: Annotated[float, Field(gt=0)] = 1e-6


class ProducerSection(Section):
    seed: int = 0
    """Of the permutation; the order of epoch e depends on (seed, e) only."""
    shuffle: bool = True
    """False: dataset order. Infinite tasksets are never shuffled."""
    epochs: Count = 1
    limit: Annotated[int, Field(ge=0)] = 0
    """Items in all; 0: epochs * rows (an infinite taskset needs a limit or runs until stopped)."""
    window: Count = 256
    """Bound on items queued + running + groups not yet acknowledged by every consumer group."""
    batch: Count = 64
    """Items admitted in one step."""
    max_item_bytes: Annotated[int, Field(ge=1, le=MAX_ITEM_BYTES)] = 1 << 20
    replacements: Annotated[int, Field(ge=0)] = 0
    """Further items admitted in place of dropped groups; 0: as many as the run has items."""


class WireSection(Section):
    compression: Literal["none", "zstd"] = "none"
    max_group_bytes: Count = 64 << 20
    """Of an encoded group, before compression."""
    messages: bool = True
    """Keep the conversations and the item's row in the group (archives and evaluations need them, most trainers do not)."""


class RunConfig(Section):
    """Everything a worker must know about a run. JSON in Redis under `RunKeys.config`."""

    run: RunSection = RunSection()
    environment: EnvironmentSection = EnvironmentSection()
    engine: EngineSection = EngineSection()
    tokenizer: TokenizerSection = TokenizerSection()
    sampling: SamplingSection = SamplingSection()
    rollouts: RolloutSection = RolloutSection()
    sft: SftSection = SftSection()
    advantage: AdvantageSection = AdvantageSection()
    producer: ProducerSection = ProducerSection()
    wire: WireSection = WireSection()
