"""Shard plan, which assigns samples to shards. Equal input and options result in the same plan on every machine."""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import islice, pairwise
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from streamvid.buckets.bucket import TEXT_BUCKET, Bucket
from streamvid.buckets.config import BucketConfig
from streamvid.dataset.draws import UNIT, StoredSet
from streamvid.dataset.manifest import shard_path
from streamvid.dataset.tabular.rows import Rows
from streamvid.sharder.options import ShardOptions
from streamvid.sharder.planning.assign import Assignment, PlannedSample, stable_hash
from streamvid.sharder.planning.base import Base
from streamvid.sharder.source.records import RecordSet, Rejection

Int64Array: TypeAlias = npt.NDArray[np.int64]
Build: TypeAlias = dict[str, Any]
"""Everything that determines a dataset's content, as JSON in the manifest. Equal builds create equal datasets."""

SPLITS = ("train", "val")
PLAN_VERSION = 1
MAX_TEXTS_A_SHARD = 8192
"""Maximum number of text samples per shard, so that a shuffle window of shards fits into a loader's memory."""


@dataclass(frozen=True, slots=True)
class PlannedShard:
    """Samples of one tar, in order. All have the same bucket, split and member extensions.

    clip_bytes: total size in bytes of the shard's clips and conditioning inputs.
    build_id: 0 for a new dataset; see `ShardInfo`.
    """

    bucket: Bucket
    number: int
    split: str
    samples: Sequence[PlannedSample]
    clip_bytes: int
    build_id: int = 0

    @property
    def path(self) -> str:
        return shard_path(self.bucket.id, self.number, self.build_id)


@dataclass(frozen=True)
class ShardPlan:
    """Shards in the order of the bucket table, and rejections in the order of the input.

    samples: samples of all shards, in the order of the shards.
    draws: sets of clips that are stored in several buckets.
    """

    shards: tuple[PlannedShard, ...]
    samples: Rows[PlannedSample]
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
        return len(self.samples)


def make_plan(
    records: RecordSet, assignment: Assignment, options: ShardOptions, build: Build, base: Base | None = None
) -> ShardPlan:
    """Return the shard plan: the samples of each bucket, split into shards by the size of their clips.

    base: dataset to which the shards are added. The new shard numbers follow the existing ones.
    """
    taken = {} if base is None else base.first_numbers
    facts = _facts_of(assignment, options.seed)
    plain = _plain_cuts(facts, options.shard_size_bytes)
    drawn = drawn_groups(facts.drawn, assignment.draw_sets, options.shard_size_bytes)
    found: list[tuple[Bucket, int, str, Int64Array]] = []
    firsts: list[dict[str, int]] = [{} for _ in drawn]
    for bucket in _ordered_buckets(options.config, facts.buckets):
        cuts = plain.get(bucket.id, [])
        for number, several in enumerate(drawn):
            firsts[number][bucket.id] = taken.get(bucket.id, 0) + len(cuts)
            cuts += [(several.split, cut) for cut in several.shards_of(bucket.id)]
        numbers = range(taken.get(bucket.id, 0), 2**31)
        found += [(bucket, number, split, cut) for number, (split, cut) in zip(numbers, cuts, strict=False)]
    order = np.concatenate([np.empty(0, np.int64), *(cut for _, _, _, cut in found)])
    samples = assignment.samples.arranged(order)
    ends = np.cumsum([0, *(len(cut) for _, _, _, cut in found)]).tolist()
    shards = tuple(
        PlannedShard(bucket, number, split, samples[start:end], int(facts.sizes[cut].sum()))
        for (bucket, number, split, cut), (start, end) in zip(found, pairwise(ends), strict=True)
    )
    draws = tuple(several.stored(first) for several, first in zip(drawn, firsts, strict=True))
    rejections = tuple(sorted((*records.rejections, *assignment.rejections), key=lambda rejection: rejection.row))
    build = {**build, "plan_sha256": _plan_sha256(shards, samples, rejections, build)}
    if base is not None:
        build_id = int(build["plan_sha256"][:8], 16) or 1
        shards = tuple(replace(shard, build_id=build_id) for shard in shards)
    return ShardPlan(shards, samples, rejections, records.num_rows, records.user_types, build, draws)


def _ordered_buckets(config: BucketConfig, found: Iterable[Bucket]) -> tuple[Bucket, ...]:
    """Return the buckets in the order of the table. If sizes are derived from clips, return `found`, largest first."""
    if not config.is_dynamic:
        return config.table.buckets
    return tuple(sorted(set(found), key=lambda bucket: (-bucket.num_pixels, bucket.id)))


