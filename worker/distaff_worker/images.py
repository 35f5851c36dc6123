"""Images of a conversation, by reference.

Invariant: what goes to the stream holds no image data: a data URI becomes its SHA-256, type and size, by which the dataset's own row tells which image it
was. URLs are references already and stay. Never changes its input.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence

from distaff.errors import TokenizationError
from distaff.types import JSON, Message

SHORTEST = 256
"""Characters of a data URI that is replaced; a shorter one is no longer than its reference."""
_DATA = re.compile(r"data:([\w.+-]+/[\w.+-]+)?(?:;[\w=.+-]+)*,")
NOT_TEXT = (
    "a message has content that is neither text nor a list of text parts (an image or audio?): modes rl and sft "
    'train text conversations only. Play it with run.mode = "eval", which keeps images by reference, or take them out'
)
_IMAGES = ("image", "image_url", "input_image")


def by_reference(value: JSON) -> JSON:
    """`value` with every data URI in it as `sha256:<hex>;type=<MIME type>;characters=<length of the URI>`, the hash being of the whole URI."""
    if isinstance(value, str):
        return _reference(value) if len(value) >= SHORTEST and value.startswith("data:") else value
    if isinstance(value, dict):
        return {key: by_reference(part) for key, part in value.items()}
    if isinstance(value, list):
        return [by_reference(part) for part in value]
    return value


def count_images(messages: Sequence[Message]) -> int:
    """Image parts of all messages."""
    contents = [message.get("content") for message in messages]
    parts = [part for content in contents if isinstance(content, list) for part in content if isinstance(part, dict)]
    return sum(part.get("type") in _IMAGES for part in parts)


def is_text(content: JSON) -> bool:
    """A message's content that text templates can hold."""
    if isinstance(content, list):
        return all(isinstance(part, dict) and part.get("type") == "text" for part in content)
    return content is None or isinstance(content, str)


def refuse_images(messages: Sequence[Message]) -> None:
    """Raise TokenizationError when a message holds what no text template can."""
    if not all(is_text(message.get("content")) for message in messages):
        raise TokenizationError(NOT_TEXT)


def _reference(uri: str) -> str:
    head = _DATA.match(uri)
    if head is None:
        return uri
    digest = hashlib.sha256(uri.encode("utf-8", "surrogatepass")).hexdigest()
    return f"sha256:{digest};type={head[1] or 'text/plain'};characters={len(uri)}"
