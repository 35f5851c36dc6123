"""Every error distaff raises on purpose, as one small tree.

Invariant: each class names the boundary it comes from (`boundary`) and whether doing the same thing again
can help (`retryable`). All are picklable: their state is their positional arguments.
"""

from __future__ import annotations

from typing import ClassVar


class DistaffError(Exception):
    """Base class. `str(error)` says what is wrong, where, and how to mend it, in one or a few lines."""

    boundary: ClassVar[str] = "distaff"
    retryable: ClassVar[bool] = False


class ConfigurationError(DistaffError):
    """A setting, an argument or a file is wrong; the command ends with exit code 2."""

    boundary = "configuration"


class RedisUnavailable(DistaffError):
    """Redis cannot be reached, refuses the credentials, or is set up in a way that would lose data."""

    boundary = "redis"
    retryable = True


class WireError(DistaffError):
    """Bytes that are not a scored group this version can read. Never guesses."""

    boundary = "wire"


class SchemaVersionError(WireError):
    """A group written by a newer major version of the schema; the message says what to install."""


class GroupTooLarge(WireError):
    """An encoded or decoded group is larger than the configured limit."""


class CodecMissing(WireError):
    """A group is compressed and the codec is not installed; the message says what to install."""


class AlignmentError(WireError):
    """Token ids, loss mask, log-probabilities or offsets of a group do not fit each other."""


class EnvironmentLoadError(DistaffError):
    """The environment cannot be found, imported or built."""

    boundary = "environment"


class EnvironmentFailure(DistaffError):
    """Code of the environment raised while a rollout was set up, stepped or cleaned up."""

    boundary = "environment"
    retryable = True


class ScoringError(DistaffError):
    """The environment's rubric raised, returned no finite number, or a list of the wrong length."""

    boundary = "scoring"
    retryable = True


class EngineError(DistaffError):
    """The inference engine did not give a usable answer."""

    boundary = "engine"
    retryable = True


class EngineUnavailable(EngineError):
    """Connection refused, reset, timed out, 429 or 5xx, after the retry budget was used up."""


class EngineRefused(EngineError):
    """The engine says that the request itself is wrong: unknown model, bad key, bad parameter. Not retried."""

    retryable = False


class EngineAnswerError(EngineError):
    """The answer is malformed: no ids, log-probabilities of another length or not finite, ids outside the vocabulary."""


class ContextOverflow(EngineError):
    """The prompt does not fit the engine's context. A clean end of the rollout (truncated), not a failure."""

    retryable = False


class TokenBudget(ContextOverflow):
    """The run's bound on the tokens of a whole rollout is reached; ends it as ContextOverflow does."""


class TurnLimit(DistaffError):
    """The run's bound on model turns is reached. A clean end of the rollout (truncated), not a failure: the environment
    adapter ends the episode as it does on ContextOverflow, keeps the turns so far and has them scored."""

    boundary = "limits"


class TokenizationError(DistaffError):
    """The chat template or the tokenizer cannot represent the conversation."""

    boundary = "tokenization"


class DeadlineExceeded(DistaffError):
    """A rollout, a group or its scoring ran past its deadline."""

    boundary = "deadline"
    retryable = True


class LeaseLost(DistaffError):
    """Another worker owns the item now; whatever this one still does for it is thrown away."""

    boundary = "lease"


class FatalRun(DistaffError):
    """This worker cannot play a run at all: wrong key, missing environment, engine away or without ids. Its items are handed back, the
    worker passes over them and ends when its pool holds nothing else."""

    boundary = "run"


class WorkerBroken(DistaffError):
    """A thread or task that a worker cannot do without has failed. The worker handed back what it held and ends with exit code 1, to be
    started again by whoever looks after it."""

    boundary = "worker"
