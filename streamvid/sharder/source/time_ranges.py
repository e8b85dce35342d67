"""Time ranges in metadata: the parts of files to which rows refer.

With `time_columns`, each range becomes a clip. Otherwise, the sharder raises SourceError if columns seem to contain
time ranges or rows share a file, because a caption may describe only a part of the file. With `whole_files`, this
check is skipped.
"""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from itertools import chain, product
from typing import Any

from streamvid.dataset.tabular.columns import find_column
from streamvid.dataset.tabular.reader import RowBlock
from streamvid.dataset.tabular.table import MetadataTable
from streamvid.dataset.tabular.text_set import TextSet
from streamvid.errors import Rejected, SourceError

_STARTS: tuple[str, ...] = ("start", "begin", "beginning", "beg", "from", "since", "in", "first", "t0", "ts0", "onset")
_STARTS += ("starts", "offset", "ss", "time", "timestamp", "ts")
_ENDS: tuple[str, ...] = ("end", "ending", "stop", "finish", "to", "until", "out", "last", "t1", "ts1", "offset")
_ENDS += ("ends", "duration", "dur", "length")
_DURATIONS = {"duration", "dur", "length"}
_GLUED = re.compile(r"(?<![a-z0-9])(t|time|frame|clip)(start|begin|end|stop)(?![a-z0-9])")
_CERTAIN = frozenset(product(("start", "begin"), ("end", "stop", "finish", "duration")))
"""Pairs of words that denote time ranges regardless of the values, if the column names contain no unusual words."""
_USUAL = {"clip", "segment", "scene", "shot", "span", "time", "timestamp", "t", "frame", "frames", "idx", "index"}
_USUAL |= {"sec", "secs", "second", "seconds", "s", "ms"}
_RANGES = {"timestamp", "time", "timerange", "range", "seg", "segment", "interval", "span", "timespan", "window"}
_RANGES |= {
    "subclip",
    "trim",
    "bound",
    "boundary",
    "boundarie",
    "excerpt",
    "portion",
    "period",
    "slice",
    "tc",
    "timecode",
}
_BESIDE = _USUAL | {"start", "end", "duration", "crop", "cut", "video"}
"""Words in names of columns with ranges: at least one of _RANGES, in the singular, and otherwise only _BESIDE."""
_PARTS = re.compile(r"(?:clip|cut|scene|shot|event|moment)s?(?:_(?:times?|timestamps?))?")
"""Names of columns that may contain time ranges, but may also contain file names or other lists."""
#: Text of a list with at least two items. Dates and single times do not match, because they are not ranges.
_LIST = re.compile(r"^\s*[\[({].*,.*[\])}]\s*$", re.DOTALL)
_CLOCK = re.compile(r"(?:(?:(\d{1,6}):)?(\d{1,6}):)?(\d{1,9}(?:[.,]\d{1,9})?)")
_TEXT_RANGE = re.compile(r"\s*([\d:.,]+)(?:\s*(?:-+>?|[–—~,;|]|to)\s*|\s+)([\d:.,]+)\s*")
_MINUTES = re.compile(r"\d:\d\d(?!\d)")
_MAX_LIST_CHARS = 2**20
_NUM_CELLS = 1000  # number of rows to read when recognizing times
_REMEDY = (
    "the caption of each row may describe only a part of its file. To extract clips, specify the columns with the "
    "times in seconds or as H:MM:SS, such as source.time_columns=('start', 'end') (--time-columns start,end). To "
    "use the whole file for each row, set source.whole_files=True (--whole-files)"
)


@dataclass(frozen=True, slots=True)
class TimeRange:
    """Part of a video: the frames with times from start to end (exclusive), in seconds from the first frame."""

    start: Fraction
    end: Fraction

    @property
    def text(self) -> str:
        """Description of the range in seconds, for messages."""
        return f"{float(self.start):g} to {float(self.end):g} s"


@dataclass(frozen=True, slots=True)
class TimeColumns:
    """Metadata columns that contain time ranges: a column of starts and a column of ends, or one column of ranges."""

    names: tuple[str, ...] = ()

    @staticmethod
    def of(names: Sequence[str], asked: Sequence[str]) -> TimeColumns:
        """Find the columns in `asked`. Raises SourceError if one of these columns does not exist."""
        return TimeColumns(tuple(find_column(names, name, (), "source.time_columns") for name in asked))

    def cells(self, block: RowBlock) -> list[tuple[object, ...]]:
        """Return the values of these columns for each row."""
        if not self.names:
            return [()] * block.num_rows
        return list(zip(*(block.column(name).values() for name in self.names), strict=True))

    def ranges(self, cells: Sequence[object]) -> list[TimeRange]:
        """Return the ranges of a row; see `parse_ranges`.

        The second column contains durations if its name contains a word such as "duration".
        """
        if not self.names:
            return []
        return parse_ranges(cells, has_duration=len(self.names) == 2 and _is_duration(_plain(self.names[1])))


