"""What an item asks, what the right answer is, and which task it belongs to, read from the columns of its row.

Invariant: a column that is not there is "" or None in the report, never an error: rows are the environment's own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from distaff.types import JSON, Message

QUESTION_COLUMNS = ("question", "problem", "query", "prompt")
ANSWER_COLUMNS = ("answer", "solution", "target", "ground_truth")
TASK_COLUMNS = ("task", "dataset", "source", "subset", "category")


def task_name(row: Mapping[str, JSON], *, default: str) -> str:
    """The environment of an EnvGroup that the row belongs to, or its dataset, or `default`."""
    route = _info(row).get("env_id")
    if isinstance(route, list):
        route = "/".join(map(str, route))
    names = [row.get("task"), route, *(row.get(column) for column in TASK_COLUMNS[1:])]
    return next((name for name in names if isinstance(name, str) and name), default)


def question(row: Mapping[str, JSON], messages: Sequence[Message]) -> str:
    """The row's question, else the last user message of its prompt, else the first of the conversation."""
    for column in QUESTION_COLUMNS:
        value = row.get(column)
        if isinstance(value, str) and value:
            return value
        if isinstance(value, list) and (texts := _user_texts(value)):
            return texts[-1]
    return next(iter(_user_texts(messages)), "")


def gold_answer(row: Mapping[str, JSON]) -> JSON:
    """The first answer column that is not empty, as it is; else None."""
    return next((row[column] for column in ANSWER_COLUMNS if row.get(column) not in (None, "")), None)


def _info(row: Mapping[str, JSON]) -> Mapping[str, JSON]:
    info = row.get("info")
    if isinstance(info, str):
        try:
            info = json.loads(info)
        except ValueError:
            return {}
    return info if isinstance(info, Mapping) else {}


def _user_texts(messages: Sequence[JSON]) -> list[str]:
    users = [m for m in messages if isinstance(m, Mapping) and m.get("role") == "user"]
    return [text for text in (_text(message.get("content")) for message in users) if text]


def _text(content: JSON) -> str:
    if isinstance(content, list):
        parts = [part.get("text") for part in content if isinstance(part, Mapping)]
        return "\n".join(part for part in parts if isinstance(part, str))
    return content if isinstance(content, str) else ""
