"""Status of a build, which `streamvid shard --status` reads from another process."""

from __future__ import annotations

import contextlib
import json
import math
import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, TypeAlias

from streamvid.cluster.lease import LeaseNote, find_leases
from streamvid.dataset.sealed_json import MANIFEST
from streamvid.dataset.versions.publish import LEASES, RUN
from streamvid.errors import DatasetError, StorageError
from streamvid.host.findings import Findings
from streamvid.host.journal import include_any
from streamvid.sharder.rejections import OTHER
from streamvid.sharder.work.destination import STAGING, Destination
from streamvid.sharder.work.shared_journal import lines_of
from streamvid.sharder.work.staging import JOURNALS, Staging
from streamvid.sharder.work.tasks import PHASES, TASKS, task_folder
from streamvid.storage import LocalStore

State: TypeAlias = Literal["running", "stopped", "sealed"]
_FILE = "status.json"
_SECONDS_BETWEEN_WRITES, _SECONDS_BETWEEN_PUBLICATIONS = 1.0, 30.0


@dataclass(frozen=True, slots=True)
class Phase:
    """Progress of one phase of a build.

    done, total: numbers of files, clips or shards.
    done_before: number of files, clips or shards that earlier runs had finished.
    seconds: time that this run has spent in the phase.
    """

    name: str
    done: int
    total: int
    done_before: int
    seconds: float

    @property
    def per_second(self) -> float | None:
        """Average number of files, clips or shards finished per second in this run; None until one is finished."""
        done = self.done - self.done_before
        return done / self.seconds if done > 0 and self.seconds > 0 else None

    @property
    def seconds_left(self) -> float | None:
        """Expected remaining time for the phase, based on its average rate; None if the rate is unknown."""
        return None if self.per_second is None else (self.total - self.done) / self.per_second

    def to_json(self) -> dict[str, Any]:
        """Return the fields, the rate and the remaining time as JSON-serializable values."""
        return {**asdict(self), "per_second": self.per_second, "seconds_left": self.seconds_left}


