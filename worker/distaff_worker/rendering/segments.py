"""Renders a chat template once and says where each message ends, and which ends are those of shorter conversations too.

Invariant: the text is what the template writes, to the letter. `proven[i]` is set only when nothing before `ends[i]` was made of a later message, of the
number of messages, or of the generation prompt's flag, so that a conversation cut behind message i renders to `text[:ends[i]]` and one of
the two closings, whatever was cut off. Never guesses: a template of another shape gives None.

How: marks are put into the template's syntax tree, before and at the end of each round of its loop over the messages, where they are given the message of the
round; and the messages are handed over in a sequence that notes how far it was read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import Environment, Template, TemplateError, nodes
from transformers.utils import chat_template_utils

_MARK = "\x00distaff-end-of-message\x00"
_CALL = "distaff_end_of_message"
_FLAG = "add_generation_prompt"
_DEEPEST_PROLOGUE = 3
"""Messages a template may have written before its loop begins: a system message, a first user message with the tools."""
_FAILURES = (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Segments:
    """One rendering."""

    text: str
    ends: list[int]
    """ends[i]: characters up to and with message i; -1 for messages written before the loop, but for the last of them."""
    proven: list[bool]

    def of(self, at: int) -> str:
        """What the template wrote for message `at` (not the first one)."""
        return self.text[self.ends[at - 1] : self.ends[at]]


class SegmentedTemplate:
    """A chat template with marks in it."""

    def __init__(self, template: Template, *, closings_are_constant: bool) -> None:
        self._template = template
        self._closings_are_constant = closings_are_constant

    def render(self, messages: Sequence[Any], arguments: Mapping[str, Any]) -> Segments | None:
        """The conversation without a generation prompt. None when marks and messages do not fit each other."""
        watched = _Watched(list(messages))
        places = {id(message): place for place, message in enumerate(messages)}
        reads: list[int] = []
        ended: list[int] = []

        def mark(message: Any = None) -> str:
            reads.append(watched.reached)
            ended.append(-1 if message is None else places.get(id(message), -1))
            return _MARK

        try:
            text = self._template.render(messages=watched, **{_FLAG: False, _CALL: mark}, **arguments)
        except _FAILURES:
            return None
        parts = text.split(_MARK)
        before_loop = len(messages) - (len(reads) - 1)
        if len(parts) != len(reads) + 1 or not 0 <= before_loop <= _DEEPEST_PROLOGUE:
            return None
        if ended != [-1, *range(before_loop, len(messages))]:  # a message was passed over, or another took its name
            return None
        ends, proven = [-1] * len(messages), [False] * len(messages)
        at = 0
        for number, (part, read) in enumerate(zip(parts[:-1], reads, strict=True)):
            at += len(part)
            message = before_loop + number - 1
            if message >= 0:
                ends[message] = at
                proven[message] = self._closings_are_constant and read == message
        return Segments(text="".join(parts), ends=ends, proven=proven)


def open_segmented(source: str) -> SegmentedTemplate | None:
    """The template with marks; None when it has no loop on its top level or cannot be compiled as the library compiles it."""
    try:
        environment: Environment = chat_template_utils._compile_jinja_template(source).environment
        tree = environment.parse(source)
        place = _loop_over_messages(tree)
        if place is None:
            return None
        constant = _closings_are_constant(tree, place)
        loop = tree.body[place]
        if not isinstance(loop, nodes.For) or not isinstance(loop.target, nodes.Name):
            return None
        loop.body.append(_mark_node(nodes.Name(loop.target.name, "load")))
        tree.body.insert(place, _mark_node())
        tree.set_environment(environment)
        code = environment.compile(tree)
        template = environment.template_class.from_code(environment, code, environment.make_globals(None))
    except _FAILURES:
        return None
    return SegmentedTemplate(template, closings_are_constant=constant)


class _Watched(Sequence[Any]):
    """Messages that note the last one that was looked at; asking for their number is looking at the end."""

    def __init__(self, messages: list[Any], *, offset: int = 0, root: _Watched | None = None) -> None:
        self._messages, self._offset, self._root = messages, offset, root or self
        self.reached = -1

    def _look(self, index: int) -> None:
        self._root.reached = max(self._root.reached, self._offset + index)

    def __bool__(self) -> bool:
        self._look(0)
        return bool(self._messages)

    def __len__(self) -> int:
        self._look(len(self._messages))
        return len(self._messages)

    def __iter__(self) -> Iterator[Any]:
        for index, message in enumerate(self._messages):
            self._look(index)
            yield message

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            if index.start in (None, *range(_DEEPEST_PROLOGUE + 1)) and index.stop is None and index.step in (None, 1):
                start = index.start or 0
                return _Watched(self._messages[start:], offset=self._offset + start, root=self._root)
            self._look(len(self._messages))
            return self._messages[index]
        self._look(index if 0 <= index < len(self._messages) else len(self._messages))
        return self._messages[index]


def _mark_node(*arguments: nodes.Expr) -> nodes.Output:
    return nodes.Output([nodes.Call(nodes.Name(_CALL, "load"), list(arguments), [], None, None)], lineno=1)


def _loop_over_messages(tree: nodes.Template) -> int | None:
    """Place of the last loop on the top level."""
    places = [place for place, node in enumerate(tree.body) if isinstance(node, nodes.For)]
    if not places:
        return None
    loop = tree.body[places[-1]]
    return places[-1] if isinstance(loop, nodes.For) and not loop.else_ and loop.test is None else None


def _closings_are_constant(tree: nodes.Template, place: int) -> bool:
    """What follows the loop depends on the flag and the template's arguments alone, and nothing before depends on the flag."""
    set_somewhere = {name.name for name in tree.find_all(nodes.Name) if name.ctx != "load"}
    set_somewhere |= {macro.name for macro in tree.find_all(nodes.Macro)} | {"messages", "loop"}
    before, after = tree.body[: place + 1], tree.body[place + 1 :]
    flagged = any(name.name == _FLAG for node in before for name in node.find_all(nodes.Name))
    used = {name.name for node in after for name in node.find_all(nodes.Name)}
    blocks = any(tree.find_all((nodes.Block, nodes.Include, nodes.Extends, nodes.Import, nodes.FromImport)))
    return not flagged and not blocks and not used & set_somewhere
