"""The policy as one rollout sees it: asks the engine for the next turn and keeps every turn it gave.

Invariant: one object per rollout (and seat); a step is the exact prompt that was sent and the exact tokens that came back. Never retries (the
engine client does), never tokenizes on the event loop (the executor has the one thread that may use the renderer).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from typing import TypeVar

from distaff.config import SamplingSection
from distaff.environments.protocol import ChatTurn
from distaff.errors import ContextOverflow, EngineAnswerError, TurnLimit
from distaff.types import JSON, FinishReason, Message, Tool
from distaff_worker.conversations import Turn, continued
from distaff_worker.engines.protocol import ChatEngine, Generation, TokenEngine
from distaff_worker.rendering.protocol import Renderer
from distaff_worker.sampling import Limits, turn_sampling
from distaff_worker.steps import ChatStep, TokenStep

T = TypeVar("T")


class _Counted:
    """Turns, tokens and seconds of one rollout, and its limits."""

    def __init__(
        self, *, sampling: SamplingSection, rollout_seed: int | None, session: str, limits: Limits, executor: Executor
    ) -> None:
        self._sampling = sampling
        self._rollout_seed = rollout_seed
        self._session = session
        self._limits = limits
        self._executor = executor
        self._turns_begun = 0
        self.prompt_tokens = 0
        """Sent to the engine, summed over the turns."""
        self.completion_tokens = 0
        self.engine_s = 0.0
        self.tokenize_s = 0.0
        """In the tokenization thread, waiting for it not counted."""
        self.finish_reason: FinishReason = "none"
        """Of the last turn."""

    def _begin_turn(self) -> int:
        """The number of the turn that begins; raises TurnLimit."""
        turn = self._turns_begun
        if self._limits.max_turns and turn >= self._limits.max_turns:
            raise TurnLimit(f"the rollout has used its {self._limits.max_turns} model turns (rollouts.max_turns)")
        self._turns_begun += 1
        return turn

    def _room(self, prompt_tokens: int) -> int:
        """max_tokens for a prompt of that length; raises ContextOverflow."""
        context = self._limits.max_context_tokens
        room = context - prompt_tokens if context else self._sampling.max_tokens
        if room < 1:
            raise ContextOverflow(
                f"the prompt has {prompt_tokens} tokens and the context {context}: no room for an answer"
            )
        return min(room, self._sampling.max_tokens)

    def _parameters(self, environment: Mapping[str, JSON], turn: int) -> dict[str, JSON]:
        return turn_sampling(environment, self._sampling, rollout_seed=self._rollout_seed, turn=turn)

    def _count(
        self, *, prompt_tokens: int, completion_tokens: int, finish_reason: FinishReason, seconds: float
    ) -> None:
        self.prompt_tokens += prompt_tokens
        self.completion_tokens += completion_tokens
        self.finish_reason = finish_reason
        self.engine_s += seconds

    async def _tokenizing(self, call: Callable[[], T]) -> T:
        value, seconds = await asyncio.get_running_loop().run_in_executor(self._executor, _timed, call)
        self.tokenize_s += seconds
        return value


class TokenChatModel(_Counted):
    """A ChatModel on a token engine (RL): renders or bridges, samples, captures ids and log-probabilities."""

    def __init__(
        self,
        engine: TokenEngine,
        renderer: Renderer,
        *,
        sampling: SamplingSection,
        rollout_seed: int | None,
        session: str,
        limits: Limits,
        executor: Executor,
    ) -> None:
        """rollout_seed: None leaves randomness to the engine. session: the rollout's id, for sticky routing."""
        super().__init__(
            sampling=sampling, rollout_seed=rollout_seed, session=session, limits=limits, executor=executor
        )
        self._engine = engine
        self._renderer = renderer
        self._turns: list[Turn] = []

    @property
    def steps(self) -> list[TokenStep]:
        """The turns given so far, in the order of their answers."""
        return [turn.step for turn in self._turns]

    @property
    def bridged_turns(self) -> int:
        """Turns whose prompt extends the exact tokens of one before; all but the first in the best case."""
        return sum(turn.step.bridged for turn in self._turns)

    def forget_tokens(self) -> None:
        """Let go of ids and log-probabilities, which are in samples by now; what is counted stays.

        A large group has millions of them as Python objects. Freed here, on the tokenizing thread and a rollout at a time, they do not
        hold up the event loop for half a second when the group is done.
        """
        for place, turn in enumerate(self._turns):
            empty = replace(turn.step, prompt_ids=[], completion_ids=[], logprobs=None)
            self._turns[place] = replace(turn, step=empty)

    async def complete(
        self, messages: Sequence[Message], tools: Sequence[Tool], sampling: Mapping[str, JSON]
    ) -> ChatTurn:
        """As `ChatModel.complete`; raises TurnLimit besides (end the rollout as truncated)."""
        number = self._begin_turn()
        messages, tools = [dict(message) for message in messages], list(tools)
        prompt_ids, bridged = await self._tokenizing(lambda: self._prompt(messages, tools))
        generation, seconds = await self._sample(prompt_ids, sampling, number)
        step = TokenStep(
            prompt_ids=prompt_ids,
            completion_ids=generation.token_ids,
            logprobs=generation.logprobs,
            finish_reason=generation.finish_reason,
            bridged=bridged,
        )
        message = await self._tokenizing(
            lambda: self._renderer.parse(step.completion_ids, tools, prompt_ids=prompt_ids, turn=number)
        )
        finish: FinishReason = step.finish_reason
        if finish == "stop" and message.get("tool_calls"):
            finish = "tool_calls"
        self._turns.append(Turn(messages=messages, tools=tools, answer=message, step=step))
        sent, sampled = len(prompt_ids), len(step.completion_ids)
        self._count(prompt_tokens=sent, completion_tokens=sampled, finish_reason=finish, seconds=seconds)
        return ChatTurn(message=message, finish_reason=finish, prompt_tokens=sent, completion_tokens=sampled)

    def _prompt(self, messages: list[Message], tools: list[Tool]) -> tuple[list[int], bool]:
        before = continued(self._turns, messages, tools)
        if before is not None:
            known = len(before.messages) + 1
            bridged = self._renderer.bridge(before.step, messages[:known], messages[known:], tools)
            if bridged is not None:
                return bridged, True
        return self._renderer.render(messages, tools), False

    async def _sample(
        self, prompt_ids: list[int], environment: Mapping[str, JSON], turn: int
    ) -> tuple[Generation, float]:
        parameters = self._parameters(environment, turn)
        parameters.setdefault("stop_token_ids", sorted(self._renderer.stop_ids))
        began = time.monotonic()
        generation = await self._engine.generate(
            prompt_ids, max_tokens=self._room(len(prompt_ids)), sampling=parameters, session=self._session
        )
        seconds = time.monotonic() - began
        ids = generation.token_ids
        if ids and not 0 <= min(ids) <= max(ids) < self._renderer.vocab_size:
            raise EngineAnswerError(
                f"the engine sampled a token outside the vocabulary of {self._renderer.name} "
                f"({self._renderer.vocab_size} ids): set tokenizer.name to the tokenizer of the model it serves"
            )
        return generation, seconds