@dataclass(frozen=True, slots=True)
class ShardStatus:
    """Status of a build.

    state: "running" if a run or a task holds a lease on the build; "stopped" if the build is unfinished and no lease is
        held, so that the same command resumes the build; "sealed" if the dataset is finished. For a build on another
        machine, the clocks of both machines must agree within two minutes.
    host, pid: machine and process ID of the last run.
    seconds_ago: seconds since `phases` was last updated. Updates occur about every second on this machine or in a
        shared folder, and every 30 seconds through an object store.
    phases: phases of the last run, ending with the current phase; for tasks, sums over the tasks that have started.
    rejections: maps each kind of rejection to its number of files or clips. If a run without tasks uses an object
        store, these numbers are known only on the machine where it runs.
    num_tasks: number of tasks that have started; 0 if the build has no tasks.
    """

    url: str
    state: State
    host: str = ""
    pid: int = 0
    seconds_ago: float = 0.0
    phases: tuple[Phase, ...] = ()
    rejections: Mapping[str, int] = field(default_factory=dict)
    num_tasks: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON-serializable values."""
        return {**asdict(self), "phases": [phase.to_json() for phase in self.phases]}


class StatusFile:
    """Progress callback that also writes the progress to a file in the staging folder, at most once per second."""

    def __init__(self, staging: Staging, progress: Callable[[str, int, int], None]) -> None:
        self._folder, self._lease, self._progress = staging.own, staging.lease, progress
        path = "/".join(filter(None, (STAGING, task_folder(staging.share), _FILE)))
        self._published = None if staging.store.is_local else (staging.store, path)
        self._phases: dict[str, Phase] = {}
        self._since = self._written_at = self._published_at = 0.0
        self._current = ""

    def __call__(self, name: str, done: int, total: int) -> None:
        self._lease.check()
        now, is_new = time.monotonic(), name != self._current
        if is_new:
            self._current, self._since = name, now
        before = done if is_new else self._phases[name].done_before
        self._phases[name] = Phase(name, done, total, before, now - self._since)
        if is_new or done == total or now - self._written_at >= _SECONDS_BETWEEN_WRITES:
            self._written_at = now
            self._write()
        self._progress(name, done, total)

    def _write(self) -> None:
        about = {"host": socket.gethostname(), "pid": os.getpid(), "time": time.time()}
        data = json.dumps({**about, "phases": [asdict(phase) for phase in self._phases.values()]}).encode()
        if self._folder.is_dir():  # sealing removes the folder before its last step
            # The build does not depend on this file. If the disk is full, another write reports the error.
            with contextlib.suppress(StorageError):
                LocalStore(self._folder).put(_FILE, data)
                self._publish(data)

    def _publish(self, data: bytes) -> None:
        """Copy the status to the object store, where other machines read it."""
        now, is_complete = time.monotonic(), all(phase.done == phase.total for phase in self._phases.values())
        is_due = is_complete or now - self._published_at >= _SECONDS_BETWEEN_PUBLICATIONS
        if self._published is not None and is_due:
            self._published_at = now
            store, path = self._published
            store.put(path, data)


def read_status(dest: Destination) -> ShardStatus:
    """Return the status of the build at `dest`, including its tasks on all machines.

    Raises DatasetError if there is neither a dataset nor a build at `dest`.
    """
    try:
        leases = {lease.name: lease.note for lease in find_leases(dest.store, LEASES)}
        notes = _status_notes(dest, leases)
        rejections = _count_rejections(dest)
    except (OSError, StorageError):  # also raised if the build ends in the meantime and removes its folder
        notes, leases = [], {}
    is_running = any(lease.is_alive for lease in leases.values())
    if not notes and not is_running and dest.store.size(MANIFEST) is not None:
        return ShardStatus(dest.url, "sealed")
    if not notes and not leases:
        raise DatasetError(
            f"there is neither a dataset nor an unfinished build at {dest.url}; check the location, or start the build"
        )
    num_tasks = sum(note.is_task for note in notes)
    state: State = "running" if is_running else "stopped"
    if not notes:  # the build has just begun
        lease = max(leases.values(), key=lambda lease: lease.renewed)
        return ShardStatus(dest.url, state, lease.host, lease.pid, max(0.0, time.time() - lease.renewed))
    latest = max(notes, key=lambda note: note.time)
    phases = _phases([note for note in notes if note.is_task == latest.is_task])
    ago = latest.seconds_ago
    return ShardStatus(dest.url, state, latest.host, latest.pid, ago, phases, rejections, num_tasks)


def read_task_phases(dest: Destination) -> tuple[Phase, ...]:
    """Return the combined phases of all tasks without reading journals. Raises StorageError if the store fails."""
    return _phases([note for note in _status_notes(dest, {}) if note.is_task])


@dataclass(frozen=True, slots=True)
class _Note:
    """Status of one run or task."""

    host: str
    pid: int
    time: float
    phases: tuple[Phase, ...]
    is_task: bool

    @property
    def seconds_ago(self) -> float:
        return max(0.0, time.time() - self.time)


def _status_notes(dest: Destination, leases: Mapping[str, LeaseNote]) -> list[_Note]:
    """Return the status of each task, and of the run without tasks if there is one."""
    found: dict[str, bytes] = {}
    own = f"{STAGING}/{_FILE}"
    if (dest.folder / _FILE).exists():  # newer than its copy in an object store
        found[own] = (dest.folder / _FILE).read_bytes()
    elif dest.store.size(own) is not None:
        found[own] = dest.store.read(own)
    for state in dest.store.files(f"{STAGING}/{TASKS}"):
        if state.path.endswith(f"/{_FILE}"):
            found[state.path] = dest.store.read(state.path)
    notes = []
    for path, data in found.items():
        name = RUN if path == own else path.split("/")[-2]
        with contextlib.suppress(ValueError, TypeError, KeyError):  # not written by a sharder
            is_alive = name in leases and leases[name].is_alive
            notes.append(_parse_note(data, is_task=path != own, is_alive=is_alive))
    return notes


def _parse_note(data: bytes, *, is_task: bool, is_alive: bool) -> _Note:
    said = json.loads(data)
    phases = [Phase(**phase) for phase in said["phases"]]
    numbers = [said["time"], *(n for one in phases for n in (one.done, one.total, one.done_before, one.seconds))]
    if any(phase.name not in PHASES for phase in phases) or not all(map(math.isfinite, numbers)):
        raise ValueError
    note = _Note(str(said["host"]), int(said["pid"]), said["time"], tuple(phases), is_task)
    if is_alive:  # the last phase has continued since the note was written
        phases[-1:] = [replace(phase, seconds=phase.seconds + note.seconds_ago) for phase in phases[-1:]]
    return replace(note, phases=tuple(phases))


def _phases(notes: Sequence[_Note]) -> tuple[Phase, ...]:
    """Return the combined phases of all runs. Numbers are added up, and the time is taken from the slowest run."""
    found: dict[str, Phase] = {}
    for phase in sorted((phase for note in notes for phase in note.phases), key=lambda phase: PHASES.index(phase.name)):
        sums = found.get(phase.name, Phase(phase.name, 0, 0, 0, 0.0))
        found[phase.name] = Phase(
            phase.name,
            sums.done + phase.done,
            sums.total + phase.total,
            sums.done_before + phase.done_before,
            max(sums.seconds, phase.seconds),
        )
    return tuple(found.values())


def _count_rejections(dest: Destination) -> dict[str, int]:
    """Return the number of rejections of each kind in all journals."""
    findings = Findings()
    for name in JOURNALS:
        if (dest.folder / name).exists():
            with (dest.folder / name).open("rb") as file:
                include_any(findings, file)
        for state in dest.store.files(f"{STAGING}/{TASKS}"):
            if state.path.endswith(f"/{name}"):
                include_any(findings, lines_of(dest.store, state))
    rejected = (
        found for found in findings.values() if isinstance(found, dict) and isinstance(found.get("rejected"), str)
    )
    kinds = (str(finding.get("kind") or OTHER) for finding in rejected)
    return dict(Counter(kinds).most_common())
