"""Shard plan, which assigns samples to shards. Equal input and options result in the same plan on every machine."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, TypeAlias, TypeVar

from streamvid.buckets.bucket import Bucket
from streamvid.buckets.config import BucketConfig
from streamvid.dataset.draws import UNIT, StoredSet
from streamvid.dataset.manifest import shard_path
from streamvid.sharder.assign import Assignment, PlannedSample, stable_hash
from streamvid.sharder.options import ShardOptions
from streamvid.sharder.source.records import RecordSet, Rejection

_Item = TypeVar("_Item")
Build: TypeAlias = dict[str, Any]
"""Everything that determines a dataset's content, as JSON in the manifest. Equal builds create equal datasets."""

SPLITS = ("train", "val")
PLAN_VERSION = 1
MAX_TEXTS_A_SHARD = 8192
"""Maximum number of text samples per shard, so that a shuffle window of shards fits into a loader's memory."""


@dataclass(frozen=True, slots=True)
class PlannedShard:
    """Ordered samples of one tar, all with the same bucket, split and member extensions."""

    bucket: Bucket
    number: int
    split: str
    samples: tuple[PlannedSample, ...]

    @property
    def path(self) -> str:
        return shard_path(self.bucket.id, self.number)

    @property
    def clip_bytes(self) -> int:
        """Total size in bytes of the shard's clips and conditioning inputs."""
        return sum(sample.num_bytes for sample in self.samples)


@dataclass(frozen=True)
class ShardPlan:
    """Shards in the order of the bucket table, and rejections in the order of the input.

    draws: sets of clips that are stored in several buckets.
    """

    shards: tuple[PlannedShard, ...]
    rejections: tuple[Rejection, ...]
    num_records: int
    user_types: dict[str, str]
    build: Build
    draws: tuple[StoredSet, ...] = ()

    @property
    def sha256(self) -> str:
        return str(self.build["plan_sha256"])

    @property
    def num_samples(self) -> int:
        return sum(len(shard.samples) for shard in self.shards)


def make_plan(records: RecordSet, assignment: Assignment, options: ShardOptions, build: Build) -> ShardPlan:
    """Return the shard plan: the samples of each bucket, split into shards by the size of their clips."""
    groups: dict[tuple[str, str, tuple[str, ...]], list[PlannedSample]] = {}
    for sample in assignment.samples:
        if not sample.draw_set:
            # Other tools refuse a tar whose samples have different members.
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
    rejections = tuple(sorted((*records.rejections, *assignment.rejections), key=lambda rejection: rejection.row))
    build = {**build, "plan_sha256": _plan_sha256(shards, rejections, build)}
    return ShardPlan(tuple(shards), rejections, records.num_rows, records.user_types, build, draws)


def _ordered_buckets(config: BucketConfig, found: Iterable[Bucket]) -> tuple[Bucket, ...]:
    """Return the table's buckets in order. If sizes are derived from clips, return the used buckets, largest first."""
    if not config.is_dynamic:
        return config.table.buckets
    return tuple(sorted(set(found), key=lambda bucket: (-bucket.num_pixels, bucket.id)))


def _shuffled(samples: Iterable[PlannedSample], seed: int) -> list[PlannedSample]:
    """Return the samples sorted by a hash of seed and key, so that the order of the input does not matter."""
    return sorted(samples, key=lambda sample: (stable_hash("order", str(seed), sample.key), sample.key))


def _plan_sha256(shards: Sequence[PlannedShard], rejections: Sequence[Rejection], build: Build) -> str:
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


