"""Leases, each of which lets one process work on a destination. A lease expires if its holder disappears.

A lease is a small file in the store that all machines see. It is created with a conditional request, so that exactly
one of several processes gets it. Its holder renews it every few seconds. A process that has lost its lease stops at
its next check. On the holder's machine, other processes check directly whether the holder is alive, and need not wait.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from streamvid.errors import DatasetError, StorageError
from streamvid.storage import DeniedError, LocalStore, Store

RENEW_SECONDS, EXPIRE_SECONDS = 10.0, 120.0
_WATCH_SECONDS = 1.5 * RENEW_SECONDS
_PAUSE_SECONDS = 0.5
_logger = logging.getLogger(__name__)
_MAX_NOTE_BYTES = 4096
#: A lease that expired is never removed by others, because its holder may still renew it. Its successor has the next
#: number instead, which only one process can create.
_FILE = re.compile(r"(.+)-(\d{6,60})\.json")
_own: Counter[tuple[str, str]] = Counter()
"""Maps each place to the number of threads in this process that hold the lease there or are trying to create it.
A lease that this process could not remove is not counted.
"""
_own_lock = threading.Lock()


@dataclass(frozen=True, slots=True)
class LeaseNote:
    """Content of a lease file.

    process: identifier of the holder, unique among all processes on all machines.
    renewed: Unix time of the last renewal.
    admits_tasks: True if other leases may be held at the same time.
    """

    host: str
    pid: int
    process: str
    renewed: float
    admits_tasks: bool

    @property
    def is_here(self) -> bool:
        """True if the holder is or was a process on this machine."""
        return self.process.rpartition("/")[0] == _machine()

    @property
    def is_dead(self) -> bool:
        """True if the holder was a process on this machine and has ended."""
        return self.is_here and self.process != _process(self.pid)

    @property
    def is_alive(self) -> bool:
        """True if the holder seems to be alive, according to the clocks of its machine and of this machine.

        The result may be wrong if the clocks differ. To exclude other processes, use `acquire`.
        """
        return not self.is_dead if self.is_here else time.time() - self.renewed < EXPIRE_SECONDS


@dataclass(frozen=True, slots=True)
class FoundLease:
    """Lease found in a store. data: content of the lease file, which changes with each renewal."""

    path: str
    name: str
    number: int
    data: bytes
    note: LeaseNote


class Lease:
    """Lease held by this process. A thread renews it until `stop` or `release` is called."""

    def __init__(self, store: Store, path: str, admits_tasks: bool) -> None:
        self._store, self.path = store, path
        self._admits_tasks, self._is_lost, self._is_counted = admits_tasks, False, True
        self._stopped, self._lock = threading.Event(), threading.Lock()
        self._thread = threading.Thread(target=self._renew_often, name="streamvid-lease", daemon=True)

    def start(self) -> None:
        """Start renewing the lease."""
        self._thread.start()

    def _renew_often(self) -> None:
        while not self._stopped.wait(RENEW_SECONDS):
            with contextlib.suppress(StorageError, DatasetError):  # the next renewal, or `check`, may succeed
                self.renew()

    def renew(self) -> None:
        """Renew the lease now. Raises DatasetError if it was lost, and StorageError if the store fails."""
        with self._lock:
            if not self._is_lost and not self._stopped.is_set():
                self._is_lost = self._is_taken()
                if not self._is_lost:
                    self._store.put(self.path, note_bytes(self._admits_tasks))
        self.check()

    def _is_taken(self) -> bool:
        folder, _, file = self.path.rpartition("/")
        own = _FILE.fullmatch(file)
        assert own is not None
        latest = {lease.name: lease for lease in find_leases(self._store, folder)}.get(own[1])
        return latest is None or latest.path != self.path

    def check(self) -> None:
        """Raise DatasetError if another process has taken over or removed this lease."""
        if self._is_lost:
            raise DatasetError(
                f"{self._store.url}: this process has lost its lease: either its attempts to renew the lease "
                f"failed for {EXPIRE_SECONDS:.0f} s and another process has taken over, or the lease was removed; wait "
                "until no other process is using this location, then run the same command again"
            )

    def close_to_tasks(self) -> None:
        """Stop admitting tasks, so that this process works alone from now on."""
        self._admits_tasks = False
        self.renew()

    def stop(self) -> None:
        """Stop renewing the lease. It remains until it expires, or until this process acquires it again."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()
        if self._is_counted:
            self._is_counted = False
            _count(self._store, self.path, -1)

    def release(self) -> None:
        """Remove the lease. If the store fails, the lease remains until it expires."""
        self.stop()
        if not self._is_lost:
            with contextlib.suppress(StorageError):
                self._store.remove(self.path)


