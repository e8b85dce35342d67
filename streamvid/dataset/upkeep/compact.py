"""Compaction: tars with removed samples are rewritten, and small shards are merged into larger ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from streamvid.dataset.index import MEDIA_PREFIX, named_by_content
from streamvid.dataset.manifest import Change, Manifest, ShardInfo, offsets_path, read_manifest
from streamvid.dataset.passes import DEFAULT_WORKERS, Progress, check_workers, no_progress
from streamvid.dataset.reader import Dataset
from streamvid.dataset.removed import ShardName
from streamvid.dataset.upkeep.copy_file import scratch_folder
from streamvid.dataset.upkeep.expire import Expired, expire_versions, parse_age
from streamvid.dataset.upkeep.new_index import NewIndex, own_groups
from streamvid.dataset.upkeep.new_shards import (
    NewShard,
    Part,
    build_id_of,
    bytes_of_samples,
    dead_shards,
    store_shards,
    taken_names,
)
from streamvid.dataset.versions.moved import NOWHERE, MovedShard, deleted_shards, encode_moved, read_moved
from streamvid.dataset.versions.open import check_newest
from streamvid.dataset.versions.publish import Writing, put_file, writing
from streamvid.errors import ConfigError
from streamvid.storage import BlockCache, StorageOptions, Store, open_store

MAX_TEXTS_PER_SHARD = 8192
NOTHING_TO_DO = "nothing to do"
_DEFAULT_BYTES = 512 * 10**6
_MAX_CACHE_BYTES = 2**62  # no block is dropped to make room
_RECORD_BYTES = 10_240  # a tar is padded to a multiple of this size
_END_BYTES = 1024


@dataclass(frozen=True, slots=True)
class CompactReport:
    """Result of a compaction.

    state: "compacted"; "expired" if only earlier versions or unreferenced files were deleted; "nothing to do"; for a
        dry run, "would be compacted" or "would be expired".
    version: number of the new version; None if the shards did not change.
    num_shards_before, num_shards: numbers of shards before and after.
    num_rewritten: number of old shards whose samples were written to new tars.
    num_bytes_written: total size of the new tars; 0 for a dry run.
    deleted: tars that were deleted because they contained samples that were removed or replaced.
    num_bytes_deleted: total size of the deleted tars.
    expired: versions and files that `expire` deleted.
    has_dropped_cache: True if the blocks of deleted tars were dropped from the local cache.
    """

    dataset: str
    state: str
    version: int | None
    num_shards_before: int
    num_shards: int
    num_rewritten: int
    num_bytes_written: int
    deleted: tuple[str, ...]
    num_bytes_deleted: int
    expired: Expired
    has_dropped_cache: bool

    def to_json(self) -> dict[str, object]:
        """Return the report as a JSON-serializable dictionary."""
        return asdict(self)


def compact(
    dataset: str | Path,
    *,
    shard_size_bytes: int | None = None,
    expire: str | float | None = None,
    dry_run: bool = False,
    cache_only: bool = False,
    storage: StorageOptions | Mapping[str, Any] | None = None,
    workers: int = DEFAULT_WORKERS,
    temp_dir: str | Path | None = None,
    progress: Progress | None = None,
) -> CompactReport:
    """Rewrite tars that contain removed samples, merge small shards, and publish the result as a new version.

    The samples, their values and their clips stay the same. Tars that contain removed samples are deleted afterwards,
    so earlier versions lose these shards. If the command is interrupted, run it again: it writes the same files.

    shard_size_bytes: target size of merged shards. Shards smaller than half this size are merged. None uses the size
        for which the dataset was built. Shards of clips that are stored in several buckets are never merged.
    expire: age, as text such as "30d" or as a number of seconds. Untagged versions that were published longer ago than
        this are also deleted, followed by all files to which no version refers.
    dry_run: only report what would be done.
    cache_only: only drop the blocks of deleted tars from the local cache. This requires no permission to change the
        dataset.
    storage: options for the store. If they configure a cache, the blocks of deleted tars are dropped from that cache.
    workers: number of shards written at a time.
    temp_dir: scratch directory for remote stores, with room for two shards per worker.

    Raises ConfigError for invalid options, IntegrityError for a damaged tar, DatasetError if another process is
    changing the dataset, and StorageError if the store fails.
    """
    check_workers(workers)
    age = None if expire is None else parse_age(expire)
    options = StorageOptions.of(storage)
    store = open_store(check_newest(dataset), options)
    if cache_only:
        return _cache_only(store, options)
    if dry_run:
        return _dry_run(Compaction(Dataset(store, manifest=read_manifest(store)), shard_size_bytes), age)
    with writing(store) as held:
        plan = Compaction(held.dataset, shard_size_bytes)
        written = 0
        if plan.has_work:
            written = plan.run(held, temp_dir, workers, progress or no_progress)
        deleted, num_bytes = _delete(store, held.newest)
        expired = Expired() if age is None else expire_versions(held, age)
        has_cache = _drop_blocks(store, held.newest, options)
        return CompactReport(
            dataset=store.url,
            state="compacted" if plan.has_work else "expired" if expired.files or expired.versions else NOTHING_TO_DO,
            version=held.newest.version if plan.has_work else None,
            num_shards_before=plan.num_shards_before,
            num_shards=held.newest.counts.shards,
            num_rewritten=plan.num_rewritten,
            num_bytes_written=written,
            deleted=deleted,
            num_bytes_deleted=num_bytes,
            expired=expired,
            has_dropped_cache=has_cache,
        )


def _cache_only(store: Store, options: StorageOptions) -> CompactReport:
    newest = read_manifest(store)
    if not _drop_blocks(store, newest, options):
        raise ConfigError(
            "cache_only=True requires a cache; set cache_dir and cache_bytes in storage (--cache-dir DIR)"
        )
    num_shards = newest.counts.shards
    return CompactReport(store.url, NOTHING_TO_DO, None, num_shards, num_shards, 0, 0, (), 0, Expired(), True)


def _drop_blocks(store: Store, newest: Manifest, options: StorageOptions) -> bool:
    """Drop the blocks of deleted tars from the configured cache. Return False if no cache is configured."""
    if options.cache_dir is None:
        return False
    cache = BlockCache(Path(options.cache_dir), _MAX_CACHE_BYTES)
    for row in deleted_shards(read_moved(store, newest.files.moved)).values():
        cache.discard(row.sha256.hex(), [(0, row.num_bytes)])
    return True


def _dry_run(plan: Compaction, age: float | None) -> CompactReport:
    doomed = [part.shard for part in plan.parts if part.shard.path in plan.doomed] + plan.dead
    expired = Expired() if age is None else expire_versions(plan.dataset, age)
    rest = "would be expired" if expired.files or expired.versions else NOTHING_TO_DO
    return CompactReport(
        dataset=plan.dataset.url,
        state="would be compacted" if plan.has_work else rest,
        version=None,
        num_shards_before=plan.num_shards_before,
        num_shards=len(plan.dataset.shards) - len(plan.parts) + len(plan.written),
        num_rewritten=plan.num_rewritten,
        num_bytes_written=0,
        deleted=tuple(shard.path for shard in doomed),
        num_bytes_deleted=sum(shard.num_bytes for shard in doomed),
        expired=expired,
        has_dropped_cache=False,
    )


@dataclass
class Compaction:
    """Plan for a compaction.

    written: shards to write.
    dead: shards with no samples left.
    """

    dataset: Dataset
    shard_size_bytes: int | None = None
    written: list[NewShard] = field(default_factory=list)
    dead: list[ShardInfo] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.shard_size_bytes is not None and self.shard_size_bytes < _RECORD_BYTES:
            raise ConfigError(f"shard_size_bytes={self.shard_size_bytes}: must be at least {_RECORD_BYTES}")
        self.dead = dead_shards(self.dataset)
        taken = taken_names(self.dataset, self.dead)
        for parts in self._groups():
            self.written.append(_written(parts, taken))

    @property
    def has_work(self) -> bool:
        return bool(self.written or self.dead)

    @property
    def num_shards_before(self) -> int:
        return len(self.dataset.shards) + len(self.dead)

    @property
    def num_rewritten(self) -> int:
        return len(self.parts)

    @property
    def parts(self) -> list[Part]:
        """Old shards that are rewritten."""
        return [part for shard in self.written for part in shard.parts]

    @cached_property
    def doomed(self) -> set[str]:
        """Paths of the old tars that contain removed samples."""
        return {part.shard.path for part in self.parts if not part.is_whole}

    def _groups(self) -> Iterator[list[Part]]:
        """Yield the old shards that form each new shard.

        Small shards are grouped. A larger shard with removed samples forms a group of its own.
        """
        drawn = {
            (bucket_id, first + number)
            for one in self.dataset.manifest.draws
            for bucket_id, _, first in one.buckets
            for number in range(one.num_shards)
        }
        open_groups: dict[tuple[object, ...], _Group] = {}
        target = self._target()
        for shard in self.dataset.shards:
            part = Part.whole(self.dataset, shard)
            is_drawn = (shard.bucket_id, shard.number) in drawn
            if is_drawn or (part.is_whole and 2 * shard.num_bytes >= target):
                if not part.is_whole:
                    yield [part]
                continue
            num_bytes = bytes_of_samples(part)
            if 2 * (num_bytes + _END_BYTES) >= target:
                if not part.is_whole:
                    yield [part]
                continue
            kind = (shard.bucket_id, shard.split, *_extensions(part))
            group = open_groups.setdefault(kind, _Group())
            if not group.has_room(part, num_bytes, target, self.dataset.manifest.clips == "text"):
                if group.is_worth_it:
                    yield group.parts
                group = open_groups[kind] = _Group()
            group.add(part, num_bytes)
        yield from (group.parts for group in open_groups.values() if group.is_worth_it)

    def _target(self) -> int:
        """Return the target size of shards in bytes."""
        if self.shard_size_bytes is not None:
            return self.shard_size_bytes
        built = self.dataset.manifest.build.get("options")
        found = built.get("shard_size_bytes") if isinstance(built, Mapping) else None
        return found if type(found) is int and found >= _RECORD_BYTES else _DEFAULT_BYTES

    def run(self, held: Writing, temp_dir: str | Path | None, workers: int, progress: Progress) -> int:
        """Write the shards and the index, and publish a version. Return the total size of the new tars in bytes."""
        manifest, store = self.dataset.manifest, held.store
        old = {part.shard.path for part in self.parts}
        affected = {part.shard.index_path for part in self.parts} | {shard.index_path for shard in self.dead}
        kept = [
            NewShard.kept(self.dataset, shard)
            for shard in self.dataset.shards
            if shard.index_path in affected and shard.path not in old
        ]
        shards = [*self.written, *kept]
        with scratch_folder(store, manifest.fingerprints.content, temp_dir) as folder:
            facts = store_shards(store, shards, folder, workers, progress)
        rows, has_packets = self.dataset.stored_schema, bool(manifest.files.packets)
        groups = own_groups(self.dataset)
        index = NewIndex(self.dataset, frozenset(affected), manifest.buckets, rows, groups, has_packets)
        draft, table = index.write(shards, facts)
        data = encode_moved(self._moves())
        file = named_by_content("moved", len(manifest.files.moved), data)
        put_file(store, file.path, data)
        draft = replace(draft, files=replace(draft.files, moved=(*manifest.files.moved, file)))
        held.publish(draft, Change("compact"), table)
        return sum(fact.num_bytes for fact in facts[: len(self.written)])

    def _moves(self) -> list[MovedShard]:
        rows = [
            MovedShard.of(part.shard, (shard.number, shard.build_id), part.shard.path in self.doomed)
            for shard in self.written
            for part in shard.parts
        ]
        return rows + [MovedShard.of(shard, (NOWHERE, 0), is_deleted=True) for shard in self.dead]


@dataclass
class _Group:
    """Small shards that may be merged into one shard."""

    parts: list[Part] = field(default_factory=list)
    num_bytes: int = 0
    num_samples: int = 0

    def has_room(self, part: Part, num_bytes: int, target: int, is_text: bool) -> bool:
        if is_text and self.num_samples + len(part.rows) > MAX_TEXTS_PER_SHARD:
            return False
        return not self.parts or self.num_bytes + num_bytes + _END_BYTES <= target

    def add(self, part: Part, num_bytes: int) -> None:
        self.parts.append(part)
        self.num_bytes += num_bytes
        self.num_samples += len(part.rows)

    @property
    def is_worth_it(self) -> bool:
        """True if writing the group would merge shards or omit removed samples."""
        return len(self.parts) > 1 or any(not part.is_whole for part in self.parts)


def _written(parts: Sequence[Part], taken: set[ShardName]) -> NewShard:
    first = parts[0].shard
    build_id = build_id_of(parts, first.number, taken)
    return NewShard(first.bucket_id, first.number, build_id, first.split, tuple(parts), "written")


def _extensions(part: Part) -> tuple[str, ...]:
    """Return the extensions of a shard's members. All samples of the shard have the same extensions."""
    names = [name for name in part.dataset.stored_schema.names if name.startswith(MEDIA_PREFIX)]
    row = part.dataset.column_rows(part.shard, part.shard.index_path, ["clip_extension", *names]).slice(0, 1)
    (values,) = row.to_pylist()
    items = [item["extension"] for name in names for item in values.get(name) or ()]
    return (values["clip_extension"], *sorted(items))


def _delete(store: Store, newest: Manifest) -> tuple[tuple[str, ...], int]:
    """Delete the tars whose samples were removed or replaced. Return their paths and total size."""
    deleted, num_bytes = [], 0
    for path, row in sorted(deleted_shards(read_moved(store, newest.files.moved)).items()):
        for name in (path, offsets_path(path)):
            if store.state(name) is not None:
                store.remove(name)
                deleted += [path] if name == path else []
                num_bytes += row.num_bytes if name == path else 0
    return tuple(deleted), num_bytes