class ApiChatModel(_Counted):
    """A ChatModel on a chat API (SFT, evaluation): captures messages, which are tokenized later."""

    def __init__(
        self,
        engine: ChatEngine,
        renderer: Renderer | None = None,
        *,
        sampling: SamplingSection,
        rollout_seed: int | None,
        session: str,
        limits: Limits,
        executor: Executor,
    ) -> None:
        """renderer: counts prompt tokens for `limits.max_context_tokens`; without one the last turn's usage is the lower bound that is used."""
        super().__init__(
            sampling=sampling, rollout_seed=rollout_seed, session=session, limits=limits, executor=executor
        )
        self._engine = engine
        self._renderer = renderer
        self.steps: list[ChatStep] = []

    async def complete(
        self, messages: Sequence[Message], tools: Sequence[Tool], sampling: Mapping[str, JSON]
    ) -> ChatTurn:
        """As `ChatModel.complete`; raises TurnLimit besides (end the rollout as truncated)."""
        number = self._begin_turn()
        messages, tools = [dict(message) for message in messages], list(tools)
        room = self._room(await self._prompt_size(messages, tools))
        began = time.monotonic()
        reply = await self._engine.chat(
            messages, tools=tools, max_tokens=room, sampling=self._parameters(sampling, number), session=self._session
        )
        self.steps.append(
            ChatStep(
                prompt=messages,
                tools=tools,
                completion=reply.message,
                finish_reason=reply.finish_reason,
                prompt_tokens=reply.prompt_tokens,
                completion_tokens=reply.completion_tokens,
            )
        )
        self._count(
            prompt_tokens=reply.prompt_tokens,
            completion_tokens=reply.completion_tokens,
            finish_reason=reply.finish_reason,
            seconds=time.monotonic() - began,
        )
        return ChatTurn(
            message=reply.message,
            finish_reason=reply.finish_reason,
            prompt_tokens=reply.prompt_tokens,
            completion_tokens=reply.completion_tokens,
        )

    async def _prompt_size(self, messages: list[Message], tools: list[Tool]) -> int:
        renderer = self._renderer
        if not self._limits.max_context_tokens:
            return 0
        if renderer is not None:
            return len(await self._tokenizing(lambda: renderer.render(messages, tools)))
        last = self.steps[-1] if self.steps else None
        if last is None or len(messages) <= len(last.prompt):
            return 0
        return last.prompt_tokens + last.completion_tokens


def _timed(call: Callable[[], T]) -> tuple[T, float]:
    began = time.perf_counter()
    return call(), time.perf_counter() - began
