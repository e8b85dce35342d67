"""The way of samples that are not decoded: read and checked into the ring by whoever is free, a few at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

from streamvid.errors import ConfigError, StreamvidError
from streamvid.loader.delivery.clip_part import TABLE_BYTES, clip_part, wrong_bytes
from streamvid.loader.delivery.fetch import finish_row, read_parts
from streamvid.loader.delivery.near import near_each_other
from streamvid.loader.delivery.pending import DECODING, QUEUED, READING, PendingBatch, StoredClip, Work, sample_error
from streamvid.loader.delivery.repair import MISSING, add_read
from streamvid.loader.delivery.requests import BatchRequest
from streamvid.loader.delivery.stages import Stages
from streamvid.loader.mix import SampleRequest
from streamvid.loader.workers.arena import Arena, Block
from streamvid.loader.workers.encoded import ClipReader, Place, ReadSlot, ReadTask
from streamvid.loader.workers.worker import MAX_MESSAGE_BYTES, Answer
from streamvid.storage import while_wanted

_CLIPS_A_TASK = 16
_ALIGN = 64
_PACKET_BYTES = 32
_SLOT_BYTES = 1024  # of a clip and its place in a message, but for the paths
_NO_TIMES = (
    "its frames are chosen by their times, which only its container says, as it has no packet index: decode it "
    "(decode=True), or take another temporal, or a dataset whose fps_rule needs no times"
)


class EncodedStages(Stages):
    """Stages whose batches hold clips as they are stored. Slots of a message go by the number of their first."""

    def open(self, resources: contextlib.ExitStack, clip_bytes: int, ring: Arena) -> None:
        self._together: dict[int, list[Work]] = {}
        super().open(resources, 0, ring)
        self._reader = ClipReader(self._clips.view, ring.map, self._stores)
        resources.callback(self._let_go)

    def _let_go(self) -> None:
        # Whoever still holds the loader must not hold its memory.
        self._together.clear()
        del self._reader

    def _prepare(self, row: dict[str, Any], sample: SampleRequest, num_frames: int) -> None:
        finish_row(row, sample, num_frames)
        row["part"] = part = clip_part(row, None, row["view"].pick)
        if part.numbers is None and row["place"] is None and sample.part.sidecar is None:
            raise ConfigError(_NO_TIMES)

    def ring_bytes(self, request: BatchRequest, rows: Sequence[dict[str, Any]]) -> int:
        return max(_ALIGN, sum(map(_room, rows)))

    def new_batch(self, request: BatchRequest, block: Block, rows: list[dict[str, Any]]) -> PendingBatch:
        return PendingBatch(request, None, self._ring.map, block, len(request.samples), rows=rows)

    def begin(self, batch: PendingBatch, allocate: Callable[[Arena, int], int | None], run: int) -> bool:
        offset, slots = 0, []
        for number, (sample, row) in enumerate(zip(batch.request.samples, batch.rows, strict=True)):
            work = self._new_work(run, batch, number, row["part"], None)
            work.stored = StoredClip(row["part"].numbers, offset)
            # Of a part, which the reader chooses, nothing is known: the rest of the clip may be what is wrong.
            reason = self._repairs.reason(sample) if row["place"] is None else None
            if row.get("is_missing"):
                self._is_bad(work, MISSING, is_corrupt=False)
            elif reason is None:
                slots.append((work, batch.block.offset + offset))
            else:
                self._is_bad(work, reason, is_corrupt=True)
            offset += _room(row)
        for part in self._groups(slots):
            places = dict[Place, int]()
            clips = tuple(_slot(work, out_offset, places) for work, out_offset in part)
            task = ReadTask(part[0][0].number, run, tuple(places), clips)
            self._together[task.task_id] = works = [work for work, _ in part]
            for work in works:
                work.enter(QUEUED)
            # Far stores are read here: many requests at a time take threads, and no work.
            if self._decoder.is_ready and not self._is_remote:
                self._decoder.submit(task)
            else:
                self._fetchers.submit(partial(self._read_here, task))
        return True

    def _groups(self, slots: Sequence[tuple[Work, int]]) -> Iterator[Sequence[tuple[Work, int]]]:
        """What is read by one thread: of far stores what one request gets, so that no clip waits for another's."""
        if self._is_remote:
            places = dict(slots)
            for near in near_each_other(list(places)):
                yield [(work, places[work]) for work in near]
            return
        at_once = _clips_at_once(work for work, _ in slots)
        for first in range(0, len(slots), at_once):
            yield slots[first : first + at_once]

    # In fetch threads.

    def _read_here(self, task: ReadTask) -> None:
        try:
            self._hear(Answer(0, task.task_id, "start"))
            with while_wanted(partial(self._is_alive, task.generation)):
                answer = self._reader.run(task)
            self._hear(answer)
        except Exception as error:  # noqa: BLE001 - the caller must hear of it, in its own thread
            self._signals.fail_unexpected(error)

    def _fetch(self, work: Work) -> None:
        """What takes the place of a bad clip: read whole, into memory of its own."""
        try:
            if work.run != self._signals.run:
                self._finish(work)
                return
            block = memoryview(bytearray(work.part.block_bytes))
            work.enter(READING)
            sample = work.sample
            wanted = [(work.row["clip_offset"], work.part, block)]
            is_again = work.num_reads > 0
            with while_wanted(partial(self._is_alive, work.run)):
                read = read_parts(sample.part.source, sample.file, wanted, is_again=is_again)
            add_read(work, read)
            problem = work.problem or wrong_bytes(block, work.part.checks)
            if problem is None:
                work.stored = StoredClip(self._numbers(work), own=bytes(block))
                self._finish(work)
            else:
                self._is_corrupt(work, problem)
        except StreamvidError as error:
            self._finish(work, sample_error(work.sample, work.row["key"], str(error)))
        except Exception as error:  # noqa: BLE001 - the caller must hear of it, in its own thread
            self._signals.fail_unexpected(error)

    def _numbers(self, work: Work) -> Sequence[int]:
        """Of the frames wanted, though all of the clip is handed over."""
        if work.sample.part.sidecar is not None:
            return ()
        if work.part.numbers is not None:
            return work.part.numbers
        packets = self._rows.packets(work.sample, work.row)
        if packets is None:
            raise ConfigError(_NO_TIMES)
        return work.part.pick.numbers(packets.num_frames, packets.frame_times)

    # In whichever thread has read or heard of it.

    def _hear(self, answer: Answer) -> None:
        if answer.kind != "read":
            for work in self._together.get(answer.task_id, ()):
                work.enter(DECODING)
            return
        works = self._together.pop(answer.task_id)
        results: list[Any] = answer.results or [None] * len(works)
        if len(results) < len(works):  # others come in messages of their own
            self._together[answer.task_id] = works[len(results) :]
        for work, result in zip(works, results, strict=False):
            work.stats.fetch_seconds += answer.seconds / len(results)
            if result is None:
                self._finish(work)
            else:
                self._take(work, *result)

    def _take(
        self, work: Work, kind: str, text: str, table_bytes: int, num_bytes: int, stream: str, num_retries: int,
        numbers: list[int] | None,
    ) -> None:  # fmt: skip
        work.stats.num_bytes_fetched += num_bytes
        work.stats.num_retries += num_retries
        if kind == "error":
            self._finish(work, sample_error(work.sample, work.row["key"], text))
        elif kind == "bad":
            self._is_bad(work, text, is_corrupt=work.row["place"] is None)
        else:
            assert work.stored is not None
            known = work.stored.numbers if numbers is None else numbers
            work.stored = StoredClip(known, work.stored.offset, table_bytes, num_bytes, stream)
            self._finish(work)


