"""The policy as one rollout sees it: asks the engine for the next turn and keeps every turn it gave.

Invariant: one object per rollout (and seat); a step is the exact prompt that was sent and the exact tokens that came back. Never retries (the
engine client does), never tokenizes on the event loop (the executor has the one thread that may use the renderer).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeVar

from distaff.config import SamplingSection
from distaff.environments.protocol import ChatTurn
from distaff.errors import ContextOverflow, EngineAnswerError, TokenBudget, TurnLimit
from distaff.types import JSON, FinishReason, Message, Tool
from distaff_worker.conversations import Turn, continued, why_not_continued
from distaff_worker.engines.protocol import ChatEngine, Generation, TokenEngine
from distaff_worker.images import refuse_images
from distaff_worker.rendering.protocol import Renderer
from distaff_worker.sampling import Limits, turn_sampling
from distaff_worker.steps import ChatStep, PrefixBreak, TokenStep

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
        self._granted = 0
        """max_tokens of turns that are being sampled."""
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

    @contextmanager
    def _grant(self, prompt_tokens: int) -> Iterator[int]:
        """max_tokens for a prompt of that length, held while the turn is sampled; raises ContextOverflow."""
        room = min(self._room(prompt_tokens), self._budget())
        self._granted += room
        try:
            yield room
        finally:
            self._granted -= room

    def _budget(self) -> int:
        """Tokens the rollout may still sample, turns that are being sampled counted as long as they may become."""
        most = self._limits.max_total_completion_tokens
        if not most:
            return self._sampling.max_tokens
        left = most - self.completion_tokens - self._granted
        if left < 1:
            raise TokenBudget(
                f"the rollout has sampled {self.completion_tokens} tokens and {self._granted} are being sampled: its "
                f"{most} are used up (rollouts.max_total_completion_tokens)"
            )
        return left

    def _room(self, prompt_tokens: int) -> int:
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

    @property
    def prefix_breaks(self) -> list[PrefixBreak]:
        """Why turns did not extend one before, in the order of their answers; the first turn has none to extend."""
        return [turn.step.broken_by for turn in self._turns if turn.step.broken_by is not None]

    @property
    def prefix_share(self) -> float | None:
        """Of the turns that had one before, those whose prompt extends its exact tokens; None when there was none."""
        later = self.bridged_turns + len(self.prefix_breaks)
        return self.bridged_turns / later if later else None

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
        prompt_ids, bridged, broken_by = await self._tokenizing(lambda: self._prompt(messages, tools))
        generation = await self._sample(prompt_ids, sampling, number)
        step = TokenStep(
            prompt_ids=prompt_ids,
            completion_ids=generation.token_ids,
            logprobs=generation.logprobs,
            finish_reason=generation.finish_reason,
            bridged=bridged,
            broken_by=broken_by,
        )
        message = await self._tokenizing(
            lambda: self._renderer.parse(step.completion_ids, tools, prompt_ids=prompt_ids, turn=number)
        )
        finish: FinishReason = step.finish_reason
        if finish == "stop" and message.get("tool_calls"):
            finish = "tool_calls"
        self.finish_reason = finish
        self._turns.append(Turn(messages=messages, tools=tools, answer=message, step=step))
        return ChatTurn(
            message=message,
            finish_reason=finish,
            prompt_tokens=len(prompt_ids),
            completion_tokens=len(step.completion_ids),
        )

    def _prompt(self, messages: list[Message], tools: list[Tool]) -> tuple[list[int], bool, PrefixBreak | None]:
        """(ids, whether they extend those of a turn before, why not where there was one)."""
        if not self._turns:
            return self._renderer.render(messages, tools), False, None
        before = continued(self._turns, messages, tools)
        if before is None:
            return self._renderer.render(messages, tools), False, why_not_continued(self._turns, messages)
        known = len(before.messages) + 1
        bridged = self._renderer.bridge(before.step, messages[:known], messages[known:], tools)
        if bridged is None:
            return self._renderer.render(messages, tools), False, "format_not_continued"
        return bridged, True, None

    async def _sample(self, prompt_ids: list[int], environment: Mapping[str, JSON], turn: int) -> Generation:
        parameters = self._parameters(environment, turn)
        parameters.setdefault("stop_token_ids", sorted(self._renderer.stop_ids))
        began = time.monotonic()
        with self._grant(len(prompt_ids)) as room:
            generation = await self._engine.generate(
                prompt_ids, max_tokens=room, sampling=parameters, session=self._session
            )
            ids = generation.token_ids
            self._count(
                prompt_tokens=len(prompt_ids),
                completion_tokens=len(ids),
                finish_reason=generation.finish_reason,
                seconds=time.monotonic() - began,
            )
        if ids and not 0 <= min(ids) <= max(ids) < self._renderer.vocab_size:
            raise EngineAnswerError(
                f"the engine sampled a token outside the vocabulary of {self._renderer.name} "
                f"({self._renderer.vocab_size} ids): set tokenizer.name to the tokenizer of the model it serves"
            )
        return generation


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
        if self._renderer is not None:
            refuse_images(messages)
        size = await self._prompt_size(messages, tools)
        parameters = self._parameters(sampling, number)
        began = time.monotonic()
        with self._grant(size) as room:
            reply = await self._engine.chat(
                messages, tools=tools, max_tokens=room, sampling=parameters, session=self._session
            )
            self._count(
                prompt_tokens=reply.prompt_tokens,
                completion_tokens=reply.completion_tokens,
                finish_reason=reply.finish_reason,
                seconds=time.monotonic() - began,
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
