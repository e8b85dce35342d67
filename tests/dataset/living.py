"""Small datasets that change: clips with known bytes, and the samples that a reader gets."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import streamvid
from streamvid.dataset.draws import StoredSet
from streamvid.dataset.manifest import Manifest
from tests.dataset.samples import BUCKETS, ROW, Part, clip_offsets, seal_parts, tar_bytes

TYPES = {"score": "double"}


def clip_of(key: str) -> bytes:
    """Return the bytes of a sample's clip, which occur nowhere else."""
    return hashlib.sha256(f"clip {key}".encode()).digest() * 40


def part_of(bucket: int, number: int, clips: Sequence[int], *, suffix: str = "") -> Part:
    """Build a shard of the samples with these numbers, whose keys end with `suffix`."""
    keys = [f"c{clip}{suffix}" for clip in clips]
    members = [
        (key, {"mp4": clip_of(key), "txt": f"words {key}".encode(), "json": json.dumps({"key": key}).encode()})
        for key in keys
    ]
    tar = tar_bytes(members)
    rows = []
    for index, (clip, key, offset) in enumerate(zip(clips, keys, clip_offsets(tar), strict=True)):
        data = clip_of(key)
        entry = replace(ROW.clip, offset=offset, num_bytes=len(data), sha256=hashlib.sha256(data).digest())
        source = replace(ROW.source, name=f"folder-{clip % 2}/{clip}.mp4")
        row = replace(ROW, key=key, record_key=f"r{clip}", index=index, text=f"words {key}", clip=entry, source=source)
        rows.append(replace(row, columns={"score": float(clip)}))
    return Part(BUCKETS[bucket], number, tar, rows)


def seal_living(root: Path, clips: Sequence[int], size: int = 2) -> Manifest:
    """Seal the samples with these numbers in shards of `size` samples that alternate between both buckets."""
    chunks = [clips[start : start + size] for start in range(0, len(clips), size)]
    parts = [part_of(number % 2, number // 2, chunk) for number, chunk in enumerate(chunks)]
    parts.sort(key=lambda part: part.bucket.id != BUCKETS[0].id)
    buckets = [bucket for bucket in BUCKETS if any(part.bucket == bucket for part in parts)]
    return seal_parts(root, buckets, parts, TYPES)


def seal_drawn(root: Path, clips: Sequence[int], size: int = 2) -> Manifest:
    """Seal each sample in both buckets, as a draw set."""
    chunks = [clips[start : start + size] for start in range(0, len(clips), size)]
    parts = [part_of(b, n, chunk, suffix=f"-b{b}") for b in (0, 1) for n, chunk in enumerate(chunks)]
    drawn = StoredSet(tuple((bucket.id, 400_000, 0) for bucket in BUCKETS), len(chunks))
    manifest = seal_parts(root, BUCKETS, parts, TYPES, draws=(drawn,))
    return reseal(root, manifest)


def reseal(root: Path, manifest: Manifest) -> Manifest:
    """Write the manifest again, with the fingerprint of its draw sets."""
    from streamvid.dataset.integrity import read_shards
    from streamvid.dataset.manifest import manifest_to_json
    from streamvid.dataset.sealed_json import MANIFEST
    from streamvid.dataset.versions.publish import described
    from streamvid.storage import LocalStore

    shards = read_shards(LocalStore(root), manifest.files.shards)
    new = described(manifest, shards)
    (root / MANIFEST).write_bytes(manifest_to_json(new))
    return new


@dataclass(frozen=True)
class Seen:
    """One sample as a reader gets it."""

    clip: bytes
    text: str | None
    columns: Mapping[str, Any]


def seen(url: str | Path, columns: Sequence[str] = ("score",)) -> dict[str, Seen]:
    """Return all samples of a dataset by key, with the bytes at the offsets that the index lists."""
    dataset = streamvid.open_dataset(url)
    found: dict[str, Seen] = {}
    names = [f"user.{name}" for name in columns if f"user.{name}" in dataset.samples_schema.names]
    for shard in dataset.shards:
        rows = dataset.samples(shard).to_pylist()
        assert len(rows) == shard.num_samples
        assert all(row["bucket_id"] == shard.bucket_id and row["shard"] == shard.number for row in rows)
        for row in rows:
            data = bytearray(row["clip_bytes"])
            dataset.store.read_ranges(shard.path, [(row["clip_offset"], memoryview(data))])
            assert row["key"] not in found
            values = {name.removeprefix("user."): row[name] for name in names}
            found[row["key"]] = Seen(bytes(data), row["text"], values)
    return found


def expected(keys: Sequence[str]) -> dict[str, Seen]:
    """Return the unchanged samples with these keys, as a reader gets them."""
    return {
        key: Seen(clip_of(key), f"words {key}", {"score": float(key.removeprefix("c").partition("-")[0])})
        for key in keys
    }


def files_with(root: Path, data: bytes) -> list[str]:
    """Return the files below a folder that contain these bytes."""
    paths = (path for path in root.rglob("*") if path.is_file())
    return sorted(path.relative_to(root).as_posix() for path in paths if data in path.read_bytes())


def check_right(url: str | Path, *, deep: bool = True) -> None:
    """Assert that a dataset verifies without problems and contains no extra files."""
    report = streamvid.verify_dataset(url, deep=deep, fresh=True)
    assert report.is_right and not report.extra, (report.problems, report.extra)
