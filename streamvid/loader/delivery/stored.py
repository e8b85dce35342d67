"""Delivery of stored bytes: clips that the caller decodes, and features. Each task reads several files."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from streamvid.buckets.pick import Pick
from streamvid.errors import ConfigError, StreamvidError
from streamvid.loader.delivery.delivery import Delivery
from streamvid.loader.delivery.fetch import near_each_other, read_parts
from streamvid.loader.delivery.flight import Allocate, Flight
from streamvid.loader.delivery.index_rows import IndexRows
from streamvid.loader.delivery.pending import DECODING, QUEUED, READING, ClipPlace, PendingBatch, Slot
from streamvid.loader.delivery.requests import BatchRequest
from streamvid.loader.mix import SampleRequest
from streamvid.loader.view.clip_part import TABLE_BYTES, ClipPart, clip_part, whole_clip, wrong_bytes
from streamvid.loader.view.index_row import IndexRow, PacketsPlace
from streamvid.loader.workers.messages import MAX_MESSAGE_BYTES, Answer, ReadResult, ReadSlot, ReadTask, TarFile
from streamvid.loader.workers.reader import ClipReader

if TYPE_CHECKING:
    from streamvid.storage import Store

_CLIPS_PER_TASK = 16
_ALIGN = 64
_PACKET_BYTES = 32
_SLOT_BYTES = 1024  # per clip in a message, without the paths
_NO_TIMES = (
    "its frames must be chosen by timestamp, but the clip has no packet index, so its timestamps are available only "
    "in its container. Use output.decode=True, another view.temporal, or a dataset that was sharded with an fps_rule "
    "other than 'resample'"
)


class StoredDelivery:
    """Delivery that reads stored clips into the ring unchanged. A task's id is the number of its first slot."""

    reads_ahead = False

    def __init__(self, rows: IndexRows, stores: Mapping[str, Store], *, is_remote: bool) -> None:
        self._rows, self._stores, self._is_remote = rows, stores, is_remote
        self._together: dict[int, list[Slot]] = {}

    def open(self, flight: Flight, resources: contextlib.ExitStack) -> None:
        self._flight = flight
        self._reader = ClipReader(flight.clips.view, flight.ring.map, self._stores)
        resources.callback(self._let_go)

    def _let_go(self) -> None:
        # A reference to the loader must not keep its memory alive.
        self._together.clear()
        del self._reader

    # In the feeder thread.

    def part(self, sample: SampleRequest, row: IndexRow, pick: Pick, *, is_whole: bool) -> ClipPart:
        """Return a part that covers the whole clip; the reader chooses which bytes to read."""
        part = clip_part(row.clip, None, pick)
        if part.numbers is not None or (row.packets is not None and not is_whole):
            return part
        packets = self._rows.packets(sample, row)
        if packets is None:
            raise ConfigError(_NO_TIMES)
        return replace(part, numbers=pick.numbers(packets.num_frames, packets.frame_times))

    def ring_bytes(self, request: BatchRequest, deliveries: Sequence[Delivery]) -> int:
        return max(_ALIGN, sum(map(_room, deliveries)))

    def room(self, request: BatchRequest) -> None:
        return None

    def begin(self, batch: PendingBatch, allocate: Allocate, run: int, *, is_urgent: bool) -> bool:
        offset, slots = 0, list[Slot]()
        for index, delivery in enumerate(batch.deliveries):
            # With packets, the reader chooses a part.
            if not self._flight.reject_known(run, batch, index, is_whole=delivery.row.packets is None):
                slot = self._flight.begin(run, batch, index)
                batch.clips[index] = ClipPlace(delivery.part.numbers, offset)
                slots.append(slot)
            offset += _room(delivery)
        for together in self._groups(slots):
            task = _task(run, together)
            self._together[task.task_id] = together
            for slot in together:
                slot.enter(QUEUED)
            # Read object stores here, because many concurrent requests need threads but no CPU.
            if self._flight.decoder.is_ready and not self._is_remote:
                self._flight.decoder.submit([task])
            else:
                self._flight.fetchers.submit(partial(self._read_here, task))
        return True

    def _groups(self, slots: Sequence[Slot]) -> Iterator[list[Slot]]:
        """Yield groups of slots, one per thread. For object stores, each group needs only one request."""
        if self._is_remote:
            for near in near_each_other([slot.delivery for slot in slots]):
                yield [slots[place] for place in near]
            return
        at_once = _clips_at_once(slots)
        for first in range(0, len(slots), at_once):
            yield list(slots[first : first + at_once])

    # In fetch threads.

    def _read_here(self, task: ReadTask) -> None:
        for slot in self._together[task.task_id]:
            slot.enter(DECODING)
        with self._flight.while_alive(task.generation):
            answer = self._reader.run(task)
        self.hear(answer)

    def read(self, slot: Slot) -> None:
        """Read the whole clip of a substitute into separate memory."""
        flight, sample, part = self._flight, slot.sample, slot.delivery.part
        if slot.run != flight.signals.run:
            flight.finish(slot)
            return
        block = memoryview(bytearray(part.block_bytes))
        slot.enter(READING)
        try:
            with flight.while_alive(slot.run):
                wanted = [(slot.delivery.row.clip.offset, part, block)]
                read = read_parts(sample.part.source, slot.delivery.tar, wanted, is_again=slot.is_again)
        except StreamvidError as error:
            flight.fail(slot, error)
            return
        slot.add_read(read)
        problem = read.problem or wrong_bytes(block, part.checks)
        if problem is None:
            slot.batch.clips[slot.index] = ClipPlace(part.numbers, own=bytes(block))
            flight.finish(slot)
        else:
            flight.wrong(slot, problem)

    # In the thread that has read the clips or receives the answer.

    def hear(self, answer: Answer) -> None:
        slots, results = self._together.pop(answer.task_id), answer.results
        if not results:  # the run is over
            for slot in slots:
                self._flight.finish(slot)
            return
        if len(results) < len(slots):  # others come in separate messages
            self._together[answer.task_id] = slots[len(results) :]
        for slot, result in zip(slots, results, strict=False):
            slot.stats.fetch_seconds += answer.seconds / len(results)
            self._take(slot, result)

    def _take(self, slot: Slot, result: ReadResult) -> None:
        slot.stats.num_bytes_fetched += result.num_bytes
        slot.stats.num_retries += result.num_retries
        if result.kind == "error":
            self._flight.fail(slot, result.text)
        elif result.kind == "bad":
            self._flight.reject(slot, result.text, is_corrupt=slot.delivery.row.packets is None)
        else:
            place = slot.batch.clips[slot.index]
            numbers = place.numbers if result.numbers is None else result.numbers
            place = ClipPlace(numbers, place.offset, result.table_bytes, result.num_bytes, result.stream)
            slot.batch.clips[slot.index] = place
            self._flight.finish(slot)


