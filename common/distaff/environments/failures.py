"""The one boundary around environment code: whatever it raises becomes a RolloutFailure that names the place.

Invariant: SystemExit and KeyboardInterrupt of environment code never reach an event loop (which they would stop), and a
cancellation of ours is never taken for a failure or lost because environment code swallowed it.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Awaitable, Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from distaff.errors import ContextOverflow, DeadlineExceeded, EngineError, TokenizationError
from distaff.types import RolloutFailure, RolloutVerdict

T = TypeVar("T")
MESSAGE_LIMIT = 2_000
"""Characters of a failure's message."""


_OURS = (EngineError, TokenizationError, DeadlineExceeded)


class EnvironmentExit(BaseException):
    """SystemExit, KeyboardInterrupt or a CancelledError out of nowhere in environment code. Like them no Exception, so that
    nothing swallows it; unlike them harmless to the event loop and never mistaken for a cancellation of ours."""


class Trail:
    """Where the exceptions of one rollout were first seen, innermost place first."""

    def __init__(self) -> None:
        self._seen: list[tuple[BaseException, str]] = []

    def note(self, error: BaseException, place: str) -> None:
        if all(known is not error for known, _ in self._seen):
            self._seen.append((error, place))

    def place(self, error: BaseException, default: str) -> str:
        """The place of `error` or of the innermost of its causes that was seen."""
        places = [place for cause in causes(error) for known, place in self._seen if known is cause]
        return places[-1] if places else default


TRAIL: ContextVar[Trail | None] = ContextVar("distaff_trail", default=None)
"""The trail of the rollout that runs in this context; child tasks and threads inherit it."""


def causes(error: BaseException) -> Iterator[BaseException]:
    """`error`, its cause, the cause's cause, ..."""
    seen: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and all(current is not known for known in seen):
        seen.append(current)
        yield current
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)


def cancelled() -> bool:
    """Whether the running task was asked to end."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


@dataclass(frozen=True, slots=True)
class Outcome(Generic[T]):
    """What a piece of environment code returned, or what it raised."""

    value: T | None = None
    error: BaseException | None = None


async def attempt(code: Awaitable[T]) -> Outcome[T]:
    """Await environment code; whatever it raises is returned. Raises CancelledError when the running task was asked to end,
    also when the code swallowed that."""
    outcome: Outcome[T]
    try:
        outcome = Outcome(value=await code)
    except GeneratorExit:
        raise
    except BaseException as error:  # noqa: BLE001 - the boundary around environment code: the failure is data
        outcome = Outcome(error=error)
    if cancelled():
        raise asyncio.CancelledError
    return outcome


def guarded(
    function: Callable[..., Any], place: Callable[..., str], *, exits_as: type[BaseException] = EnvironmentExit
) -> Callable[..., Any]:
    """`function` as a coroutine function whose exceptions are noted on the trail under `place(*args, **kwargs)`, and
    whose exits (see EnvironmentExit) become an `exits_as`."""

    @functools.wraps(function)
    async def call(*args: Any, **kwargs: Any) -> Any:
        trail = TRAIL.get()
        try:
            result = function(*args, **kwargs)
            return await result if inspect.isawaitable(result) else result
        except (SystemExit, KeyboardInterrupt, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError) and cancelled():
                raise  # ours
            escaped = exits_as(_describe(error))
            if trail is not None:
                trail.note(escaped, place(*args, **kwargs))
            raise escaped from None
        except GeneratorExit:
            raise
        except BaseException as error:
            if trail is not None:
                trail.note(error, place(*args, **kwargs))
            raise

    return call


def failure(error: BaseException, place: str) -> RolloutFailure:
    """What `error`, raised at `place`, means for its rollout.

    An EngineError, TokenizationError or DeadlineExceeded among its causes decides; everything else is the environment's.
    """
    known = next(
        (cause for cause in causes(error) if isinstance(cause, _OURS) and not isinstance(cause, ContextOverflow)), None
    )
    if isinstance(known, _OURS):
        return RolloutFailure(
            kind=_kind(known), boundary=known.boundary, message=clip(_describe(known)), retryable=known.retryable
        )
    return RolloutFailure(kind="environment_error", boundary=place, message=clip(_describe(error)))


def scoring_failure(message: str) -> RolloutFailure:
    """A failure of the rubric."""
    return RolloutFailure(kind="scoring_error", boundary="reward", message=clip(message))


def clip(text: str) -> str:
    """`text`, cut to MESSAGE_LIMIT characters."""
    return text if len(text) <= MESSAGE_LIMIT else text[: MESSAGE_LIMIT - 3] + "..."


def _kind(error: EngineError | TokenizationError | DeadlineExceeded) -> RolloutVerdict:
    if isinstance(error, TokenizationError):
        return "tokenization_error"
    return "timeout" if isinstance(error, DeadlineExceeded) else "engine_error"


def _describe(error: BaseException) -> str:
    if isinstance(error, EnvironmentExit):
        return str(error)
    if isinstance(error, asyncio.CancelledError):
        return "CancelledError raised by environment code (nothing had cancelled the rollout)"
    cause = error.__cause__
    detail = f" (from {type(cause).__name__}: {cause})" if cause is not None else ""
    return f"{type(error).__name__}: {error}{detail}"
