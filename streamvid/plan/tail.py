"""Samples that an epoch takes from a bucket, as arithmetic on positions: known before the first step.

S, E               where the epoch's block of the bucket begins and ends: for one dataset e * n and (e + 1) * n
P                  the run's position; at least S except under "carry", where the previous remainder lies before S
available          max(0, E - P)
unit               one batch of one rank; a bucket has available // batch_size of them, or ceil(…) under "pad"

R units make a step (lane.py). The remainder: "carry" leaves P where it is, and the next epoch opens with it; "drop"
continues from E; "pad" fills the last step with positions past E, which wrap into [S, E) as repeats; "shrink" and
"uneven" take the remainder in one more step per bucket.
"""

from __future__ import annotations

from dataclasses import dataclass

from streamvid.plan.options import Tail


@dataclass(frozen=True, slots=True)
class BucketReport:
    """Counts of one bucket for the remainder of an epoch.

    num_samples: stored samples, over all datasets; all other counts begin at the cursor.
    num_steps: steps that have this bucket; with sync="cost", where others share them, the steps that its batches would
        make up.   num_delivered: samples that the ranks receive together, including repeats.
    """

    bucket_id: str
    num_samples: int
    batch_size: int
    global_batch: int
    num_steps: int
    num_delivered: int
    num_carried: int
    num_dropped: int
    num_repeated: int

    @property
    def num_available(self) -> int:
        """Samples that the remainder of the epoch may take, including those that an epoch before carried."""
        return self.num_delivered - self.num_repeated + self.num_carried + self.num_dropped

    @property
    def is_starved(self) -> bool:
        """True if nothing of the bucket is delivered although it has samples."""
        return bool(self.num_available) and not self.num_delivered


@dataclass(frozen=True, slots=True)
class BucketSpan:
    """The part of a bucket's stream that one epoch covers, and the run's position in it."""

    bucket_id: str
    num_samples: int
    batch_size: int
    num_ranks: int
    tail: Tail
    epoch: int
    start: int
    end: int
    position: int

    @property
    def global_batch(self) -> int:
        """Samples of a step in which all ranks have this bucket."""
        return self.num_ranks * self.batch_size

    @property
    def length(self) -> int:
        """Samples of the epoch's own block."""
        return self.end - self.start

    @property
    def available(self) -> int:
        """Samples from the position to the end of the epoch."""
        return max(0, self.end - self.position)

    @property
    def num_units(self) -> int:
        """Batches of one rank that the rest of the epoch has; the last of "pad" may be filled with repeats."""
        return -(-self.available // self.batch_size) if self.tail == "pad" else self.available // self.batch_size

    def position_after(self, num_units: int) -> int:
        """Return the bucket's position after a number of units of the epoch."""
        reached = self.position + num_units * self.batch_size
        # A padded step ends with the block: positions past it are repeats.
        return max(self.position, min(reached, self.end)) if self.tail == "pad" else reached
