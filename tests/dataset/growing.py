"""Versions of small sealed datasets: added shards, removed samples, and rewritten shards."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

import numpy as np

from streamvid.buckets.bucket import Bucket
from streamvid.dataset.index import ClipEntry, RowGroup, encode_samples, encode_shards, named_by_content
from streamvid.dataset.integrity import read_shards
from streamvid.dataset.manifest import Change, FileInfo, Manifest, ShardInfo, Verb, offsets_path
from streamvid.dataset.reader import Dataset
from streamvid.dataset.removed import Removals, RemovedSample, encode_removed
from streamvid.dataset.tar import scan_tar
from streamvid.dataset.versions.moved import NOWHERE, MovedShard, encode_moved
from streamvid.dataset.versions.publish import Writing, described, writing
from streamvid.storage import LocalStore
from tests.dataset.samples import ROW, USER_TYPES, Part, clip_offsets, seal_parts, tar_bytes

ClipOf: TypeAlias = Callable[[Bucket, str], tuple[bytes, ClipEntry]]
"""Function that returns the bytes of a sample's clip and its index entry."""


def no_video(bucket: Bucket, key: str) -> tuple[bytes, ClipEntry]:
    """Return a clip that is not a video and differs from the clips of all other keys."""
    return hashlib.sha256(key.encode()).digest() * 3, replace(ROW.clip, num_frames=bucket.num_frames)


def part(bucket: Bucket, number: int, keys: Sequence[str], clip_of: ClipOf) -> Part:
    """Build a shard of these samples."""
    tar = tar_bytes([(key, {"mp4": clip_of(bucket, key)[0], "txt": b""}) for key in keys])
    rows = []
    for index, (key, offset) in enumerate(zip(keys, clip_offsets(tar), strict=True)):
        data, entry = clip_of(bucket, key)
        clip = replace(entry, offset=offset, num_bytes=len(data), sha256=hashlib.sha256(data).digest())
        score = float(hashlib.sha256(key.encode()).digest()[0] % 4)
        rows.append(replace(ROW, key=key, record_key=key, index=index, clip=clip, columns={"score": score}))
    return Part(bucket, number, tar, rows)


def seal_keys(root: Path, layout: Mapping[Bucket, Sequence[Sequence[str]]], clip_of: ClipOf = no_video) -> Manifest:
    """Seal one shard for each sequence of keys."""
    parts = [
        part(bucket, number, keys, clip_of) for bucket, shards in layout.items() for number, keys in enumerate(shards)
    ]
    return seal_parts(root, tuple(layout), parts, USER_TYPES)


def grow(root: Path, layout: Mapping[Bucket, Sequence[Sequence[str]]], clip_of: ClipOf = no_video) -> Manifest:
    """Publish a version with more shards."""
    with writing(LocalStore(root)) as held:
        shards = list(held.dataset.shards)
        following = {
            bucket.id: 1 + max((s.number for s in shards if s.bucket_id == bucket.id), default=-1) for bucket in layout
        }
        parts = [
            part(bucket, following[bucket.id] + number, keys, clip_of)
            for bucket, several in layout.items()
            for number, keys in enumerate(several)
        ]
        buckets = {bucket.id: bucket for bucket in (*held.newest.buckets, *layout)}
        draft = replace(held.newest, buckets=tuple(buckets[name] for name in sorted(buckets)))
        draft, new = _with_parts(held, draft, parts, held.newest.version)
        files = replace(draft.files, shards=(*draft.files.shards, _put(held, "shards", encode_shards(new))))
        return _publish(held, replace(draft, files=files), "append", num_added=sum(len(one.rows) for one in parts))


def remove_keys(root: Path, keys: Collection[str]) -> Manifest:
    """Publish a version without these samples."""
    with writing(LocalStore(root)) as held:
        removed, version = [], held.newest.version + 1
        for shard in held.dataset.shards:
            table, kept = held.dataset.samples(shard, ["key"]), held.dataset.kept_rows(shard)
            for number, key in enumerate(table.column("key").to_pylist()):
                if key in keys:
                    row = number if kept is None else int(kept[number])
                    place = (shard.bucket_id, shard.number, shard.build_id, row)
                    removed.append(RemovedSample(key, key, *place, bytes(32), version))
        file = _put(held, f"removed-{version}", encode_removed(removed))
        files = replace(held.newest.files, removed=(*held.newest.files.removed, file))
        return _publish(held, replace(held.newest, files=files), "remove", num_removed=len(removed))


