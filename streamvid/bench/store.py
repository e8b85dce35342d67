"""What a store gives alone: a loader's reads, proved by their checksums, and nothing decoded."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from streamvid.bench.figures import StoreRun
from streamvid.loader.delivery.clip_part import TABLE_BYTES, ClipPart, clip_part, wrong_bytes
from streamvid.loader.delivery.fetch import FetchThreads, IndexRows, finish_row, read_parts
from streamvid.loader.delivery.requests import Selection
from streamvid.loader.mix import Mix, SampleRequest
from streamvid.loader.stores import Stores
from streamvid.plan import Cursor

Progress = Callable[[str, int, int], None]
"""Called with (phase, seconds done, seconds in all)."""

_MAX_SAMPLES = 100_000
_IO = Path("/proc/self/io")


class Clock:
    """The time of one measurement, and what is shown of it."""

    def __init__(self, seconds: float, phase: str, progress: Progress) -> None:
        self._seconds, self._phase, self._progress = seconds, phase, progress
        self._total = max(1, round(seconds))
        self._shown = -1
        self._show(0)
        self.start()

    def start(self) -> None:
        """Count from now on."""
        self._since = time.perf_counter()

    @property
    def share(self) -> float:
        """Of the time: 1 or more when it is over."""
        share = (time.perf_counter() - self._since) / self._seconds
        self._show(min(self._total - 1, int(share * self._total)))
        return share

    @property
    def is_over(self) -> bool:
        return self.share >= 1

    def end(self) -> None:
        """Show that it is done."""
        self._show(self._total)

    def _show(self, done: int) -> None:
        if done > self._shown:
            self._progress(self._phase, done, self._total)
            self._shown = done


def num_fetch_threads(mix: Mix) -> int:
    """As many as a loader of these datasets has."""
    return Stores.of(None, None, None).num_fetch_threads([part.dataset for part in mix.parts])


def measure_store(selection: Selection, seconds: float, progress: Progress) -> tuple[StoreRun, StoreRun]:
    """Two passes: an epoch's samples in a loader's order, as far as the time allows; and those again and again.

    Raises StorageError, DatasetError, IntegrityError; bad samples are counted.
    """
    requests, rows = selection.requests(selection.plan(Cursor()), 1), IndexRows()
    samples = (sample for request in requests for sample in request.samples)
    first, taken = _read_pass(selection.mix, rows, samples, Clock(seconds, "store, first pass", progress))
    second, _ = _read_pass(selection.mix, rows, cycle(taken), Clock(seconds, "store, second pass", progress))
    return first, second


def _read_pass(
    mix: Mix, rows: IndexRows, samples: Iterator[SampleRequest], clock: Clock
) -> tuple[StoreRun, list[SampleRequest]]:
    """Read samples till they or the time are at an end, at least one; and which they were."""
    reads, taken = _Reads(mix, rows), list[SampleRequest]()
    before, since = _disk_bytes(), time.perf_counter()
    try:
        for sample in samples:
            reads.begin(sample)
            taken.append(sample)
            if clock.is_over or len(taken) == _MAX_SAMPLES:
                break
    finally:
        reads.close()
    elapsed, after = time.perf_counter() - since, _disk_bytes()
    reads.check()
    clock.end()
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
    """Reads under way on as many threads as a loader has for them; their blocks bound how many there are."""

    def __init__(self, mix: Mix, rows: IndexRows) -> None:
        num_threads = num_fetch_threads(mix)
        self._rows, self._threads = rows, FetchThreads(num_threads)
        self._blocks: SimpleQueue[memoryview] = SimpleQueue()
        for _ in range(num_threads):
            self._blocks.put(memoryview(bytearray(mix.max_clip_bytes + TABLE_BYTES)))
        self._failure: Exception | None = None
        self._lock = threading.Lock()
        self.num_bad = self.num_bytes = self.num_stored_bytes = 0

    def begin(self, sample: SampleRequest) -> None:
        """Read a sample as soon as a block is free. Raises what went wrong with one before."""
        row = self._rows.row(sample)
        num_frames = sample.part.dataset.manifest.bucket(sample.bucket_id).num_frames
        finish_row(row, sample, num_frames)
        part = clip_part(row, self._rows.packets(sample, row), row["view"].pick)
        self.num_bytes += part.num_bytes
        self.num_stored_bytes += row["clip_bytes"]
        block = self._blocks.get()
        self.check()
        self._threads.submit(partial(self._read, sample, row, part, block))

    def _read(self, sample: SampleRequest, row: dict[str, Any], part: ClipPart, block: memoryview) -> None:
        try:
            wanted = [(row["clip_offset"], part, block[: part.block_bytes])]
            read = read_parts(sample.part.dataset, sample.shard_info, wanted)
            data = block[part.table_bytes : part.block_bytes]
            if read.problem is not None or wrong_bytes(data, part.checks) is not None:
                with self._lock:
                    self.num_bad += 1
        except Exception as error:  # noqa: BLE001 - raised in the thread that waits
            self._failure = error
        finally:
            self._blocks.put(block)

    def check(self) -> None:
        """Raise what went wrong so far."""
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Finish what is under way, and end the threads."""
        self._threads.close()


def _disk_bytes() -> int | None:
    """Bytes that the kernel fetched from disks for this process so far; None where it does not say."""
    try:
        lines = dict(line.split(": ") for line in _IO.read_text().splitlines())
        return int(lines["read_bytes"])
    except (OSError, ValueError, KeyError):
        return None
