"""Reader for annotation files. Column types follow the same rules as in the sharder."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from streamvid.dataset.captions import (
    CAPTION_COLUMNS,
    MAX_CAPTIONS_BYTES,
    captions_to_json,
    listed_captions,
    parse_captions,
)
from streamvid.dataset.column_groups import nearest
from streamvid.dataset.tabular.columns import MAX_TEXT_BYTES, NOT_UTF8, Column, common_kind
from streamvid.dataset.tabular.reader import RowBlock, column_names, read_blocks
from streamvid.errors import ConfigError, Rejected, SourceError

KEY_COLUMNS = ("key", "record_key", "source")
_SOURCE_NAMES = ("source", "path", "video", "file_name")


@dataclass(frozen=True)
class Annotation:
    """Rows of an annotation file as Arrow columns. Only the selected columns are kept in memory.

    key_column: index column to which the keys refer.
    keys: one string per row, or null if the row has no key.
    columns: user columns of type int64, double, bool or large string.
    text: first caption of each row.
    captions: JSON list of all captions for rows with several captions, null for other rows.
    sha256: digest of the file and of the names of the selected columns.

    `text` and `captions` are None if there is no caption column.
    """

    key_column: str
    keys: pa.Array
    columns: dict[str, pa.Array]
    text: pa.Array | None
    captions: pa.Array | None
    sha256: str


def read_annotation(
    path: Path, key_column: str | None, columns: Sequence[str] | None, caption_column: str | None
) -> Annotation:
    """Read an annotation file. Raises ConfigError if a column is missing and SourceError if the file cannot be read."""
    names = column_names(path)
    if not names:
        raise SourceError(
            f"annotation {path} has no columns: it is empty, or none of its rows can be read; add rows with a key "
            "column"
        )
    key, own = find_key_column(path, names, key_column)
    if caption_column is None and columns is None:
        caption_column = next((name for name in CAPTION_COLUMNS if name in names and name != own), None)
    wanted = _wanted(path, names, own, columns, caption_column)
    taken = dict.fromkeys([own, *wanted, *([caption_column] if caption_column else [])])
    blocks = list(_whole_blocks(path, taken))
    text, captions = _captions(path, blocks, caption_column) if caption_column else (None, None)
    return Annotation(
        key,
        _joined([block.column(own).as_kind("string") for block in blocks]),
        {name: _user_column(path, name, [block.column(name) for block in blocks]) for name in wanted},
        text,
        captions,
        _sha256(path, [key, own, sorted(wanted), caption_column]),
    )


def _whole_blocks(path: Path, columns: Iterable[str]) -> Iterable[RowBlock]:
    row = 0
    for block in read_blocks(path, tuple(columns)):
        if block.broken:
            place, reason = min(block.broken.items())
            raise SourceError(f"annotation {path}, row {row + place}: {reason}; fix the row")
        row += block.num_rows
        yield block


def find_key_column(path: Path, names: Sequence[str], asked: str | None) -> tuple[str, str]:
    """Return the index column that identifies samples, and the name of the matching column in the file.

    A row applies to all samples that have the same value in the index column.
    """
    if asked is not None and asked not in KEY_COLUMNS:
        raise ConfigError(
            f"key_column={asked!r}: must be one of {', '.join(KEY_COLUMNS)}{nearest(asked, KEY_COLUMNS)}; rename the "
            "column that identifies the samples to one of these names"
        )
    for key in KEY_COLUMNS if asked is None else (asked,):
        for name in _SOURCE_NAMES if key == "source" else (key,):
            if name in names:
                return key, name
    raise ConfigError(
        f"{path} has no key column ({asked or ', '.join(KEY_COLUMNS)}); its columns are "
        f"{', '.join(names)}{nearest(asked or 'key', names)}; rename the column that identifies the samples to 'key' "
        "(sample keys), 'record_key' (source keys) or 'source' (source names as in the index; 'path', 'video' and "
        "'file_name' are also accepted)"
    )


def _wanted(
    path: Path, names: Sequence[str], key: str, columns: Sequence[str] | None, caption_column: str | None
) -> list[str]:
    for option, asked in (("columns", columns or ()), ("caption_column", (caption_column,) if caption_column else ())):
        for name in asked:
            if name not in names:
                raise ConfigError(
                    f"{option}: {name!r} is not a column of {path}{nearest(name, names)}; available: {', '.join(names)}"
                )
            if name == key:
                raise ConfigError(f"{option}: {name!r} is the key column, which cannot be added; omit it from the list")
    if columns is None:
        columns = [name for name in names if name not in (key, caption_column, *KEY_COLUMNS)]
    if not columns and not caption_column:
        raise ConfigError(
            f"annotation {path}: there are no columns to add; add columns to the file, or set columns "
            f"(--columns) to columns that the file contains"
        )
    return list(dict.fromkeys(columns))


def _joined(arrays: Sequence[pa.Array]) -> pa.Array:
    return pa.chunked_array(arrays, arrays[0].type).combine_chunks()


def _user_column(path: Path, name: str, parts: Sequence[Column]) -> pa.Array:
    kind = common_kind(part.kinds() for part in parts)
    values = _joined([part.as_kind(kind) for part in parts])
    return _checked(values, path, f"the text in column {name!r}") if kind == "string" else values


def _captions(path: Path, blocks: Iterable[RowBlock], name: str) -> tuple[pa.Array, pa.Array]:
    """Return two arrays with one entry per row: the first caption, and a JSON list of all captions or null.

    The second array is null for rows with at most one caption."""
    first: list[pa.Array] = []
    several: list[pa.Array] = []
    row = 0
    for block in blocks:
        pairs = [_row_captions(value, path, row + place) for place, value in enumerate(block.column(name).values())]
        first.append(pa.array([text for text, _ in pairs], pa.large_string()))
        several.append(pa.array([stored for _, stored in pairs], pa.large_string()))
        row += block.num_rows
    texts, stored = _checked(_joined(first), path, "the caption"), _joined(several)
    return texts, _checked(stored, path, "the list of captions", MAX_CAPTIONS_BYTES)


def _row_captions(value: Any, path: Path, row: int) -> tuple[str | None, str | None]:
    try:
        found = parse_captions(listed_captions(value))
        for text, _ in found:
            text.encode()
    except UnicodeEncodeError:
        raise SourceError(f"annotation {path}, row {row}: a caption {NOT_UTF8}; fix the row") from None
    except Rejected as error:
        raise SourceError(f"annotation {path}, row {row}: {error}; fix the row, or remove its caption") from None
    if not found:
        return None, None
    return found[0][0], captions_to_json(found) if len(found) > 1 else None


def _checked(texts: pa.Array, path: Path, what: str, most: int = MAX_TEXT_BYTES) -> pa.Array:
    wrong = pc.or_(pc.greater(pc.binary_length(texts), most), pc.match_substring(texts, "\0"))
    row = pc.index(wrong, True).as_py()
    if row >= 0:
        text = texts[row].as_py()
        size = f"is {len(text.encode())} bytes long, but at most {most} are allowed"
        problem = "contains a NUL character" if "\0" in text else size
        raise SourceError(f"annotation {path}, row {row}: {what} {problem}; fix the text")
    return texts


def _sha256(path: Path, taken: object) -> str:
    digest = hashlib.sha256(json.dumps(taken).encode())
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: digest).hexdigest()
