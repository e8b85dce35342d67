"""Metadata columns: values, type inference, and usual column names.

To add a column type, which changes the dataset format, extend `ColumnType`, `Column.kinds` and `Column.as_kind`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Literal, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types

from streamvid.errors import Rejected, SourceError

ColumnType: TypeAlias = Literal["int64", "double", "bool", "string"]

VIDEO_COLUMNS = (
    *("path", "video", "video_path", "file_name", "filename", "file", "file_path", "filepath", "media", "media_path"),
    *("clip", "clip_path", "video_file", "image", "image_path", "image_file"),
)
AUDIO_COLUMNS = ("audio", "audio_path", "audio_file", *VIDEO_COLUMNS)
FACT_COLUMNS: Mapping[str, tuple[str, ...]] = {
    "num_frames": ("num_frames", "n_frames", "nb_frames", "frame_count", "frames"),
    "height": ("height", "video_height", "h"),
    "width": ("width", "video_width", "w"),
    "fps": ("fps", "frame_rate", "framerate", "avg_fps", "video_fps"),
    "seconds": ("duration_seconds", "duration", "seconds", "duration_sec"),
    "num_bytes": ("num_bytes", "bytes", "file_size", "filesize", "size_bytes", "size"),
}
"""Usual column names for each property of a clip."""
MAX_COLUMNS = 1000
MAX_NAME_BYTES = 256
MAX_TEXT_BYTES = 64 * 2**10
NOT_UTF8 = "is not valid UTF-8"

_INTEGER = r"^-?(0|[1-9][0-9]{0,18})$"
# Numbers have no leading zeros, because texts such as 007 are names, and no more digits than a double can represent.
_NUMBER = r"^[+-]?((0|[1-9][0-9]{0,14})(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]{1,3})?$"
_NO_VALUE = ("", "nan", "none", "null", "n/a", "na")
_BOOLS = ("true", "false")


@dataclass(frozen=True, slots=True)
class Column:
    """Values of one column in a block of rows.

    form: "typed" for Arrow values; "text" for CSV cells as written, where "" means no value and all cells of the column
        determine its type; "json" for values that are nested or differ in type, stored as JSON text.
    """

    cells: pa.Array
    form: Literal["typed", "text", "json"] = "typed"

    def raw_values(self) -> list[Any]:
        """Return the values as Python objects."""
        cells = self.cells.to_pylist()
        if self.form == "json":
            return [None if cell is None else json.loads(cell) for cell in cells]
        return [cell or None for cell in cells] if self.form == "text" else cells

    def values(self) -> list[Any]:
        """Return the values as Python objects, with None in place of empty strings and NaN."""
        # NaN is the only value that differs from itself.
        return [None if value == "" or value != value else value for value in self.raw_values()]  # noqa: PLR0124

    def kinds(self) -> frozenset[ColumnType] | None:
        """Return all types, other than string, that fit every value; None if there are no values."""
        if self.form == "text":
            return _text_kinds(self.cells)
        if self.form == "json":
            found = [kinds for value in self.raw_values() if (kinds := _value_kinds(value)) is not None]
            return frozenset.intersection(*found) if found else None
        return _arrow_kinds(self.cells)

    def as_kind(self, kind: ColumnType) -> pa.Array:
        """Convert the values to `kind`. Strings become large strings; NaN and infinity become null."""
        if self.form == "text":
            return _text_as(self.cells, kind)
        if self.form == "json":
            return _array([value_as(value, kind) for value in self.raw_values()], kind)
        return _arrow_as(self.cells, kind)


def common_kind(found: Iterable[frozenset[ColumnType] | None]) -> ColumnType:
    """Return the type of a column. found: `Column.kinds` of each block. Mixed and empty columns are strings."""
    known = [kinds for kinds in found if kinds is not None]
    shared = frozenset.intersection(*known) if known else frozenset()
    ordered: tuple[ColumnType, ...] = ("int64", "double", "bool")
    return next((kind for kind in ordered if kind in shared), "string")


def _text_kinds(cells: pa.Array) -> frozenset[ColumnType] | None:
    present = _present(cells).drop_null()
    if not len(present):
        return None
    found: set[ColumnType] = set()
    if _all(pc.match_substring_regex(present, _INTEGER)):
        try:
            pc.cast(present, pa.int64())
            found.add("int64")
        except pa.ArrowInvalid:  # a number of 19 digits can exceed 64 bits
            pass
    if _all(pc.match_substring_regex(present, _NUMBER)):
        found.add("double")
    if _all(pc.is_in(pc.utf8_lower(present), value_set=pa.array(_BOOLS, present.type))):
        found.add("bool")
    return frozenset(found)


def _text_as(cells: pa.Array, kind: ColumnType) -> pa.Array:
    if kind == "string":
        return pc.if_else(pc.equal(cells, ""), pa.scalar(None, cells.type), cells)
    present = _present(cells)
    if kind == "bool":
        return pc.equal(pc.utf8_lower(present), "true")
    if kind == "int64":
        return pc.cast(present, pa.int64())
    return _finite(pc.cast(pc.replace_substring_regex(present, r"^\+", ""), pa.float64()))


def _present(cells: pa.Array) -> pa.Array:
    """Return the cells without surrounding whitespace. Text such as "n/a" becomes null."""
    words = pc.utf8_trim_whitespace(cells)
    absent = pc.is_in(pc.utf8_lower(words), value_set=pa.array(_NO_VALUE, words.type))
    return pc.if_else(absent, pa.scalar(None, words.type), words)


def _all(matches: pa.Array) -> bool:
    return bool(pc.all(matches).as_py())


def _finite(values: pa.Array) -> pa.Array:
    return pc.if_else(pc.is_finite(values), values, pa.scalar(None, pa.float64()))


def _arrow_kinds(cells: pa.Array) -> frozenset[ColumnType] | None:
    kind = cells.type
    if types.is_null(kind):
        return None
    if types.is_boolean(kind):
        return frozenset({"bool"})
    if types.is_integer(kind):
        try:
            cells.cast(pa.int64())
        except pa.ArrowInvalid:  # an unsigned value exceeds 63 bits
            return frozenset()
        return frozenset({"int64", "double"})
    return frozenset({"double"}) if types.is_floating(kind) or types.is_decimal(kind) else frozenset()


def _arrow_as(cells: pa.Array, kind: ColumnType) -> pa.Array:
    if kind == "string" and not (types.is_string(cells.type) or types.is_large_string(cells.type)):
        return _array([value_as(value, kind) for value in cells.to_pylist()], kind)
    array = cells.cast(_arrow_type(kind), safe=False)
    return _finite(array) if kind == "double" else array


def _arrow_type(kind: ColumnType) -> pa.DataType:
    return pa.large_string() if kind == "string" else pa.type_for_alias(kind)


def _array(values: Sequence[Any], kind: ColumnType) -> pa.Array:
    return pa.array(values, _arrow_type(kind))


def _value_kinds(value: object) -> frozenset[ColumnType] | None:
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return None
    if isinstance(value, bool):
        return frozenset({"bool"})
    if isinstance(value, int) and -(2**63) <= value < 2**63:
        return frozenset({"int64", "double"})
    return frozenset({"double"}) if isinstance(value, float) else frozenset()


def value_as(value: Any, kind: str) -> Any:
    """Convert a Python value to `kind`. NaN and infinity become None."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return None
    if kind == "double":
        return float(value)
    return _as_text(value) if kind == "string" else value