def parse_ranges(cells: Sequence[object], has_duration: bool = False) -> list[TimeRange]:
    """Return the time ranges of a row, or an empty list if the cells are empty and the row thus describes a whole file.

    cells: two cells with a start and an end, each a time or a list of times; or one cell with a range or a list of
        ranges. A range is a pair (start, end), a mapping such as {"start": 0, "end": 2.5}, or text such as
        "0:00-0:02.5". Lists and mappings may be given as JSON or Python text.
    has_duration: True if the second cell contains durations instead of ends.
    Raises Rejected for any other values.
    """
    values = [_opened(cell) for cell in cells]
    if all(value is None for value in values):
        return []
    pairs: list[Any]
    if len(values) == 2:
        starts, ends = (value if isinstance(value, list | tuple) else [value] for value in values)
        if len(starts) != len(ends):
            what = "durations" if has_duration else "end times"
            raise Rejected(f"the row has {len(starts)} start times, but {len(ends)} {what}", kind="time-range")
        pairs = list(zip(starts, ends, strict=True))
    else:
        (value,) = values
        is_list = isinstance(value, list | tuple)
        is_pair = is_list and len(value) == 2 and not any(_is_range(item) for item in value)
        pairs = [value] if is_pair or not is_list else list(value)
    return [_range(pair, has_duration) for pair in pairs]


def _opened(cell: object) -> Any:
    if not isinstance(cell, str) or not cell.lstrip().startswith(("[", "(", "{")):
        return cell
    found = parse_list(cell)
    if found is None:
        raise Rejected(
            f"the time ranges {cell[:80]!r} cannot be parsed; use a JSON or Python list of at most {_MAX_LIST_CHARS} "
            "characters",
            kind="time-range",
        )
    return found


def parse_list(text: str) -> Any:
    """Parse a value, such as a list, in JSON or Python syntax. Return None if the text is invalid or too long."""
    if len(text) <= _MAX_LIST_CHARS:
        for parse in (json.loads, ast.literal_eval):
            try:
                return parse(text.strip())
            except (ValueError, SyntaxError, RecursionError, MemoryError):
                continue
    return None


def _is_range(value: object) -> bool:
    """Return True if a value seems to contain a start and an end, in any supported form."""
    if isinstance(value, str):
        return _LIST.match(value) is not None or _TEXT_RANGE.fullmatch(value) is not None
    return isinstance(value, list | tuple | dict)


def _range(pair: Any, has_duration: bool = False) -> TimeRange:
    if isinstance(pair, dict):
        cells = {_plain(str(name)): value for name, value in pair.items()}
        for first, last, _ in _pairs_of(cells):
            return _range([cells[first], cells[last]], _is_duration(last))
    elif isinstance(pair, str) and (match := _TEXT_RANGE.fullmatch(pair)):
        pair = match.groups()
    if not isinstance(pair, list | tuple) or len(pair) != 2:
        raise Rejected(f"the time range {str(pair)[:80]!r} is not a (start, end) pair", kind="time-range")
    start, end = map(_seconds, pair)
    found = TimeRange(start, start + end if has_duration else end)
    if found.start >= found.end:
        raise Rejected(f"the time range {found.text} must end after it starts", kind="time-range")
    return found


def _seconds(value: object) -> Fraction:
    """Parse a time such as 12.5, "12.5", "0:12.5" or "0:00:12.5". Return the exact number of seconds."""
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and 0 <= value < 1e9:
        return Fraction(str(value))
    match = _CLOCK.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None:
        problem = "a start, end or duration is missing" if value is None else f"the time {str(value)[:40]!r} is invalid"
        raise Rejected(f"{problem}; use a number of seconds or a time such as 0:01:30.5", kind="time-range")
    hours, minutes, seconds = match.groups()
    return int(hours or 0) * 3600 + int(minutes or 0) * 60 + Fraction(seconds.replace(",", "."))


