"""Clips that several buckets take, each stored in all of them, in the same order and cut into the same shards.

A loader draws anew in each pass which bucket has a clip (plan/draws.py); it looks at no sample for that, because place
and shard are the same in all buckets.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from streamvid.dataset.draws import UNIT, StoredSet
from streamvid.sharder.assign import PlannedSample, stable_hash
from streamvid.sharder.cut import cut_by_bytes


@dataclass(frozen=True)
class DrawnGroup:
    """Clips of one draw set, one split and the same members, in shards.

    buckets: (bucket id, probability in parts of UNIT). shards: of each bucket, in the order of `buckets`: the samples
    of each of its shards, clip for clip the same as in the others.
    """

    buckets: tuple[tuple[str, int], ...]
    split: str
    shards: tuple[tuple[Sequence[PlannedSample], ...], ...]

    def shards_of(self, bucket_id: str) -> tuple[Sequence[PlannedSample], ...]:
        """Samples of each shard in a bucket; none in a bucket that the set does not have."""
        return next((mine for (name, _), mine in zip(self.buckets, self.shards, strict=True) if name == bucket_id), ())

    def stored(self, firsts: Mapping[str, int]) -> StoredSet:
        """As the manifest has it. firsts: bucket id → number of the group's first shard there."""
        return StoredSet(tuple((name, weight, firsts[name]) for name, weight in self.buckets), len(self.shards[0]))


_Clip = tuple[PlannedSample, ...]  # one clip's samples, a bucket each


def drawn_groups(
    samples: Iterable[PlannedSample],
    draw_sets: Mapping[str, Sequence[tuple[str, Fraction]]],
    seed: int,
    shard_size_bytes: int,
) -> list[DrawnGroup]:
    """The groups of those samples that belong to a draw set, in an order of their own that the input's has no part in.

    A clip that lost the sample of a bucket, because it could not be encoded at that size, keeps the others with their
    probabilities.
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
        shards = list(_cut(_shuffled(members, seed), shard_size_bytes))
        by_bucket = tuple(tuple([clip[number] for clip in shard] for shard in shards) for number in range(len(buckets)))
        found.append(DrawnGroup(buckets, split, by_bucket))
    return found


def weights_of(probabilities: Sequence[tuple[str, Fraction]]) -> dict[str, int]:
    """Bucket id → probability in parts of UNIT, to the nearest; all together what their sum is, to the nearest."""
    exact = [(name, probability * UNIT) for name, probability in probabilities]
    weights = {name: max(1, int(value)) for name, value in exact}
    # What is too rare for a part takes one all the same, of the most probable.
    for _ in range(sum(weights.values()) - UNIT):
        weights[max(weights, key=lambda name: (weights[name], name))] -= 1
    missing = int(sum((value for _, value in exact), Fraction(0)) + Fraction(1, 2)) - sum(weights.values())
    for name, _ in sorted(exact, key=lambda item: (-(item[1] - int(item[1])), item[0]))[: max(0, missing)]:
        weights[name] += 1
    return weights


def _shuffled(clips: Iterable[_Clip], seed: int) -> list[_Clip]:
    def place(clip: _Clip) -> tuple[int, str]:
        first = clip[0]
        parts = (first.record_key, str(first.window.start), str(first.window.num_frames))
        return stable_hash("order", str(seed), *parts), first.key

    return sorted(clips, key=place)


def _cut(clips: Sequence[_Clip], shard_size_bytes: int) -> Iterator[Sequence[_Clip]]:
    yield from cut_by_bytes(clips, [max(sample.num_bytes for sample in clip) for clip in clips], shard_size_bytes)
