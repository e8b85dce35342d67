"""Dataset to which a build adds samples, and the input rows that are already recorded in it.

A row is identified before its file is opened: by the name of its file, its time range, its captions and the names of
its conditioning inputs. A dataset knows the rows that became samples, and those that were rejected for a reason that
does not change as long as the size of the file stays the same.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from streamvid.dataset.column_groups import ColumnGroups
from streamvid.dataset.index import USER_PREFIX
from streamvid.dataset.integrity import SamplesFile, read_shards
from streamvid.dataset.manifest import Manifest
from streamvid.dataset.reader import Dataset
from streamvid.dataset.removed import read_removed
from streamvid.dataset.tabular.columns import value_as
from streamvid.dataset.tabular.rows import Rows
from streamvid.dataset.versions.publish import Writing
from streamvid.dataset.versions.records import ROW, InputRows, find_records, rejected_rows
from streamvid.errors import ConfigError, DatasetError
from streamvid.sharder.planning.assign import PlannedSample, record_key, stable_hash
from streamvid.sharder.source.records import Record, RecordSet, Rejection

if TYPE_CHECKING:
    import pyarrow as pa

RETRIED = frozenset(("timeout", "memory", "crash", "fault", "missing-file", "unreadable-file"))
"""Kinds of rejections that might not occur again. Rows that are rejected for these reasons are not recorded."""
_ODD = 0x9E3779B97F4A7C15


@dataclass(frozen=True)
class Base:
    """Version of a dataset to which a build adds samples.

    writing: the right to publish the next version; None for a task or a dry run, because neither of them publishes
        anything.
    num_known: number of input rows that are already recorded in the dataset.
    earlier: for input files that already have samples, maps the hash of the file's name to its number of known rows.
    """

    dataset: Dataset
    writing: Writing | None = None
    num_known: int = 0
    earlier: Mapping[int, int] = field(default_factory=dict)

    @property
    def manifest(self) -> Manifest:
        return self.dataset.manifest

    @cached_property
    def first_numbers(self) -> dict[str, int]:
        """First unused shard number for each bucket id.

        Numbers of shards that no longer have samples are not reused.
        """
        shards = read_shards(self.dataset.store, self.manifest.files.shards)
        names, codes = shards.bucket_id.names, shards.bucket_id.codes
        return {name: int(shards.number[codes == code].max()) + 1 for code, name in enumerate(names)}

    @cached_property
    def stored_types(self) -> dict[str, str]:
        """Maps each user column in the sample files to its type."""
        return _user_types(self._stored_schema)

    @cached_property
    def user_types(self) -> dict[str, str]:
        """Maps each user column in the dataset to its type, including columns that were added later."""
        return _user_types(ColumnGroups.of(self.manifest).schema(self._stored_schema))

    @cached_property
    def _stored_schema(self) -> pa.Schema:
        """Schema of the sample files. It is read from the smallest one, because the whole file must be verified."""
        import pyarrow as pa

        smallest = min(self.manifest.files.samples, key=lambda file: file.num_bytes, default=None)
        return pa.schema([]) if smallest is None else SamplesFile(self.dataset.store, smallest).arrow_schema()

    def added_types(self, types: Mapping[str, str]) -> dict[str, str]:
        """Return the columns in `types` that the sample files cannot store: new columns and columns of a wider type."""
        return {name: kind for name, kind in types.items() if self.stored_types.get(name) != kind}

    def without_known(self, records: RecordSet) -> tuple[RecordSet, Base]:
        """Return the rows that are not yet in the dataset, and a copy of this base that counts all other rows as known.

        The columns of the rows are converted to the dataset's types. A row is rejected if its file was removed from the
        dataset, or if the dataset contains another file with the same name. Raises ConfigError if the type of
        a column does not fit the dataset, and DatasetError if the dataset has no table of known rows.
        """
        manifest, store = self.manifest, self.dataset.store
        if manifest.counts.samples and not manifest.files.records:
            raise DatasetError(
                f"{self.dataset.url} does not list the rows from which it was built, so known rows cannot be "
                "recognized; build the dataset again"
            )
        types, entries = self._joined_types(records), entries_of(records.records)
        missing = np.array([stable_hash(one.source) for one in records.rejections], np.uint64)
        found = find_records(store, manifest.files.records, np.concatenate([entries["name"], missing]))
        removed = frozenset(read_removed(store, manifest.files.removed).column("record_key").to_pylist())
        # The file of a row that is in the dataset may be gone.
        is_gone = np.isin(missing, found["name"]).tolist()
        pairs = zip(records.rejections, is_gone, strict=True)
        rejections = [one for one, gone in pairs if not (gone and one.kind == "missing-file")]
        rows = Rows.of(Record, _new(records.records, entries, found, removed, types, rejections))
        kept = self._without_recorded(rejections)
        numbers = [number for (number,) in rows.tuples("row")] + [rejection.row for rejection in kept]
        num_new = len(np.unique(np.array(numbers, np.int64)))
        new = replace(records, records=rows, rejections=kept, user_types=types, num_rows=num_new)
        names = entries_of(rows)["name"]
        with_samples = names[np.isin(names, found["name"][~rejected_rows(found)])]
        several = np.unique(found["name"][np.isin(found["name"], with_samples)], return_counts=True)
        earlier = dict(zip(*(values.tolist() for values in several), strict=True))
        return new, replace(self, num_known=records.num_rows - num_new, earlier=earlier)

    def _without_recorded(self, rejections: Sequence[Rejection]) -> tuple[Rejection, ...]:
        """Return the rejections that the dataset has not recorded yet."""
        entries = _entries_of_rejections(rejections)
        found = find_records(self.dataset.store, self.manifest.files.records, entries["name"])
        is_recorded = np.isin(entries["row"], found["row"]).tolist()
        return tuple(one for one, recorded in zip(rejections, is_recorded, strict=True) if not recorded)

    def _joined_types(self, records: RecordSet) -> dict[str, str]:
        """Return the dataset's types for the input's columns.

        Raises ConfigError if a type does not match.
        """
        types = {}
        for name, kind in records.user_types.items():
            there = self.user_types.get(name, kind)
            if {there, kind} == {"int64", "double"}:
                there = "double"
            elif kind != there != "string" and _has_values(records, name):
                raise ConfigError(
                    f"column {name!r} has type {there} in the dataset at {self.dataset.url} and type {kind} in the "
                    "input; rename the column, or fix the values that have the wrong type"
                )
            types[name] = there
        return types


def _user_types(schema: pa.Schema) -> dict[str, str]:
    fields = {one.name.removeprefix(USER_PREFIX): str(one.type) for one in schema if one.name.startswith(USER_PREFIX)}
    return {name: "string" if kind == "large_string" else kind for name, kind in fields.items()}


def _has_values(records: RecordSet, column: str) -> bool:
    return any(columns.get(column) is not None for (columns,) in records.records.tuples("columns"))


def _new(
    records: Rows[Record],
    entries: InputRows,
    found: InputRows,
    removed: Collection[str],
    types: Mapping[str, str],
    rejections: list[Rejection],
) -> Iterator[Record]:
    """Yield the records that are new to the dataset. Add rows that conflict with the dataset to `rejections`.

    A row that was rejected before is new if the size of its file has changed, because the file may have been
    incomplete.
    """
    is_rejected = rejected_rows(found)
    accepted, rejected = found[~is_rejected], found[is_rejected].copy()
    rejected["num_bytes"] = ~rejected["num_bytes"]
    is_known = np.isin(entries["row"], accepted["row"]) | np.isin(_sized(entries, "row"), _sized(rejected, "row"))
    is_other = np.isin(entries["name"], accepted["name"])
    is_other &= ~np.isin(_sized(entries, "name"), _sized(accepted, "name"))
    for record, known, other in zip(records, is_known.tolist(), is_other.tolist(), strict=True):
        if removed and key_of(record) in removed:
            rejections.append(Rejection(record.row, record.source, _REMOVED, "removed"))
        elif other:
            rejections.append(Rejection(record.row, record.source, _OTHER, "other-file"))
        elif not known:
            yield replace(record, columns={name: value_as(record.columns.get(name), types[name]) for name in types})


_REMOVED = "samples from this file were removed from the dataset"
_OTHER = "the dataset contains another file with this name and a different size"


def _sized(entries: InputRows, field_name: str) -> npt.NDArray[np.uint64]:
    """Return a hash of the given field and the file's size for each entry."""
    hashes: npt.NDArray[np.uint64] = entries[field_name] ^ (entries["num_bytes"].astype(np.uint64) * np.uint64(_ODD))
    return hashes


