"""Text for a delivery: one of the sample's captions, formatted by a template, or an empty string (SAMPLE-1).

A template is a string with placeholders for column values. No part of a template is ever executed (SAFE-1).

    "{text} {fps:.0f} FPS{?, {motion:.0f} motion score}."

    {name}        the value of a column; a number as Python writes it, unless a format is given
    {name:.1f}    [+ or space][0][width][,][.digits][d f e g %]; d rounds down. Width and digits are 0 to 99
    {? ...}       an optional part, which may contain nested parts
    {{  }}        a literal brace; within a part, only {{ is available

A part that names a missing value (null, NaN or an empty text) is left out. The whole template is also a part; if it is
left out, the caption alone is used.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import accumulate
from typing import Literal, NoReturn, TypeAlias

from streamvid.config import check_options, option
from streamvid.dataset.captions import captions_from_json
from streamvid.dataset.reader import Dataset
from streamvid.errors import ConfigError, IntegrityError
from streamvid.loader.view.index_row import IndexRow
from streamvid.loader.view.view import CAPTION, CAPTION_COLUMN, CAPTION_DROPOUT, CAPTION_PART, RandomChoices

MAX_TEMPLATE_CHARS = 4096
_MAX_DEPTH = 8
_FORMAT = re.compile(r"[+ ]?0?[0-9]{0,2},?(\.[0-9]{1,2})?[dfeg%]?")
_BRACE = re.compile(r"[{}]")
_NAME = re.compile(r"[^{}:!.\[\]?]+")

CaptionChoice: TypeAlias = Literal["draw", "first"]

_CAPTIONS = "captions"  # column of all captions of a sample; `text` is the first of them
_TEXT, _FPS = "text", "fps"  # in a template: the caption, and the rate of the delivered frames

Node: TypeAlias = "str | TemplateField | TemplatePart"


@dataclass(frozen=True, slots=True)
class TemplateField:
    """Placeholder for a column's value.

    format: number format; "" for Python's default.
    """

    name: str
    format: str = ""

    def written(self, value: object) -> str | None:
        """Return the formatted value, or None if the value is missing."""
        if value is None or value == "" or (isinstance(value, float) and math.isnan(value)):
            return None
        if not self.format or not isinstance(value, int | float):
            return str(value)
        if self.format.endswith("d"):
            return format(math.floor(value), self.format) if math.isfinite(value) else None
        if "." in self.format:
            value = float(value)  # without a type letter, Python accepts no precision for integers
        return format(value, self.format)


@dataclass(frozen=True, slots=True)
class TemplatePart:
    """Part of a template: a sequence of texts, fields and nested parts.

    number: index among the parts of a template, in the order in which the parts begin; 0 for the template itself.
    """

    number: int
    nodes: tuple[Node, ...]

    def written(self, values: Mapping[str, object], is_kept: Callable[[int], bool]) -> str | None:
        """Return the formatted part, or None if a value is missing.

        is_kept: function that returns True if the nested part with the given number is kept.
        """
        texts: list[str] = []
        for node in self.nodes:
            if isinstance(node, TemplatePart):
                texts.append((node.written(values, is_kept) or "") if is_kept(node.number) else "")
                continue
            text = node if isinstance(node, str) else node.written(values.get(node.name))
            if text is None:
                return None
            texts.append(text)
        return "".join(texts)

    def fields(self) -> Iterator[TemplateField]:
        """Yield all fields, including the fields of nested parts."""
        for node in self.nodes:
            if isinstance(node, TemplateField):
                yield node
            elif isinstance(node, TemplatePart):
                yield from node.fields()


@dataclass(frozen=True, slots=True)
class TextOptions:
    """Options for sample texts."""

    column: str | Mapping[str, float] = option(
        "text",
        help="Caption column, or columns with weights, such as {'short': 1, 'long': 3}; columns that are empty for a "
        "sample are skipped.",
    )
    choice: CaptionChoice = option(
        "draw", help="Caption to use: one of the sample's captions, drawn by weight, or the first one."
    )
    template: str | None = option(
        None,
        help="Template for the text, such as '{text} {fps:.0f} FPS{?, {motion:.0f} motion score.}'; a {?...} part is "
        "omitted if one of its values is missing.",
    )
    prefix: str = option("", help="Text to insert before the caption.")
    dropout: float = option(
        0.0, help="Probability that a sample is delivered with an empty caption.", minimum=0.0, maximum=1.0
    )
    part_dropout: float = option(
        0.0, help="Probability that each {? ...} part of the template is omitted.", minimum=0.0, maximum=1.0
    )

    def __post_init__(self) -> None:
        check_options(self)
        if self.template is not None:
            parse_template(self.template)
        elif self.part_dropout:
            raise ConfigError(
                f"part_dropout={self.part_dropout!r} applies only to the {{? ...}} parts of a template, but template "
                "is not set; set template, or omit part_dropout"
            )
        if not self.weights or not all(_is_weight(weight) for weight in self.weights.values()):
            raise ConfigError(
                f"column={self.column!r}: must be a column name, or a mapping from names to weights above 0 (at most "
                "1e12), such as {'short': 1, 'long': 3}"
            )

    @property
    def weights(self) -> Mapping[str, float]:
        """Weight of each caption column, by column name."""
        if isinstance(self.column, Mapping):
            return {name: weight for name, weight in self.column.items() if isinstance(name, str)}
        return {self.column: 1.0} if isinstance(self.column, str) else {}


@dataclass(frozen=True)
class TextRule:
    """Rule that determines the texts delivered with one dataset's samples.

    columns: (index column, weight) for each caption column. In the `text` column, samples may have several captions.
    template: parsed template, or None.
    template_columns: (name, index column) for each column in the template; {text} and {fps} are not columns.
    """

    options: TextOptions = field(default_factory=TextOptions)
    columns: tuple[tuple[str, float], ...] = ((_TEXT, 1.0),)
    template: TemplatePart | None = None
    template_columns: tuple[tuple[str, str], ...] = ()

    @cached_property
    def needed(self) -> tuple[str, ...]:
        """Index columns that the `texts` of each index row must contain."""
        names = [name for name, _ in self.columns] + [name for _, name in self.template_columns]
        return tuple(dict.fromkeys([*names, _CAPTIONS] if _TEXT in dict(self.columns) else names))

    def text(self, row: IndexRow, fps: float, choices: RandomChoices, dropout: RandomChoices | None = None) -> str:
        """Return the text for a delivery. Raises IntegrityError if the index contains invalid captions.

        fps: rate of the delivered frames; 0.0 if unknown.
        dropout: choices that decide whether the text is dropped; by default, `choices`. Precomputed features fix the
            other choices of a visit, but never the dropout.
        """
        options = self.options
        if self._is_dropped(dropout or choices):
            return ""
        caption, _ = self._caption(row.texts, choices)
        if self.template is not None:
            values = {name: row.texts[column] for name, column in self.template_columns}
            values |= {_TEXT: caption, _FPS: fps or None}
            written = self.template.written(values, partial(self._is_kept, choices))
            caption = caption if written is None else written
        return options.prefix + caption

    def variant(self, row: IndexRow, choices: RandomChoices, dropout: RandomChoices | None = None) -> str:
        """Return the name of the caption that `text` draws: a column name, "text/2" for the third caption, or ""."""
        return "" if self._is_dropped(dropout or choices) else self._caption(row.texts, choices)[1]

    def only_variant(self, row: IndexRow) -> str | None:
        """Return the caption's variant if no random choice affects it, otherwise None."""
        if self.options.dropout > 0.0 or len(self.columns) > 1 or row.texts.get(_CAPTIONS) is not None:
            return None
        ((column, _),) = self.columns
        return column if row.texts[column] else ""

    def _is_dropped(self, choices: RandomChoices) -> bool:
        return self.options.dropout > 0.0 and choices.share(CAPTION_DROPOUT) < self.options.dropout

    def _caption(self, texts: Mapping[str, object], choices: RandomChoices) -> tuple[str, str]:
        """Return the drawn caption and its variant."""
        there = [(column, weight) for column, weight in self.columns if texts[column]]
        if not there:
            return "", ""
        column = there[0][0]
        if len(there) > 1 and self.options.choice == "draw":
            column = there[_drawn([weight for _, weight in there], choices.share(CAPTION_COLUMN))][0]
        several = texts.get(_CAPTIONS)
        if column != _TEXT or several is None or self.options.choice == "first":
            return str(texts[column]), column
        try:
            captions = captions_from_json(str(several))
        except ValueError as error:
            raise IntegrityError(
                f"the captions in the index cannot be read: {error}; copy the dataset again"
            ) from error
        place = _drawn([weight for _, weight in captions], choices.share(CAPTION))
        return captions[place][0], f"{_TEXT}/{place}"

    def _is_kept(self, choices: RandomChoices, part: int) -> bool:
        share = self.options.part_dropout
        return share == 0.0 or choices.share(CAPTION_PART, part) >= share


