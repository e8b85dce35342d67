"""The captions of a record: out of one or several columns, lists, weights, or the lines of a file beside it."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from streamvid.dataset.captions import CAPTION_COLUMNS, Captions, captions_to_json, parse_captions
from streamvid.errors import Rejected, SourceError
from streamvid.sharder.source.columns import check_text, find_column
from streamvid.sharder.source.metadata import Cell, cell_text

_SLUG_CHARS = 40
_UNSAFE = re.compile(r"[^A-Za-z0-9]+")
MAX_CAPTIONS_BYTES = 256 * 2**10
"""Of all captions of a sample, as they are stored."""


@dataclass(frozen=True, slots=True)
class CaptionColumns:
    """The columns of the metadata that captions come from; `weights`, where it is not None, holds their weights."""

    names: tuple[str, ...] = ()
    weights: str | None = None

    @property
    def all(self) -> tuple[str, ...]:
        return self.names if self.weights is None else (*self.names, self.weights)

    def of_row(self, row: Mapping[str, Any]) -> CaptionCells | None:
        """What a row holds there."""
        if not self.names:
            return None
        cells = tuple(_listed(row.get(name)) for name in self.names)
        return CaptionCells(cells, None if self.weights is None else _weights(row.get(self.weights)))


@dataclass(frozen=True, slots=True)
class CaptionCells:
    """A row's values of its caption columns, and of the column of weights, as the user gave them."""

    values: tuple[object, ...]
    weights: object = None

    def captions(self) -> Captions:
        """Raises Rejected."""
        if len(self.values) == 1:
            return parse_captions(self.values[0], self.weights)
        items = [item for value in self.values for item in (value if isinstance(value, list) else [value])]
        return parse_captions(items, self.weights)


def find_caption_columns(
    names: Sequence[str], asked: str | Sequence[str] | None, weights: str | None
) -> CaptionColumns:
    """The columns that the options caption_column and caption_weight_column mean. Raises SourceError."""
    several = [asked] if asked is None or isinstance(asked, str) else list(asked)
    found = tuple(name for one in several if (name := _caption_column(names, one)) is not None)
    if weights is not None:
        find_column(names, weights, (), "caption_weight_column")
    return CaptionColumns(found, weights)


def text_source(text: str) -> str:
    """The source of a sample that is a text alone: its first words for people, and what tells it from any other."""
    words = _UNSAFE.sub("_", text[:_SLUG_CHARS]).strip("_") or "text"
    return f"{words}.{hashlib.sha256(text.encode()).hexdigest()[:32]}"


def caption_lines(text: str | None) -> Captions:
    """The captions of a file with one a line."""
    return parse_captions([line.strip() for line in (text or "").splitlines() if line.strip()])


def check_captions(captions: Captions) -> Captions:
    """`captions` if they can be stored and read everywhere; Rejected says what is wrong with them."""
    for text, _ in captions:
        check_text(text, "the caption")
    if len(captions) > 1:
        num_bytes = len(captions_to_json(captions).encode())
        if num_bytes > MAX_CAPTIONS_BYTES:
            raise Rejected(f"its captions have {num_bytes} bytes together, {MAX_CAPTIONS_BYTES} are allowed")
    return captions


def _caption_column(names: Sequence[str], asked: str | None) -> str | None:
    if asked == "" or (asked is None and not names):
        return None
    try:
        return find_column(names, asked, CAPTION_COLUMNS, "caption_column")
    except SourceError as error:
        raise SourceError(f'{error}, or give caption_column="" for no captions') from None


def _listed(value: object) -> object:
    """A value of a caption column; in a CSV cell a list is written as JSON."""
    text = cell_text(value)
    if isinstance(value, Cell) and isinstance(text, str) and text.lstrip().startswith("["):
        found = _parsed(text)
        # "[1]" may be a caption, and is no list of them.
        is_list = isinstance(found, list) and all(isinstance(item, str | dict | None) for item in found)
        return found if is_list else text
    return text


def _weights(value: object) -> object:
    """A value of the column of weights: a list, or None."""
    found = cell_text(value)
    if isinstance(value, Cell) and isinstance(found, str):
        found = _parsed(found)
    return found if found is None or isinstance(found, list | tuple) else [found]


def _parsed(text: str) -> object:
    try:
        found: object = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return found
