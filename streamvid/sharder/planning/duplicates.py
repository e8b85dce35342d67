"""Near-duplicates among the rows of all sources: their groups, the row to keep, and one split per group.

Facts about rows are kept in arrays, which use about 130 bytes per row. Objects are created only for found groups.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import compress
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from streamvid.dataset.tabular.rows import Rows
from streamvid.sharder.curation.groups import Numbers, find_leaders
from streamvid.sharder.curation.options import GROUP
from streamvid.sharder.curation.signature import NUM_WORDS, Words, from_text
from streamvid.sharder.options import ShardOptions
from streamvid.sharder.planning.assign import Assignment, PlannedSample, stable_hash
from streamvid.sharder.source.records import Rejection
from streamvid.sharder.source.summary import Counted, Duplicates
from streamvid.sharder.source.time_ranges import TimeRange

_Flags: TypeAlias = npt.NDArray[np.bool_]


def group_duplicates(assignment: Assignment, options: ShardOptions) -> Assignment:
    """Find near-duplicates.

    Return an assignment in which a column stores each sample's group, and all samples in a group are in the same split.
    With `dedup="keep-largest"`, all rows in a group except the best one are rejected (SHARD-3). Only rows that a bucket
    accepts are grouped, so that no row is removed in favor of a row that is not stored.
    """
    if options.curation.dedup is None:
        return assignment
    rows = _SampleRows(assignment.samples)
    table = _Table.of(rows)
    leaders = table.leaders()
    is_val = table.splits(leaders)
    removes = options.curation.dedup == "keep-largest"
    is_grouped = np.zeros(len(leaders), np.bool_)
    is_grouped[leaders[leaders != np.arange(len(leaders))]] = True
    names = {number: (_name(*own), row) for number, row, *own in rows.tuples(is_grouped, *_NAMES)}

    def kept() -> Iterator[PlannedSample]:
        for sample, number in zip(assignment.samples, rows.numbers.tolist(), strict=True):
            leader, record = int(leaders[number]), sample.record
            if leader == number or not removes:
                columns = {**record.columns, GROUP: names[leader][0] if leader in names else None}
                split = "val" if is_val[number] else "train"
                yield replace(sample, record=replace(record, columns=columns), split=split)

    def followers() -> Iterator[tuple[int, str, str, str, int]]:
        for number, row, source, time_range in rows.tuples(leaders != np.arange(len(leaders)), *_NAMES):
            yield row, source, _name(source, time_range), *names[int(leaders[number])]

    reason = "near-duplicate of {} (row {}), which is kept"
    removed = [
        Rejection(row, source, reason.format(kept_name, kept_row), "duplicate")
        for row, source, _, kept_name, kept_row in (followers() if removes else ())
    ]
    found = Duplicates(len(names), Counted.of(f"{own} = {kept_name}" for _, _, own, kept_name, _ in followers()))
    samples = Rows.of(PlannedSample, kept())
    return replace(assignment, samples=samples, rejections=(*assignment.rejections, *removed), duplicates=found)


_NAMES = ("record.row", "record.source", "record.time_range")


def _name(source: str, time_range: TimeRange | None) -> str:
    """Return the name of a row. Each group is identified by the name of its best row."""
    return source if time_range is None else f"{source} ({time_range.text})"


class _SampleRows:
    """Rows to which samples belong. The samples of a row are consecutive. numbers: the row number of each sample."""

    def __init__(self, samples: Rows[PlannedSample]) -> None:
        self._samples = samples
        is_first, last = [], None
        for own in samples.tuples("record.row", "record.time_range"):
            is_first.append(own != last)
            last = own
        self._is_first = np.asarray(is_first, np.bool_)
        self.numbers: Numbers = np.cumsum(self._is_first) - 1

    def __len__(self) -> int:
        return int(self._is_first.sum())

    def tuples(self, is_wanted: _Flags | None, *names: str) -> Iterator[tuple[Any, ...]]:
        """Yield the number of each wanted row, followed by the values of the fields in `names`.

        is_wanted: None to select all rows.
        """
        wanted = self._is_first if is_wanted is None else self._is_first & is_wanted[self.numbers]
        numbers = self.numbers[wanted].tolist()
        found = compress(self._samples.tuples(*names), wanted.tolist())
        return ((number, *values) for number, values in zip(numbers, found, strict=True))


@dataclass(frozen=True)
class _Table:
    """Facts about each row. Groups, the best row in each group, and splits are computed from them.

    has_signature: False for rows that are not compared.
    quality: number of pixels, duration in seconds, and size in bytes.
    file: hash of the record key.
    stays_val: True if the row is in the "val" split of the dataset from which it comes.
    """

    signatures: Words
    has_signature: _Flags
    is_image: _Flags
    quality: tuple[Numbers, npt.NDArray[np.float64], Numbers]
    file: npt.NDArray[np.uint64]
    is_val: _Flags
    stays_val: _Flags

    @staticmethod
    def of(rows: _SampleRows) -> _Table:
        signatures = np.zeros((NUM_WORDS, len(rows)), np.uint64)
        has_signature, is_image, is_val, stays_val = (np.zeros(len(rows), np.bool_) for _ in range(4))
        pixels, seconds, num_bytes, file = array("q"), array("d"), array("q"), array("Q")
        probed = ("probe.width", "probe.height", "probe.duration_seconds", "probe.is_image")
        names = ("record.signature", "record.time_range", "record.num_bytes", "record.origin", "record_key", "split")
        for number, width, height, length, image, *own in rows.tuples(None, *probed, *names):
            signature, time_range, size, origin, key, split = own
            if signature is not None:
                signatures[:, number] = from_text(signature)
                has_signature[number] = True
            is_image[number], is_val[number] = image, split == "val"
            stays_val[number] = origin is not None and origin.is_val
            pixels.append(width * height)
            seconds.append(length if time_range is None else float(time_range.end - time_range.start))
            num_bytes.append(size)
            file.append(stable_hash(key))
        quality = (np.asarray(pixels), np.asarray(seconds), np.asarray(num_bytes))
        return _Table(signatures, has_signature, is_image, quality, np.asarray(file), is_val, stays_val)

    def leaders(self) -> Numbers:
        """Return the number of the best row in each row's group. Images and videos have separate groups."""
        leaders = np.arange(len(self.file))
        best = np.lexsort(tuple(-value for value in reversed(self.quality)))  # equal rows stay in order
        for is_image in (False, True):
            order = best[(self.has_signature & (self.is_image == is_image))[best]]
            leaders[order] = order[find_leaders(self.signatures[:, order])]
        return leaders

    def splits(self, leaders: Numbers) -> _Flags:
        """Return a mask of the rows in the "val" split. All rows of a file or of a group are in the same split.

        Rows that are connected through shared files and groups get the split of the first of these rows in the input,
        unless the split of one of these rows is fixed.
        """
        _, files = np.unique(self.file, return_inverse=True)
        first, before = np.arange(len(leaders)), np.empty(0, np.int64)
        while not np.array_equal(first, before):
            before = first
            first = _least(_least(first, leaders), files)
        is_changed, is_fixed = np.zeros((2, len(first)), np.bool_)
        is_changed[first[leaders != np.arange(len(leaders))]] = True
        is_fixed[first[self.stays_val]] = True
        return np.where(is_changed[first], self.is_val[first] | is_fixed[first], self.is_val)


def _least(values: Numbers, groups: Numbers) -> Numbers:
    """Return, for each value, the smallest value in the same group."""
    least = np.full(len(values), len(values))
    np.minimum.at(least, groups, values)
    return least[groups]
