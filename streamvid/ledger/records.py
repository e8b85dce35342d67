"""Ledger records: the plan of a session, the start of a loop, and the batches that were handed out."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

LEDGER_VERSION = 1
_MAX_TEXT = 1024
_MAX_SAMPLES = 1 << 20  # of one block


class Position(NamedTuple):
    """Position of a batch in a run.

    step: index of the step in the epoch, counting steps before a resume.
    """

    epoch: int
    step: int


class LoggedSample(NamedTuple):
    """One slot in a batch that was handed out.

    dataset: index of the dataset in the loader.
    visit: number of the planned visit to the sample.
    start: position of the first frame on the view's frame grid; 0 for texts.
    stride: distance between frames, in positions on the view's frame grid; 0 for texts.
    caption: name of the caption that was drawn, such as "text", "text/2" (the third caption) or a column name; "" for
        an empty text.
    is_repeat: True for a repeat that the tail policy added.
    substituted_for: key of the planned sample, if it was bad and `key` replaced it.
    """

    dataset: int
    key: str
    visit: int
    start: int
    stride: int
    caption: str
    is_repeat: bool = False
    substituted_for: str | None = None


@dataclass(frozen=True, slots=True)
class LoggedBatch:
    """One batch that one rank handed out."""

    position: Position
    samples: tuple[LoggedSample, ...]


@dataclass(frozen=True, slots=True)
class LoopStart:
    """Start of a loop over a loader.

    cursor: position in the plan (`Cursor.to_json`).
    is_again: True if the same loader began the epoch again after a `break`. In this case, the loader's earlier
        deliveries still count. Otherwise, the loop replaces all deliveries at or after its position, because the model
        was restored to that position.
    """

    cursor: Mapping[str, Any]
    is_again: bool
    seconds: float

    @property
    def position(self) -> Position:
        """Position of the loop's first batch."""
        return Position(self.cursor["epoch"], self.cursor["step"])


def start_record(number: int, cursor: Mapping[str, Any], is_again: bool) -> dict[str, Any]:
    """Return the start of a loop as JSON.

    number: number of earlier records in the rank's log.
    """
    return {"n": number, "cursor": dict(cursor), "again": is_again, "seconds": round(time.time(), 3)}


def batch_record(number: int, batch: LoggedBatch) -> list[Any]:
    """Return one batch as JSON: number, epoch, step, and one row per sample.

    Creating this record takes less time than creating a block of one batch.
    """
    return [number, *batch.position, batch.samples]


def block_record(number: int, batches: Sequence[LoggedBatch]) -> dict[str, Any]:
    """Return consecutive batches as JSON columns, which compress well.

    Except for the keys, a column whose values are all equal is stored as one value.

    number: number of earlier records in the rank's log.
    """
    samples = [sample for batch in batches for sample in batch.samples]
    columns = list(zip(*samples, strict=True)) or [()] * len(LoggedSample._fields)
    epochs, steps = zip(*[batch.position for batch in batches], strict=True)
    block: dict[str, Any] = {
        "n": number,
        "epochs": _differences(epochs),
        "steps": _differences(steps),
        "sizes": [len(batch.samples) for batch in batches],
    }
    for name, column in zip(_COLUMNS, columns, strict=False):
        is_equal = name != "keys" and samples and column.count(column[0]) == len(column)
        block[name] = column[0] if is_equal else column
    are_repeats, planned = columns[-2:]
    if True in are_repeats:
        block["repeats"] = [place for place, is_repeat in enumerate(are_repeats) if is_repeat]
    if planned.count(None) < len(planned):
        block["substituted"] = {str(place): key for place, key in enumerate(planned) if key}
    return block


_COLUMNS = ("datasets", "keys", "visits", "starts", "strides", "captions")
_KINDS = (int, str, int, int, int, str)


def _differences(values: Sequence[int]) -> list[int]:
    return [values[0], *(after - before for before, after in pairwise(values))]