def _room(row: dict[str, Any]) -> int:
    """Bytes for a clip and, where it has an index, a table of about as many packets as it has frames."""
    table = min(TABLE_BYTES, _PACKET_BYTES * (2 * row["window_num_frames"] + 64)) if row["place"] else 0
    return -(-(int(row["clip_bytes"]) + table) // _ALIGN) * _ALIGN


def _clips_at_once(works: Iterable[Work]) -> int:
    """How many clips one message may name. A character of a path is twelve in JSON at most."""
    longest = max((len(w.sample.part.source.url) + len(w.sample.shard_info.path) for w in works), default=0)
    return max(1, min(_CLIPS_A_TASK, MAX_MESSAGE_BYTES // (_SLOT_BYTES + 12 * longest)))


def _slot(work: Work, out_offset: int, places: dict[Place, int]) -> ReadSlot:
    row, sample, place = work.row, work.sample, work.row["place"]
    source, file = sample.part.source, sample.file
    content: dict[str, Any] = {}
    if not source.store.is_local:
        content = {"shard_sha256": file.sha256, "shard_bytes": file.num_bytes}
    return ReadSlot(
        url=source.url,
        path=file.path,
        clip_offset=row["clip_offset"],
        clip_bytes=row["clip_bytes"],
        clip_sha256=row["clip_sha256"].hex(),
        num_clip_frames=row["window_num_frames"],
        pick=work.part.pick.to_json(),
        place=-1 if place is None else places.setdefault(place, len(places)),
        row=row["row"],
        out_offset=out_offset,
        room=_room(row),
        **content,
    )
