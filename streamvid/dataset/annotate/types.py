"""Values of an annotation as columns of the index: the types that the sharder gives the user's own columns."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streamvid.dataset.captions import captions_to_json, parse_captions
from streamvid.errors import Rejected, SourceError

if TYPE_CHECKING:
    import pyarrow as pa

MAX_TEXT_BYTES = 64 * 2**10
MAX_CAPTIONS_BYTES = 256 * 2**10
"""Of all captions of a sample, as they are stored."""
_ROWS_AT_ONCE = 1 << 16
_INTEGER = r"^-?(0|[1-9][0-9]{0,18})$"
_NUMBER = r"^[+-]?((0|[1-9][0-9]{0,14})(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]{1,3})?$"
_NOT_A_NUMBER = ("", "nan", "none", "null", "n/a", "na")
_BOOLS = ("true", "false")


def from_csv(values: pa.ChunkedArray) -> pa.ChunkedArray:
    """Cells with their common type: all integers, all numbers, all truth values, else the texts as they are."""
    import pyarrow as pa
    import pyarrow.compute as pc

    words = pc.utf8_trim_whitespace(values)
    lower = pc.utf8_lower(words)
    absent = pc.or_kleene(pc.is_null(values), pc.is_in(lower, value_set=pa.array(_NOT_A_NUMBER)))
    present = pc.if_else(absent, pa.scalar(None, pa.string()), words)
    if present.null_count == len(present):
        return values
    try:
        if _all(pc.match_substring_regex(present, _INTEGER)):
            return pc.cast(present, pa.int64())
        if _all(pc.match_substring_regex(present, _NUMBER)):
            return _finite(pc.cast(pc.replace_substring_regex(present, r"^\+", ""), pa.float64()))
    except pa.ArrowInvalid:  # more digits than the type has
        return values
    if _all(pc.is_in(pc.utf8_lower(present), value_set=pa.array([*_BOOLS, None]))):
        return pc.equal(pc.utf8_lower(present), "true")
    return values


def _all(matches: pa.ChunkedArray) -> bool:
    import pyarrow.compute as pc

    return bool(pc.all(matches, skip_nulls=True).as_py())


def from_values(values: Sequence[Any], path: Path, name: str) -> pa.Array:
    """Python values of JSON as one array: integers, numbers, truth values, else texts; lists and objects as JSON."""
    import pyarrow as pa

    kinds = {type(value) for value in values if value is not None}
    try:
        if kinds == {bool} or (kinds == {int} and all(-(2**63) <= (value or 0) < 2**63 for value in values)):
            return pa.array(values)
        if kinds in ({float}, {int, float}):
            return pa.array([None if value is None else _as_float(value) for value in values], pa.float64())
        return pa.array([value if value is None else _as_text(value) for value in values], pa.string())
    except UnicodeEncodeError:
        raise SourceError(f"annotation {path}: column {name!r} holds text that is no valid Unicode") from None


def _as_float(value: float) -> float | None:
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _as_text(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, bool | int | float | list | dict):
        return json.dumps(value, ensure_ascii=False, sort_keys=True, default=str)
    return str(value)


def common_type(types: Collection[pa.DataType]) -> Callable[[pa.Array], pa.Array]:
    """What makes arrays of these types, of one column, arrays of one type."""
    import pyarrow as pa

    known = {kind for kind in types if kind != pa.null()}
    if len(known) == 1:
        (kind,) = known
        return lambda part: part.cast(kind)
    if known and known <= {pa.int64(), pa.float64()}:
        return lambda part: part.cast(pa.float64())
    return lambda part: pa.array([None if v is None else _as_text(v) for v in part.to_pylist()], pa.string())


def normal(values: pa.ChunkedArray, path: Path, name: str) -> pa.Array:
    """A column of any type as one of int64, double, bool or large_string, in one piece. SourceError for its texts."""
    import pyarrow as pa
    from pyarrow import types

    if types.is_dictionary(values.type):
        values = values.cast(values.type.value_type)
    kind = values.type
    if types.is_boolean(kind):
        return values.combine_chunks()
    if types.is_integer(kind):
        try:
            return values.cast(pa.int64()).combine_chunks()
        except pa.ArrowInvalid:  # beyond 64 bits with a sign
            return values.cast(pa.large_string()).combine_chunks()
    if types.is_floating(kind) or types.is_decimal(kind):
        return _finite(values.cast(pa.float64())).combine_chunks()
    if not (types.is_string(kind) or types.is_large_string(kind) or types.is_null(kind)):
        values = _by_rows(values)
    return _checked(values.cast(pa.large_string()).combine_chunks(), path, f"column {name!r}")


def _by_rows(values: pa.ChunkedArray) -> pa.ChunkedArray:
    import pyarrow as pa

    parts = (values.slice(start, _ROWS_AT_ONCE).to_pylist() for start in range(0, len(values), _ROWS_AT_ONCE))
    texts = [pa.array([None if v is None else _as_text(v) for v in part], pa.string()) for part in parts]
    return pa.chunked_array(texts, pa.string())


def _finite(values: Any) -> Any:
    import pyarrow as pa
    import pyarrow.compute as pc

    return pc.if_else(pc.is_finite(values), values, pa.scalar(None, pa.float64()))


def _checked(texts: pa.Array, path: Path, what: str, most: int = MAX_TEXT_BYTES) -> pa.Array:
    import pyarrow.compute as pc

    wrong = pc.or_(pc.greater(pc.binary_length(texts), most), pc.match_substring(texts, "\0"))
    row = pc.index(wrong, True).as_py()
    if row >= 0:
        raise SourceError(
            f"annotation {path}, row {row}: {what} holds a NUL character or more than {most} bytes; mend it"
        )
    return texts


def captions_of(values: pa.ChunkedArray, path: Path) -> tuple[pa.Array, pa.Array]:
    """(first caption, all of them as `captions_to_json` has them where there are several) of each row; else null."""
    import pyarrow as pa

    first: list[Any] = []
    several: list[Any] = []
    for start in range(0, len(values), _ROWS_AT_ONCE):
        rows = enumerate(values.slice(start, _ROWS_AT_ONCE).to_pylist(), start)
        pairs = [_captions(value, path, row) for row, value in rows]
        first.append(pa.array([text for text, _ in pairs], pa.large_string()))
        several.append(pa.array([stored for _, stored in pairs], pa.large_string()))
    texts, stored = (pa.chunked_array(parts, pa.large_string()).combine_chunks() for parts in (first, several))
    return _checked(texts, path, "the caption"), _checked(stored, path, "the captions", MAX_CAPTIONS_BYTES)


def _captions(value: Any, path: Path, row: int) -> tuple[str | None, str | None]:
    if value is None or value == "":
        return None, None
    try:
        found = parse_captions(_listed(value))
        for text, _ in found:
            text.encode()
    except UnicodeEncodeError:
        raise SourceError(f"annotation {path}, row {row}: a caption is not valid UTF-8; mend the row") from None
    except Rejected as error:
        raise SourceError(f"annotation {path}, row {row}: {error}; mend the row, or leave its caption empty") from None
    if not found:
        return None, None
    return found[0][0], captions_to_json(found) if len(found) > 1 else None


def _listed(value: Any) -> Any:
    """A list that stands as JSON in a text, as in a cell of a CSV, also in the index' own form of pairs."""
    found = value
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            found = json.loads(value)
        except ValueError:
            return value
    if not isinstance(found, list):
        return value
    if found and all(isinstance(item, list) and len(item) == 2 for item in found):
        return [{"text": text, "weight": weight} for text, weight in found]
    # "[1]" may be a caption, and is no list of them.
    return found if all(isinstance(item, str | dict | None) for item in found) else value
