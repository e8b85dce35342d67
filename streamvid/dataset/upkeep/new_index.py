"""Index of a new version whose shards were made from existing shards."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from streamvid.buckets.bucket import Bucket
from streamvid.dataset.arrow import array_of
from streamvid.dataset.column_groups import typed
from streamvid.dataset.index import (
    MAX_SHARDS_PER_FILE,
    MEDIA_PREFIX,
    TablePlace,
    encode_row_groups,
    encode_shards,
    named_by_content,
    schema,
)
from streamvid.dataset.integrity import read_range, read_shards
from streamvid.dataset.manifest import ColumnGroup, FileInfo, Manifest, ShardInfo
from streamvid.dataset.packets import encode_packets
from streamvid.dataset.reader import Dataset
from streamvid.dataset.removed import Removals
from streamvid.dataset.shard_table import ShardTable
from streamvid.dataset.upkeep.new_shards import NewShard, Part, TarFacts
from streamvid.dataset.versions.publish import put_file
from streamvid.errors import IntegrityError

if TYPE_CHECKING:
    import pyarrow as pa

    from streamvid.video.audio.index import AudioIndex
    from streamvid.video.clip_index import ClipIndex

_PLACE = ("packets_offset", "packets_bytes", "packets_sha256")


@dataclass(frozen=True)
class NewGroup:
    """One column group of the new version. Such groups contain columns that were added after sealing.

    old: the same group in the changed dataset; None for a group of merged samples.
    has: function that returns True if a part of a shard has values in the group.
    """

    columns: Mapping[str, str]
    source_sha256: str
    old: ColumnGroup | None
    has: Callable[[Part], bool]


def own_groups(dataset: Dataset) -> list[NewGroup]:
    """Return the column groups of the dataset that is being changed. Samples keep their values."""
    places = {file.path: place for place, file in enumerate(dataset.manifest.files.samples)}

    def has(group: ColumnGroup, part: Part) -> bool:
        return part.dataset is dataset and group.files[places[part.shard.index_path]] is not None

    def asked(group: ColumnGroup) -> Callable[[Part], bool]:
        return lambda part: has(group, part)

    groups = dataset.manifest.columns
    return [NewGroup(group.columns, group.source_sha256, group, asked(group)) for group in groups]


@dataclass(frozen=True)
class _WrittenFiles:
    """Index files for up to MAX_SHARDS_PER_FILE shards, and the rows of these shards in the shard table.

    columns: one file per group, or None for a group in which no sample has values.
    is_mixed: for each group, True if some samples have values in the group and some do not.
    """

    samples: FileInfo
    packets: FileInfo | None
    columns: tuple[FileInfo | None, ...]
    is_mixed: tuple[bool, ...]
    infos: tuple[ShardInfo, ...]


@dataclass(frozen=True)
class NewIndex:
    """Writes the index files of a new version.

    dataset: version that is being changed.
    affected: sample files of `dataset` that are replaced as a whole.
    buckets: buckets of the new version, in order.
    rows: schema of the sample files.
    has_packets: True if the new version has packets files.
    """

    dataset: Dataset
    affected: frozenset[str]
    buckets: Sequence[Bucket]
    rows: pa.Schema
    groups: Sequence[NewGroup]
    has_packets: bool

    def write(self, shards: Sequence[NewShard], facts: Sequence[TarFacts]) -> tuple[Manifest, ShardTable]:
        """Write the index files for `shards`, which replace the shards in the affected sample files.

        Return the manifest and the shard table. The manifest lacks the fields that are derived from the shard table.
        """
        manifest, store = self.dataset.manifest, self.dataset.store
        order = {bucket.id: place for place, bucket in enumerate(self.buckets)}
        pairs = sorted(zip(shards, facts, strict=True), key=lambda pair: (order[pair[0].bucket_id], pair[0].number))
        kept = [place for place, file in enumerate(manifest.files.samples) if file.path not in self.affected]
        chunks = [pairs[start : start + MAX_SHARDS_PER_FILE] for start in range(0, len(pairs), MAX_SHARDS_PER_FILE)]
        files = [self._write_files(len(kept) + number, chunk) for number, chunk in enumerate(chunks)]
        # The stored table counts removed samples too; readers subtract them.
        infos = [
            replace(shard, num_samples=self.dataset.num_stored(shard))
            for shard in self.dataset.shards
            if shard.index_path not in self.affected
        ]
        infos += [shard for file in files for shard in file.infos]
        infos.sort(key=lambda shard: (order[shard.bucket_id], shard.number))
        table = self._put("shards", 0, encode_shards(infos))
        removals = Removals.read(store, manifest.files.removed)
        return self._manifest(kept, files, table), removals.applied(read_shards(store, (table,)))

    def _put(self, stem: str, number: int, data: bytes, suffix: str = "parquet") -> FileInfo:
        file = named_by_content(stem, number, data, suffix)
        put_file(self.dataset.store, file.path, data)
        return file

    def _manifest(self, kept: Sequence[int], files: Sequence[_WrittenFiles], table: FileInfo) -> Manifest:
        old = self.dataset.manifest.files
        groups = [self._group(number, kept, files) for number in range(len(self.groups))]
        there = [self._old_packets(place) for place in kept] if self.has_packets else []
        listed = {file.path: file for group in groups for file in group.known_files}
        new = replace(
            old,
            shards=(table,),
            samples=(*(old.samples[place] for place in kept), *(file.samples for file in files)),
            packets=(*there, *(file.packets for file in files if file.packets is not None)),
            other=tuple(listed.values()),
        )
        return replace(self.dataset.manifest, buckets=tuple(self.buckets), files=new, columns=tuple(groups))

    def _group(self, number: int, kept: Sequence[int], files: Sequence[_WrittenFiles]) -> ColumnGroup:
        group = self.groups[number]
        there = [None if group.old is None else group.old.files[place] for place in kept]
        # Samples without values are mixed with others, so the same annotation may have values for them later.
        is_mixed = any(file.is_mixed[number] for file in files)
        of_files = (*there, *(file.columns[number] for file in files))
        return ColumnGroup(of_files, group.columns, "" if is_mixed else group.source_sha256)

    def _old_packets(self, place: int) -> FileInfo:
        """Return the packets file for a sample file that is kept.

        If the dataset has no packets, write an empty packets file.
        """
        packets = self.dataset.manifest.files.packets
        return packets[place] if packets else self._put("packets", place, b"", "arrows")

    def _write_files(self, number: int, pairs: Sequence[tuple[NewShard, TarFacts]]) -> _WrittenFiles:
        tables = [_packets(shard) if self.has_packets else b"" for shard, _ in pairs]
        packets = self._put("packets", number, b"".join(tables), "arrows") if self.has_packets else None
        rows = [self._rows(*pair, place) for pair, place in zip(pairs, _places(tables), strict=True)]
        samples = self._put("samples", number, encode_row_groups(rows, self.rows))
        has = [[group.has(part) for shard, _ in pairs for part in shard.parts] for group in self.groups]
        columns = [
            self._put("columns", number, self._columns(group, pairs)) if any(mine) else None
            for group, mine in zip(self.groups, has, strict=True)
        ]
        infos = [
            _info(shard, tar, table, samples.path, row_group)
            for row_group, ((shard, tar), table) in enumerate(zip(pairs, rows, strict=True))
        ]
        is_mixed = tuple(any(mine) and not all(mine) for mine in has)
        return _WrittenFiles(samples, packets, tuple(columns), is_mixed, tuple(infos))

    def _rows(self, shard: NewShard, tar: TarFacts, place: TablePlace | None) -> pa.Table:
        """Return the index rows of a new shard, with values from the sample files of its parts."""
        import pyarrow as pa

        parts = [
            part.dataset.column_rows(part.shard, part.shard.index_path, None).take(array_of(part.rows))
            for part in shard.parts
        ]
        # A column of another type is in a group of columns.
        parts = [part.select([field.name for field in part.schema if field in self.rows]) for part in parts]
        table = pa.concat_tables(typed(part, self.rows.names, self.rows) for part in parts)
        new: dict[str, Sequence[Any]] = {
            "index": range(table.num_rows),
            "shard": [shard.number] * table.num_rows,
            "packets_offset": [place and place.offset] * table.num_rows,
            "packets_bytes": [place and place.num_bytes] * table.num_rows,
            "packets_sha256": [place and place.sha256] * table.num_rows,
        }
        if tar.offsets is not None:
            new |= _moved_members(table, tar.offsets)
        columns = {
            field.name: pa.array(new[field.name], field.type) if field.name in new else table.column(field.name)
            for field in self.rows
        }
        return pa.table(columns, schema=self.rows)

    def _columns(self, group: NewGroup, pairs: Sequence[tuple[NewShard, TarFacts]]) -> bytes:
        """Return the bytes of a column group's file, with the values that a reader of the dataset sees."""
        import pyarrow as pa

        target = schema({"key": "string", **group.columns})

        def values(part: Part) -> pa.Table:
            there = [name for name in target.names if name in part.dataset.samples_schema.names]
            found = part.dataset.samples(part.shard, there).take(array_of(part.rows))
            return typed(found, target.names, target)

        return encode_row_groups([pa.concat_tables(map(values, shard.parts)) for shard, _ in pairs], target)