class FeatureDelivery(StoredDelivery):
    """Delivery that reads the stored features of samples into the ring unchanged."""

    def part(self, sample: SampleRequest, row: IndexRow, pick: Pick, *, is_whole: bool) -> ClipPart:
        return whole_clip(row.clip, pick, ())


def _room(delivery: Delivery) -> int:
    """Return the number of ring bytes for a clip.

    If the clip has a packet index, the number includes a table of about two packets per frame.
    """
    clip, has_packets = delivery.row.clip, delivery.row.packets is not None
    table = min(TABLE_BYTES, _PACKET_BYTES * (2 * clip.num_frames + 64)) if has_packets else 0
    return -(-(clip.num_bytes + table) // _ALIGN) * _ALIGN


def _clips_at_once(slots: Iterable[Slot]) -> int:
    """Return the maximum number of clips whose paths fit into one message.

    A path character takes at most twelve bytes in JSON.
    """
    longest = max((len(one.sample.part.source.url) + len(one.delivery.tar.path) for one in slots), default=0)
    return max(1, min(_CLIPS_PER_TASK, MAX_MESSAGE_BYTES // (_SLOT_BYTES + 12 * longest)))


def _task(run: int, slots: Sequence[Slot]) -> ReadTask:
    tables = dict[PacketsPlace, int]()
    found = []
    for slot in slots:
        delivery, source, file = slot.delivery, slot.sample.part.source, slot.delivery.tar
        row, place = delivery.row, slot.batch.clips[slot.index]
        tar = TarFile(source.url, file.path)
        if not source.store.is_local:
            tar = TarFile(source.url, file.path, file.sha256, file.num_bytes)
        found.append(
            ReadSlot(
                tar=tar,
                clip=row.clip,
                pick=delivery.part.pick,
                table=-1 if row.packets is None else tables.setdefault(row.packets, len(tables)),
                row=row.number,
                out_offset=slot.batch.block.offset + place.offset,
                room=_room(delivery),
            )
        )
    return ReadTask(slots[0].number, run, tuple(tables), tuple(found))