def acquire(
    store: Store, folder: str, name: str, conflicts: Callable[[FoundLease], bool], admits_tasks: bool = False
) -> Lease:
    """Acquire the lease `name` in a folder of the store.

    conflicts: function that returns True for a lease that has another name and must not be held at the same time.

    The lease of a process that ran on this machine and has ended is taken over immediately. The lease of a process
    on another machine is taken over once it has expired; this function waits until then.

    Raises DatasetError if another process holds the lease or a conflicting lease, and StorageError if the store fails.
    """
    watch = _Watch(store, folder)
    while True:
        earlier = watch.wait(lambda lease: lease.name == name)
        number = 1 + max((lease.number for lease in earlier if lease.name == name), default=0)
        path = f"{folder}/{name}-{number:06d}.json"
        try:
            if _create(store, path, admits_tasks):
                break
        except DeniedError as error:
            raise DeniedError(
                f"{store.url} is read-only for this process; use credentials with write access, or work on a copy. "
                f"{error}"
            ) from error
    lease = Lease(store, path, admits_tasks)
    try:
        for old in earlier:
            if old.name == name:
                store.remove(old.path)
        # Each process creates its lease before it looks at the others, so at least one of two is refused.
        watch.wait(lambda other: other.path != path and conflicts(other))
        lease.start()
    except BaseException:
        lease.release()
        raise
    return lease


def _place(store: Store, path: str) -> tuple[str, str]:
    return os.path.realpath(store.url) if store.is_local else store.url, path


@contextlib.contextmanager
def held(store: Store, folder: str, name: str) -> Iterator[Lease]:
    """Hold a lease that excludes all other leases in its folder. On exit, remove folders that are left empty.

    Raises the same errors as `acquire`.
    """
    is_new = isinstance(store, LocalStore) and not store.root.exists()
    lease = acquire(store, folder, name, lambda _: True)
    try:
        yield lease
    finally:
        lease.release()
        remove_empty(store, folder, and_root=is_new)


def remove_empty(store: Store, folder: str, *, and_root: bool) -> None:
    """Remove a folder from a local store if it is empty, then each parent folder that is left empty."""
    if isinstance(store, LocalStore):
        root = store.root
        with contextlib.suppress(OSError):  # missing, or not empty
            for path in (root / folder, *(root / parent for parent in Path(folder).parents[:-1]), *[root] * and_root):
                path.rmdir()


def _count(store: Store, path: str, difference: int) -> None:
    with _own_lock:
        _own[_place(store, path)] += difference


def _create(store: Store, path: str, admits_tasks: bool) -> bool:
    data = note_bytes(admits_tasks)
    _count(store, path, 1)  # before others in this process can see the lease
    is_created = False
    try:
        try:
            is_created = store.create(path, data)
        except StorageError:
            if not store.is_local:
                raise
            is_created = store.create(path, data)  # a process that just ended may have removed the folder
        return is_created
    finally:
        if not is_created:
            _count(store, path, -1)


def wait_until_free(store: Store, folder: str, conflicts: Callable[[FoundLease], bool]) -> None:
    """Wait until conflicting leases have ended or expired. Raises DatasetError if a conflicting holder is alive."""
    _Watch(store, folder).wait(conflicts)