def _moved_members(table: pa.Table, offsets: Mapping[str, int]) -> dict[str, Sequence[Any]]:
    """Return the columns with member offsets, updated for a new tar. offsets: maps member names to data offsets."""
    keys, extensions = table.column("key").to_pylist(), table.column("clip_extension").to_pylist()
    names = [f"{key}.{extension}" for key, extension in zip(keys, extensions, strict=True)]
    new: dict[str, Sequence[Any]] = {"clip_offset": [offsets[name] for name in names]}
    for name in table.column_names:
        if name.startswith(MEDIA_PREFIX):
            new[name] = [
                items and [{**item, "offset": offsets[f"{key}.{item['extension']}"]} for item in items]
                for key, items in zip(keys, table.column(name).to_pylist(), strict=True)
            ]
    return new


def _info(shard: NewShard, tar: TarFacts, table: pa.Table, index_path: str, row_group: int) -> ShardInfo:
    return ShardInfo(
        bucket_id=shard.bucket_id,
        number=shard.number,
        build_id=shard.build_id,
        split=shard.split,
        num_samples=table.num_rows,
        num_bytes=tar.num_bytes,
        sha256=tar.sha256,
        offsets_num_bytes=tar.offsets_num_bytes,
        offsets_sha256=tar.offsets_sha256,
        max_clip_bytes=shard.parts[0].shard.max_clip_bytes if tar.offsets is None else _largest(table),
        index_path=index_path,
        index_row_group=row_group,
    )


