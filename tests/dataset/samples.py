"""Small sealed datasets without any video in them."""

from __future__ import annotations

import hashlib
import io
from dataclasses import replace
from pathlib import Path
from typing import Any

from streamvid.buckets import Bucket
from streamvid.dataset.index import (
    ClipEntry,
    RowGroup,
    SampleRow,
    SourceEntry,
    encode_rejections,
    encode_samples,
    encode_shards,
    named_by_content,
)
from streamvid.dataset.manifest import (
    MANIFEST,
    Counts,
    Fingerprints,
    Manifest,
    ManifestFiles,
    ShardInfo,
    manifest_to_json,
)
from streamvid.dataset.tar import write_shard
from streamvid.storage import LocalStore

BUCKETS = (Bucket(9, 64, 96), Bucket(16, 192, 336, "256px", "16:9"))
USER_TYPES = {"score": "double", "tag": "string"}
ROW = SampleRow(
    key="a-0",
    record_key="a",
    index=0,
    text="words",
    clip=ClipEntry("mp4", 512, 3, bytes(32), 9, 96, 64, 24.0, 0.375, "h264"),
    source=SourceEntry("a.mp4", 96, 64, 3, 0, 9),
    columns={"score": 0.5, "tag": None},
)


def rows(count: int) -> list[SampleRow]:
    return [replace(ROW, key=f"a-{index}", index=index, columns={"score": float(index)}) for index in range(count)]


def tar_bytes(samples: list[tuple[str, dict[str, bytes]]]) -> bytes:
    file = io.BytesIO()
    write_shard(file, samples)
    return file.getvalue()


def shard_info(bucket: Bucket, number: int, num_samples: int, data: bytes, index_path: str, group: int) -> ShardInfo:
    digest = hashlib.sha256(data).hexdigest()
    return ShardInfo(
        bucket.id, number, "train", num_samples, len(data), digest, 8, "0" * 64, 3, index_path, group
    )  # fmt: skip


def seal(root: Path, counts: tuple[int, ...] = (2, 3, 1), **changes: Any) -> Manifest:
    """Seal shards of these sample counts, the last in the second bucket, with changes to the manifest's fields.

    A change of `counts`, `files` or `fingerprints` is a mapping of the fields in it that change.
    """
    store = LocalStore(root)
    places = [(BUCKETS[0], number) for number in range(len(counts) - 1)] + [(BUCKETS[1], 0)]
    groups = [RowGroup(bucket.id, n, "train", rows(count)) for (bucket, n), count in zip(places, counts, strict=True)]
    sample_data = encode_samples(groups, USER_TYPES)
    samples = named_by_content("samples", 0, sample_data)
    shards = []
    for group, ((bucket, number), count) in enumerate(zip(places, counts, strict=True)):
        data = tar_bytes([(f"a-{i}", {"mp4": b"mp4", "txt": b""}) for i in range(count)])
        shards.append(shard_info(bucket, number, count, data, samples.path, group))
        store.put(shards[-1].path, data)
    shard_data, rejection_data = encode_shards(shards), encode_rejections([(7, "b.mp4", "no video", "not-media")])
    files = named_by_content("shards", 0, shard_data), named_by_content("rejections", 0, rejection_data)
    manifest = Manifest(
        buckets=BUCKETS,
        clips="copy",
        counts=Counts(sum(counts) + 1, sum(counts), 1, len(shards), sum(shard.num_bytes for shard in shards)),
        files=ManifestFiles((files[0],), (samples,), (files[1],)),
        fingerprints=Fingerprints.of(BUCKETS, shards, (samples,)),
        build={"options": {"seed": 0}},
    )
    for name in ("counts", "files", "fingerprints"):
        if (nested := changes.pop(f"manifest_{name}", None)) is not None:
            changes[name] = replace(getattr(manifest, name), **nested)
    manifest = replace(manifest, **changes)
    for file, data in ((samples, sample_data), (files[0], shard_data), (files[1], rejection_data)):
        store.put(file.path, data)
    store.put(MANIFEST, manifest_to_json(manifest))
    return manifest