def key_of(record: Record) -> str:
    """Return the record key that all samples of a record share."""
    return record_key(record.source) if record.origin is None else record.origin.record_key


def entries_of(records: Rows[Record], without: Collection[int] = (), rejected: Collection[int] = ()) -> InputRows:
    """Return the entries that describe these records in the table of known rows.

    without: numbers of the rows to omit.
    rejected: numbers of the rows that did not become samples.
    """

    names = ("row", "source", "origin", "num_bytes", "time_range", "caption", "captions", "extra")

    def entries() -> Iterator[tuple[int, int, int]]:
        for row, source, origin, num_bytes, times, caption, captions, extra in records.tuples(*names):
            if row in without:
                continue
            name = source if origin is None else origin.name
            span = ("", "") if times is None else (str(times.start), str(times.end))
            texts = [text for text, _ in captions] or [caption or ""]
            media = (f"{file.name}={file.source}" for file in extra)
            size = ~num_bytes if row in rejected else num_bytes
            yield stable_hash(name), stable_hash("row", name, *span, *texts, "", *media), size

    return np.fromiter(entries(), ROW)


def _entries_of_rejections(rejections: Iterable[Rejection]) -> InputRows:
    hashes = (stable_hash("rejected", rejection.source, rejection.kind) for rejection in rejections)
    return np.fromiter(((one, one, 0) for one in hashes), ROW)


def known_rows(records: RecordSet, rejections: Sequence[Rejection], samples: Rows[PlannedSample]) -> InputRows:
    """Return the entries that describe a build's input in the table of known rows.

    records: the input, including the rows that were rejected while it was read.
    rejections: all rejections of the build.
    samples: all samples of the build.
    """
    retried = {rejection.row for rejection in rejections if rejection.kind in RETRIED}
    rejected = {rejection.row for rejection in rejections}
    if rejected:  # a row of which only some windows were rejected has samples
        rejected.difference_update(row for (row,) in samples.tuples("record.row"))
    entries = entries_of(records.records, retried, rejected)
    return np.concatenate([entries, _entries_of_rejections(records.rejections)])
