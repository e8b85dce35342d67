"""Records of a ledger: the plan of a session, the start of a loop, and the batches that were handed out."""

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
    """Position of a batch in a run. step: index in the epoch, including steps before a resume."""

    epoch: int
    step: int


class LoggedSample(NamedTuple):
    """One slot of a batch that was handed out.

    dataset: index of the dataset in the loader.
    visit: planned visit of the sample.
    start, stride: first frame and distance of the frames, as positions on the grid of the view; 0 and 0 for texts.
    caption: drawn caption, such as "text", "text/2" (the third caption of a sample) or a column; "" for an empty text.
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
    """One batch of one rank."""

    position: Position
    samples: tuple[LoggedSample, ...]


@dataclass(frozen=True, slots=True)
class LoopStart:
    """Start of a loop over a loader.

    cursor: position in the plan (`Cursor.to_json`).
    is_again: True if the same loader began the epoch again after a `break`. What it delivered before still counts;
        otherwise, a loop replaces all deliveries from its position on, because the model restarted from there.
    """

    cursor: Mapping[str, Any]
    is_again: bool
    seconds: float

    @property
    def position(self) -> Position:
        """Position of the loop's first batch."""
        return Position(self.cursor["epoch"], self.cursor["step"])


def start_record(number: int, cursor: Mapping[str, Any], is_again: bool) -> dict[str, Any]:
    """Return the start of a loop as JSON. number: number of records before it in the rank's log."""
    return {"n": number, "cursor": dict(cursor), "again": is_again, "seconds": round(time.time(), 3)}


def block_record(number: int, batches: Sequence[LoggedBatch]) -> dict[str, Any]:
    """Return consecutive batches as JSON columns, which compress well. number: see `start_record`."""
    samples = [sample for batch in batches for sample in batch.samples]
    epochs = [batch.position.epoch for batch in batches]
    steps = [batch.position.step for batch in batches]
    block: dict[str, Any] = {
        "n": number,
        "epochs": _differences(epochs),
        "steps": _differences(steps),
        "sizes": [len(batch.samples) for batch in batches],
        **{name: [sample[place] for sample in samples] for place, name in enumerate(_COLUMNS)},
    }
    if repeats := [place for place, sample in enumerate(samples) if sample.is_repeat]:
        block["repeats"] = repeats
    if planned := {str(place): one.substituted_for for place, one in enumerate(samples) if one.substituted_for}:
        block["substituted"] = planned
    return block


_COLUMNS = ("datasets", "keys", "visits", "starts", "strides", "captions")
_KINDS = (int, str, int, int, int, str)


def _differences(values: Sequence[int]) -> list[int]:
    return [values[0], *(after - before for before, after in pairwise(values))]


def read_record(value: Any, number: int) -> LoopStart | list[LoggedBatch] | None:
    """Return the content of a record, without what precedes record `number`, which was read already.

    The result is None if the value is not a record (SAFE-1), or if records are missing before it.
    """
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


def _batches(block: Mapping[str, Any]) -> Iterator[LoggedBatch] | None:
    columns = [block.get(name) for name in _COLUMNS]
    heads = [block.get(name) for name in ("epochs", "steps", "sizes")]
    if not all(_is_list(head, int) for head in heads) or not all(map(_is_list, columns, _KINDS)):
        return None
    epochs, steps, sizes = (list[int](head or ()) for head in heads)
    total = sum(sizes)
    if not len(epochs) == len(steps) == len(sizes) or min(sizes, default=0) < 0 or total > _MAX_SAMPLES:
        return None
    if any(len(column or ()) != total for column in columns):
        return None
    return _unpacked(
        epochs, steps, sizes, [LoggedSample(*row) for row in zip(*map(_items, columns), strict=True)], block
    )


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


def _items(column: Any) -> list[Any]:
    return list(column or ())


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