_Group: TypeAlias = tuple[str, str, tuple[str, ...]]
"""(bucket id, split, member extensions). All samples of a shard share them, because other tools refuse a tar whose
samples have different members."""


@dataclass(frozen=True)
class _Facts:
    """Facts that determine the samples' order and shards. Arrays have one entry per sample, in the order of the input.

    codes: index of the sample's group in `groups`, or -1 for a sample that is stored in several buckets.
    places: hash that determines the sample's position in its group, so that the order of the input does not matter.
        Two samples in a group have equal hashes with a probability of 2**-64.
    sizes: size of the sample in bytes.
    drawn: samples that are stored in several buckets.
    """

    groups: list[_Group]
    buckets: list[Bucket]
    codes: npt.NDArray[np.int32]
    places: npt.NDArray[np.uint64]
    sizes: Int64Array
    drawn: list[DrawnSample]


def _facts_of(assignment: Assignment, seed: int) -> _Facts:
    groups: dict[_Group, int] = {}
    buckets: dict[str, Bucket] = {}
    codes, places, sizes = array("i"), array("Q"), array("q")
    drawn: list[DrawnSample] = []
    names = ("key", "bucket", "split", "clip.extension", "clip.num_bytes", "media", "draw_set")
    clips = assignment.samples.tuples("record.row", "window.start", "window.num_frames", "record_key")
    for number, (facts, clip) in enumerate(zip(assignment.samples.tuples(*names), clips, strict=True)):
        key, bucket, split, extension, num_bytes, media, draw_set = facts
        extensions: tuple[str, ...] = (extension,)
        if media:
            extensions = (extension, *sorted(medium.extension for medium in media))
            num_bytes += sum(medium.clip.num_bytes for medium in media)
        sizes.append(num_bytes)
        buckets[bucket.id] = bucket
        if draw_set:
            _, start, num_frames, own = clip
            place = stable_hash("order", str(seed), own, str(start), str(num_frames))
            one = DrawnSample(number, key, bucket.id, split, extensions, num_bytes, draw_set, clip, place)
            drawn.append(one)
        codes.append(-1 if draw_set else groups.setdefault((bucket.id, split, extensions), len(groups)))
        places.append(0 if draw_set else stable_hash("order", str(seed), key))
    return _Facts(
        list(groups),
        list(buckets.values()),
        np.asarray(codes),
        np.asarray(places),
        np.asarray(sizes),
        drawn,
    )


