"""Draw sets. A draw set contains clips that are stored in several buckets. Each pass draws at most one bucket for a
clip.

The clips of a draw set have the same buckets with the same probabilities. Each of these buckets stores all clips of the
set, in the same order and in shards of equal sizes. A pass over the N clips of a set covers N slots of an endless line:

    slots      0 1 2 3 4 5 6 7 8 9 …       pass e has the slots [h + e * N, h + (e + 1) * N)
    label      a b a a b - a b a a …       the bucket for each slot: floor(x * p) of the first x are a's, and so on

The labels keep their proportions over every stretch, and so within every shard. Two things are drawn for each pass:
the slot of the set's first clip, and the assignment of a shard's labels to its clips. Each clip is therefore drawn for
each bucket with that bucket's probability, but never for two buckets in the same pass. The number of samples that a
pass has in a bucket follows from a formula. All buckets of a set compute the same result independently.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from streamvid.dataset.draws import UNIT, StoredSet
from streamvid.errors import ConfigError, IntegrityError
from streamvid.plan.hashing import UInt64Array, hash64, hash64_array, hash_below, hash_text, permute
from streamvid.plan.options import PlanOptions
from streamvid.plan.stream import BucketStream, Int64Array, IntArray, Pass, prefix_sums

_PHASE, _TURN, _ORDER = 7, 8, 9  # keep these uses of the seed apart from those in stream.py, mix.py and order.py
_PHASE_BITS = 20


@dataclass(frozen=True, eq=False)
class DrawSet:
    """One bucket's view of a draw set, which is a set of clips that are stored in several buckets.

    name: hash of the set's name, the same in all of its buckets.
    weights: probabilities of the buckets, in units of 1 / UNIT. UNIT minus the sum of the weights is the
        probability, in the same units, that a clip is not drawn for any bucket.
    member: index of this bucket in `weights`.
    shards: ascending indices of the set's shards in the bucket, with shape (m,).
    """

    name: int
    weights: tuple[int, ...]
    member: int
    shards: Int64Array

    def __post_init__(self) -> None:
        if not 0 <= self.member < len(self.weights) or min(self.weights) < 0 or not 0 < sum(self.weights) <= UNIT:
            raise ConfigError(
                f"draw set with weights {self.weights}, member {self.member}: weights must be at least 0, their "
                f"sum must be from 1 to {UNIT}, and member must be an index into weights"
            )

    @property
    def probability(self) -> Fraction:
        """Probability that a pass draws this bucket for a clip in the set."""
        return Fraction(self.weights[self.member], UNIT)


def draw_sets(
    sets: Sequence[StoredSet], numbers: Mapping[str, npt.NDArray[Any]], counts: Mapping[str, Int64Array]
) -> dict[str, list[DrawSet]]:
    """Map each bucket id to the bucket's draw sets.

    numbers: bucket id → indices of the shards that the plan uses, among all shards of the bucket, in the plan's order.
    counts: bucket id → sample counts of the same shards.
    Raises IntegrityError if the sample counts of a set's shards differ between its buckets.
    """
    found: dict[str, list[DrawSet]] = {}
    for one in sets:
        weights, sizes = tuple(weight for _, weight, _ in one.buckets), set()
        for member, (bucket_id, _, first) in enumerate(one.buckets):
            mine = numbers.get(bucket_id, np.zeros(0, np.int64))
            shards = np.flatnonzero((mine >= first) & (mine < first + one.num_shards))
            own = counts[bucket_id][shards] if len(shards) else shards
            sizes.add((tuple((mine[shards] - first).tolist()), tuple(own.tolist())))
            if len(shards):
                found.setdefault(bucket_id, []).append(DrawSet(hash_text(one.name), weights, member, shards))
        if len(sizes) > 1:
            raise IntegrityError(
                f"draw set {one.name}: its buckets have different numbers of samples. Either the filter selects only "
                "some copies of a clip, or the index is damaged; change the filter (where=), or copy the dataset again"
            )
    return found


@dataclass(frozen=True, eq=False)
class _Drawn:
    """Samples selected for a pass: `sizes[i]` samples from shard i.

    If `is_drawn[i]`, the shard is permuted with `keys[i]`, and its samples are used starting at position `firsts[i]`.
    """

    sizes: Int64Array
    firsts: Int64Array
    keys: UInt64Array
    is_drawn: npt.NDArray[np.bool_]


class DrawnStream(BucketStream):
    """Stream for a bucket that has shards in draw sets. Its passes have unequal lengths."""

    def __init__(
        self, bucket_id: str, shard_sizes: Int64Array, options: PlanOptions, seed: int, sets: Sequence[DrawSet]
    ) -> None:
        super().__init__(bucket_id, shard_sizes, options, seed)
        self._sets = [one for one in sets if shard_sizes[one.shards].any()]
        self._set_starts = [prefix_sums(shard_sizes[one.shards]).astype(np.int64) for one in self._sets]
        self._phases = [hash64(_PHASE, self._seed, one.name) >> (64 - _PHASE_BITS) for one in self._sets]
        self._num_plain = self.num_samples - sum(int(starts[-1]) for starts in self._set_starts)
        self._drawn: dict[int, _Drawn] = {}
        self._pass_starts = {0: 0}

    @property
    def samples_per_pass(self) -> Fraction:
        each = zip(self._sets, self._set_starts, strict=True)
        return self._num_plain + sum((int(starts[-1]) * one.probability for one, starts in each), Fraction(0))

    @property
    def slack(self) -> Fraction:
        # At both ends, the error of each label's count may be one larger than that of the label before it.
        return Fraction(2 * sum(len(one.weights) + 1 for one in self._sets) + 1)

    def begin(self, passes: Fraction | int) -> int:
        whole, part = divmod(passes, 1)
        start = self._pass_start(int(whole))
        length = self._pass_start(int(whole) + 1) - start
        return start + int(part * length + Fraction(1, 2))

    @property
    def _needs_order(self) -> bool:
        return True

    def passes_of(self, positions: Int64Array) -> Int64Array:
        if not positions.size:
            return np.zeros_like(positions)
        first, last = self.pass_of(int(positions.min())), self.pass_of(int(positions.max()))
        starts = np.array([self._pass_start(number) for number in range(first, last + 1)], np.int64)
        return first + np.searchsorted(starts, positions, side="right") - 1

    def pass_of(self, position: int) -> int:
        # The last pass that begins there or before: if several begin at a position, only the last has samples.
        rate, slack = self.samples_per_pass, self.slack
        low, high = max(0, int((position - slack) / rate)), int((position + slack) / rate) + 2
        return low + bisect_right(range(low + 1, high), position, key=self._pass_start)

    def _pass_start(self, number: int) -> int:
        found = self._pass_starts.get(number)
        if found is None:
            found = number * self._num_plain
            for one, starts, phase in zip(self._sets, self._set_starts, self._phases, strict=True):
                total = int(starts[-1])
                ends = _labels_before(phase + number * total, one.weights), _labels_before(phase, one.weights)
                found += ends[0][one.member] - ends[1][one.member]
            if len(self._pass_starts) > 4096:
                self._pass_starts.clear()
            self._pass_starts[number] = found
        return found

    def _sizes_in(self, number: int) -> Int64Array:
        return self._draw(number).sizes

    def _draw(self, number: int) -> _Drawn:
        found = self._drawn.get(number)
        if found is not None:
            return found
        sizes = self._shard_sizes.copy()
        firsts, keys = np.zeros_like(sizes), np.zeros(len(sizes), np.uint64)
        is_drawn = np.zeros(len(sizes), bool)
        for one, starts, phase in zip(self._sets, self._set_starts, self._phases, strict=True):
            total = int(starts[-1])
            turn = hash_below(total, _TURN, self._seed, one.name, number)
            counts = _labels_of(
                phase + number * total, (starts[:-1] + turn) % total, np.diff(starts), total, one.weights
            )
            sizes[one.shards] = counts[one.member]
            firsts[one.shards] = sum(counts[: one.member], np.zeros_like(starts[:-1]))
            keys[one.shards] = hash64_array(_ORDER, self._seed, one.name, number, starts[:-1])
            is_drawn[one.shards] = True
        while len(self._drawn) >= 2:
            del self._drawn[next(iter(self._drawn))]
        self._drawn[number] = found = _Drawn(sizes, firsts, keys, is_drawn)
        return found

    def count(self, order: Pass | None, places: IntArray) -> IntArray:
        assert order is not None
        turns = np.searchsorted(order.ends, places, side="right") - 1
        shards, rows = order.shards[turns], (places - order.ends[turns]).astype(np.int64)
        drawn = self._draw(order.number)
        here = drawn.is_drawn[shards]
        mine = shards[here]
        rows[here] = permute(drawn.firsts[mine] + rows[here], self._shard_sizes[mine], drawn.keys[mine])
        ordinals: IntArray = self._starts[shards] + rows
        return ordinals


@lru_cache(maxsize=4096)
def _labels_before(slots: int, weights: tuple[int, ...]) -> tuple[int, ...]:
    """Return how often each label occurs in the first `slots` slots."""
    left, remaining, found = slots, UNIT, []
    for weight in weights:
        count = left * weight // remaining
        found.append(count)
        left, remaining = left - count, max(1, remaining - weight)
    return tuple(found)


def _labels_of(
    base: int, firsts: Int64Array, sizes: Int64Array, total: int, weights: tuple[int, ...]
) -> list[Int64Array]:
    """Return how often each label occurs in each stretch of a pass that has `total` slots and starts at slot `base`.

    A stretch that reaches the end of the pass continues at its start.
    """
    direct = np.minimum(sizes, total - firsts)
    ends, starts, rest = (_labels_after(base, slots, weights) for slots in (firsts + direct, firsts, sizes - direct))
    return [end - start + wrapped for end, start, wrapped in zip(ends, starts, rest, strict=True)]


def _labels_after(base: int, slots: Int64Array, weights: tuple[int, ...]) -> list[Int64Array]:
    """Return how often each label occurs in the slots [base, base + slots).

    Counts that exceed int64 are Python integers.
    """
    left_before, left, remaining, found = base, slots, UNIT, []
    for weight in weights:
        before, rest = divmod(left_before * weight, remaining)
        count = (rest + left * weight) // remaining
        found.append(count)
        left_before, left, remaining = left_before - before, left - count, max(1, remaining - weight)
    return found
