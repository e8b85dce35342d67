"""Captions of a record, read from metadata columns or from a caption file."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from streamvid.dataset.captions import (
    CAPTION_COLUMNS,
    MAX_CAPTIONS_BYTES,
    Captions,
    captions_to_json,
    listed_captions,
    parse_captions,
)
from streamvid.dataset.tabular.columns import MAX_TEXT_BYTES, check_text, find_column
from streamvid.dataset.tabular.reader import RowBlock
from streamvid.errors import Rejected, SourceError
from streamvid.sharder.source.time_ranges import parse_list

_SLUG_CHARS = 40
_UNSAFE = re.compile(r"[^A-Za-z0-9]+")


@dataclass(frozen=True, slots=True)
class CaptionColumns:
    """Metadata columns that contain captions, and the column that contains caption weights, if there is one.

    is_timed: True if rows have time ranges. A list of captions may then also be in Python syntax, as in Panda-70M.
    """

    names: tuple[str, ...] = ()
    weights: str | None = None
    is_timed: bool = False

    @property
    def all(self) -> tuple[str, ...]:
        return self.names if self.weights is None else (*self.names, self.weights)

    def cells(self, block: RowBlock) -> list[CaptionCells]:
        """Return the caption and weight values of each row."""
        read = _caption_list if self.is_timed else listed_captions
        columns = [[read(value) for value in block.column(name).values()] for name in self.names]
        weights: list[object] = [None] * block.num_rows
        if self.weights is not None:
            weights = [_weights(value) for value in block.column(self.weights).values()]
        rows: list[tuple[object, ...]] = list(zip(*columns, strict=True)) if columns else [()] * block.num_rows
        return [CaptionCells(values, weight) for values, weight in zip(rows, weights, strict=True)]


@dataclass(frozen=True, slots=True)
class CaptionCells:
    """Caption and weight values of one row, as given in the metadata."""

    values: tuple[object, ...] = ()
    weights: object = None

    def captions(self) -> Captions:
        """Return the captions with their weights. Raises Rejected if they are invalid."""
        if len(self.values) <= 1:
            return parse_captions(self.values[0], self.weights) if self.values else ()
        items = [item for value in self.values for item in (value if isinstance(value, list) else [value])]
        return parse_captions(items, self.weights)


def find_caption_columns(
    names: Sequence[str], asked: str | Sequence[str] | None, weights: str | None, *, is_timed: bool = False
) -> CaptionColumns:
    """Return the columns in `asked`, or detect one if `asked` is None.

    Raises SourceError if a column does not exist.
    """
    several = [asked] if asked is None or isinstance(asked, str) else list(asked)
    found = tuple(name for one in several if (name := _caption_column(names, one)) is not None)
    if weights is not None:
        find_column(names, weights, (), "source.captions.weight_column")
    return CaptionColumns(found, weights, is_timed)


def text_source(text: str) -> str:
    """Return the source name of a text sample: its first words for readability, and a digest of the text."""
    words = _UNSAFE.sub("_", text[:_SLUG_CHARS]).strip("_") or "text"
    return f"{words}.{hashlib.sha256(text.encode()).hexdigest()[:32]}"


def caption_lines(text: str | None) -> Captions:
    """Return the captions in `text`, which contains one caption per line."""
    return parse_captions([line.strip() for line in (text or "").splitlines() if line.strip()])


def check_captions(captions: Captions, *, truncates: bool = False) -> Captions:
    """Return the captions if they are valid. If `truncates` is True, truncate each caption to MAX_TEXT_BYTES.

    Raises Rejected if a caption is not valid text or is too long, or if all captions together are too long.
    """
    if truncates:
        captions = tuple((_truncated(text), weight) for text, weight in captions)
    for text, _ in captions:
        check_text(text, "the caption")
    if len(captions) > 1:
        num_bytes = len(captions_to_json(captions).encode())
        if num_bytes > MAX_CAPTIONS_BYTES:
            raise Rejected(
                f"the captions total {num_bytes} bytes, but at most {MAX_CAPTIONS_BYTES} are allowed; shorten or "
                "remove some captions"
            )
    return captions


def _truncated(text: str) -> str:
    """Truncate a text to at most MAX_TEXT_BYTES at a character boundary. Return invalid Unicode unchanged."""
    with suppress(UnicodeEncodeError):
        return text.encode()[:MAX_TEXT_BYTES].decode(errors="ignore")
    return text


def _caption_column(names: Sequence[str], asked: str | None) -> str | None:
    if asked == "" or (asked is None and not names):
        return None
    try:
        return find_column(names, asked, CAPTION_COLUMNS, "source.captions.column")
    except SourceError as error:
        raise SourceError(f"{error}; to omit captions, set source.captions.column='' (--caption-column '')") from None


def _caption_list(value: object) -> object:
    found = listed_captions(value)
    if isinstance(found, str) and found.lstrip().startswith("["):
        texts = parse_list(found)
        return texts if isinstance(texts, list) and all(isinstance(text, str) for text in texts) else found
    return found


def _weights(value: object) -> object:
    """Return the weights in a cell as a list, or None if the cell is empty.

    A single value becomes a list of one item.
    """
    if isinstance(value, str):
        with suppress(ValueError, RecursionError):
            value = json.loads(value)
    return value if value is None or isinstance(value, list | tuple) else [value]
