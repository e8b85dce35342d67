"""Delivery of decoded pictures: clips are read ahead into the clip arena, then decoded into the ring.

A clip that is in the page cache is read by a worker, so that its bytes pass only through the worker's processor cache.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING

from streamvid.buckets.bucket import Bucket
from streamvid.buckets.pick import Pick
from streamvid.errors import StreamvidError
from streamvid.loader.delivery.delivery import Delivery
from streamvid.loader.delivery.fetch import ClipRead, Wanted, fill_tables_of_cached, near_each_other, read_parts
from streamvid.loader.delivery.flight import Allocate, Flight
from streamvid.loader.delivery.index_rows import IndexRows
from streamvid.loader.delivery.pending import QUEUED, READING, VIDEO, WAITING, PendingBatch, Slot
from streamvid.loader.delivery.requests import BatchRequest
from streamvid.loader.mix import SampleRequest
from streamvid.loader.view.audio import AudioShape, audio_only, with_audio
from streamvid.loader.view.clip_part import AudioPart, ClipPart, clip_part
from streamvid.loader.view.index_row import IndexRow, SampleFile
from streamvid.loader.view.media import MediaPart, Medium, PictureRoom
from streamvid.loader.workers.messages import NO_BATCH, Answer, AudioTask, ClipBlock, DecodeTask
from streamvid.video.audio.grid import first_sample_at
from streamvid.video.picture import Accuracy, PictureFormat, Pixels

if TYPE_CHECKING:
    from streamvid.video.clip_index import ClipIndex

_log = logging.getLogger(__name__)

_THREADED_PIXELS = 1280 * 720  # per frame; with smaller frames, threads cost more time than they save
_THREADED_FRAMES = 16
_MAX_THREADS = 4
_MAX_PIECES = 512  # per part; more checksums would make a message to a worker too long

_MAX_WORKER_BYTES = 8 * 2**20  # of a sample in a worker's own memory; larger ones need the arena, whose size is planned
_MAX_PATH = 1024  # characters; a longer path would make a message to a worker too long

_LIGHT_PIXELS = 8_000_000  # to decode, which takes about 20 ms; more work is worth a message of its own

_format = cache(PictureFormat)  # a loader has few formats, and validating one takes longer than a lookup


class DecodedDelivery:
    """Delivery that decodes samples into pictures in the ring.

    accuracy: accuracy of the RGB conversion. With None, the conversion is exact for pictures that are scaled anyway,
        because exactness then adds little time, and fast for all other pictures.
    """

    reads_ahead = True

    def __init__(
        self, rows: IndexRows, num_workers: int, pixels: Pixels, accuracy: Accuracy | None, media: tuple[Medium, ...]
    ) -> None:
        self._rows, self._num_workers = rows, num_workers
        self._pixels, self._accuracy, self._media = pixels, accuracy, media

    def open(self, flight: Flight, resources: contextlib.ExitStack) -> None:
        self._flight = flight

    # In the feeder thread.

    def part(self, sample: SampleRequest, row: IndexRow, pick: Pick, *, is_whole: bool) -> ClipPart:
        plan = sample.part.audio
        if sample.part.dataset.manifest.clips == "audio":
            assert plan is not None
            index = None if is_whole else self._rows.audio_packets(sample, row)
            return audio_only(row.clip, index, pick, plan.of(sample.bucket_id), _MAX_PIECES)
        packets = None if is_whole and plan is None else self._rows.packets(sample, row)
        part = clip_part(row.clip, None if is_whole else packets, pick, max_pieces=_MAX_PIECES)
        if plan is None:
            return part
        shape = plan.of(sample.bucket_id)
        shape.check_speed(part, packets)
        if not row.has_audio:
            return self._timed(part, packets)
        audio = None if packets is None or is_whole else self._rows.audio_packets(sample, row)
        both = None if packets is None or audio is None else (packets, audio)
        return self._timed(with_audio(part, row.clip, both, shape, _MAX_PIECES), packets)

    def _timed(self, part: ClipPart, packets: ClipIndex | None) -> ClipPart:
        """Return the part, with `start_seconds` set if an audio input needs it and the packets contain timestamps."""
        is_needed = any(medium.is_audio for medium in self._media)
        if not is_needed or packets is None or packets.time_base is None or part.numbers is None:
            return part
        times = packets.frame_times
        return replace(part, start_seconds=int(times[part.numbers[0]] - times[0]) * packets.time_base)

    def ring_bytes(self, request: BatchRequest, deliveries: Sequence[Delivery]) -> int:
        return self.room(request).num_bytes

    def room(self, request: BatchRequest) -> PictureRoom:
        bucket = request.bucket
        picture = _format(bucket.height, bucket.width, self._pixels) if bucket.has_pictures else None
        plan = request.samples[0].part.audio
        shape = None if plan is None else plan.of(bucket.id)
        return PictureRoom(picture, bucket, len(request.samples), self._media, shape)

    def begin(self, batch: PendingBatch, allocate: Allocate, run: int, *, is_urgent: bool) -> bool:
        flight, slots = self._flight, list[Slot]()
        for index, delivery in enumerate(batch.deliveries):
            if flight.reject_known(run, batch, index, is_whole=delivery.part.is_whole):
                continue
            clip = flight.clips.allocate(delivery.block_bytes, 0.0)
            if clip is None:  # submit the collected clips: they release memory when they are done
                self._submit(slots, is_urgent)
                slots = []
                clip = allocate(flight.clips, delivery.block_bytes)
            if clip is None:
                return False
            slots.append(flight.begin(run, batch, index, clip))
        self._submit(slots, is_urgent)
        return True

    def _submit(self, slots: Sequence[Slot], is_urgent: bool) -> None:
        cached, other, may_be_cached = list[Slot](), list[Slot](), True
        for slot in slots:
            # After one clip that is not in the page cache, the other clips of the batch are probably not there either.
            may_be_cached = may_be_cached and self._look_in_cache(slot)
            (cached if slot.path else other).append(slot)
        for group in near_each_other([slot.delivery for slot in other]):
            self._flight.fetchers.submit(partial(self._read, [other[place] for place in group]))
        # Each message wakes threads, and a worker answers once for the tasks that it receives together.
        for together in _light_groups(cached, 0 if is_urgent else _LIGHT_PIXELS):
            self._decode(together)

    def _look_in_cache(self, slot: Slot) -> bool:
        """Set a slot's `path` if a worker can read the clip from the page cache. Return False if it is not there."""
        source, delivery = slot.sample.part.source, slot.delivery
        if not source.store.is_local or delivery.num_bytes > _MAX_WORKER_BYTES:
            return True
        path = fill_tables_of_cached(source, delivery.tar, self._wanted([slot]))
        if path is not None and len(path) <= _MAX_PATH:
            slot.path = path
        else:
            slot.enter(WAITING)  # for a fetch thread, whose read is timed
        return path is not None

    # In fetch threads.

    def read(self, slot: Slot) -> None:
        self._read([slot])

    def _read(self, slots: Sequence[Slot]) -> None:
        """Read neighboring clips of one shard together. If the tar is truncated, read each clip separately."""
        flight = self._flight
        alive = [slot for slot in slots if slot.run == flight.signals.run]
        for slot in slots:
            if slot not in alive:
                flight.finish(slot)
        if not alive:
            return
        try:
            read = self._fill(alive)
        except StreamvidError as error:
            for slot in alive:  # the store failed, and would fail for each of them
                flight.fail(slot, error)
            return
        if read.problem is not None and len(alive) > 1:
            for slot in alive:
                flight.fetchers.submit(partial(self.read, slot))
            return
        self._was_read(alive, read)

    def _fill(self, slots: Sequence[Slot]) -> ClipRead:
        first, wanted = slots[0], self._wanted(slots)
        with self._flight.while_alive(first.run):
            return read_parts(first.sample.part.source, first.delivery.tar, wanted, is_again=first.is_again)

    def _wanted(self, slots: Sequence[Slot]) -> list[Wanted]:
        wanted: list[Wanted] = []
        for slot in slots:
            slot.enter(READING)
            start = self._flight.block(slot)
            wanted += slot.delivery.wanted(self._flight.clips.view[start : start + slot.delivery.block_bytes])
        return wanted

    def _was_read(self, slots: Sequence[Slot], read: ClipRead) -> None:
        for slot in slots:
            slot.add_read(ClipRead(read.seconds / len(slots), slot.delivery.num_bytes))
            if read.problem is not None:
                self._flight.wrong(slot, read.problem)
            else:
                slot.path = ""
                slot.colors.clear()
                self._decode([slot])

    def _decode(self, slots: Sequence[Slot]) -> None:
        for slot in slots:
            slot.enter(QUEUED)
        self._flight.decoder.submit([self._task(slot) for slot in slots])

    def _task(self, slot: Slot) -> DecodeTask:
        """Return a slot's next decode task: first the clip, then one conditioning input at a time."""
        delivery, room, medium = slot.delivery, slot.batch.room, _medium(slot)
        assert room is not None
        if medium is not None and medium.medium.is_audio:
            return self._audio_task(slot, medium)
        part, file = delivery.part, delivery.row.clip
        start, place = self._flight.block(slot), room.video_place(slot.index)
        numbers: tuple[int, ...] | None = None
        if medium is not None:
            start += delivery.media_place(medium)
            part, file = medium.part, medium.file
            place = room.place(medium.medium, slot.index, medium.item)
            if part.pick.needs_times and part.numbers is not None:
                numbers = tuple(map(int, part.numbers))
        return DecodeTask(
            task_id=slot.number,
            generation=slot.run,
            batch=_batch_of(slot),
            source=_clip_block(slot, start, file, part),
            pick=part.pick,
            crop=delivery.view.crop,
            picture=self._picture(slot, room.bucket, is_mask=medium is not None and medium.medium.is_mask),
            out_offset=slot.batch.block.offset + place,
            num_threads=self._num_threads(part),
            numbers=numbers,
            audio=None if medium is not None else _audio_task(slot, room, part.audio),
        )

    def _audio_task(self, slot: Slot, medium: MediaPart) -> DecodeTask:
        """Return the task for an audio input, whose time zero is the time of the clip's first frame."""
        delivery, room, part = slot.delivery, slot.batch.room, medium.part
        assert room is not None and room.audio is not None
        seconds = slot.start_seconds if delivery.part.start_seconds is None else delivery.part.start_seconds
        place = slot.batch.block.offset + room.place(medium.medium, slot.index, medium.item)
        task = _silence(room.audio, place)._replace(
            stream="", first_sample=first_sample_at(seconds, room.audio.sample_rate)
        )
        first = self._flight.block(slot) + delivery.media_place(medium)
        block = _clip_block(slot, first, medium.file, part)
        return DecodeTask(slot.number, slot.run, _batch_of(slot), block, part.pick, None, None, 0, audio=task)

    def _picture(self, slot: Slot, bucket: Bucket, *, is_mask: bool) -> PictureFormat | None:
        if not bucket.has_pictures:
            return None
        is_scaled = slot.sample.part.dataset.manifest.clips == "copy"
        pixels = "mask" if is_mask else self._pixels
        return _format(bucket.height, bucket.width, pixels, self._accuracy or ("exact" if is_scaled else "fast"))

    def _num_threads(self, part: ClipPart) -> int:
        """Return the number of threads for a decoder: several for a large sample if workers would otherwise be idle."""
        if part.window is None or part.stream is None or len(part.window.packets) < _THREADED_FRAMES:
            return 1
        if part.stream.coded_width * part.stream.coded_height < _THREADED_PIXELS:
            return 1
        return max(1, min(_MAX_THREADS, self._num_workers // max(1, len(self._flight.slots))))

    # In the answer thread.

    def hear(self, answer: Answer) -> None:
        flight = self._flight
        slot = flight.slots[answer.task_id]
        slot.stats.decode_seconds += answer.seconds
        medium = _medium(slot)
        if answer.kind == "absent":
            slot.enter(WAITING)
            flight.fetchers.submit(partial(self.read, slot))
            return
        if slot.path and answer.kind != "error":
            slot.stats.num_bytes_fetched += (slot.delivery.part if medium is None else medium.part).num_bytes
        text = answer.text if medium is None else medium.label + answer.text
        if answer.kind == "corrupt":
            flight.wrong(slot, text)
        elif answer.kind == "bad":
            flight.reject(slot, text, is_corrupt=False)
        elif answer.kind == "error":
            flight.fail(slot, text)
        elif slot.run != flight.signals.run:
            flight.finish(slot)
        else:
            slot.colors[VIDEO if medium is None else (medium.medium.name, medium.item)] = answer.color
            if medium is None:
                slot.audio, slot.start_seconds = answer.audio, answer.first_time
            self._decoded(slot)

    def _decoded(self, slot: Slot) -> None:
        if len(slot.colors) <= len(slot.delivery.media):
            self._decode([slot])
            return
        batch = slot.batch
        assert batch.room is not None
        batch.room.blank(batch.memory, batch.block.offset, slot.index, slot.colors.keys())
        if slot.bad is not None and not slot.bad.is_gone and not slot.is_substitute:
            _log.warning(
                "%s was decoded through its container, because decoding from its packets failed: %s",
                slot.name,
                slot.bad.reason,
            )
        self._flight.finish(slot)


def _medium(slot: Slot) -> MediaPart | None:
    """Return the conditioning input to decode, or None if the clip itself is to be decoded."""
    return slot.delivery.media[len(slot.colors) - 1] if slot.colors else None


def _light_groups(slots: Sequence[Slot], max_pixels: int) -> Iterator[list[Slot]]:
    """Yield groups of consecutive slots whose tasks decode at most `max_pixels` pixels together, or of one slot."""
    group, total = list[Slot](), 0
    for slot in slots:
        part = slot.delivery.part
        pixels = _LIGHT_PIXELS  # of a whole clip, whose size is not known
        if part.window is not None and part.stream is not None:
            pixels = len(part.window.packets) * part.stream.coded_width * part.stream.coded_height
        if group and total + pixels > max_pixels:
            yield group
            group, total = [], 0
        group.append(slot)
        total += pixels
    if group:
        yield group


def _clip_block(slot: Slot, offset: int, file: SampleFile, part: ClipPart) -> ClipBlock:
    """Return the location of the part of one of a slot's files, whose memory is at `offset` in the clip arena."""
    return ClipBlock(
        offset=offset,
        table_bytes=part.table_bytes,
        num_bytes=part.num_bytes,
        checks=part.checks,
        num_frames=file.num_frames,
        stream="" if part.stream is None else part.stream.to_json(),
        key_time=0 if part.window is None else part.window.key_time,
        path=slot.path,
        ranges=[(file.offset + start, num_bytes) for start, num_bytes in part.ranges] if slot.path else (),
    )


def _batch_of(slot: Slot) -> int:
    """Return `DecodeTask.batch` for a slot's next task. Workers may delay only the result of a slot's last task."""
    return slot.batch.block.offset if len(slot.colors) == len(slot.delivery.media) else NO_BATCH


def _audio_task(slot: Slot, room: PictureRoom, part: AudioPart | None) -> AudioTask | None:
    """Return the task for a clip's audio, or None if no audio is delivered.

    part: packets of the audio; None if the clip has no audio.
    """
    shape = room.audio
    if shape is None:
        return None
    task = _silence(shape, slot.batch.block.offset + room.audio_place(slot.index))
    if part is None:
        return task
    rows, columns = (0, 0) if part.packets is None else part.packets.shape
    return task._replace(
        stream=part.stream,
        table=(rows, columns),
        first_sample=part.first_sample,
        offset_seconds=part.offset_seconds,
        num_decoded=part.num_decoded,
        num_frames=shape.num_frames if shape.stretch else 0,
    )


def _silence(shape: AudioShape, place: int) -> AudioTask:
    return AudioTask(shape.sample_rate, shape.num_channels, shape.num_samples, place)
