"""Clips as they are stored, for a decoder of the caller's own: what `decode=False` hands over.

A batch's clips are read by whoever is free, all of one message: until the workers are up by the loader's own threads,
so that the first batch waits for no process to start; then by the workers, so that the caller's process does not.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from streamvid.buckets.pick import Pick
from streamvid.errors import StreamvidError
from streamvid.loader.delivery.clip_part import MAX_READS, ClipPart, clip_part, read_ranges, wrong_bytes
from streamvid.loader.delivery.kept import Kept
from streamvid.loader.workers.worker import GENERATION, MAX_MESSAGE_BYTES, Answer
from streamvid.storage import open_store, read_content
from streamvid.video.stream_info import StreamInfo

if TYPE_CHECKING:
    import torch

    from streamvid.dataset.packets import PacketTables
    from streamvid.storage import Store

_KEPT_BYTES = 64 * 2**20  # of packet tables

Place = tuple[str, int, int, str, int]
"""Of a shard's packet table: file, offset, bytes, SHA-256 as hex, and how many clips it has."""


@dataclass(frozen=True, eq=False, slots=True)
class EncodedClip:
    """One sample's video as it is stored, proved by its checksum.

    - data: uint8 (n,), in the loader's ring. With `packets` the range of the clip's bytes that the wanted frames need;
      without, the whole clip, a file of its container's format.
    - packets: int64 (k, 4): timestamp, start in `data`, size in bytes, and the place among the wanted frames, -1 for a
      packet that only others need; in the order of decoding, from a key frame on, whose frame has the first timestamp.
      None for a whole clip.
    - stream_json: what a decoder must be told, see `stream`; "" for a whole clip.
    - start, num_frames: the first wanted frame's number in the clip, and how many are wanted.
    - numbers: of all of them, ascending. One that repeats, where a frame rate above the clip's was asked for, has one
      packet, with its first place: a place that no packet has shows the frame of the place before.
    """

    data: torch.Tensor
    packets: torch.Tensor | None
    stream_json: str
    start: int
    num_frames: int
    numbers: tuple[int, ...] = ()

    @property
    def stream(self) -> StreamInfo | None:
        """Codec, headers, size and colours; None for a whole clip, whose container says them."""
        return StreamInfo.from_json(self.stream_json) if self.stream_json else None

    def map_tensors(self, function: Callable[[torch.Tensor], torch.Tensor]) -> EncodedClip:
        """The same with `function` of its tensors."""
        packets = None if self.packets is None else function(self.packets)
        return replace(self, data=function(self.data), packets=packets)

    def __reduce__(self) -> Any:
        # A tensor is pickled with all of the memory that it is a part of: the whole batch's, for each of its clips.
        own = self.map_tensors(lambda tensor: tensor.clone())
        return EncodedClip, (own.data, own.packets, self.stream_json, self.start, self.num_frames, self.numbers)


@dataclass(frozen=True, slots=True)
class ReadSlot:
    """One clip to read: where it lies in its store, which frames are wanted (`Pick.to_json`), and where they go.

    place: number of its shard's packet table among the task's, -1 for none. row: the clip's in it. room: bytes there.
    shard_sha256, shard_bytes: what a cache knows the tar by, where there may be one.
    """

    url: str
    path: str
    clip_offset: int
    clip_bytes: int
    clip_sha256: str
    num_clip_frames: int
    pick: list[Any]
    place: int
    row: int
    out_offset: int
    room: int
    shard_sha256: str = ""
    shard_bytes: int = 0


@dataclass(frozen=True, slots=True)
class ReadTask:
    """Clips to read; task_id is that of the first."""

    task_id: int
    generation: int
    places: tuple[Place, ...]
    slots: tuple[ReadSlot, ...]

    def to_json(self) -> bytes:
        slots = [[getattr(slot, name) for name in ReadSlot.__slots__] for slot in self.slots]
        return json.dumps({"read": [self.task_id, self.generation, self.places, slots]}).encode()

    @staticmethod
    def from_json(value: list[Any]) -> ReadTask:
        """Of what `to_json` wrote under "read"."""
        task_id, generation, places, slots = value
        return ReadTask(task_id, generation, tuple(map(tuple, places)), tuple(ReadSlot(*slot) for slot in slots))


@dataclass(slots=True)
class _Reading:
    """A clip on its way: where it goes, and what of it."""

    number: int
    slot: ReadSlot
    part: ClipPart
    table_bytes: int
    data: memoryview
    num_retries: int = 0

    @property
    def range(self) -> tuple[int, memoryview]:
        return self.slot.clip_offset + self.part.first_byte, self.data


