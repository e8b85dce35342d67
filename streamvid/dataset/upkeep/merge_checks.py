"""Decisions before a merge: whether the datasets are compatible, which samples to keep, and which columns to store."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from streamvid.buckets.bucket import Bucket
from streamvid.dataset.reader import Dataset
from streamvid.dataset.removed import read_removed
from streamvid.dataset.upkeep.new_index import NewGroup, own_groups
from streamvid.dataset.upkeep.new_shards import Part
from streamvid.dataset.upkeep.selection import in_all_buckets
from streamvid.errors import DatasetError

if TYPE_CHECKING:
    import pyarrow as pa

OnDuplicate: TypeAlias = Literal["error", "first", "last"]
"""Samples to keep if several datasets have samples from the same source file. "error" refuses to merge such
datasets."""
Rows: TypeAlias = npt.NDArray[np.int32]

_SHOWN = 3
_TYPES = {"bool": "bool", "double": "double", "int64": "int64", "string": "string", "fixed_size_binary[32]": "sha256"}


def check_alike(dest: Dataset, sources: Sequence[Dataset]) -> None:
    """Raise DatasetError unless the datasets can be merged."""
    mine, shapes = dest.manifest, {bucket.id: bucket.shape for bucket in dest.manifest.buckets}
    kinds = {field.name: field.type for field in dest.samples_schema}
    for source in sources:
        theirs = source.manifest
        pairs = {
            "clips": (mine.clips, theirs.clips),
            "frame_rate": (mine.frame_rate, theirs.frame_rate),
            "model": (mine.model, theirs.model),
            "media": (dict(mine.media), dict(theirs.media)),
            "audio": (_audio_of(dest), _audio_of(source)),
            "native encoding": (mine.native and mine.native.encoding, theirs.native and theirs.native.encoding),
        }
        for name, (own, other) in pairs.items():
            if own != other:
                raise _unlike(dest, source, name, own, other, "build both datasets with the same options")
        for bucket in theirs.buckets:
            if shapes.setdefault(bucket.id, bucket.shape) != bucket.shape:
                remedy = "build one of the datasets with explicit sizes"
                raise _unlike(dest, source, f"bucket {bucket.id}", shapes[bucket.id], bucket.shape, remedy)
        for column in source.samples_schema:
            if kinds.setdefault(column.name, column.type) != column.type:
                name = f"the type of column {column.name.removeprefix('user.')!r}"
                raise _unlike(
                    dest, source, name, kinds[column.name], column.type, "rename the column in one of the datasets"
                )


def _audio_of(dataset: Dataset) -> object:
    """Return the value of the `clips.audio` option with which a dataset was built."""
    return dataset.manifest.build.get("options", {}).get("audio", "keep")


def _unlike(dest: Dataset, source: Dataset, name: str, own: object, other: object, remedy: str) -> DatasetError:
    return DatasetError(f"{name} is {own} in {dest.url}, but {other} in {source.url}; {remedy}, and merge again")


def merged_buckets(datasets: Sequence[Dataset]) -> tuple[Bucket, ...]:
    """Return the buckets of all datasets, starting with the buckets of the first dataset."""
    buckets: dict[str, Bucket] = {}
    for dataset in datasets:
        for bucket in dataset.manifest.buckets:
            buckets.setdefault(bucket.id, bucket)
    return tuple(buckets.values())


def merged_groups(dest: Dataset, sources: Sequence[Dataset], rows: pa.Schema) -> list[NewGroup]:
    """Return the column groups of a merged dataset. rows: schema of its sample files.

    Each source adds one group. It contains the columns that were added to the source after sealing, and the columns
    that the merged dataset's sample files lack.
    """
    groups = own_groups(dest)
    for source in sources:
        later = {name for group in source.manifest.columns for name in group.columns}
        columns = {
            column.name: _TYPES[str(column.type)]
            for column in source.samples_schema
            if column.name in later or column not in rows
        }
        if columns:
            groups.append(NewGroup(columns, "", None, _is_of(source)))
    return groups


def _is_of(source: Dataset) -> Callable[[Part], bool]:
    return lambda part: part.dataset is source


@dataclass
class Omissions:
    """Samples that a merge omits, as mappings from a shard's row in the shard table to ascending positions in the
    shard.

    of_dest: omitted samples of the destination.
    of_sources: omitted samples of each source.
    num_replaced, num_duplicates, num_kept_out: see MergeReport.
    """

    of_dest: dict[int, Rows] = field(default_factory=dict)
    of_sources: list[dict[int, Rows]] = field(default_factory=list)
    num_replaced: int = 0
    num_duplicates: int = 0
    num_kept_out: int = 0


def left_out(dest: Dataset, sources: Sequence[Dataset], on_duplicate: OnDuplicate) -> Omissions:
    """Return the samples that a merge omits: duplicates, and samples that had been removed from `dest`.

    Memory usage is proportional to the number of record keys in the sources. Raises DatasetError for duplicates if
    `on_duplicate` is "error".
    """
    owners = _owners(dest, sources, on_duplicate)
    found = Omissions()
    for place, _, record_keys in _keys(dest):
        rows = [row for row, record_key in enumerate(record_keys) if owners.get(record_key, 0) != 0]
        if rows:
            found.of_dest[place] = np.array(rows, np.int32)
    found.of_dest = in_all_buckets(dest, found.of_dest)
    found.num_replaced = sum(map(len, found.of_dest.values()))
    removed = set(read_removed(dest.store, dest.manifest.files.removed).column("key").to_pylist())
    for number, source in enumerate(sources, 1):
        mine: dict[int, Rows] = {}
        num_kept_out = 0
        for place, keys, record_keys in _keys(source):
            is_duplicate = np.array([owners[record_key] != number for record_key in record_keys])
            is_removed = np.array([key in removed for key in keys]) & ~is_duplicate
            num_kept_out += int(is_removed.sum())
            if (is_duplicate | is_removed).any():
                mine[place] = np.flatnonzero(is_duplicate | is_removed).astype(np.int32)
        found.of_sources.append(in_all_buckets(source, mine))
        found.num_kept_out += num_kept_out
        found.num_duplicates += sum(map(len, mine.values())) - num_kept_out
    return found


def _owners(dest: Dataset, sources: Sequence[Dataset], on_duplicate: OnDuplicate) -> Mapping[str, int]:
    """Map each record key in the sources to the number of the dataset whose samples are kept.

    Number 0 is `dest`; the sources are numbered from 1.
    """
    owners: dict[str, int] = {}
    twice: set[str] = set()
    for number, source in enumerate(sources, 1):
        for _, _, record_keys in _keys(source):
            for record_key in record_keys:
                owner = owners.setdefault(record_key, number)
                if owner != number:
                    twice.add(record_key)
                    owners[record_key] = owner if on_duplicate == "first" else number
    for _, _, record_keys in _keys(dest):
        for record_key in owners.keys() & set(record_keys):
            twice.add(record_key)
            owners[record_key] = 0 if on_duplicate == "first" else owners[record_key]
    if twice and on_duplicate == "error":
        shown = ", ".join(sorted(twice)[:_SHOWN]) + (", …" if len(twice) > _SHOWN else "")
        raise DatasetError(
            f"{len(twice)} source files have samples in several of the datasets (record keys {shown}); set "
            "on_duplicate (--on-duplicate) to 'first' or 'last' to choose which samples to keep"
        )
    return owners


def _keys(dataset: Dataset) -> Iterator[tuple[int, list[str], list[str]]]:
    """For each shard, yield its row in the shard table, and the keys and record keys of its samples."""
    for place, shard in enumerate(dataset.shards):
        table = dataset.samples(shard, ("key", "record_key"))
        yield place, table.column("key").to_pylist(), table.column("record_key").to_pylist()