def _as_text(value: object) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, bool | int | float | list | dict | tuple):
        return json.dumps(value, ensure_ascii=False, sort_keys=True, default=plain_text)
    return plain_text(value)


def plain_text(value: object) -> str:
    """Return text that stands for a value that JSON cannot represent."""
    return value.hex() if isinstance(value, bytes) else str(value)


def check_count(num_columns: int, where: str) -> None:
    """Raise SourceError if there are more columns than an index can store."""
    if num_columns > MAX_COLUMNS:
        raise SourceError(f"{where} has {num_columns} columns; at most {MAX_COLUMNS} are allowed; remove some columns")


def checked_names(names: Iterable[str], where: str) -> tuple[str, ...]:
    """Return the names with duplicates omitted. Raises SourceError for a name that an index cannot store."""
    found = tuple(dict.fromkeys(names))
    check_count(len(found), where)
    for name in found:
        shown = name.encode("utf-8", "backslashreplace")
        if len(shown) > MAX_NAME_BYTES or not name.isprintable():
            raise SourceError(
                f"{where} has a column named {name[:MAX_NAME_BYTES]!a}; names must be printable and at most "
                f"{MAX_NAME_BYTES} bytes long in UTF-8; rename the column"
            )
    return found


def usual_column(names: Sequence[str], usual: Sequence[str]) -> str | None:
    """Return the column whose name comes first in `usual`, ignoring case, or None if no name matches."""
    folded = {name.strip().casefold(): name for name in reversed(names)}
    return next((folded[name] for name in usual if name in folded), None)


def find_column(names: Sequence[str], asked: str | None, usual: Sequence[str], option: str) -> str:
    """Return `asked` or, if it is None, the first column with a usual name.

    Raises SourceError if there is no such column.
    """
    listed = ", ".join(names) or "none"
    if asked is None:
        found = usual_column(names, usual)
        if found is None:
            raise SourceError(
                f"the metadata has no column with one of the usual names for {option}; set {option} to one of the "
                f"existing columns: {listed}"
            )
        return found
    if asked not in names:
        near = get_close_matches(asked, names, n=1)
        meant = f" (did you mean {near[0]!r}?)" if near else ""
        raise SourceError(f"{option}={asked!r} is not a column of the metadata{meant}; available: {listed}")
    return asked


def check_text(text: str, what: str) -> str:
    """Return `text`. Raises Rejected if the text is not valid UTF-8, is too long, or contains a NUL character."""
    try:
        num_bytes = len(text.encode())
    except UnicodeEncodeError:
        raise Rejected(f"{what} {NOT_UTF8}") from None
    if num_bytes > MAX_TEXT_BYTES:
        raise Rejected(f"{what} is {num_bytes} bytes long, but at most {MAX_TEXT_BYTES} are allowed", kind="long-text")
    if "\0" in text:
        raise Rejected(f"{what} contains a NUL character; remove it")
    return text
