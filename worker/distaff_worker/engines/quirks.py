"""What a chat API will not take, learned from its refusals and left out from then on.

Invariant: nothing the run asks for is dropped silently or for good measure: a parameter goes when the API has refused it, and only if that leaves
the run as it was (a neutral value), or what is sampled instead is known and recorded (temperature), or it is logged as a change
(top_p, seed). Anything else a refusal names is the run's business, and an error. Knows no provider by name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Literal

import structlog

from distaff.errors import ContextOverflow, EngineRefused
from distaff.types import JSON, Message
from distaff_worker.engines.failures import refused_status

log = structlog.get_logger(__name__)

LIMITS = {"max_tokens": "max_completion_tokens", "max_completion_tokens": "max_tokens"}
NEUTRAL: Mapping[str, tuple[JSON, ...]] = {
    "temperature": (1, 1.0),
    "top_p": (1, 1.0),
    "top_k": (0, -1),
    "min_p": (0, 0.0),
    "presence_penalty": (0, 0.0),
    "frequency_penalty": (0, 0.0),
    "repetition_penalty": (1, 1.0),
    "n": (1,),
    "logprobs": (False,),
    "parallel_tool_calls": (True,),
    "tool_choice": ("auto",),
    "store": (False,),
}
"""Values that say what an API does anyway."""
CHANGES = {"temperature", "top_p", "seed", "random_seed"}
"""May be dropped whatever their value: fixed on reasoning models, or unknown to the API. What is sampled then is not what was asked."""
DEFAULT_TEMPERATURE = 1.0
"""Of the chat APIs that have a fixed one and do not say which."""
ROLES = {"system": "developer", "developer": "system"}
_STATUSES = (400, 422)
_TOOLS_ONLY = ("tool_choice", "parallel_tool_calls", "functions", "function_call")
"""Refused by themselves when no tools are sent."""

_UNSUPPORTED = re.compile(
    r"unsupported|not (currently )?support|not allowed|not permitted|extra_forbidden|unknown (name|parameter|field|argument)"
    r"|unrecognized|unexpected|cannot (both )?be (specified|used|set)|deprecated|fixed at|only \S+ is allowed"
    r"|only the default|must be removed|should not be (set|specified)",
    re.IGNORECASE,
)
_BOTH = re.compile(r"cannot both be|(specify|use) (only one|either)|only one of", re.IGNORECASE)
_FIXED = re.compile(r"default \(([\d.]+)\)|fixed at ([\d.]+)|only ([\d.]+) is allowed", re.IGNORECASE)
_REASONING = re.compile(r"(?<![a-z_])(reasoning_content|reasoning|thinking)(?![a-z_])", re.IGNORECASE)
_MISSING = re.compile(r"missing|must be (passed|sent|included|provided)|is required|has to be passed", re.IGNORECASE)
_IN_MESSAGE = re.compile(r"messages?\b|assistant|property|pass(ed)? back", re.IGNORECASE)
_ACCOUNT = re.compile(
    r"insufficient_quota|billing|exceeded your current quota|\(402\)|insufficient (credit|balance|funds)|out of credits|payment",
    re.IGNORECASE,
)

ReasoningField = Literal["reasoning_content", "reasoning", "parts"]


class Quirks:
    """What is known of one API and model. Made for an engine; used on one loop."""

    def __init__(self, *, model: str = "") -> None:
        self.model = model
        self.limit = "max_tokens"
        self.reasoning: ReasoningField = "reasoning_content"
        """How the API gives the model's thoughts, and so how it is given them back."""
        self.changes: list[str] = []
        """What is sent or sampled otherwise than asked, for people."""
        self.dropped: set[str] = set()
        self.sends_reasoning = True
        self.demands_reasoning = False
        self._temperature: float | None = None
        self._roles: dict[str, str] = {}

    def temperature(self, asked: float) -> float:
        """The temperature answers are sampled with."""
        return asked if self._temperature is None else self._temperature

    # -- what is sent

    def body(self, parameters: Mapping[str, JSON], *, max_tokens: int, has_tools: bool) -> dict[str, JSON]:
        """The parameters of a request as this API takes them."""
        kept = {name: value for name, value in parameters.items() if name not in self.dropped}
        if not has_tools:
            kept = {name: value for name, value in kept.items() if name not in _TOOLS_ONLY}
        return {**kept, self.limit: max_tokens}

    def messages(self, messages: Sequence[Message]) -> list[Message]:
        """The conversation as this API takes it."""
        plain = self.reasoning == "reasoning_content" and self.sends_reasoning and not self.demands_reasoning
        if plain and not self._roles:
            return list(messages)
        return [self._message(message) for message in messages]

    def _message(self, message: Message) -> Message:
        role = str(message.get("role"))
        if role != "assistant":
            return {**message, "role": self._roles[role]} if role in self._roles else message
        sent = {name: value for name, value in message.items() if name != "reasoning_content"}
        thoughts = message.get("reasoning_content") or ""
        if not self.sends_reasoning or not (thoughts or self.demands_reasoning):
            return sent
        if self.reasoning != "parts":
            return {**sent, self.reasoning: thoughts}
        thinking = {"type": "thinking", "thinking": [{"type": "text", "text": thoughts}]}
        text = [{"type": "text", "text": sent["content"]}] if sent.get("content") else []
        return {**sent, "content": [thinking, *text]}

    # -- what a refusal teaches

    def learn(self, error: EngineRefused, body: Mapping[str, JSON], messages: Sequence[Message]) -> bool:
        """Whether the request, made anew, is another one and may pass. body, messages: as they were sent.

        Raises EngineRefused, with the mend, for a parameter that the run has set and the API does not have.
        """
        text = str(error)
        if isinstance(error, ContextOverflow) or refused_status(error) not in _STATUSES:
            return False
        return (
            self._learn_limit(text, body)
            or self._learn_reasoning(text, messages)
            or self._learn_role(text, messages)
            or self._learn_parameters(text, body)
        )

    def _learn_limit(self, text: str, body: Mapping[str, JSON]) -> bool:
        sent = next((name for name in LIMITS if name in body), self.limit)
        other = LIMITS[sent]
        if not _names(text, sent) or not (_UNSUPPORTED.search(text) or _names(text, other)):
            return False
        if self.limit == sent:
            self.limit = other
            log.info("request.adapted", model=self.model, parameter=sent, sent_as=other)
        return True

    def _learn_reasoning(self, text: str, messages: Sequence[Message]) -> bool:
        answers = [message for message in messages if message.get("role") == "assistant"]
        if not answers or not _REASONING.search(text) or not _IN_MESSAGE.search(text):
            return False
        if _MISSING.search(text):
            changes = not self.demands_reasoning
            self.demands_reasoning = self.sends_reasoning = True
            return changes
        if not _UNSUPPORTED.search(text) or not any(_has_reasoning(message) for message in answers):
            return False
        if self.sends_reasoning:
            self._change("the API refuses the model's earlier thoughts, which are no longer sent back", "reasoning")
        self.sends_reasoning = False
        return True

    def _learn_role(self, text: str, messages: Sequence[Message]) -> bool:
        """system and developer are one another's other name; an API that knows neither gets the text as the user's."""
        sent = {str(message.get("role")) for message in messages} & set(ROLES)
        named = next((role for role in sent if re.search(rf"['\"`]{role}['\"`]", text)), None)
        if (
            named is None
            or not re.search(r"\brole", text)
            or not (_UNSUPPORTED.search(text) or "invalid" in text.lower())
        ):
            return False
        origin = next((role for role, other in self._roles.items() if other == named), named)
        if self._roles.get(origin, origin) != named:
            return True  # another request has learned it meanwhile
        self._roles[origin] = ROLES[named] if origin == named else "user"
        self._change(f"messages of role {origin!r} are sent as {self._roles[origin]!r}", "role")
        return True

    def _learn_parameters(self, text: str, body: Mapping[str, JSON]) -> bool:
        if not _UNSUPPORTED.search(text) and not _BOTH.search(text):
            return False
        named = [name for name in body if name not in ("model", "messages", "tools", *LIMITS) and _names(text, name)]
        if _BOTH.search(text):
            named = [name for name in named if _is_neutral(name, body[name])][-1:] or named[-1:]
        refused = [name for name in named if name not in self.dropped]
        if not refused:
            return bool(named)  # another request has learned it meanwhile
        for name in refused:
            if name not in CHANGES and not _is_neutral(name, body[name]):
                raise EngineRefused(
                    f"{text}. The API does not take {name} = {body[name]!r}, which the run asks for: take it out of sampling.extra, "
                    "or out of the environment's sampling arguments"
                )
        for name in refused:
            self._drop(name, body[name], text)
        return True

    def _drop(self, name: str, value: JSON, text: str) -> None:
        self.dropped.add(name)
        if name == "temperature":
            fixed = next(
                (float(number.rstrip(".")) for match in _FIXED.finditer(text) for number in match.groups() if number),
                None,
            )
            self._temperature = DEFAULT_TEMPERATURE if fixed is None else fixed
            if self._temperature != value:
                self._change(f"temperature {value} is refused: sampled, and recorded, with {self._temperature:g}", name)
            return
        if not _is_neutral(name, value):
            self._change(f"{name} {value} is refused: sampled without it", name)

    def _change(self, what: str, parameter: str) -> None:
        self.changes.append(what)
        log.warning("request.changed", model=self.model, parameter=parameter, change=what)


def is_about_the_account(error: EngineRefused) -> bool:
    """The API would refuse every request alike: no credit, no quota."""
    return bool(_ACCOUNT.search(str(error)))


def _is_neutral(name: str, value: JSON) -> bool:
    return any(value is known or (value == known and not isinstance(value, bool)) for known in NEUTRAL.get(name, ()))


def _has_reasoning(message: Message) -> bool:
    content = message.get("content")
    return bool(message.get("reasoning_content") or message.get("reasoning")) or isinstance(content, list)


def _names(text: str, parameter: str) -> bool:
    """The refusal speaks of `parameter`, also in camel case."""
    first, *others = parameter.split("_")
    camel = first + "".join(part.capitalize() for part in others)
    return bool(re.search(rf"(?<![A-Za-z0-9_])({parameter}|{camel})(?![A-Za-z0-9_])", text))
