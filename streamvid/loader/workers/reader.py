"""Reader that fills the ring with stored clips, for callers that decode clips themselves or use features.

One thread or process reads all clips of a task. Until the workers have started, the loader's own threads read, so that
the first batch does not wait for a process. After that, workers read local stores, to relieve the caller's process.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from streamvid.errors import StreamvidError
from streamvid.loader.view.clip_part import ClipPart, clip_part, read_ranges, wrong_bytes
from streamvid.loader.workers.cache import SharedCache
from streamvid.loader.workers.messages import GENERATION, Answer, ReadResult, ReadSlot, ReadTask, short_text
from streamvid.storage import UNPROVEN, WrongReads, open_store

if TYPE_CHECKING:
    from streamvid.dataset.packets import PacketTables
    from streamvid.loader.view.index_row import PacketsPlace
    from streamvid.storage import Store

_TABLES_BYTES = 64 * 2**20  # size of cached packet tables


@dataclass(slots=True)
class _Reading:
    """Clip in progress: the part to read, the destination of the data, and the reads that returned wrong bytes."""

    number: int
    slot: ReadSlot
    part: ClipPart
    data: memoryview
    wrong: WrongReads = field(default_factory=WrongReads)

    @property
    def range(self) -> tuple[int, memoryview]:
        return self.slot.clip.offset + self.part.first_byte, self.data


class ClipReader:
    """Reader that places clips in the ring. Thread-safe.

    stores: open stores by URL; other stores are opened on first use.
    """

    def __init__(self, clips: memoryview, ring: Any, stores: Mapping[str, Store] | None = None) -> None:
        self._clips, self._ring = clips, memoryview(ring)
        self._stores: dict[str, Store] = dict(stores or {})
        self._tables: SharedCache[PacketTables] = SharedCache(_TABLES_BYTES)

    def run(self, task: ReadTask) -> Answer:
        """Run a task and return its results."""
        since = time.monotonic()
        results: tuple[ReadResult, ...] = ()
        # Skip the tasks of a run that is over.
        if task.generation == GENERATION.unpack_from(self._clips)[0]:
            results = self._read_all(task)
        return Answer(os.getpid(), task.task_id, "read", "", time.monotonic() - since, None, results)

    def _read_all(self, task: ReadTask) -> tuple[ReadResult, ...]:
        results: dict[int, ReadResult] = {}
        shards: dict[tuple[str, str], list[_Reading]] = {}
        for number, slot in enumerate(task.slots):
            try:
                shards.setdefault((slot.tar.url, slot.tar.path), []).append(self._begin(number, slot, task.tables))
            except Exception as error:  # noqa: BLE001 - the caller must receive it, and the worker continues
                results[number] = _failed(error)
        for several in shards.values():
            for one, result in zip(several, self._read(several), strict=True):
                results[one.number] = result
        return tuple(results[number] for number in range(len(task.slots)))

    def _begin(self, number: int, slot: ReadSlot, tables: Sequence[PacketsPlace]) -> _Reading:
        index = None if slot.table < 0 else self._table(slot, tables[slot.table]).clip(slot.row)
        part = clip_part(slot.clip, index, slot.pick, room=slot.room)
        room = self._ring[slot.out_offset : slot.out_offset + slot.room]
        if part.window is not None:
            room[: part.table_bytes] = part.window.packets.tobytes()
        return _Reading(number, slot, part, room[part.table_bytes : part.block_bytes])

    def _read(self, several: Sequence[_Reading]) -> list[ReadResult]:
        """Read clips of one shard together. If the tar is truncated, read each clip separately."""
        try:
            problem = self._fill(several)
        except Exception as error:  # noqa: BLE001 - as above
            return [_failed(error)] * len(several)  # the store failed, and would fail for each of them
        if problem is not None and len(several) > 1:
            return [self._read([one])[0] for one in several]
        return [self._verify(one, problem) for one in several]

    def _fill(self, several: Sequence[_Reading]) -> str | None:
        tar, ranges = several[0].slot.tar, [one.range for one in several]
        content, is_again = (tar.sha256, tar.num_bytes), len(several[0].wrong) > 0
        return read_ranges(self._store(tar.url), tar.path, content, ranges, is_again=is_again)

    def _verify(self, one: _Reading, problem: str | None) -> ReadResult:
        """Verify a clip that was read, and return its result. Wrong bytes are read again."""
        while (problem := problem or wrong_bytes(one.data, one.part.checks)) is not None:
            num_retries, verdict = len(one.wrong), one.wrong.judge(problem)
            if verdict == "stored":
                return ReadResult(
                    "bad",
                    f"{problem}, and a second read gave the same result; copy the shard again",
                    num_retries=num_retries,
                )
            if verdict == "unproven":
                return ReadResult("error", UNPROVEN, num_retries=num_retries)
            try:
                problem = self._fill([one])
            except Exception as error:  # noqa: BLE001 - as above
                return _failed(error)
        part = one.part
        return ReadResult(
            kind="done",
            table_bytes=part.table_bytes,
            num_bytes=part.num_bytes,
            stream="" if part.stream is None else part.stream.to_json(),
            num_retries=len(one.wrong),
            numbers=tuple(part.numbers or ()) if part.pick.needs_times else None,
        )

    def _store(self, url: str) -> Store:
        if url not in self._stores:
            self._stores[url] = open_store(url)
        return self._stores[url]

    def _table(self, slot: ReadSlot, place: PacketsPlace) -> PacketTables:
        def make() -> PacketTables:
            return place.read(self._store(slot.tar.url), slot.tar.path)

        return self._tables.get((slot.tar.url, *place), make)


def _failed(error: Exception) -> ReadResult:
    text = str(error) if isinstance(error, StreamvidError) else f"{type(error).__name__}: {error}"
    return ReadResult("error", short_text(text))
