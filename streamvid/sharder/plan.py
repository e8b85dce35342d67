"""The shard plan: which sample goes where. Pure: the same input and options give the same plan, on any machine."""

from __future__ import annotations

import hashlib
import json
import posixpath
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from streamvid.buckets import Bucket
from streamvid.dataset.manifest import shard_path
from streamvid.errors import NoBucketError
from streamvid.sharder.journal import FileState
from streamvid.sharder.options import ShardOptions
from streamvid.sharder.probing import Probe, file_state
from streamvid.sharder.records import Record, RecordSet, Rejection, sorted_rejections

SPLITS = ("train", "val")
PLAN_VERSION = 1
MAX_STEM_CHARS = 40
_UNSAFE = re.compile(r"[^A-Za-z0-9_-]+")


@dataclass(frozen=True, slots=True)
class PlannedSample:
    """A record that has a bucket, with the keys it has for ever."""

    key: str
    record_key: str
    record: Record
    probe: Probe
    bucket: Bucket
    split: str


@dataclass(frozen=True, slots=True)
class PlannedShard:
    """A unit of work: one tar of one bucket, one split and one clip extension, its samples in order."""

    bucket: Bucket
    number: int
    split: str
    samples: tuple[PlannedSample, ...]

    @property
    def path(self) -> str:
        return shard_path(self.bucket.id, self.number)

    @property
    def clip_bytes(self) -> int:
        return sum(sample.record.num_bytes for sample in self.samples)


@dataclass(frozen=True)
class ShardPlan:
    """All shards, bucket by bucket in the table's order, and all rejections in the order of the input."""

    shards: tuple[PlannedShard, ...]
    rejections: tuple[Rejection, ...]
    user_types: dict[str, str]
    build: dict[str, Any]

    @property
    def sha256(self) -> str:
        return str(self.build["plan_sha256"])

    @property
    def num_samples(self) -> int:
        return sum(len(shard.samples) for shard in self.shards)


def make_plan(
    records: RecordSet, probes: Mapping[FileState, Probe | str], options: ShardOptions, build: dict[str, Any]
) -> ShardPlan:
    """Assign every probed record to a bucket, and cut the buckets into shards."""
    samples, rejected = _assign(records.records, probes, options)
    groups: dict[tuple[str, str, str], list[PlannedSample]] = {}
    for sample in samples:
        groups.setdefault((sample.bucket.id, sample.split, sample.probe.extension), []).append(sample)
    shards: list[PlannedShard] = []
    for bucket in options.table.buckets:
        number = 0
        for group in sorted((key for key in groups if key[0] == bucket.id), key=lambda k: (SPLITS.index(k[1]), k[2])):
            for cut in cut_shards(_shuffled(groups[group], options.seed), options.shard_size_bytes):
                shards.append(PlannedShard(bucket, number, group[1], tuple(cut)))
                number += 1
    rejections = sorted_rejections((*records.rejections, *rejected))
    build = {**build, "plan_sha256": _plan_sha256(shards, rejections, build)}
    return ShardPlan(tuple(shards), rejections, records.user_types, build)


def _assign(
    records: Sequence[Record], probes: Mapping[FileState, Probe | str], options: ShardOptions
) -> tuple[list[PlannedSample], list[Rejection]]:
    table = options.table
    samples: list[PlannedSample] = []
    rejected: list[Rejection] = []
    seen: Counter[tuple[str, str]] = Counter()
    for record in records:
        probe = probes[file_state(record)]
        if isinstance(probe, str):
            rejected.append(Rejection(record.row, record.source, probe))
            continue
        try:
            bucket = table.assign(probe.num_frames, probe.height, probe.width, probe.is_image)
        except NoBucketError as error:
            rejected.append(Rejection(record.row, record.source, str(error)))
            continue
        occurrence = seen[record.source, bucket.id]
        seen[record.source, bucket.id] += 1
        key = sample_key(record.source, 0, probe.num_frames, bucket.id, occurrence)
        own = record_key(record.source)
        samples.append(PlannedSample(key, own, record, probe, bucket, split_of(own, options.val_fraction)))
    return samples, rejected


def sample_key(source: str, window_start: int, window_num_frames: int, bucket_id: str, occurrence: int = 0) -> str:
    """A sample's key: a readable stem, and a hash of all that makes it another sample. Later input never changes it.

    `occurrence` counts earlier rows with the same file in the same bucket.
    """
    parts = [source, str(window_start), str(window_num_frames), bucket_id]
    if occurrence:
        parts.append(str(occurrence))
    return f"{safe_stem(source)}-{_hash(*parts):016x}"


def record_key(source: str) -> str:
    """The key shared by all samples that came from one file."""
    return f"{safe_stem(source)}-{_hash(source):016x}"


def safe_stem(source: str) -> str:
    """A file's name as part of a key: readers of tars cut a name at its first dot, so none is left."""
    stem = posixpath.splitext(posixpath.basename(source))[0]
    return _UNSAFE.sub("_", stem)[:MAX_STEM_CHARS].strip("_-") or "clip"


def split_of(own: str, val_fraction: float) -> str:
    """train or val, by the record key alone: more input never moves a sample to the other."""
    return "val" if _hash("split", own) < val_fraction * 2.0**64 else "train"


def _shuffled(samples: Iterable[PlannedSample], seed: int) -> list[PlannedSample]:
    """In an order that depends on seed and keys, not on the order of the input."""
    return sorted(samples, key=lambda sample: (_hash("order", str(seed), sample.key), sample.key))


def cut_shards(samples: Sequence[PlannedSample], shard_size_bytes: int) -> Iterator[Sequence[PlannedSample]]:
    """Consecutive runs of about equal bytes, none above `shard_size_bytes` but where one clip alone is."""
    remaining = sum(sample.record.num_bytes for sample in samples)
    start = 0
    while start < len(samples):
        num_shards = -(-remaining // shard_size_bytes)
        end, total = start, 0
        while end < len(samples):
            size = samples[end].record.num_bytes
            # Half of a clip beyond an equal share is rounding; more would make the last shards small.
            is_full = total + size > shard_size_bytes or num_shards * (2 * total + size) > 2 * remaining
            if is_full and end > start:
                break
            total, end = total + size, end + 1
        yield samples[start:end]
        remaining, start = remaining - total, end


def _hash(*parts: str) -> int:
    return int.from_bytes(hashlib.sha256("\0".join(parts).encode()).digest()[:8], "big")


def _plan_sha256(shards: Sequence[PlannedShard], rejections: Sequence[Rejection], build: dict[str, Any]) -> str:
    digest = hashlib.sha256(json.dumps([PLAN_VERSION, build], sort_keys=True).encode())
    for shard in shards:
        for sample in shard.samples:
            row = [sample.key, sample.record.source, sample.record.num_bytes, sample.split, shard.path]
            digest.update(json.dumps(row).encode())
    for rejection in rejections:
        digest.update(json.dumps([rejection.row, rejection.source, rejection.reason]).encode())
    return digest.hexdigest()
