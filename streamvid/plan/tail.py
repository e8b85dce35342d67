"""What an epoch takes from a bucket, as arithmetic on positions: known before the first step.

E = (e + 1) * n            where pass e of the bucket's n samples ends, and S = e * n where it starts
P                          where the run stands; the natural start of epoch e is S, or floor(S / G) * G under "carry"
G                          samples a step takes: num_ranks * batch_size

carry   (E - P) // G steps from P; P stays behind E by the remainder, with which the next epoch opens
drop    (E - P) // G steps from max(P, S); the remainder is left out, the next epoch starts at E
pad     ceil((E - P) / G) steps from max(P, S); positions past E wrap into [S, E) as repeats, the next epoch starts at E
"""

from __future__ import annotations

from dataclasses import dataclass

from streamvid.plan.options import Tail


@dataclass(frozen=True, slots=True)
class BucketReport:
    """What the rest of an epoch makes of a bucket; all but `num_samples` and `global_batch` count from the cursor.

    num_delivered: samples that the ranks receive together, `num_steps_left` * `global_batch`, repeats among them.
    """

    bucket_id: str
    num_samples: int
    global_batch: int
    num_steps_left: int
    num_delivered: int
    num_carried: int
    num_dropped: int
    num_repeated: int


@dataclass(frozen=True, slots=True)
class BucketSpan:
    """The part of a bucket's stream that one epoch covers, from where the run stands."""

    bucket_id: str
    num_samples: int
    global_batch: int
    tail: Tail
    epoch: int
    position: int

    @classmethod
    def open(
        cls, bucket_id: str, num_samples: int, global_batch: int, tail: Tail, epoch: int, position: int | None
    ) -> BucketSpan:
        """Span from a cursor's position, or from the natural start of the epoch."""
        start = epoch * num_samples
        if position is None:
            position = start // global_batch * global_batch if tail == "carry" else start
        elif tail != "carry":
            position = max(position, start)
        return cls(bucket_id, num_samples, global_batch, tail, epoch, position)

    @property
    def start(self) -> int:
        """Position at which the epoch's own pass starts."""
        return self.epoch * self.num_samples

    @property
    def end(self) -> int:
        """Position at which the epoch's own pass ends."""
        return self.start + self.num_samples

    @property
    def num_steps(self) -> int:
        """Steps of the whole epoch from its natural start."""
        return num_steps_through(self.num_samples, self.global_batch, self.tail, self.epoch + 1) - num_steps_through(
            self.num_samples, self.global_batch, self.tail, self.epoch
        )

    @property
    def num_steps_left(self) -> int:
        """Steps from the position to the end of the epoch."""
        return _num_steps(max(0, self.end - self.position), self.global_batch, self.tail)

    def position_after(self, num_steps: int) -> int:
        """Where the bucket stands after so many steps of the epoch."""
        reached = self.position + num_steps * self.global_batch
        # A padded step ends with the pass: what lies past it was repeats.
        return max(self.position, min(reached, self.end)) if self.tail == "pad" else reached

    @property
    def next_position(self) -> int:
        """Where the next epoch opens."""
        reached = self.position_after(self.num_steps_left)
        return reached if self.tail == "carry" else max(reached, self.end)

    def report(self) -> BucketReport:
        """What the rest of the epoch delivers, carries, drops and repeats."""
        available = max(0, self.end - self.position)
        delivered = self.num_steps_left * self.global_batch
        rest = max(0, available - delivered)
        return BucketReport(
            bucket_id=self.bucket_id,
            num_samples=self.num_samples,
            global_batch=self.global_batch,
            num_steps_left=self.num_steps_left,
            num_delivered=delivered,
            num_carried=rest if self.tail == "carry" else 0,
            num_dropped=rest if self.tail == "drop" else 0,
            num_repeated=max(0, delivered - available),
        )


def num_steps_through(num_samples: int, global_batch: int, tail: Tail, num_epochs: int) -> int:
    """Steps of a bucket in its first `num_epochs` epochs, from their natural starts."""
    if tail == "carry":
        return num_epochs * num_samples // global_batch
    return num_epochs * _num_steps(num_samples, global_batch, tail)


def _num_steps(num_available: int, global_batch: int, tail: Tail) -> int:
    return -(-num_available // global_batch) if tail == "pad" else num_available // global_batch
