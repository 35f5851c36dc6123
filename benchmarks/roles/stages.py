"""Which function of the worker belongs to which stage.

Invariant: a name that is not there any more is an error here, not a stage that costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from benchmarks.accounts import Accounts
from distaff_worker import executions, job
from distaff_worker.chat_models import TokenChatModel
from distaff_worker.claim import Claimer
from distaff_worker.engines import answers, vllm
from distaff_worker.executions import Executions
from distaff_worker.hosting import frames
from distaff_worker.job import GroupPlayer
from distaff_worker.rendering.template_backend import TemplateRenderer

_Place: TypeAlias = tuple[Any, str, str]
"""Class or module, name of the function, stage."""
_FUNCTIONS: list[_Place] = [
    (Claimer, "claim", "claim"),
    (frames, "encode", "talk to the environment"),
    (executions, "decode_job", "claim"),
    (TemplateRenderer, "render", "render"),
    (TemplateRenderer, "bridge", "render"),
    (TemplateRenderer, "parse", "parse the tokens"),
    (vllm, "parse_json", "read the answer"),
    (vllm, "_logprobs", "read the answer"),
    (answers, "generation", "read the answer"),
    (job, "model_samples", "make samples"),
    (job, "played_rollouts", "assemble"),
    (GroupPlayer, "_assemble", "assemble"),
    (GroupPlayer, "_count", "assemble"),
    (GroupPlayer, "_encode", "encode"),
    (Executions, "_carry_out", "settle"),
    (Executions, "_report", "settle"),
]
_COROUTINES: list[_Place] = [
    (TokenChatModel, "complete", "turn"),
    (vllm.VllmEngine, "generate", "ask the engine"),
]


def watch_stages(accounts: Accounts) -> None:
    """Put a clock around each stage, wherever in the worker it is called."""
    for owner, name, stage in _FUNCTIONS:
        setattr(owner, name, _same_kind(owner, name, accounts.of(stage, getattr(owner, name))))
    for owner, name, stage in _COROUTINES:
        setattr(owner, name, accounts.of_async(stage, getattr(owner, name)))


def _same_kind(owner: Any, name: str, function: Callable[..., Any]) -> Any:
    return staticmethod(function) if isinstance(vars(owner).get(name), staticmethod) else function
