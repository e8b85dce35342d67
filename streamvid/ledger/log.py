"""Reader for one rank's delivery log."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from pathlib import Path

from streamvid.ledger.frames import read_frames
from streamvid.ledger.records import LoggedBatch, LoopStart, Position, read_record
from streamvid.ledger.sessions import rank_file, tail_file

START = Position(0, 0)
END = Position(1 << 63, 0)


@dataclass(frozen=True, slots=True)
class LoggedLoop:
    """One loop over a loader, as logged by one rank.

    number: index of the loop in the log.
    ends: maps each epoch to the step after the loop's last batch in that epoch.
    until: position at which a later loop of the same loader begins to replace this loop's deliveries.
    """

    number: int
    start: LoopStart
    ends: Mapping[int, int]
    num_batches: int
    until: Position

    @property
    def end(self) -> Position:
        """Position after the last batch, or the start of the loop if the loop has no batches."""
        return max((Position(*end) for end in self.ends.items()), default=self.start.position)


@dataclass(frozen=True)
class RankLog:
    """One rank's log in one session.

    urls: locations of the datasets, in the order in which the loader reads them.
    """

    session: Path
    rank: int
    urls: tuple[str, ...] = field(default=())

    def records(self) -> Iterator[LoopStart | LoggedBatch]:
        """Yield loop starts and batches, in order, up to the first damaged record.

        The log is read in blocks of at most a few MiB. Raises OSError if a file cannot be read.
        """
        number = 0
        for path in (rank_file(self.session, self.rank), tail_file(self.session, self.rank)):
            if not path.exists():
                continue
            with path.open("rb") as file:
                for value in read_frames(file):
                    if isinstance(value, dict) and "urls" in value:
                        continue
                    found = read_record(value, number)
                    if found is None:
                        break
                    several = [found] if isinstance(found, LoopStart) else found
                    number += len(several)
                    yield from several

    def url(self, dataset: int) -> str:
        """Return the location of one of the loader's datasets, or its index as text if the location was not logged."""
        return self.urls[dataset] if 0 <= dataset < len(self.urls) else str(dataset)

    @cached_property
    def loops(self) -> tuple[LoggedLoop, ...]:
        """All loops, in order."""
        found: list[tuple[LoopStart, dict[int, int], int]] = []
        for record in self.records():
            if isinstance(record, LoopStart):
                found.append((record, {}, 0))
            elif found:
                start, ends, count = found[-1]
                ends[record.position.epoch] = record.position.step + 1
                found[-1] = start, ends, count + 1
        loops: list[LoggedLoop] = []
        until = END
        for number in range(len(found) - 1, -1, -1):
            start, ends, count = found[number]
            loops.append(LoggedLoop(number, start, ends, count, until))
            if not start.is_again:
                until = min(until, start.position)
        return tuple(reversed(loops))

    def by_loop(self) -> Iterator[tuple[LoggedLoop, Iterator[LoggedBatch]]]:
        """Yield each loop with an iterator over its batches, in one pass over the file."""
        number = -1

        def loop_of(record: LoopStart | LoggedBatch) -> int:
            nonlocal number
            number += isinstance(record, LoopStart)
            return number

        for place, records in groupby(self.records(), loop_of):
            if 0 <= place < len(self.loops):
                yield self.loops[place], (one for one in records if isinstance(one, LoggedBatch))


def read_urls(session: Path, rank: int) -> tuple[str, ...]:
    """Return the locations, without credentials, of the datasets that a rank read. If the log is damaged, return ()."""
    with rank_file(session, rank).open("rb") as file:
        for value in read_frames(file):
            urls = value.get("urls") if isinstance(value, dict) else None
            return tuple(map(str, urls)) if isinstance(urls, list) else ()
    return ()