class _Watch:
    """Observer that finds out whether lease holders are alive.

    A lease that changes proves that its holder is alive. The age of a lease does not, because clocks may differ.
    """

    def __init__(self, store: Store, folder: str) -> None:
        self._store, self._folder = store, folder
        self._first: dict[str, bytes] = {}
        self._since = time.monotonic()

    def wait(self, conflicts: Callable[[FoundLease], bool]) -> list[FoundLease]:
        """Wait until no conflicting lease remains, and return all leases.

        Raises DatasetError if the holder of a conflicting lease is alive.
        """
        has_told = False
        while True:
            leases = find_leases(self._store, self._folder)
            for lease in leases:
                self._first.setdefault(lease.path, lease.data)
            held = [lease for lease in leases if conflicts(lease) and self._is_held(lease)]
            if not held:
                return leases
            if not has_told:
                _logger.warning(
                    "%s may still be in use by a process on %s; waiting up to %.0f s to find out whether that process "
                    "is running",
                    *(self._store.url, held[0].note.host, EXPIRE_SECONDS),
                )
                has_told = True
            time.sleep(_PAUSE_SECONDS)

    def _is_held(self, lease: FoundLease) -> bool:
        """Return False if the lease has ended or expired, and True while its holder may still be alive.

        Raises DatasetError if the holder of the lease is alive."""
        is_left = lease.note.process == _process(os.getpid()) and not _own[_place(self._store, lease.path)]
        if lease.note.is_dead or is_left:
            return False
        watched, age = time.monotonic() - self._since, time.time() - lease.note.renewed
        is_renewed = lease.data != self._first[lease.path]
        if lease.note.is_here or (is_renewed and watched >= _WATCH_SECONDS):
            raise DatasetError(
                f"{_title(lease.name)}, process {lease.note.pid} on {lease.note.host}, is working on "
                f"{self._store.url}; wait until that process ends, or choose another destination"
            )
        return is_renewed or watched < (_WATCH_SECONDS if age > EXPIRE_SECONDS else EXPIRE_SECONDS)


def find_leases(store: Store, folder: str) -> list[FoundLease]:
    """Return the latest lease for each name. If a lease is damaged, its holder is unknown.

    Files that are not leases are ignored.
    """
    latest: dict[str, tuple[int, str, int]] = {}
    for state in store.files(folder):
        match = _FILE.fullmatch(state.path.rpartition("/")[2])
        if match is not None and state.path.count("/") == folder.count("/") + 1:
            latest[match[1]] = max(latest.get(match[1], (0, "", 0)), (int(match[2]), state.path, state.num_bytes))
    return list(_read(store, latest))


def _read(store: Store, latest: dict[str, tuple[int, str, int]]) -> Iterator[FoundLease]:
    for name, (number, path, num_bytes) in latest.items():
        try:
            data = store.read(path) if num_bytes <= _MAX_NOTE_BYTES else b""
        except StorageError:
            if store.size(path) is None:  # released meanwhile
                continue
            raise
        yield FoundLease(path, name, number, data, _parse(data))


def _parse(data: bytes) -> LeaseNote:
    """Parse the bytes of a lease. Bytes not written by this package are treated as an expired lease (SAFE-1)."""
    with contextlib.suppress(ValueError, TypeError, RecursionError):
        note = LeaseNote(**json.loads(data))
        kinds = {"host": str, "pid": int, "process": str, "renewed": int | float, "admits_tasks": bool}
        if all(isinstance(getattr(note, name), kind) for name, kind in kinds.items()):
            return note
    return LeaseNote("an unknown machine", 0, "", 0.0, False)


def note_bytes(admits_tasks: bool) -> bytes:
    """Return the content that the lease file would have if this process renewed its lease now."""
    pid = os.getpid()
    return json.dumps(asdict(LeaseNote(socket.gethostname(), pid, _process(pid), time.time(), admits_tasks))).encode()


def _machine() -> str:
    """Return an identifier for this container or machine. It changes when the machine restarts."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}/{Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return f"{socket.gethostname()}/"


def _process(pid: int) -> str:
    """Return a process identifier that is never reused on this machine, or "" if the process has ended."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (OSError, ValueError):
        return ""
    return "" if state in "ZX" else f"{_machine()}/{pid}-{fields[18]}"


def _title(name: str) -> str:
    return f"task {name.replace('-of-', '/')}" if "-of-" in name else "another run"
