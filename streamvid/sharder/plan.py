"""The shard plan: which sample goes where. Pure: the same input and options give the same plan, on any machine."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from streamvid.buckets import Bucket
from streamvid.buckets.config import BucketConfig
from streamvid.dataset.draws import StoredSet
from streamvid.dataset.manifest import shard_path
from streamvid.sharder.assign import Assignment, PlannedSample, stable_hash
from streamvid.sharder.cut import cut_by_bytes
from streamvid.sharder.drawn import drawn_groups
from streamvid.sharder.options import ShardOptions
from streamvid.sharder.source.records import RecordSet, Rejection, sorted_rejections

SPLITS = ("train", "val")
PLAN_VERSION = 1
MAX_TEXTS_A_SHARD = 8192
"""Of samples without pictures: a window of so many shards' rows fits into a loader's memory for them."""


@dataclass(frozen=True, slots=True)
class PlannedShard:
    """A unit of work: one tar of one bucket, one split and the same members a sample, its samples in order."""

    bucket: Bucket
    number: int
    split: str
    samples: tuple[PlannedSample, ...]

    @property
    def path(self) -> str:
        return shard_path(self.bucket.id, self.number)

    @property
    def clip_bytes(self) -> int:
        """Of clips and further media."""
        return sum(sample.num_bytes for sample in self.samples)


@dataclass(frozen=True)
class ShardPlan:
    """All shards, bucket by bucket in the table's order, and all rejections in the order of the input.

    draws: the clips that several buckets store.
    """

    shards: tuple[PlannedShard, ...]
    rejections: tuple[Rejection, ...]
    num_records: int
    user_types: dict[str, str]
    build: dict[str, Any]
    draws: tuple[StoredSet, ...] = ()

    @property
    def sha256(self) -> str:
        return str(self.build["plan_sha256"])

    @property
    def num_samples(self) -> int:
        return sum(len(shard.samples) for shard in self.shards)


def make_plan(records: RecordSet, assignment: Assignment, options: ShardOptions, build: dict[str, Any]) -> ShardPlan:
    """Cut the buckets into shards, by the bytes of their clips."""
    groups: dict[tuple[str, str, tuple[str, ...]], list[PlannedSample]] = {}
    for sample in assignment.samples:
        if not sample.draw_set:
            # Foreign readers refuse a tar whose samples differ in their members.
            groups.setdefault((sample.bucket.id, sample.split, sample.extensions), []).append(sample)
    drawn = drawn_groups(assignment.samples, assignment.draw_sets, options.seed, options.shard_size_bytes)
    shards: list[PlannedShard] = []
    firsts: list[dict[str, int]] = [{} for _ in drawn]
    for bucket in _ordered_buckets(options.config, (sample.bucket for sample in assignment.samples)):
        cuts: list[tuple[str, Sequence[PlannedSample]]] = []
        for group in sorted((key for key in groups if key[0] == bucket.id), key=lambda k: (SPLITS.index(k[1]), k[2])):
            in_order = _shuffled(groups[group], options.seed)
            least = -(-options.shard_size_bytes // MAX_TEXTS_A_SHARD) if bucket.is_text else 0
            sizes = [max(least, sample.num_bytes) for sample in in_order]
            cuts += [(group[1], cut) for cut in cut_by_bytes(in_order, sizes, options.shard_size_bytes)]
        for number, several in enumerate(drawn):
            firsts[number][bucket.id] = len(cuts)
            cuts += [(several.split, cut) for cut in several.shards_of(bucket.id)]
        shards += [PlannedShard(bucket, number, split, tuple(cut)) for number, (split, cut) in enumerate(cuts)]
    draws = tuple(several.stored(first) for several, first in zip(drawn, firsts, strict=True))
    rejections = sorted_rejections((*records.rejections, *assignment.rejections))
    build = {**build, "plan_sha256": _plan_sha256(shards, rejections, build)}
    return ShardPlan(tuple(shards), rejections, records.num_rows, records.user_types, build, draws)


def _ordered_buckets(config: BucketConfig, found: Iterable[Bucket]) -> tuple[Bucket, ...]:
    """Return the buckets that got clips, in the table's order; if sizes follow the clips, the largest first."""
    if not config.is_dynamic:
        return config.table.buckets
    return tuple(sorted(set(found), key=lambda bucket: (-bucket.num_pixels, bucket.id)))


def _shuffled(samples: Iterable[PlannedSample], seed: int) -> list[PlannedSample]:
    """In an order that depends on seed and keys, not on the order of the input."""
    return sorted(samples, key=lambda sample: (stable_hash("order", str(seed), sample.key), sample.key))


def _plan_sha256(shards: Sequence[PlannedShard], rejections: Sequence[Rejection], build: dict[str, Any]) -> str:
    digest = hashlib.sha256(json.dumps([PLAN_VERSION, build], sort_keys=True).encode())
    for shard in shards:
        for sample in shard.samples:
            row = [sample.key, sample.record.source, sample.clip.num_bytes, sample.split, shard.path]
            row += [sample.clip.sha256] if sample.clip.sha256 else []
            row += [part for medium in sample.media for part in (*medium.file.line, medium.clip.sha256)]
            digest.update(json.dumps(row).encode())
    for rejection in rejections:
        digest.update(json.dumps([rejection.row, rejection.source, rejection.reason]).encode())
    return digest.hexdigest()
