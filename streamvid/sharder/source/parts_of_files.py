"""Detection of rows that describe only a part of a file, so that their captions do not fit the whole file."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from streamvid.dataset.tabular.reader import MetadataTable
from streamvid.errors import SourceError

_UNITS = ("", "_time", "_sec", "_secs", "_second", "_seconds", "_s", "_ms", "_frame", "_frames", "_idx", "_index")
_PREFIXES = ("", "clip_", "segment_", "scene_", "shot_", "time_", "frame_")
_PAIRS = (("start", "end"), ("begin", "end"), ("start", "stop"), ("start", "duration"))
_RANGE_LISTS = frozenset(
    ("timestamp", "timestamps", "time_range", "time_ranges", "segment", "segments", "interval", "intervals")
)
#: A list of at least two items. Dates and single times are not ranges.
_LIST = re.compile(r"^\s*[\[(].*,.*[\])]\s*$", re.DOTALL)
_NUM_CELLS = 1000  # cells that are read to recognize lists
_REMEDY = (
    "streamvid does not cut files: each row would become a sample of its whole file, with the caption of a part. Cut "
    "the files first and name one file per row, or set whole_files=True (--whole-files) to use the whole file for "
    "each row"
)


def check_time_ranges(table: MetadataTable, used: Sequence[str | None]) -> None:
    """Raise SourceError if columns look like the time ranges of clips. used: columns to ignore."""
    names = {_plain(name): name for name in table.names if name not in used}
    for first, last in _PAIRS:
        for prefix in _PREFIXES:
            for unit in _UNITS:
                one, other = (names.get(f"{prefix}{word}{unit}") for word in (first, last))
                if one and other:
                    raise SourceError(f"columns {one!r} and {other!r} look like time ranges, but {_REMEDY}")
    for plain in names.keys() & _RANGE_LISTS:
        if _holds_ranges(table, names[plain]):
            raise SourceError(f"column {names[plain]!r} seems to hold time ranges, but {_REMEDY}")


def _plain(name: str) -> str:
    """Return a column's name in lower case with underscores: "Start Time" and "startTime" become start_time."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name.strip())
    return re.sub(r"[^a-z0-9]+", "_", words.lower()).strip("_")


def _holds_ranges(table: MetadataTable, name: str) -> bool:
    num_left = _NUM_CELLS
    for block in table.blocks:
        for value in block.column(name).values()[:num_left]:
            if value is not None and value != "":
                return isinstance(value, list | tuple | dict) or _LIST.match(str(value)) is not None
        num_left -= block.num_rows
        if num_left <= 0:
            break
    return False


def check_own_files(files: Iterable[tuple[int, str]]) -> None:
    """Raise SourceError if rows share a file. files: (row number, file name) pairs."""
    first_rows: dict[str, int] = {}
    shared: list[tuple[int, int, str]] = []
    for row, name in files:
        if first_rows.setdefault(name, row) != row:
            shared.append((first_rows[name], row, name))
    if shared:
        first, second, name = shared[0]
        raise SourceError(
            f"{len(shared)} row(s) use the same file as an earlier row; for example, rows {first} and {second} "
            f"use {name}. {_REMEDY}"
        )
