"""Benchmark of the store alone. It reads samples as a loader does and verifies checksums, but decodes nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle
from pathlib import Path
from queue import SimpleQueue

from streamvid.bench.verdict import StoreRun
from streamvid.loader.delivery.delivery import Delivery, prepare
from streamvid.loader.delivery.fetch import FetchThreads, read_parts
from streamvid.loader.delivery.index_rows import IndexRows
from streamvid.loader.mix import SampleRequest
from streamvid.loader.setup import Setup
from streamvid.loader.view.clip_part import TABLE_BYTES, clip_part, wrong_bytes
from streamvid.plan import Cursor

Progress = Callable[[str, int, int], None]
"""Callback that receives (phase, seconds done, total seconds)."""

_MAX_SAMPLES = 100_000
_IO = Path("/proc/self/io")


class MeasureTimer:
    """Timer that also reports the progress of a measurement."""

    def __init__(self, seconds: float, phase: str, progress: Progress) -> None:
        self._seconds = seconds
        self._phase = phase
        self._progress = progress
        self._total = max(1, round(seconds))
        self._shown = -1
        self._show(0)
        self.start()

    def start(self) -> None:
        """Start or restart the timer."""
        self._since = time.perf_counter()

    @property
    def share(self) -> float:
        """Elapsed fraction of the measurement's duration; at least 1 once time is up."""
        share = (time.perf_counter() - self._since) / self._seconds
        self._show(min(self._total - 1, int(share * self._total)))
        return share

    def end(self) -> None:
        """Report the end of the measurement."""
        self._show(self._total)

    def _show(self, done: int) -> None:
        if done > self._shown:
            self._progress(self._phase, done, self._total)
            self._shown = done


def measure_store(setup: Setup, seconds: float, progress: Progress) -> tuple[StoreRun, StoreRun]:
    """Measure two passes over the store, and return the result of each.

    The first pass reads an epoch's samples in plan order until time is up. The second pass reads the same samples
    repeatedly.

    Samples with a checksum mismatch are counted as bad. Raises StorageError, DatasetError or SampleError if a sample
    cannot be read.
    """
    requests, rows = setup.selection.requests(setup.selection.plan(Cursor()), 1), IndexRows()
    samples = (sample for request in requests for sample in request.samples)
    first, taken = _read_pass(setup, rows, samples, MeasureTimer(seconds, "store, first pass", progress))
    second, _ = _read_pass(setup, rows, cycle(taken), MeasureTimer(seconds, "store, second pass", progress))
    return first, second


def _read_pass(
    setup: Setup, rows: IndexRows, samples: Iterator[SampleRequest], timer: MeasureTimer
) -> tuple[StoreRun, list[SampleRequest]]:
    """Read at least one sample, and continue until time is up. Return the measurements and the samples."""
    reads, taken = _Reads(setup, rows), list[SampleRequest]()
    before, since = _disk_bytes(), time.perf_counter()
    try:
        for sample in samples:
            reads.begin(sample)
            taken.append(sample)
            if timer.share >= 1 or len(taken) == _MAX_SAMPLES:
                break
    finally:
        reads.close()
    elapsed, after = time.perf_counter() - since, _disk_bytes()
    reads.check()
    timer.end()
    run = StoreRun(
        num_samples=len(taken),
        num_bytes=reads.num_bytes,
        num_stored_bytes=reads.num_stored_bytes,
        seconds=elapsed,
        num_bad=reads.num_bad,
        num_disk_bytes=None if before is None or after is None else after - before,
    )
    return run, taken


class _Reads:
    """Concurrent reader with as many threads as a loader has, and one memory block per thread."""

    def __init__(self, setup: Setup, rows: IndexRows) -> None:
        num_threads = setup.pipeline.num_fetch_threads
        self._rows, self._threads = rows, FetchThreads(num_threads, self._failed)
        self._blocks: SimpleQueue[memoryview] = SimpleQueue()
        for _ in range(num_threads):
            self._blocks.put(memoryview(bytearray(setup.mix.max_clip_bytes + TABLE_BYTES)))
        self._failure: Exception | None = None
        self._lock = threading.Lock()
        self.num_bad = self.num_bytes = self.num_stored_bytes = 0

    def begin(self, sample: SampleRequest) -> None:
        """Start reading a sample as soon as a block is free. If an earlier read failed, raise its error."""
        bucket = sample.part.dataset.manifest.bucket(sample.bucket_id)
        packets = partial(self._rows.packets, sample)
        delivery = prepare(self._rows, sample, bucket, lambda row, pick: clip_part(row.clip, packets(row), pick))
        self.num_bytes += delivery.part.num_bytes
        self.num_stored_bytes += delivery.row.clip.num_bytes
        block = self._blocks.get()
        self.check()
        self._threads.submit(partial(self._read, delivery, block))

    def _read(self, delivery: Delivery, block: memoryview) -> None:
        try:
            sample, part = delivery.sample, delivery.part
            wanted = [(delivery.row.clip.offset, part, block[: part.block_bytes])]
            read = read_parts(sample.part.dataset, sample.shard_info, wanted)
            data = block[part.table_bytes : part.block_bytes]
            if read.problem is not None or wrong_bytes(data, part.checks) is not None:
                with self._lock:
                    self.num_bad += 1
        finally:
            self._blocks.put(block)

    def _failed(self, error: Exception) -> None:
        self._failure = error  # raised by `check` in the main thread

    def check(self) -> None:
        """If an earlier read failed, raise its error."""
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Wait for reads in flight and stop the threads."""
        self._threads.close()


def _disk_bytes() -> int | None:
    """Return the number of bytes that the kernel has read from disk for this process, or None if unknown."""
    try:
        lines = dict(line.split(": ") for line in _IO.read_text().splitlines())
        return int(lines["read_bytes"])
    except (OSError, ValueError, KeyError):
        return None
