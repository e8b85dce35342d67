"""Caption templates: a text with the values of columns in it. Nothing of a template is ever run (SAFE-1).

    "{text} {fps:.0f} FPS{?, {motion:.0f} motion score}."

    {name}        the value of a column; a number as it is written in Python, or as a format says
    {name:.1f}    [+ or space][0][width][,][.digits][d f e g %]; d rounds down. Width and digits are 0 to 99
    {? ...}       a part of its own, which may hold further ones
    {{  }}        a brace; within a part only the first

A part that names a missing value vanishes: null, NaN or an empty text. The whole template is a part too.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn, TypeAlias

from streamvid.errors import ConfigError

MAX_TEMPLATE_CHARS = 4096
_MAX_DEPTH = 8
_FORMAT = re.compile(r"[+ ]?0?[0-9]{0,2},?(\.[0-9]{1,2})?[dfeg%]?")
_NAME = re.compile(r"[^{}:!.\[\]?]+")

Node: TypeAlias = "str | Field | Part"


@dataclass(frozen=True, slots=True)
class Field:
    """A column's value: its name, and how a number is written; "" as it is."""

    name: str
    format: str = ""

    def written(self, value: object) -> str | None:
        """None where the value is missing."""
        if value is None or value == "" or (isinstance(value, float) and math.isnan(value)):
            return None
        if not self.format or not isinstance(value, int | float):
            return str(value)
        if self.format.endswith("d"):
            return format(math.floor(value), self.format) if math.isfinite(value) else None
        if "." in self.format:
            value = float(value)  # of an integer without a letter Python writes no digits
        return format(value, self.format)


@dataclass(frozen=True, slots=True)
class Part:
    """Texts, fields and parts one after the other. number: of the parts of a template in the order they begin, from 0;
    the template itself is 0."""

    number: int
    nodes: tuple[Node, ...]

    def written(self, values: Mapping[str, object], is_kept: Callable[[int], bool]) -> str | None:
        """None where a value that it names is missing. is_kept: asked for the number of each part within it."""
        texts: list[str] = []
        for node in self.nodes:
            if isinstance(node, Part):
                texts.append((node.written(values, is_kept) or "") if is_kept(node.number) else "")
                continue
            text = node if isinstance(node, str) else node.written(values.get(node.name))
            if text is None:
                return None
            texts.append(text)
        return "".join(texts)

    def fields(self) -> Iterator[Field]:
        """All fields, those of parts within it among them."""
        for node in self.nodes:
            if isinstance(node, Field):
                yield node
            elif isinstance(node, Part):
                yield from node.fields()


def parse_template(text: object) -> Part:
    """The template that `text` states. Raises ConfigError, which names the place."""
    if not isinstance(text, str) or len(text) > MAX_TEMPLATE_CHARS:
        shown = repr(text) if len(repr(text)) <= 80 else f"{repr(text)[:80]}…"
        raise ConfigError(f"template={shown}: expected a text of at most {MAX_TEMPLATE_CHARS} characters")
    template = _Parser(text).part(0)
    if not any(template.fields()):
        raise ConfigError(f"template={text!r} names no column: write the caption as {{text}}, as '{{text}} 4K'")
    return template


class _Parser:
    def __init__(self, text: str) -> None:
        self._text, self._at, self._num_parts = text, 0, 0

    def part(self, depth: int) -> Part:
        """Up to the brace that ends it, or the end of the text."""
        number, begin = self._num_parts, self._at
        self._num_parts += 1
        nodes: list[Node] = []
        while self._at < len(self._text):
            character = self._text[self._at]
            if self._text.startswith("{{", self._at) or (not depth and self._text.startswith("}}", self._at)):
                nodes.append(character)
                self._at += 2
            elif character == "}":
                if not depth:
                    self._fail("a brace that closes nothing; write '}}' for the character")
                self._at += 1
                return Part(number, _joined(nodes))
            elif character == "{":
                nodes.append(self._braced(depth))
            else:
                nodes.append(character)
                self._at += 1
        if depth:
            self._at = begin
            self._fail("a part that is never closed; end it with '}'")
        return Part(number, _joined(nodes))

    def _braced(self, depth: int) -> Node:
        if self._text.startswith("{?", self._at):
            if depth >= _MAX_DEPTH:
                self._fail(f"parts lie more than {_MAX_DEPTH} deep")
            self._at += 2
            part = self.part(depth + 1)
            if not any(part.fields()):
                self._fail("the part that ends here names no column, so that nothing decides whether it stands")
            return part
        end = self._text.find("}", self._at)
        if end < 0:
            self._fail("a brace that is never closed; write '{{' for the character")
        name, colon, form = self._text[self._at + 1 : end].partition(":")
        if not _NAME.fullmatch(name):
            self._fail(f"{name!r} is no name of a column; nothing of a value can be taken out, as by '.', '[' or '!'")
        if (colon and not form) or not _FORMAT.fullmatch(form) or (form.endswith("d") and "." in form):
            self._fail(f"the format {form!r} is not allowed; numbers are written as {{{name}:.1f}} or {{{name}:d}}")
        self._at = end + 1
        return Field(name, form)

    def _fail(self, message: str) -> NoReturn:
        raise ConfigError(f"template={self._text!r}, column {self._at + 1}: {message}")


def _joined(nodes: Sequence[Node]) -> tuple[Node, ...]:
    """Characters that stand together as one text."""
    found: list[Node] = []
    for node in nodes:
        if isinstance(node, str) and found and isinstance(found[-1], str):
            found[-1] += node
        else:
            found.append(node)
    return tuple(found)