def rewrite(root: Path, numbers: Collection[int], clip_of: ClipOf = no_video) -> Manifest:
    """Publish a version in which the shards at these positions of the shard table are new tars, and delete the old
    tars."""
    store = LocalStore(root)
    with writing(store) as held:
        shards, dataset, build_id = list(held.dataset.shards), held.dataset, held.newest.version + 1
        old = [shard for number, shard in enumerate(shards) if number in numbers]
        keys = [dataset.samples(shard, ["key"]).column("key").to_pylist() for shard in old]
        buckets = {bucket.id: bucket for bucket in held.newest.buckets}
        parts = [
            part(buckets[shard.bucket_id], shard.number, few, clip_of) for shard, few in zip(old, keys, strict=True)
        ]
        draft, new = _with_parts(held, held.newest, parts, build_id)
        kept = [shard for shard in _stored(held) if shard.path not in {one.path for one in old}]
        moved = [MovedShard.of(one, (other.number, other.build_id), True) for one, other in zip(old, new, strict=True)]
        # The shard table omits shards without any remaining sample.
        gone = [shard for shard in _stored(held) if shard.path not in {one.path for one in shards}]
        moved += [MovedShard.of(shard, (NOWHERE, 0), True) for shard in gone]
        kept = [shard for shard in kept if shard not in gone]
        files = replace(
            draft.files,
            shards=(_put(held, "shards", encode_shards([*kept, *new])),),
            moved=(*draft.files.moved, _put(held, f"moved-{build_id}", encode_moved(moved))),
        )
        manifest = _publish(held, replace(draft, files=files), "compact")
        for shard in (*old, *gone):
            store.remove(shard.path)
            store.remove(offsets_path(shard.path))
        return manifest


def add_view(root: Path, name: str, condition: str) -> Manifest:
    """Publish a version with one more view."""
    with writing(LocalStore(root)) as held:
        views = {**held.newest.views, name: condition}
        return held.publish(replace(held.newest, views=views), Change("view"))


def keys_of(root: Path) -> set[str]:
    """Return the keys of all samples in the newest version."""
    dataset = Dataset(LocalStore(root))
    return {key for shard in dataset.shards for key in dataset.samples(shard, ["key"]).column("key").to_pylist()}


def _stored(held: Writing) -> list[ShardInfo]:
    return list(read_shards(held.store, held.newest.files.shards))


def _with_parts(
    held: Writing, draft: Manifest, parts: Sequence[Part], build_id: int
) -> tuple[Manifest, list[ShardInfo]]:
    """Write the shards of these parts; return the manifest with one more sample file, and the new shards."""
    groups = [RowGroup(one.bucket.id, one.number, one.split, one.rows) for one in parts]
    samples = _put(held, f"samples-{held.newest.version}", encode_samples(groups, USER_TYPES))
    infos = [replace(one.info(samples.path, group), build_id=build_id) for group, one in enumerate(parts)]
    for info, one in zip(infos, parts, strict=True):
        held.store.put(info.path, one.tar)
        held.store.put(offsets_path(info.path), one.offsets)
    assert all(len(list(scan_tar(io.BytesIO(one.tar)))) == 2 * len(one.rows) for one in parts)
    return replace(draft, files=replace(draft.files, samples=(*draft.files.samples, samples))), infos


def _put(held: Writing, stem: str, data: bytes) -> FileInfo:
    file = named_by_content(stem, 0, data)
    held.store.put(file.path, data)
    return file


def _publish(held: Writing, draft: Manifest, verb: Verb, num_added: int = 0, num_removed: int = 0) -> Manifest:
    files = draft.files
    table = read_shards(held.store, files.shards).arranged([bucket.id for bucket in draft.buckets])
    shards = Removals.read(held.store, files.removed).applied(table)
    assert np.all(shards.num_samples > 0)
    other = {file.path for group in draft.columns for file in group.known_files}
    draft = replace(draft, files=replace(files, other=tuple(f for f in files.other if f.path in other)))
    return held.publish(described(draft, shards), Change(verb, num_added, num_removed))
