"""What a benchmark measures: passes over a store, runs of a loader, and what they were made with."""

from __future__ import annotations

from dataclasses import dataclass

from streamvid.video.picture import Pixels


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreRun:
    """One pass over ranges of clips, each read and proved by its checksum, nothing decoded.

    num_bytes: read; num_stored_bytes: of the whole clips. num_bad: samples whose checksum was wrong.
    num_disk_bytes: what the kernel fetched from a disk meanwhile; None where it does not say.
    """

    num_samples: int
    num_bytes: int
    num_stored_bytes: int
    seconds: float
    num_bad: int = 0
    num_disk_bytes: int | None = None

    @property
    def samples_per_second(self) -> float:
        return share(self.num_samples, self.seconds)

    @property
    def bytes_per_second(self) -> float:
        return share(self.num_bytes, self.seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketRun:
    """What samples of one bucket took to decode, in seconds of decoders, within a LoaderRun."""

    bucket_id: str
    num_samples: int
    decode_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderRun:
    """A loader with so many workers, its caller doing nothing but take batches.

    first_batch_seconds: from making the loader, of a dataset that is open, to its first batch.
    All else is of the time after a warm-up. decode_seconds, fetch_seconds: on the clock, summed over the decoders and
    over the threads that read.
    room: samples of this mean size that prefetch_bytes let be under way at a time.
    worker_cpu_seconds, main_cpu_seconds: of the workers and of this process; None where they cannot be told apart.
    """

    num_workers: int
    num_fetch_threads: int
    first_batch_seconds: float
    seconds: float
    room: float
    num_steps: int
    num_samples: int
    num_bytes: int
    num_substituted: int
    decode_seconds: float
    fetch_seconds: float
    buckets: tuple[BucketRun, ...]
    worker_cpu_seconds: float | None = None
    main_cpu_seconds: float | None = None

    @property
    def samples_per_second(self) -> float:
        return share(self.num_samples, self.seconds)

    @property
    def decoders_busy(self) -> float:
        """The share of their time that decoders were at work: 0..1."""
        return min(1.0, share(self.decode_seconds, max(1, self.num_workers) * self.seconds))

    @property
    def readers_busy(self) -> float:
        """The share of their time that threads read: 0..1."""
        return min(1.0, share(self.fetch_seconds, self.num_fetch_threads * self.seconds))

    @property
    def main_busy(self) -> float | None:
        """The share of one core that this process took: 0..1."""
        return None if self.main_cpu_seconds is None else min(1.0, share(self.main_cpu_seconds, self.seconds))

    @property
    def main_cpu_a_step(self) -> float | None:
        """CPU seconds of this process a batch."""
        return None if self.main_cpu_seconds is None else share(self.main_cpu_seconds, self.num_steps)

    @property
    def cpu_seconds(self) -> float | None:
        """CPU seconds of all its processes."""
        if self.worker_cpu_seconds is None or self.main_cpu_seconds is None:
            return None
        return self.worker_cpu_seconds + self.main_cpu_seconds

    @property
    def cpu_a_decode(self) -> float | None:
        """CPU seconds of the workers for each second that they were at work: below 1 where others had the cores."""
        return None if self.worker_cpu_seconds is None else share(self.worker_cpu_seconds, self.decode_seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What the runs were made with, as far as advice depends on it. clips: how the dataset holds them."""

    num_cores: int
    clips: str
    pixels: Pixels
    accuracy: str | None


def share(part: float, whole: float) -> float:
    """`part` of `whole`; 0 of nothing."""
    return part / whole if whole > 0 else 0.0