def check_time_ranges(table: MetadataTable, used: Sequence[str | None]) -> None:
    """Raise SourceError if columns seem to contain the time ranges of clips. used: columns to ignore."""
    names = {_plain(name): name for name in table.names if name not in used}
    for first, last, is_certain in _pairs_of(names):
        pair = (names[first], names[last])
        if is_certain or _most_cells(table, pair, partial(_are_times, has_duration=_is_duration(last))):
            raise SourceError(f"columns {pair[0]!r} and {pair[1]!r} seem to contain time ranges, so {_REMEDY}")
    for plain, name in names.items():
        is_range = _names_ranges(plain) and _most_cells(table, (name,), lambda cells: _is_range(cells[0]))
        test = _are_times if _PARTS.fullmatch(plain) else _are_clear
        if is_range or _most_cells(table, (name,), test):
            raise SourceError(f"column {name!r} seems to contain time ranges, so {_REMEDY}")


def _names_ranges(plain: str) -> bool:
    """Return True if a column's name suggests that each cell contains ranges, as "segment_times" and "start_end" do."""
    words = {word if word in _BESIDE else word.removesuffix("s") for word in plain.split("_")}
    return plain in ("start_end", "ts") or (not words.isdisjoint(_RANGES) and words <= _RANGES | _BESIDE)


def _pairs_of(names: Iterable[str]) -> Iterator[tuple[str, str, bool]]:
    """Yield (start, end, is_certain) for each pair of names, such as start and end, that differ in one word.

    Apart from that word, the names are equal or contain only common words, as in start_time and duration.
    is_certain: True if such names always denote time ranges; False if only the values can show whether they do.
    """
    words_of = {name: name.split("_") for name in names}
    for first, last in sorted(product(_STARTS, _ENDS), key=lambda pair: pair not in _CERTAIN):
        starts, ends = ({name: words for name, words in words_of.items() if word in words} for word in (first, last))
        for (name, words), (other, others) in product(starts.items(), ends.items()):
            rests = _without(first, words), _without(last, others)
            is_equal, is_usual = rests[0] == rests[1], _USUAL.issuperset(chain(*rests))
            if (is_equal or is_usual) and name != other:
                yield name, other, (first, last) in _CERTAIN and is_equal and is_usual


def _without(word: str, words: Sequence[str]) -> list[str]:
    place = words.index(word)
    return [*words[:place], *words[place + 1 :]]


def _are_times(cells: Sequence[object], has_duration: bool = False) -> bool:
    try:
        return bool(parse_ranges(cells, has_duration))
    except Rejected:
        return False


def _are_clear(cells: Sequence[object]) -> bool:
    """Return True if a cell, such as "0:00-0:02.5", is clearly a time range, whatever its column is called."""
    text = str(cells[0])
    return ("{" in text or len(_MINUTES.findall(text)) > 1) and _are_times(cells)


def _is_duration(plain: str) -> bool:
    return not _DURATIONS.isdisjoint(plain.split("_"))


def _plain(name: str) -> str:
    """Return a column's name in lower case with underscores. For example, "startTime" becomes "start_time"."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name.strip()).lower()
    return re.sub(r"[^a-z0-9]+", "_", _GLUED.sub(r"\1_\2", words)).strip("_")


def _most_cells(table: MetadataTable, names: Sequence[str], test: Callable[[Sequence[object]], bool]) -> bool:
    """Return True if `test` accepts the cells of these columns in most of the first rows. Empty rows are ignored."""
    num_left, surplus = _NUM_CELLS, 0
    for block in table.blocks:
        rows = zip(*(block.column(name).values()[:num_left] for name in names), strict=True)
        for cells in rows:
            if any(cell is not None and cell != "" for cell in cells):
                surplus += 1 if test(cells) else -1
        num_left -= block.num_rows
        if num_left <= 0:
            break
    return surplus > 0


def check_own_files(files: Callable[[], Iterable[tuple[int, str]]]) -> None:
    """Raise SourceError if several rows use the same file.

    files: function that returns (row number, file name) pairs.
    """
    repeated = TextSet.repeated(name for _, name in files())
    if not len(repeated):
        return
    first_rows: dict[str, int] = {}
    shared: list[tuple[int, int, str]] = []
    for row, name in files():
        if name in repeated and first_rows.setdefault(name, row) != row:
            shared.append((first_rows[name], row, name))
    if shared:
        first, second, name = shared[0]
        raise SourceError(
            f"some rows ({len(shared)} in total) use the same file as an earlier row (for example, rows {first} "
            f"and {second} use {name}), so {_REMEDY}"
        )
