"""The user's columns: which is which, what type each has, and what may be in them."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Any, TypeAlias

from streamvid.errors import Rejected, SourceError

VIDEO_COLUMNS = (
    *("path", "video", "video_path", "file_name", "filename", "file", "file_path", "filepath", "media", "media_path"),
    *("clip", "clip_path", "video_file", "image", "image_path", "image_file"),
)
MAX_COLUMNS = 1000
MAX_TEXT_BYTES = 64 * 2**10
MAX_NAME_BYTES = 256

Value: TypeAlias = bool | int | float | str | None
_INTEGER = re.compile(r"-?(0|[1-9][0-9]{0,18})")
# No leading zeros and no more digits than a double holds: those are names, such as 007.
_NUMBER = re.compile(r"[+-]?((0|[1-9][0-9]{0,14})(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]{1,3})?")
_NOT_A_NUMBER = ("", "nan", "none", "null", "n/a", "na")
_BOOLS = {"true": True, "false": False}


def find_column(names: Sequence[str], asked: str | None, usual: Sequence[str], option: str) -> str:
    """The column that the user asked for, else the first usual one; SourceError lists the columns when none fits."""
    listed = ", ".join(names) or "none"
    if asked is not None:
        if asked in names:
            return asked
        near = get_close_matches(asked, names, n=1)
        meant = f" (did you mean {near[0]!r}?)" if near else ""
        raise SourceError(f"{option}={asked!r} is not a column of the metadata{meant}; it has {listed}")
    folded = {name.strip().casefold(): name for name in reversed(names)}
    for name in usual:
        if name in folded:
            return folded[name]
    raise SourceError(f"the metadata has no column that {option} is usually called; name one of its columns: {listed}")


def clean_value(value: Any) -> Value:
    """A value as one of the index's types: no NaN or infinity, lists and objects as JSON, anything else as text."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, list | dict | tuple):
        return json.dumps(value, ensure_ascii=False, sort_keys=True, default=str)
    return str(value)


def parse_text(values: Iterable[Any]) -> list[Value]:
    """The cells of a CSV column with their common type: all integers, all numbers, all booleans, else text as it is."""
    cells: list[Any] = [None if cell is None or cell == "" else cell for cell in values]
    present = [cell for cell in cells if cell is not None and cell.strip().casefold() not in _NOT_A_NUMBER]
    for pattern, convert in ((_INTEGER, int), (_NUMBER, float)):
        if present and all(pattern.fullmatch(cell.strip()) for cell in present):
            return [_converted(cell, convert) for cell in cells]
    if present and all(cell.strip().casefold() in _BOOLS for cell in present):
        return [None if cell is None else _BOOLS.get(cell.strip().casefold()) for cell in cells]
    return cells


def _converted(cell: str | None, convert: type[int] | type[float]) -> Value:
    if cell is None or cell.strip().casefold() in _NOT_A_NUMBER:
        return None
    return clean_value(convert(cell.strip()))


def common_type(values: Sequence[Value]) -> str:
    """int64, double, bool or string, whichever holds all values; a mixed or empty column is string."""
    types = {type(value) for value in values if value is not None}
    if types == {bool}:
        return "bool"
    if types == {int}:
        fits = all(-(2**63) <= value < 2**63 for value in values if isinstance(value, int))
        return "int64" if fits else "string"
    return "double" if types in ({float}, {int, float}) else "string"


def as_type(value: Value, kind: str) -> Value:
    """A clean value as the column's type."""
    if value is None:
        return None
    if kind == "double" and isinstance(value, int):
        try:
            return float(value)
        except OverflowError:
            return None
    if kind == "string" and not isinstance(value, str):
        return json.dumps(value)
    return value


def check_text(text: str, what: str) -> str:
    """`text` if it can be stored and read everywhere; Rejected says what is wrong with it."""
    try:
        num_bytes = len(text.encode())
    except UnicodeEncodeError:
        raise Rejected(f"{what} is not valid UTF-8") from None
    if num_bytes > MAX_TEXT_BYTES:
        raise Rejected(f"{what} has {num_bytes} bytes, {MAX_TEXT_BYTES} are allowed")
    if "\0" in text:
        raise Rejected(f"{what} holds a NUL character")
    return text


def check_names(names: Sequence[str], where: str) -> None:
    """Raise SourceError for columns that no index can hold."""
    if len(names) > MAX_COLUMNS:
        raise SourceError(f"{where} has {len(names)} columns, {MAX_COLUMNS} are allowed; drop those you do not need")
    for name in names:
        try:
            fits = len(name.encode()) <= MAX_NAME_BYTES and name.isprintable()
        except UnicodeEncodeError:
            fits = False
        if not fits:
            raise SourceError(
                f"{where} has a column named {name[:MAX_NAME_BYTES]!a}; rename it: printable, "
                f"at most {MAX_NAME_BYTES} bytes of UTF-8"
            )