def _plain_cuts(facts: _Facts, shard_size_bytes: int) -> dict[str, list[tuple[str, Int64Array]]]:
    """Return each bucket's shards as (split, sample numbers) pairs.

    Samples that are stored in several buckets are omitted.
    """
    found: dict[str, list[tuple[str, Int64Array]]] = {}
    order = np.lexsort((facts.places, facts.codes))
    bounds = np.searchsorted(facts.codes[order], np.arange(len(facts.groups) + 1))
    for code in sorted(range(len(facts.groups)), key=lambda code: _in_order(facts.groups[code])):
        bucket_id, split, _ = facts.groups[code]
        members = order[bounds[code] : bounds[code + 1]]
        least = -(-shard_size_bytes // MAX_TEXTS_A_SHARD) if bucket_id == TEXT_BUCKET.id else 0
        cuts = cut_by_bytes(np.maximum(facts.sizes[members], least), shard_size_bytes)
        found.setdefault(bucket_id, []).extend((split, members[cut]) for cut in cuts)
    return found


def _in_order(group: _Group) -> tuple[str, int, tuple[str, ...]]:
    bucket_id, split, extensions = group
    return bucket_id, SPLITS.index(split), extensions


def _plan_sha256(
    shards: Sequence[PlannedShard], samples: Rows[PlannedSample], rejections: Sequence[Rejection], build: Build
) -> str:
    digest = hashlib.sha256(json.dumps([PLAN_VERSION, build], sort_keys=True).encode())
    rows = samples.tuples("key", "record.source", "clip.num_bytes", "split", "clip.sha256", "media")
    for shard in shards:
        for key, source, num_bytes, split, sha256, media in islice(rows, len(shard.samples)):
            row = [key, source, num_bytes, split, shard.path]
            row += [sha256] if sha256 else []
            row += [part for medium in media for part in (*medium.file.line, medium.clip.sha256)]
            digest.update(json.dumps(row).encode())
    for rejection in rejections:
        digest.update(json.dumps([rejection.row, rejection.source, rejection.kind]).encode())
    return digest.hexdigest()


def cut_by_bytes(sizes: Int64Array, shard_size_bytes: int) -> Iterator[slice]:
    """Yield slices of consecutive items with about the same total size.

    A slice exceeds `shard_size_bytes` only if it contains a single item. sizes: size of each item in bytes.
    """
    ends = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
    doubled = ends[:-1] + ends[1:]
    start = 0
    while start < len(sizes):
        before, remaining = int(ends[start]), int(ends[-1] - ends[start])
        num_shards = -(-remaining // shard_size_bytes) or 1
        fits = int(np.searchsorted(ends, before + shard_size_bytes, side="right")) - 1
        # A slice may exceed an equal share by half an item; a larger excess would make the last shards small.
        is_even = int(np.searchsorted(doubled, 2 * before + 2 * remaining // num_shards, side="right"))
        stop = max(start + 1, min(fits, is_even))
        yield slice(start, stop)
        start = stop


@dataclass(frozen=True)
class DrawnSample:
    """Sample whose clip is stored in several buckets.

    number: index of the sample in the input.
    size: size in bytes.
    clip: values that identify the clip.
    place: hash that determines the clip's position among all clips.
    """

    number: int
    key: str
    bucket_id: str
    split: str
    extensions: tuple[str, ...]
    size: int
    draw_set: str
    clip: tuple[int, int, int, str]
    place: int


@dataclass(frozen=True)
class DrawnGroup:
    """Clips with the same draw set, split and member extensions, divided into shards.

    buckets: (bucket id, probability times UNIT) pairs.
    shards: for each bucket, in the order of `buckets`, the numbers of each shard's samples. All buckets store the same
        clips in the same order.
    """

    buckets: tuple[tuple[str, int], ...]
    split: str
    shards: tuple[tuple[Int64Array, ...], ...]

    def shards_of(self, bucket_id: str) -> tuple[Int64Array, ...]:
        """Return the sample numbers of each shard of a bucket, or () if the group does not include the bucket."""
        return next((mine for (name, _), mine in zip(self.buckets, self.shards, strict=True) if name == bucket_id), ())

    def stored(self, firsts: Mapping[str, int]) -> StoredSet:
        """Return the group in the form that the manifest stores.

        firsts: maps each bucket id to the number of the group's first shard.
        """
        return StoredSet(tuple((name, weight, firsts[name]) for name, weight in self.buckets), len(self.shards[0]))


def drawn_groups(
    samples: Iterable[DrawnSample], draw_sets: Mapping[str, Sequence[tuple[str, Fraction]]], shard_size_bytes: int
) -> list[DrawnGroup]:
    """Group the samples whose clips are stored in several buckets. The order of `samples` does not affect the result.

    If a clip could not be encoded for one bucket, its samples in the other buckets keep their probabilities.
    """
    clips: dict[tuple[int, int, int, str], list[DrawnSample]] = {}
    for sample in samples:
        clips.setdefault(sample.clip, []).append(sample)
    groups: dict[tuple[tuple[tuple[str, int], ...], str, tuple[str, ...]], list[list[DrawnSample]]] = {}
    for several in clips.values():
        first = several[0]
        weights = weights_of(draw_sets[first.draw_set])
        mine = tuple((name, weights[name]) for name in sorted(sample.bucket_id for sample in several))
        in_order = sorted(several, key=lambda sample: sample.bucket_id)
        groups.setdefault((mine, first.split, first.extensions), []).append(in_order)
    found = []
    for (buckets, split, _), members in sorted(groups.items(), key=lambda item: item[0]):
        ordered = sorted(members, key=lambda clip: (clip[0].place, clip[0].key))
        sizes = np.array([max(sample.size for sample in clip) for clip in ordered], np.int64)
        numbers = np.array([[sample.number for sample in clip] for clip in ordered], np.int64)
        cuts = list(cut_by_bytes(sizes, shard_size_bytes))
        by_bucket = tuple(tuple(numbers[cut, place] for cut in cuts) for place in range(len(buckets)))
        found.append(DrawnGroup(buckets, split, by_bucket))
    return found


def weights_of(probabilities: Sequence[tuple[str, Fraction]]) -> dict[str, int]:
    """Map each bucket id to an integer weight: its probability times UNIT, rounded without changing the sum."""
    exact = [(name, probability * UNIT) for name, probability in probabilities]
    weights = {name: max(1, int(value)) for name, value in exact}
    # A weight that would be rounded to 0 is set to 1. If the sum then exceeds UNIT, the largest weights are reduced.
    for _ in range(sum(weights.values()) - UNIT):
        weights[max(weights, key=lambda name: (weights[name], name))] -= 1
    missing = int(sum((value for _, value in exact), Fraction(0)) + Fraction(1, 2)) - sum(weights.values())
    for name, _ in sorted(exact, key=lambda item: (-(item[1] - int(item[1])), item[0]))[: max(0, missing)]:
        weights[name] += 1
    return weights