def text_rule(options: TextOptions, dataset: Dataset) -> TextRule:
    """Return the text rule for a dataset. Raises ConfigError for columns that are missing or of an unsupported type."""
    columns = []
    for name, weight in options.weights.items():
        # A user column named `text`, in addition to the caption column, is available as `user.text`.
        column = _TEXT if name == _TEXT else dataset.column(name, "captions.column")
        if not _is_text(dataset, column):
            number = f", or include the number with captions.template='{{text}} {{{name}}}'"
            raise ConfigError(
                f"captions.column: {name!r} of {dataset.url} has type {_kind(dataset, column)}; use a text column "
                f"({_text_columns(dataset)}){number if dataset.is_numeric(column) else ''}"
            )
        columns.append((column, float(weight)))
    template = None if options.template is None else parse_template(options.template)
    found = {} if template is None else _template_columns(template, dataset)
    return TextRule(options, tuple(columns), template, tuple(found.items()))


def _template_columns(template: TemplatePart, dataset: Dataset) -> dict[str, str]:
    found: dict[str, str] = {}
    for one in template.fields():
        if one.name == _TEXT:
            _check_format(one, is_text=True)
        elif one.name != _FPS:
            column = dataset.column(one.name, "captions.template")
            is_text = _is_text(dataset, column)
            if not is_text and not dataset.is_numeric(column):
                kind = _kind(dataset, column)
                raise ConfigError(f"captions.template: {one.name!r} has type {kind}; use text or numeric columns")
            _check_format(one, is_text=is_text)
            found[one.name] = column
    return found