def read_record(value: Any, number: int) -> LoopStart | list[LoggedBatch] | None:
    """Return the content of a record, without the batches before batch `number`, which have already been read.

    The result is None if the value is not a record (SAFE-1), or if the records before this record are incomplete.
    """
    if isinstance(value, list):
        value = _block_of_rows(value)
    if not isinstance(value, dict) or not _is_count(value.get("n")) or value["n"] > number:
        return None
    if "cursor" not in value:
        batches = list(_batches(value) or ())
        return batches[number - value["n"] :] if batches else None
    cursor = value["cursor"]
    is_right = isinstance(cursor, dict) and _is_count(cursor.get("epoch")) and _is_count(cursor.get("step"))
    if not is_right or not isinstance(value.get("seconds"), float | int):
        return None
    if value["n"] < number:
        return []
    return LoopStart(cursor, value.get("again") is True, float(value["seconds"]))


def _block_of_rows(record: Sequence[Any]) -> dict[str, Any] | None:
    """Return a batch as a block of one batch, or None if the value is not a batch."""
    number, epoch, step, rows = record if len(record) == 4 else (None,) * 4
    width = len(LoggedSample._fields)
    if not isinstance(rows, list) or not all(isinstance(row, list) and len(row) == width for row in rows):
        return None
    columns = list(map(list, zip(*rows, strict=True))) or [[]] * width
    return {
        "n": number,
        "epochs": [epoch],
        "steps": [step],
        "sizes": [len(rows)],
        **dict(zip(_COLUMNS, columns, strict=False)),
        "repeats": [place for place, is_repeat in enumerate(columns[-2]) if is_repeat is True],
        "substituted": {str(place): key for place, key in enumerate(columns[-1])},
    }


def _batches(block: Mapping[str, Any]) -> Iterator[LoggedBatch] | None:
    heads = [block.get(name) for name in ("epochs", "steps", "sizes")]
    if not all(_is_list(head, int) for head in heads):
        return None
    epochs, steps, sizes = (list[int](head or ()) for head in heads)
    total = sum(sizes)
    if not len(epochs) == len(steps) == len(sizes) or min(sizes, default=0) < 0 or total > _MAX_SAMPLES:
        return None
    columns = [_column(block.get(name), kind) for name, kind in zip(_COLUMNS, _KINDS, strict=True)]
    keys = columns[_COLUMNS.index("keys")]
    if not isinstance(keys, list) or len(keys) != total:
        return None  # every key is in the file, which limits how often other values are repeated (SAFE-1)
    rows = [[column] * total if isinstance(column, int | str) else column for column in columns]
    if any(row is None or len(row) != total for row in rows):
        return None
    return _unpacked(epochs, steps, sizes, list(map(LoggedSample, *rows)), block)


def _column(value: Any, kind: type) -> Any:
    """Return a column of a block: a list, or one value for all samples. Return None for any other value."""
    return value if _is_list(value if isinstance(value, list) else [value], kind) else None


def _unpacked(
    epochs: list[int], steps: list[int], sizes: list[int], samples: list[LoggedSample], block: Mapping[str, Any]
) -> Iterator[LoggedBatch]:
    for place in _places(block.get("repeats"), samples):
        samples[place] = samples[place]._replace(is_repeat=True)
    planned = block.get("substituted")
    for text, key in planned.items() if isinstance(planned, dict) else ():
        if text.isdecimal() and len(text) < 10 and int(text) < len(samples) and isinstance(key, str):
            samples[int(text)] = samples[int(text)]._replace(substituted_for=key[:_MAX_TEXT])
    epoch = step = first = 0
    for more_epochs, more_steps, size in zip(epochs, steps, sizes, strict=True):
        epoch, step = epoch + more_epochs, step + more_steps
        yield LoggedBatch(Position(epoch, step), tuple(samples[first : first + size]))
        first += size


def _places(value: Any, samples: Sequence[LoggedSample]) -> list[int]:
    return [place for place in value if _is_count(place) and place < len(samples)] if isinstance(value, list) else []


def _is_list(value: Any, kind: type) -> bool:
    if not isinstance(value, list):
        return False
    if kind is str:
        return all(isinstance(one, str) and len(one) <= _MAX_TEXT for one in value)
    return all(type(one) is int and -(1 << 63) <= one < 1 << 63 for one in value)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 63
