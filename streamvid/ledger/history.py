"""History of a run, read from its ledger: which deliveries count after interruptions and resumes.

    session    ranks that were started together: a folder with one log per rank, and the plan and position at which it
               began. A loader that continues with another version of a dataset begins a new session
    attempt    consecutive sessions with the same plan and position. They deliver the same batches
    history    per attempt and rank, the deliveries before the position at which a later attempt began

A later attempt replaces all deliveries from its position on, because the model was restored to that position. Before
it, the log of any session of an attempt counts: a rank may have been killed before it opened its log in the session
that the other ranks started. In the last attempt, only the last session of each rank counts, because the log does not
show how many steps of an earlier session the final model includes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from streamvid.errors import SourceError
from streamvid.ledger.frames import MAX_JSON_BYTES
from streamvid.ledger.log import END, START, LoggedLoop, RankLog, read_urls
from streamvid.ledger.records import LEDGER_VERSION, LoggedBatch, Position
from streamvid.ledger.sessions import SESSION_FILE, ranks_in, session_folder, session_numbers


@dataclass(frozen=True, slots=True)
class Stretch:
    """Consecutive deliveries from one rank in one loop, none of which was replaced later.

    The deliveries are at positions from `start` to `until` (exclusive).
    """

    log: RankLog
    loop: LoggedLoop
    start: Position
    until: Position

    def __contains__(self, position: Position) -> bool:
        return self.start <= position < self.until


@dataclass(frozen=True)
class Attempt:
    """Consecutive sessions with the same plan and start.

    plan: values that determine the plan, as JSON; see LedgerWriter.begin.
    cursor: position at which the sessions began.
    logs: maps each rank to its logs, in the order of the sessions.
    until: position at which a later attempt begins to replace this attempt's deliveries; END for the last attempt.
    """

    number: int
    sessions: tuple[int, ...]
    plan: Mapping[str, Any]
    cursor: Mapping[str, Any]
    logs: Mapping[int, tuple[RankLog, ...]]
    until: Position = END

    @property
    def num_ranks(self) -> int:
        """Number of ranks in each session."""
        return int(self.plan["num_ranks"])

    @property
    def start(self) -> Position:
        """Position at which the sessions began."""
        return Position(self.cursor["epoch"], self.cursor["step"])

    @property
    def num_logged(self) -> int:
        """Number of batches in all logs, including batches that later attempts replace."""
        return sum(loop.num_batches for logs in self.logs.values() for log in logs for loop in log.loops)

    def stretches(self, rank: int) -> list[Stretch]:
        """Return a rank's deliveries that were not replaced later, in order."""
        logs = self.logs.get(rank, ())
        if self.until == END:
            logs = logs[-1:]
        found: list[Stretch] = []
        reached = START
        for log in reversed(logs):
            later = [
                Stretch(log, loop, max(reached, loop.start.position), min(loop.until, self.until)) for loop in log.loops
            ]
            found += [one for one in later if one.start < one.until and one.start < one.loop.end]
            reached = max([reached, *(one.end for one in log.loops)])
        return found

    def batches(self, rank: int) -> Iterator[tuple[RankLog, LoggedBatch, bool]]:
        """Yield (log, batch, counts) for every batch in a rank's logs.

        counts: True if the batch was not replaced later.
        """
        stretches = {(one.log.session, one.loop.number): one for one in self.stretches(rank)}
        for log in self.logs.get(rank, ()):
            for loop, batches in log.by_loop():
                stretch = stretches.get((log.session, loop.number))
                for batch in batches:
                    yield log, batch, stretch is not None and batch.position in stretch

    def deliveries(self, rank: int) -> Iterator[tuple[Stretch, Iterator[LoggedBatch]]]:
        """Yield a rank's stretches, each with an iterator over its batches. Each log is read once."""
        stretches = self.stretches(rank)
        for log in dict.fromkeys(one.log for one in stretches):
            mine = {one.loop.number: one for one in stretches if one.log is log}
            for loop, batches in log.by_loop():
                if (stretch := mine.get(loop.number)) is not None:
                    yield stretch, filter(partial(_is_in, stretch), batches)


def _is_in(stretch: Stretch, batch: LoggedBatch) -> bool:
    return batch.position in stretch


def read_history(folder: Path) -> tuple[Attempt, ...]:
    """Return the attempts recorded in a ledger, in order.

    Raises SourceError if the folder is not a ledger, or if a session's plan cannot be read.
    """
    try:
        numbers = session_numbers(folder)
        if not numbers:
            raise SourceError(f"{folder} contains no ledger; pass the folder that was set as output.ledger")
        return _with_ends(_attempts(folder, numbers))
    except OSError as error:
        raise SourceError(
            f"{folder}: the ledger cannot be read ({error.strerror or error}); check the folder and its permissions"
        ) from error


def _attempts(folder: Path, numbers: list[int]) -> list[Attempt]:
    attempts: list[Attempt] = []
    for number in numbers:
        place = session_folder(folder, number)
        logs = {rank: RankLog(place, rank, read_urls(place, rank)) for rank in ranks_in(place)}
        logs = {rank: log for rank, log in logs.items() if log.loops}
        if not logs:
            continue  # it was killed before its first batch
        plan, cursor = _session(place / SESSION_FILE)
        last = attempts[-1] if attempts else None
        if last is not None and (last.plan, last.cursor) == (plan, cursor):
            joined = {
                rank: (*last.logs.get(rank, ()), *((logs[rank],) if rank in logs else ()))
                for rank in sorted({*last.logs, *logs})
            }
            attempts[-1] = Attempt(last.number, (*last.sessions, number), plan, cursor, joined)
        else:
            single = {rank: (log,) for rank, log in logs.items()}
            attempts.append(Attempt(len(attempts), (number,), plan, cursor, single))
    return attempts


def _with_ends(attempts: list[Attempt]) -> tuple[Attempt, ...]:
    """Return the attempts, with `until` set to the position at which a later attempt begins to replace each of them."""
    found: list[Attempt] = []
    until = END
    for one in reversed(attempts):
        found.append(Attempt(one.number, one.sessions, one.plan, one.cursor, one.logs, until))
        starts = [
            loop.start.position
            for logs in one.logs.values()
            for log in logs
            for loop in log.loops
            if not loop.start.is_again
        ]
        until = min([until, one.start, *starts])
    return tuple(reversed(found))


def _session(path: Path) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Return a session's (plan, cursor). Raises SourceError if either of them is invalid."""
    with path.open("rb") as file:
        data = file.read(MAX_JSON_BYTES)
    try:
        value = json.loads(data)
        version, plan, cursor = value["version"], value["plan"], value["start"]
        is_right = all(type(cursor[name]) is int and cursor[name] >= 0 for name in ("epoch", "step"))
        is_right = is_right and type(plan["num_ranks"]) is int and 0 < plan["num_ranks"] <= 1 << 24
    except (ValueError, TypeError, KeyError, RecursionError):
        version, is_right = LEDGER_VERSION, False
    if version != LEDGER_VERSION:
        raise SourceError(
            f"{path} uses version {version!r} of the ledger format, but this version of streamvid reads "
            f"only version {LEDGER_VERSION}; use the streamvid version that wrote the ledger"
        )
    if not is_right:
        raise SourceError(f"{path} is damaged; remove the folder {path.parent} to read the other sessions")
    return plan, cursor
