"""Index and manifest of synthetic datasets, for tests and benchmarks. Files that are not written need not exist."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from streamvid.buckets.bucket import Bucket
from streamvid.dataset.index import encode_rejections, encode_shards, named_by_content
from streamvid.dataset.manifest import Counts, FileInfo, Fingerprints, Manifest, ManifestFiles, ShardInfo
from streamvid.dataset.tar import energon_files
from streamvid.storage import Store


def put_file(store: Store, stem: str, number: int, data: bytes) -> FileInfo:
    """Write an index file under a name that its content determines."""
    file = named_by_content(stem, number, data)
    store.put(file.path, data)
    return file


def put_index(
    store: Store,
    buckets: Sequence[Bucket],
    shards: Sequence[ShardInfo],
    samples: Sequence[FileInfo],
    *,
    rejections: Sequence[tuple[int, str, str, str]] = (),
    packets: Sequence[FileInfo] = (),
    records: Sequence[FileInfo] = (),
    build: Mapping[str, Any] | None = None,
) -> Manifest:
    """Write the shard table, the rejections and the files for other readers. Return the manifest without writing it.

    samples, packets, records: files that the caller has written, or that are never read.
    """
    others = energon_files(shards)
    for path, data in others.items():
        store.put(path, data)
    files = ManifestFiles(
        shards=(put_file(store, "shards", 0, encode_shards(shards)),),
        samples=tuple(samples),
        rejections=(put_file(store, "rejections", 0, encode_rejections(list(rejections))),),
        packets=tuple(packets),
        records=tuple(records),
        other=tuple(FileInfo.of(path, data) for path, data in others.items()),
    )
    num_samples, num_bytes = sum(shard.num_samples for shard in shards), sum(shard.num_bytes for shard in shards)
    return Manifest(
        buckets=tuple(buckets),
        clips="copy",
        counts=Counts(num_samples + len(rejections), num_samples, len(rejections), len(shards), num_bytes),
        files=files,
        fingerprints=Fingerprints.of(buckets, shards, samples),
        build=dict(build or {}),
    )