def _largest(table: pa.Table) -> int:
    """Return the size in bytes of the largest clip, including its conditioning inputs."""
    sizes = np.asarray(table.column("clip_bytes").to_numpy(), np.int64).copy()
    for name in table.column_names:
        if name.startswith(MEDIA_PREFIX):
            items = table.column(name).to_pylist()
            sizes += [sum(item["num_bytes"] for item in listed or ()) for listed in items]
    return int(sizes.max())


def _places(tables: Sequence[bytes]) -> list[TablePlace | None]:
    """Return the location of each packet table in the file that results from concatenating all tables."""
    ends = np.cumsum([len(table) for table in tables]).tolist()
    return [
        TablePlace(end - len(table), len(table), hashlib.sha256(table).digest()) if table else None
        for table, end in zip(tables, ends, strict=True)
    ]


def _packets(shard: NewShard) -> bytes:
    """Return the packet table of a new shard, or b"" if none of its clips has an index."""
    places = [_place(part) for part in shard.parts]
    if len(places) == 1 and shard.parts[0].is_whole:
        return b"" if places[0] is None else _packets_as_they_are(shard.parts[0], places[0])
    clips: list[ClipIndex | None] = []
    audios: list[AudioIndex | None] = []
    for part, place in zip(shard.parts, places, strict=True):
        if place is None:
            clips += [None] * len(part.rows)
            audios += [None] * len(part.rows)
        else:
            tables = part.dataset.packets(part.shard, place.offset, place.num_bytes, place.sha256)
            clips += [tables.clip(row) for row in part.stored_rows.tolist()]
            audios += [tables.audio(row) for row in part.stored_rows.tolist()]
    return encode_packets(clips, audios) if any(index is not None for index in (*clips, *audios)) else b""


def _place(part: Part) -> TablePlace | None:
    table = part.dataset.column_rows(part.shard, part.shard.index_path, _PLACE)
    offset, num_bytes, sha256 = (table.column(name)[0].as_py() for name in _PLACE)
    return None if offset is None or num_bytes is None or sha256 is None else TablePlace(offset, num_bytes, sha256)


def _packets_as_they_are(part: Part, place: TablePlace) -> bytes:
    path, offset, num_bytes, sha256 = part.dataset.check_place(part.shard, place.offset, place.num_bytes, place.sha256)
    data = read_range(part.dataset.store, path, offset, num_bytes, sha256)
    if hashlib.sha256(data).digest() != sha256:
        raise IntegrityError(
            f"{part.dataset.url}: checksum mismatch in the packets of {part.shard.path}; copy the dataset again"
        )
    return data