def _check_format(one: TemplateField, *, is_text: bool) -> None:
    if one.format and is_text:
        raise ConfigError(
            f"captions.template: {{{one.name}:{one.format}}} has a number format, but {one.name!r} is text; "
            f"write {{{one.name}}}"
        )


def _is_text(dataset: Dataset, column: str) -> bool:
    return _kind(dataset, column) in ("string", "large_string")


def _kind(dataset: Dataset, column: str) -> str:
    return str(dataset.samples_schema.field(column).type)


def _text_columns(dataset: Dataset) -> str:
    texts = [name for name in dataset.user_columns if _is_text(dataset, dataset.column(name))]
    return ", ".join([_TEXT, *texts[:8]])


def _is_weight(weight: object) -> bool:
    return not isinstance(weight, bool) and isinstance(weight, int | float) and 0 < weight <= 1e12


def _drawn(weights: Sequence[float], share: float) -> int:
    """Draw an index with probability proportional to its weight.

    share: uniform random number in [0, 1).
    """
    there = [place for place, weight in enumerate(weights) if weight > 0]
    ends = list(accumulate(weights[place] for place in there))
    place = bisect_right(ends, share * sum(weights[place] for place in there))
    return there[min(place, len(there) - 1)]  # the last one if rounding exceeds the total


def parse_template(text: object) -> TemplatePart:
    """Parse a template. Raises ConfigError, which names the position, if the template is invalid."""
    if not isinstance(text, str) or len(text) > MAX_TEMPLATE_CHARS:
        shown = repr(text) if len(repr(text)) <= 80 else f"{repr(text)[:80]}…"
        raise ConfigError(f"template={shown}: must be a string of at most {MAX_TEMPLATE_CHARS} characters")
    template = _TemplateParser(text).part(0)
    if not any(template.fields()):
        raise ConfigError(
            f"template={text!r} contains no column; to insert the caption, write {{text}}, as in '{{text}} 4K'"
        )
    return template


class _TemplateParser:
    def __init__(self, text: str) -> None:
        self._text, self._at, self._num_parts = text, 0, 0

    def part(self, depth: int) -> TemplatePart:
        """Parse up to the brace that ends the part, or up to the end of the text."""
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
                    self._fail("unmatched brace; write '}}' for a literal brace")
                self._at += 1
                return TemplatePart(number, tuple(nodes))
            elif character == "{":
                nodes.append(self._braced(depth))
            else:
                brace = _BRACE.search(self._text, self._at)
                end = brace.start() if brace else len(self._text)
                nodes.append(self._text[self._at : end])
                self._at = end
        if depth:
            self._at = begin
            self._fail("a part is never closed; end it with '}'")
        return TemplatePart(number, tuple(nodes))

    def _braced(self, depth: int) -> Node:
        if self._text.startswith("{?", self._at):
            if depth >= _MAX_DEPTH:
                self._fail(f"parts are nested more than {_MAX_DEPTH} levels deep")
            self._at += 2
            part = self.part(depth + 1)
            if not any(part.fields()):
                self._fail("the part that ends here contains no column, so it would always be kept; add a column")
            return part
        end = self._text.find("}", self._at)
        if end < 0:
            self._fail("a brace is never closed; write '{{' for a literal brace")
        name, colon, form = self._text[self._at + 1 : end].partition(":")
        if not _NAME.fullmatch(name):
            self._fail(f"{name!r} is not a column name; '.', '[' and '!' are not supported")
        if (colon and not form) or not _FORMAT.fullmatch(form) or (form.endswith("d") and "." in form):
            self._fail(f"the format {form!r} is not allowed; write numbers as {{{name}:.1f}} or {{{name}:d}}")
        self._at = end + 1
        return TemplateField(name, form)

    def _fail(self, message: str) -> NoReturn:
        raise ConfigError(f"template={self._text!r}, character {self._at + 1}: {message}")