def cut_by_bytes(items: Sequence[_Item], sizes: Sequence[int], shard_size_bytes: int) -> Iterator[Sequence[_Item]]:
    """Split the items into consecutive runs of about the same total size, and yield the runs.

    Only a run with a single item may exceed `shard_size_bytes`.

    sizes: size of each item in bytes.
    """
    remaining = sum(sizes)
    start = 0
    while start < len(items):
        num_shards = -(-remaining // shard_size_bytes)
        end, total = start, 0
        while end < len(items):
            size = sizes[end]
            # A run may exceed an equal share by half an item; a larger excess would make the last shards small.
            is_full = total + size > shard_size_bytes or num_shards * (2 * total + size) > 2 * remaining
            if is_full and end > start:
                break
            total, end = total + size, end + 1
        yield items[start:end]
        remaining, start = remaining - total, end


@dataclass(frozen=True)
class DrawnGroup:
    """Clips with the same draw set, split and member extensions, divided into shards.

    buckets: (bucket id, probability times UNIT) pairs. shards: for each bucket, in the order of `buckets`, a tuple of
    shards with their samples. All buckets store the same clips in the same order.
    """

    buckets: tuple[tuple[str, int], ...]
    split: str
    shards: tuple[tuple[Sequence[PlannedSample], ...], ...]

    def shards_of(self, bucket_id: str) -> tuple[Sequence[PlannedSample], ...]:
        """Return the samples of each shard in a bucket; empty for a bucket outside the group."""
        return next((mine for (name, _), mine in zip(self.buckets, self.shards, strict=True) if name == bucket_id), ())

    def stored(self, firsts: Mapping[str, int]) -> StoredSet:
        """Return the group as the manifest stores it. firsts: bucket id → number of the group's first shard."""
        return StoredSet(tuple((name, weight, firsts[name]) for name, weight in self.buckets), len(self.shards[0]))


_Clip = tuple[PlannedSample, ...]  # samples of one clip, one per bucket


def drawn_groups(
    samples: Iterable[PlannedSample],
    draw_sets: Mapping[str, Sequence[tuple[str, Fraction]]],
    seed: int,
    shard_size_bytes: int,
) -> list[DrawnGroup]:
    """Group the samples of clips that several buckets store. The result does not depend on the order of the input.

    If a clip could not be encoded for one bucket, its samples in the other buckets keep their probabilities.
    """
    clips: dict[tuple[int, int, int], list[PlannedSample]] = {}
    for sample in samples:
        if sample.draw_set:
            clip = (sample.record.row, sample.window.start, sample.window.num_frames)
            clips.setdefault(clip, []).append(sample)
    groups: dict[tuple[tuple[tuple[str, int], ...], str, tuple[str, ...]], list[_Clip]] = {}
    for several in clips.values():
        first = several[0]
        weights = weights_of(draw_sets[first.draw_set])
        mine = tuple((name, weights[name]) for name in sorted(sample.bucket.id for sample in several))
        in_order = tuple(sorted(several, key=lambda sample: sample.bucket.id))
        groups.setdefault((mine, first.split, first.extensions), []).append(in_order)
    found = []
    for (buckets, split, _), members in sorted(groups.items(), key=lambda item: item[0]):
        ordered = _shuffled_clips(members, seed)
        sizes = [max(sample.num_bytes for sample in clip) for clip in ordered]
        shards = list(cut_by_bytes(ordered, sizes, shard_size_bytes))
        by_bucket = tuple(tuple([clip[number] for clip in shard] for shard in shards) for number in range(len(buckets)))
        found.append(DrawnGroup(buckets, split, by_bucket))
    return found


def weights_of(probabilities: Sequence[tuple[str, Fraction]]) -> dict[str, int]:
    """Return integer weights by bucket id: probabilities times UNIT, rounded so that their sum is the rounded sum."""
    exact = [(name, probability * UNIT) for name, probability in probabilities]
    weights = {name: max(1, int(value)) for name, value in exact}
    # A weight that would be rounded to 0 is set to 1. If the sum then exceeds UNIT, the largest weights are reduced.
    for _ in range(sum(weights.values()) - UNIT):
        weights[max(weights, key=lambda name: (weights[name], name))] -= 1
    missing = int(sum((value for _, value in exact), Fraction(0)) + Fraction(1, 2)) - sum(weights.values())
    for name, _ in sorted(exact, key=lambda item: (-(item[1] - int(item[1])), item[0]))[: max(0, missing)]:
        weights[name] += 1
    return weights


def _shuffled_clips(clips: Iterable[_Clip], seed: int) -> list[_Clip]:
    def place(clip: _Clip) -> tuple[int, str]:
        first = clip[0]
        parts = (first.record_key, str(first.window.start), str(first.window.num_frames))
        return stable_hash("order", str(seed), *parts), first.key

    return sorted(clips, key=place)