class ClipReader:
    """Reads tasks into the ring. Safe in several threads.

    stores: those that are open already, by URL.
    """

    def __init__(self, clips: memoryview, ring: Any, stores: Mapping[str, Store] | None = None) -> None:
        self._clips, self._ring = clips, memoryview(ring)
        self._stores: dict[str, Store] = dict(stores or {})
        self._tables: Kept[PacketTables] = Kept(_KEPT_BYTES)

    def run(self, task: ReadTask) -> Answer:
        """Do a task; `results` has for each clip (kind, text, table bytes, data bytes, stream, extra reads, numbers
        of frames that follow from timestamps)."""
        since = time.monotonic()
        results: list[Any] = []
        # A task of a generation that the loader has left behind is passed over: nobody waits for its clips.
        if task.generation == GENERATION.unpack_from(self._clips)[0]:
            results = self._read_all(task)
        return Answer(os.getpid(), task.task_id, "read", "", time.monotonic() - since, None, results)

    def _read_all(self, task: ReadTask) -> list[Any]:
        results: list[Any] = [None] * len(task.slots)
        shards: dict[tuple[str, str], list[_Reading]] = {}
        for number, slot in enumerate(task.slots):
            try:
                shards.setdefault((slot.url, slot.path), []).append(self._begin(number, slot, task.places))
            except Exception as error:  # noqa: BLE001 - a worker must not end of it; the caller must hear of it
                results[number] = _failed(error)
        for several in shards.values():
            for one, result in zip(several, self._read(several), strict=True):
                results[one.number] = result
        return results

    def _begin(self, number: int, slot: ReadSlot, places: tuple[Place, ...]) -> _Reading:
        part = self._part(self._store(slot.url), slot, places)
        table = b"" if part.window is None else part.window.packets.tobytes()
        room = self._ring[slot.out_offset : slot.out_offset + slot.room]
        room[: len(table)] = table
        return _Reading(number, slot, part, len(table), room[len(table) : part.block_bytes])

    def _read(self, several: Sequence[_Reading]) -> list[tuple[Any, ...]]:
        """The results of clips of one shard: read together, and each alone where their tar ends too early."""
        try:
            problem = self._fill(several)
        except Exception as error:  # noqa: BLE001 - as above
            return [_failed(error)] * len(several)  # the store is what is wrong, for all of them
        if problem is not None and len(several) > 1:
            return [self._read([one])[0] for one in several]
        return [self._prove(one, problem) for one in several]

    def _fill(self, several: Sequence[_Reading]) -> str | None:
        slot, ranges = several[0].slot, [one.range for one in several]
        store, content = self._store(slot.url), (slot.shard_sha256, slot.shard_bytes)
        is_again = several[0].num_retries > 0
        return read_ranges(
            store, slot.path, ranges, lambda: read_content(store, slot.path, content, ranges, is_again=is_again)
        )

    def _prove(self, one: _Reading, problem: str | None) -> tuple[Any, ...]:
        """The result of a clip that was read; the same wrong bytes twice are what is stored."""
        before = ""
        while True:
            problem = problem or wrong_bytes(one.data, one.part.checks)
            if problem is None:
                stream = "" if one.part.stream is None else one.part.stream.to_json()
                numbers = list(one.part.numbers or ()) if one.part.pick.needs_times else None
                return ("done", "", one.table_bytes, one.part.num_bytes, stream, one.num_retries, numbers)
            if problem == before:
                return ("bad", f"{problem}, twice; copy the shard again", 0, 0, "", one.num_retries, None)
            if one.num_retries + 1 >= MAX_READS:
                text = f"{MAX_READS} reads gave other bytes each time; look at the network and the store"
                return ("error", text, 0, 0, "", one.num_retries, None)
            before, one.num_retries = problem, one.num_retries + 1
            try:
                problem = self._fill([one])
            except Exception as error:  # noqa: BLE001 - as above
                return _failed(error)

    def _part(self, store: Store, slot: ReadSlot, places: tuple[Place, ...]) -> ClipPart:
        index = None if slot.place < 0 else self._table(store, slot, places[slot.place]).clip(slot.row)
        row = {
            "clip_bytes": slot.clip_bytes,
            "clip_sha256": bytes.fromhex(slot.clip_sha256),
            "window_num_frames": slot.num_clip_frames,
        }
        return clip_part(row, index, Pick.from_json(slot.pick), room=slot.room)

    def _store(self, url: str) -> Store:
        if url not in self._stores:
            self._stores[url] = open_store(url)
        return self._stores[url]

    def _table(self, store: Store, slot: ReadSlot, place: Place) -> PacketTables:
        from streamvid.dataset.integrity import read_packets
        from streamvid.dataset.packets import PacketTables

        def make() -> PacketTables:
            path, offset, num_bytes, sha256, num_clips = place
            data = read_packets(store, path, offset, num_bytes, bytes.fromhex(sha256))
            where = f"{slot.url}: the packets of {slot.path} in {path}"
            return PacketTables(data, bytes.fromhex(sha256), num_clips, where)

        return self._tables.get((slot.url, *place), make)


def _failed(error: Exception) -> tuple[Any, ...]:
    text = str(error) if isinstance(error, StreamvidError) else f"{type(error).__name__}: {error}"
    return ("error", text[: MAX_MESSAGE_BYTES // 8], 0, 0, "", 0, None)
