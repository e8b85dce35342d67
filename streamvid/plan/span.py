"""Range of samples that an epoch uses from a bucket. It is computed from positions, before the first step.

The samples of a bucket form an endless stream of positions, one pass over the bucket after the other.

start, end         the epoch's block of the stream; for a single dataset of n samples, epoch * n and (epoch + 1) * n
position           the run's position; at least `start`, unless the tail carries samples over, which precede `start`
available          max(0, end - position)
unit               one batch of one rank; a bucket has available // batch_size of them, or ceil(…) if the tail pads

A step takes one unit per rank (lane.py). Samples that do not fill a step are the remainder: "carry" keeps the position,
and the next epoch starts with them; "drop" continues from `end`; "pad" fills the last step with positions past `end`,
which wrap into the epoch's block as repeats; "shrink" and "uneven" deliver the remainder in one more step per bucket.
"""

from __future__ import annotations

from dataclasses import dataclass

from streamvid.plan.tail import TailRule


@dataclass(frozen=True, slots=True)
class BucketReport:
    """Sample and step counts for one bucket in the remainder of an epoch.

    num_samples: number of stored samples in all datasets. All other counts begin at the cursor.
    num_steps: number of steps with this bucket. With sync="cost", where buckets share steps, it is the number of steps
        that the bucket's batches would fill.
    num_delivered: number of samples that all ranks receive, including repeats.
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
        """Number of samples in the remainder of the epoch, including samples carried from the previous epoch."""
        return self.num_delivered - self.num_repeated + self.num_carried + self.num_dropped

    @property
    def num_epochs_to_step(self) -> int | None:
        """Number of epochs, including this one, until carried samples fill a step, or None if they never do.

        The number assumes that every epoch delivers each of the bucket's samples once and that buckets do not share
        steps.
        """
        if not (self.num_carried and self.num_samples):
            return None
        return 1 + -(-max(0, self.global_batch - self.num_available) // self.num_samples)

    @property
    def is_starved(self) -> bool:
        """True if the bucket has available samples, but none of them is delivered."""
        return bool(self.num_available) and not self.num_delivered


@dataclass(frozen=True, slots=True)
class BucketSpan:
    """Part of a bucket's stream that one epoch covers, and the run's position in the stream."""

    bucket_id: str
    num_samples: int
    batch_size: int
    num_ranks: int
    tail: TailRule
    epoch: int
    start: int
    end: int
    position: int

    @property
    def global_batch(self) -> int:
        """Number of samples in a step in which every rank has this bucket."""
        return self.num_ranks * self.batch_size

    @property
    def length(self) -> int:
        """Number of samples in the epoch's block of the stream."""
        return self.end - self.start

    @property
    def available(self) -> int:
        """Number of samples from the position to the end of the epoch."""
        return max(0, self.end - self.position)

    @property
    def num_units(self) -> int:
        """Number of units in the remainder of the epoch. If the tail policy pads, repeats may fill the last unit."""
        return -(-self.available // self.batch_size) if self.tail.pads else self.available // self.batch_size

    def position_after(self, num_units: int) -> int:
        """Return the bucket's position after the next `num_units` units."""
        reached = self.position + num_units * self.batch_size
        # A padded step ends with the block; positions past it are repeats.
        return max(self.position, min(reached, self.end)) if self.tail.pads else reached
