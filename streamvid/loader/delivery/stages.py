"""The way of one sample: read and checked, decoded into its place in the ring, or replaced if it is bad."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from streamvid.buckets.bucket import Bucket
from streamvid.errors import StreamvidError, WorkerError
from streamvid.loader.delivery.clip_part import MAX_READS, ClipPart, clip_part
from streamvid.loader.delivery.clock import Clock, Wait, where_threads_are
from streamvid.loader.delivery.fetch import ClipRead, FetchThreads, IndexRows, check_row, finish_row, read_parts
from streamvid.loader.delivery.near import near_each_other
from streamvid.loader.delivery.pending import DECODING, QUEUED, READING, PendingBatch, Work, name_sample, sample_error
from streamvid.loader.delivery.repair import Repairs, add_read, repair_bytes
from streamvid.loader.delivery.requests import BatchRequest
from streamvid.loader.delivery.signals import Signals
from streamvid.loader.mix import MixPart, SampleRequest
from streamvid.loader.view.media import MediaRoom, media_parts
from streamvid.loader.workers.arena import ALIGN_BYTES, Arena, Block
from streamvid.loader.workers.pool import DecodePool, Decoder, InlineDecoder
from streamvid.loader.workers.worker import GENERATION, Answer, DecodeTask
from streamvid.storage import while_wanted
from streamvid.video.picture import Accuracy, PictureFormat, Pixels

_log = logging.getLogger(__name__)

_NUM_WARMERS, _MAX_ASKED = 8, 4096
_LOOKAHEAD = 16  # batches whose shards' index rows are asked for before their turn, where the store is far
_THREADED_PIXELS = 1280 * 720  # of a frame; smaller ones cost more in waiting for each other than they gain
_THREADED_FRAMES = 16
_MAX_THREADS = 4
_MAX_PIECES = 512  # of a part: the checksums of more make too long a message to a worker
_POLL_SECONDS = 0.2
_STUCK_SECONDS = 1.0  # for threads that hang already


class Stages:
    """Fetch threads, decoders and the memory for clips: none before `open`, which leaves their end to `resources`.

    clip_bytes: memory for clips read ahead; `repair_bytes(parts)` are taken besides. pixels, accuracy: of the pictures
    in the ring; see PictureFormat and PendingBatch. num_fetch_threads: that read.
    """

    def __init__(
        self,
        parts: Sequence[MixPart],
        signals: Signals,
        clock: Clock,
        num_workers: int,
        pixels: Pixels = "rgb24",
        accuracy: Accuracy | None = None,
        num_fetch_threads: int = 4,
    ) -> None:
        self._is_remote = any(part.is_remote for part in parts)
        self._num_fetch_threads = num_fetch_threads
        self._stores = {part.source.url: part.source.store for part in parts}
        self._signals, self._clock, self._num_workers = signals, clock, num_workers
        self._pixels, self._accuracy, self._media = pixels, accuracy, parts[0].media
        self._repair_bytes = repair_bytes(parts)
        self._rows = IndexRows()
        self._repairs = Repairs(self._rows)
        self._lock = threading.Lock()  # over what follows; only our own threads take it
        self._works: dict[int, Work] = {}
        self._next_number = 0

    def open(self, resources: contextlib.ExitStack, clip_bytes: int, ring: Arena) -> None:
        """Start it all over a ring; `end` is to be called before `resources` are closed."""
        self._ring = ring
        ahead = max(clip_bytes, self._repair_bytes)  # one that has no room at all would be waited for without end
        self._clips = Arena("clips", ahead + self._repair_bytes + ALIGN_BYTES)
        resources.callback(self._clips.close)
        self._clips.allocate(GENERATION.size, 0.0)  # its first page is the run that workers look at
        self._repair_clip = self._clips.allocate(self._repair_bytes, 0.0)
        self._fetchers = FetchThreads(self._num_fetch_threads)
        resources.callback(self._close_threads, self._fetchers)
        self._warmers = FetchThreads(_NUM_WARMERS)  # of their own: clips that are needed now wait for none of them
        resources.callback(self._close_threads, self._warmers)
        self._decoder: Decoder = (
            DecodePool(self._num_workers, self._clips, ring) if self._num_workers else InlineDecoder(self._clips, ring)
        )
        answers = threading.Thread(target=self._serve_answers, name="streamvid-answers", daemon=True)
        resources.callback(self._end_decoding, answers)
        answers.start()

    def _end_decoding(self, answers: threading.Thread) -> None:
        self._decoder.close()
        if answers.is_alive():
            answers.join(_STUCK_SECONDS if self._signals.is_stuck else None)
        self._decoder.let_go()

    def _close_threads(self, threads: FetchThreads) -> None:
        threads.close(_STUCK_SECONDS if self._signals.is_stuck else None)

    @property
    def worker_pids(self) -> tuple[int, ...]:
        """Process ids of the decode workers."""
        return self._decoder.pids

    @property
    def is_idle(self) -> bool:
        """Whether no sample is under way."""
        return not self._works

    def set_run(self, run: int) -> None:
        """Tell the workers which run is alive."""
        GENERATION.pack_into(self._clips.map, 0, run)

    def wake(self) -> None:
        """End the feeder's wait for room, if its run is over."""
        self._clips.wake()

    def watch(self, wait: Wait) -> None:
        """Fail if something has taken too long, and kill the worker that is stuck on it."""
        overdue = None if self._signals.failure else self._clock.overdue(wait, list(self._works.values()))
        if overdue is None:
            return
        self._signals.is_stuck = overdue.task_id is None or not self._decoder.pids
        self._signals.fail(overdue.error)
        if overdue.task_id is not None:
            _log.warning("%s. Threads:\n%s", overdue.error, where_threads_are())
            self._decoder.kill(overdue.task_id)

    # In the feeder.

    def ahead(self, requests: Iterator[BatchRequest]) -> Iterator[BatchRequest]:
        """The requests; of those to come, the index rows are on their way already, where the store is far."""
        if not self._is_remote:
            yield from requests
            return
        coming: deque[BatchRequest] = deque()
        asked: set[tuple[int, str, int]] = set()
        for request in requests:
            run = self._signals.run
            for name, sample in {(s.part.number, s.bucket_id, s.shard): s for s in request.samples}.items():
                if name not in asked and sample.part.is_remote and not self._rows.has(sample):
                    self._warmers.submit(partial(self._warm, sample, run))
                    asked.add(name)
            if len(asked) > _MAX_ASKED:
                asked.clear()
            coming.append(request)
            if len(coming) > _LOOKAHEAD:
                yield coming.popleft()
        yield from coming

    def _warm(self, sample: SampleRequest, run: int) -> None:
        with while_wanted(partial(self._is_alive, run)):
            self._rows.warm(sample)

    def _is_alive(self, run: int) -> bool:
        return run == self._signals.run and not self._signals.is_closing

    def read_rows(self, request: BatchRequest) -> tuple[list[dict[str, Any]], StreamvidError | None]:
        """The index rows of a batch's samples; where one fails, those before it and why it does."""
        rows: list[dict[str, Any]] = []
        for sample in request.samples:
            row: dict[str, Any] = {"key": None}
            self._clock.index_read = (sample, time.monotonic())
            try:
                row = self._rows.row(sample)
                if request.bucket.is_text:
                    check_row(row, sample.shard_info, 0)
                else:
                    self._prepare(row, sample, request.bucket.num_frames)
            except StreamvidError as error:
                return rows, sample_error(sample, row["key"], str(error))
            finally:
                self._clock.index_read = None
            rows.append(row)
        return rows, None

    def _prepare(self, row: dict[str, Any], sample: SampleRequest, num_frames: int) -> None:
        finish_row(row, sample, num_frames)
        packets = self._rows.packets(sample, row)
        row["part"] = clip_part(row, packets, row["view"].pick, max_pieces=_MAX_PIECES)
        row["media_parts"] = media_parts(row, sample.part.media, sample.shard_info, row["part"])

    def ring_bytes(self, request: BatchRequest, rows: Sequence[dict[str, Any]]) -> int:
        """What a batch takes of the ring."""
        return self._room(request).num_bytes

    def new_batch(self, request: BatchRequest, block: Block, rows: list[dict[str, Any]]) -> PendingBatch:
        """A batch whose place in the ring is `block`."""
        room = self._room(request)
        return PendingBatch(
            request, self._picture(request.bucket), self._ring.map, block, len(request.samples), self._accuracy, rows,
            room=room if room.media else None,
        )  # fmt: skip

    def _room(self, request: BatchRequest) -> MediaRoom:
        picture = self._picture(request.bucket)
        return MediaRoom(self._media, request.bucket, len(request.samples), picture.num_bytes)

    def _picture(self, bucket: Bucket) -> PictureFormat:
        return PictureFormat(bucket.height, bucket.width, self._pixels)

    def begin(self, batch: PendingBatch, allocate: Callable[[Arena, int], int | None], run: int) -> bool:
        """Start a batch's samples on their way, waiting for room for each clip; False where the run is over."""
        works: list[Work] = []
        for slot, (sample, row) in enumerate(zip(batch.request.samples, batch.rows, strict=True)):
            part: ClipPart = row["part"]
            # Of a part nothing is known: the rest of the clip may be what is wrong.
            reason = self._repairs.reason(sample) if part.window is None else None
            if reason is not None:
                self._is_bad(self._new_work(run, batch, slot, part, None), reason, is_corrupt=True)
                continue
            num_bytes = part.block_bytes + sum(one.part.num_bytes for one in row["media_parts"])
            clip = self._clips.allocate(num_bytes, 0.0)
            if clip is None:  # room for more comes from those that are read
                self._submit(works)
                works = []
                clip = allocate(self._clips, num_bytes)
            if clip is None:
                return False
            works.append(self._new_work(run, batch, slot, part, clip))
        self._submit(works)
        return True

    def _submit(self, works: Sequence[Work]) -> None:
        """Have clips read: of a far store those together that lie near each other, as one request gets them."""
        for group in near_each_other(works):
            self._fetchers.submit(partial(self._fetch_all, group))

    def _new_work(self, run: int, batch: PendingBatch, slot: int, part: ClipPart, clip: int | None) -> Work:
        with self._lock:
            row = batch.rows[slot]
            work = Work(self._next_number, run, batch, slot, batch.request.samples[slot], row, part, clip)
            work.media = row.get("media_parts", ())
            self._next_number += 1
            self._works[work.number] = work
        return work

    # In fetch threads.

    def _fetch(self, work: Work) -> None:
        self._fetch_all([work])

    def _fetch_all(self, works: Sequence[Work]) -> None:
        """Read clips that lie near each other in one shard; where their tar ends too early, each alone."""
        blocks: list[tuple[Work, int]] = []
        try:
            for work in works:
                clip = work.clip if work.clip is not None else self._repair_clip
                if work.run != self._signals.run or clip is None:
                    self._finish(work)
                else:
                    work.enter(READING)
                    blocks.append((work, clip))
            if not blocks:
                return
            with while_wanted(partial(self._is_alive, blocks[0][0].run)):
                read = self._read(blocks)
            if read.problem is not None and len(blocks) > 1:
                self._fetch_each(blocks)
                return
            for work, clip in blocks:
                add_read(work, replace(read, seconds=read.seconds / len(blocks), num_bytes=work.num_bytes))
                if work.problem is None:
                    work.num_decoded = 0
                    self._decode(work, clip, self._decoder.submit)
                else:
                    self._is_corrupt(work, work.problem)
        except StreamvidError as error:
            for work, _ in blocks:  # the store is what is wrong, for all of them: none is tried again
                self._finish(work, sample_error(work.sample, work.row["key"], str(error)))
        except Exception as error:  # noqa: BLE001 - the caller must hear of it, in its own thread
            self._signals.fail_unexpected(error)

    def _read(self, blocks: Sequence[tuple[Work, int]]) -> ClipRead:
        first = blocks[0][0]
        view = self._clips.view
        wanted = [one for work, clip in blocks for one in work.wanted(view[clip : clip + work.block_bytes])]
        sample = first.sample
        return read_parts(sample.part.source, sample.file, wanted, is_again=first.num_reads > 0)

    def _decode(self, work: Work, block: int, submit: Callable[[DecodeTask], None]) -> None:
        work.enter(QUEUED)
        submit(work.task(block, self._num_threads(work)))

    def _fetch_each(self, blocks: Sequence[tuple[Work, int]]) -> None:
        for work, _ in blocks:
            self._fetchers.submit(partial(self._fetch, work))

    def _is_corrupt(self, work: Work, problem: str) -> None:
        """What was read is not what the index means: once more. The same twice is proved bad (FETCH-1); other bytes
        each time were changed on their way, which is no proof."""
        name = f"{work.sample.part.source.url}: {work.row['key']} of {work.sample.file.path}"
        if problem == work.problem_before:
            self._is_bad(work, f"{problem}, twice; copy the shard again", is_corrupt=True)
        elif work.num_reads < MAX_READS:
            work.problem_before = problem
            _log.info("%s is read again: %s", name, problem)
            self._fetchers.submit(partial(self._fetch, work))
        else:
            text = f"{MAX_READS} reads gave other bytes each time; look at the network and the store"
            self._finish(work, sample_error(work.sample, work.row["key"], text))

    def _is_bad(self, work: Work, reason: str, *, is_corrupt: bool) -> None:
        if work.clip is not None:
            self._clips.release(work.clip)
            work.clip = None
        if self._repairs.add(work, reason, is_corrupt=is_corrupt):
            self._fetchers.submit(partial(self._repair, work))

    def _repair(self, work: Work) -> None:
        try:
            with while_wanted(partial(self._is_alive, work.run)):
                is_found = self._repairs.find(work, lambda: work.run == self._signals.run)
            if is_found:
                self._fetch(work)
            else:
                self._finish(work)
        except StreamvidError as error:
            self._finish(work, error)
        except Exception as error:  # noqa: BLE001 - the caller must hear of it, in its own thread
            self._signals.fail_unexpected(error)

    def _num_threads(self, work: Work) -> int:
        """Threads for one decoder: several where a large sample would else leave other workers without work."""
        window = work.part.window
        if window is None or len(window.packets) < _THREADED_FRAMES:
            return 1
        info = work.part.stream
        if info is None or info.coded_width * info.coded_height < _THREADED_PIXELS:
            return 1
        return max(1, min(_MAX_THREADS, self._num_workers // max(1, len(self._works))))

    # In the answer thread.

    def _serve_answers(self) -> None:
        try:
            while not self._signals.is_closing:
                self._decoder.serve(_POLL_SECONDS, self._hear)
        except WorkerError as error:
            work = None if error.task_id is None else self._works.get(error.task_id)
            about = "" if work is None else f". It was decoding {name_sample(work.sample, work.row['key'])}"
            self._signals.fail(WorkerError(f"{error}{about}"))
        except Exception as error:  # noqa: BLE001 - the caller must hear of it, in its own thread
            self._signals.fail_unexpected(error)

    def _hear(self, answer: Answer) -> None:
        work = self._works[answer.task_id]
        self._clock.heard_at = time.monotonic()
        if answer.kind == "start":
            work.enter(DECODING)
            return
        work.stats.decode_seconds += answer.seconds
        text = work.label + answer.text
        if answer.kind == "corrupt":
            self._is_corrupt(work, text)
        elif answer.kind == "bad":
            self._is_bad(work, text, is_corrupt=False)
        elif answer.kind == "error":
            self._finish(work, sample_error(work.sample, work.row["key"], text))
        elif not work.decoded(answer.color) and work.run == self._signals.run:
            block = work.clip if work.clip is not None else self._repair_clip
            assert block is not None
            self._decode(work, block, self._decoder.submit_heard)
        else:
            if work.bad is not None and not work.is_substitute:
                name = name_sample(work.sample, work.row["key"])
                _log.warning("%s was decoded by way of its container, as its packets fail: %s", name, work.bad[2])
            self._finish(work)

    def _finish(self, work: Work, error: StreamvidError | None = None) -> None:
        with self._lock:
            del self._works[work.number]
            batch = work.batch
            if error is not None:  # its batch stays incomplete, and is never handed over
                batch.error = batch.error or error
            elif work.run == self._signals.run:
                work.deliver()
                batch.num_missing -= 1
            is_news = batch.num_missing == 0 or error is not None or not self._works
        if work.clip is not None:
            self._clips.release(work.clip)
        following = self._repairs.end(work)
        if following is not None:
            self._fetchers.submit(partial(self._repair, following))
        if is_news:
            self._signals.tell()
