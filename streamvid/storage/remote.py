"""Store in an object store. It adds retries, versions and atomic writes to the single requests in transport.py.

Each read or write has one deadline: transient failures are retried after increasing, jittered pauses until
`deadline_seconds` have passed. The underlying libraries try only once.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from streamvid.errors import StorageError
from streamvid.storage.options import StorageOptions
from streamvid.storage.ranges import join_ranges
from streamvid.storage.request_pool import shared_pool
from streamvid.storage.request_stats import RequestStats
from streamvid.storage.requests import Call, Engine, RangeRead
from streamvid.storage.reread import UNPROVEN, WrongReads
from streamvid.storage.store import DeniedError, FileState, Ranges, ShortFileError, Store, StoreStats, check_relative
from streamvid.storage.transport import RequestError, Transport

_Answer = TypeVar("_Answer")
_Part = TypeVar("_Part")
_stores: weakref.WeakSet[RemoteStore] = weakref.WeakSet()
_log = logging.getLogger(__name__)
_VERSIONS_KEPT = 4096
_PARTS_AT_ONCE = 4
_QUIET_SECONDS = 3.0  # longer retries are logged, because a user may be waiting for a wrong endpoint
_LEAST_BYTES_PER_SECOND = 256 * 2**10  # extends the time for a response to a write, not the time for retries


class RemoteStore(Store):
    """Store for the objects below `prefix` in a bucket. make: function that creates a transport in each process."""

    def __init__(self, url: str, prefix: str, options: StorageOptions, make: Callable[[], Transport]) -> None:
        self._url, self.options = url, options
        self._prefix, self._make = prefix, make
        self._lock = threading.Lock()
        self._made: Engine | None = None
        self._versions: OrderedDict[str, str] = OrderedDict()
        self._has_warned = False
        _stores.add(self)

    def __getstate__(self) -> dict[str, object]:
        return {"_url": self._url, "options": self.options, "_prefix": self._prefix, "_make": self._make}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state, _has_warned=False)
        self._forget_process()
        _stores.add(self)

    @property
    def url(self) -> str:
        return self._url

    def _engine(self) -> Engine:
        if self._made is None:
            with self._lock:
                if self._made is None:
                    self._made = Engine(self._make(), shared_pool(self.options), RequestStats())
        return self._made

    def disconnect(self) -> None:
        made = self._made
        if made is not None:
            made.transport.disconnect()

    def _forget_process(self) -> None:
        """Drop the connections, locks and threads that belong to the parent process, without closing them."""
        self._lock = threading.Lock()
        self._made = None
        self._versions = OrderedDict()

    def _key(self, path: str) -> str:
        return self._prefix + check_relative(path)

    # Reading.

    def state(self, path: str) -> FileState | None:
        key = self._key(path)
        try:
            found = self._retry("access", path, lambda transport: transport.state(key))
        except _AbsentError:
            return None
        return FileState(path, found.num_bytes, found.version)

    def read(self, path: str) -> bytes:
        for is_last in (False, False, True):
            state = self.state(path)
            if state is None:
                raise StorageError(f"{self.url}: cannot read {path}: no such object")
            try:
                return self._read_version(path, state)
            except _ConflictError:  # the object was replaced, so its size may have changed too
                if is_last:
                    raise
        raise AssertionError

    def _read_version(self, path: str, state: FileState) -> bytes:
        data, version = bytearray(state.num_bytes), state.version
        self.read_ranges(path, [(0, memoryview(data))], version)
        wrong = WrongReads()
        while _is_md5(version) and (digest := hashlib.md5(data, usedforsecurity=False).hexdigest()) != version:
            # Either the bytes were damaged in transit, or the version is not an MD5. If two reads return the same
            # bytes, these are the stored bytes.
            match wrong.judge(digest):
                case "stored":
                    break
                case "unproven":
                    raise StorageError(f"{self.url}: cannot read {path}: {UNPROVEN}")
            self.read_ranges(path, [(0, memoryview(data))], version)
        return bytes(data)

    def read_ranges(self, path: str, ranges: Ranges, version: str = "") -> None:
        key, requests = self._key(path), join_ranges(ranges)
        num_tries = num_changes = 0
        seconds = 0.0
        while True:
            left = self.options.deadline_seconds - seconds
            read = RangeRead(self._engine(), max(0.01, left), on_retry=self._warn_once)
            try:
                read.fill(key, requests, version or self._versions.get(path, ""))
            except RequestError as error:
                num_tries += read.num_tries
                seconds += read.seconds
                if error.kind != "conflict" or version or num_changes >= 2:
                    raise self._error("read", path, error, num_tries, seconds) from None
                # The new object is read, because the caller verifies its bytes by checksum.
                num_changes += 1
                _log.warning("%s: %s was replaced while in use; reading the new version", self.url, path)
                self._forget_version(path)
            else:
                self._keep_version(path, read.version)
                return

    def _forget_version(self, path: str) -> None:
        with self._lock:
            self._versions.pop(path, None)

    def _keep_version(self, path: str, version: str) -> None:
        with self._lock:
            self._versions[path] = version
            self._versions.move_to_end(path)
            if len(self._versions) > _VERSIONS_KEPT:
                self._versions.popitem(last=False)

    def files(self, folder: str = "") -> Iterator[FileState]:
        prefix = self._key(folder) + "/" if folder else self._prefix
        following = ""
        while True:
            page = partial(_page, prefix=prefix, following=following)
            found, following = self._retry("list", folder or "its objects", page)
            for state in found:
                path = state.path[len(self._prefix) :]
                if path and not path.endswith("/"):  # some tools create such objects to represent folders
                    yield replace(state, path=path)
            if not following:
                return

    # Writing.

    def put(self, path: str, data: bytes | Path) -> None:
        key = self._key(path)
        try:
            num_bytes = len(data) if isinstance(data, bytes) else data.stat().st_size
            if isinstance(data, Path) and num_bytes > self._engine().transport.part_bytes:
                self._put_parts(path, key, data, num_bytes)
            else:
                body = data if isinstance(data, bytes) else data.read_bytes()
                self._retry("write", path, lambda transport: transport.put(key, body), num_bytes)
            if isinstance(data, Path):
                data.unlink()
        except OSError as error:
            raise StorageError(f"{self.url}: cannot write {path}: {error}") from error
        self._engine().stats.count(num_bytes_written=num_bytes)
        self._forget_version(path)

    def create(self, path: str, data: bytes) -> bool:
        key = self._key(path)
        tries = []

        def attempt(transport: Transport) -> None:
            tries.append(transport)
            transport.put(key, data, if_absent=True)

        try:
            self._retry("write", path, attempt, len(data))
        except _ConflictError:
            # An earlier try may have created the object although its response was lost.
            return len(tries) > 1 and self.size(path) == len(data) and self.read(path) == data
        self._engine().stats.count(num_bytes_written=len(data))
        return True

    def copy(self, source: Store, path: str, name: str, num_bytes: int) -> bool:
        if not isinstance(source, RemoteStore):
            return False
        theirs, source_key = source._engine().transport, source._key(path)
        # Ceph decodes the name of a copied part's source twice, so another object could be meant.
        if "%" in source_key or not self._engine().transport.copies_from(theirs):
            return False
        try:
            state = source.state(path)
            if state is None or state.num_bytes != num_bytes:
                return False
            self._copy(theirs, source_key, state, name)
            return self.size(name) == num_bytes
        except StorageError as error:
            _log.info(
                ("%s: copying %s by reading and writing it, because the store cannot copy it: %s"),
                self.url,
                name,
                error,
            )
            return False
        finally:
            self._forget_version(name)

    def _copy(self, source: Transport, source_key: str, state: FileState, name: str) -> None:
        key, size, version = self._key(name), self._engine().transport.part_bytes, state.version
        if state.num_bytes <= size:
            self._retry(
                "write", name, lambda transport: transport.copy(source, source_key, version, key), state.num_bytes
            )
            return

        def copied(upload: str, number: int) -> str:
            start, end = (number - 1) * size, min(number * size, state.num_bytes)
            place = (source, source_key, version, key, upload, number, start, end)
            return self._retry("write", name, lambda transport: transport.copy_part(*place), size)

        def end(upload: str, tags: list[str]) -> None:
            self._retry("write", name, lambda transport: transport.end_parts(key, upload, tags))

        self._in_parts(name, key, -(-state.num_bytes // size), copied, end)

    def remove(self, path: str) -> None:
        key = self._key(path)
        self._retry("remove", path, lambda transport: transport.remove(key))
        self._forget_version(path)

    def abort_uploads(self, folder: str = "") -> int:
        begun = self._uploads(self._key(folder) + "/" if folder else self._prefix)
        for key, upload in begun:
            self._abort(key, upload)
        return len(begun)

    def _uploads(self, prefix: str) -> list[tuple[str, str]]:
        path = prefix[len(self._prefix) :]
        return self._retry("list the uploads of", path or "this store", lambda transport: transport.uploads(prefix))

    def _abort(self, key: str, upload: str) -> None:
        path = key[len(self._prefix) :]
        self._retry("abort the upload of", path, lambda transport: transport.abort_parts(key, upload))

    def _put_parts(self, path: str, key: str, file: Path, num_bytes: int) -> None:
        size = self._engine().transport.part_bytes

        def put(upload: str, number: int) -> tuple[str, bytes]:
            with file.open("rb") as source:
                source.seek((number - 1) * size)
                data = source.read(size)
            tag = self._retry("write", path, lambda transport: transport.put_part(key, upload, number, data), len(data))
            return tag, hashlib.md5(data, usedforsecurity=False).digest()

        def end(upload: str, sent: list[tuple[str, bytes]]) -> None:
            self._end_parts(path, key, upload, sent, file)

        self._in_parts(path, key, -(-num_bytes // size), put, end)

    def _in_parts(
        self,
        path: str,
        key: str,
        num_parts: int,
        make: Callable[[str, int], _Part],
        end: Callable[[str, list[_Part]], None],
    ) -> None:
        """Write an object in parts.

        make: function that uploads a part, given the upload id and the part number, and returns the part.
        end: function that assembles the object, given the upload id and all parts."""
        upload = self._begin_parts(path, key)
        try:
            try:
                with ThreadPoolExecutor(_PARTS_AT_ONCE, "streamvid-put") as threads:
                    made = list(threads.map(partial(make, upload), range(1, num_parts + 1)))
            except _AbsentError:
                raise self._given_up(path) from None
            end(upload, made)
        except BaseException:
            self._try_abort(path, lambda: [(key, upload)])
            raise

    def _begin_parts(self, path: str, key: str) -> str:
        tries, upload = 0, ""

        def attempt(transport: Transport) -> str:
            nonlocal tries
            tries += 1
            return transport.begin_parts(key)

        try:
            upload = self._retry("write", path, attempt)
            return upload
        finally:
            if tries > 1:  # an earlier try may have begun an upload although its response was lost
                self._try_abort(path, lambda: [(k, u) for k, u in self._uploads(key) if k == key and u != upload])

    def _try_abort(self, path: str, begun: Callable[[], list[tuple[str, str]]]) -> None:
        try:
            for key, upload in begun():
                self._abort(key, upload)
        except StorageError as error:
            _log.warning("%s: parts of an unfinished upload of %s remain in the store (%s)", self.url, path, error)

    def _end_parts(self, path: str, key: str, upload: str, sent: list[tuple[str, bytes]], file: Path) -> None:
        tags = [tag for tag, _ in sent]
        try:
            self._retry("write", path, lambda transport: transport.end_parts(key, upload, tags))
        except _AbsentError:
            # The upload no longer exists. If the object exists as expected, an earlier try succeeded, but its response
            # was lost.
            state = self.state(path)
            whole = hashlib.md5(b"".join(digest for _, digest in sent), usedforsecurity=False).hexdigest()
            if state is None or state.num_bytes != file.stat().st_size:
                raise self._given_up(path) from None
            # Not every store derives its versions from the MD5 of the parts.
            if whole not in state.version and not self._holds(path, file):
                raise self._given_up(path) from None

    def _holds(self, path: str, file: Path) -> bool:
        """Return True if the object has the same bytes as a local file.

        The caller has checked that the sizes are equal.
        """
        self._forget_version(path)
        offset = 0
        with file.open("rb") as source:
            while data := source.read(self._engine().transport.part_bytes):
                stored = bytearray(len(data))
                self.read_ranges(path, [(offset, memoryview(stored))])
                if stored != data:
                    return False
                offset += len(data)
        return True

    def _given_up(self, path: str) -> StorageError:
        return StorageError(
            f"{self.url}: cannot write {path}: another process aborted the upload, perhaps while sealing the "
            "same dataset; run the same command again"
        )

    def stats(self) -> StoreStats:
        return self._engine().stats.report()

    # Retries.

    def _retry(self, verb: str, path: str, attempt: Callable[[Transport], _Answer], num_bytes: int = 0) -> _Answer:
        """Send a request repeatedly until it succeeds or fails permanently, or until the deadline passes."""
        extra_seconds = num_bytes / _LEAST_BYTES_PER_SECOND
        call = Call(self._engine(), self.options.deadline_seconds, extra_seconds, self._warn_once)
        try:
            return call.ask(attempt, num_bytes)
        except RequestError as error:
            raise self._error(verb, path, error, call.num_tries, call.seconds) from None

    def _warn_once(self, error: RequestError, seconds: float) -> None:
        if seconds > _QUIET_SECONDS and not self._has_warned:
            self._has_warned = True
            _log.warning("%s: %s; retrying for up to %g s", self.url, error.cause, self.options.deadline_seconds)

    def _error(self, verb: str, path: str, error: RequestError, num_tries: int, seconds: float) -> StorageError:
        text = f"{self.url}: cannot {verb} {path}: {error.cause}"
        if error.is_transient:
            tries = "1 try" if num_tries == 1 else f"{num_tries} tries"
            text += f" ({tries} in {seconds:.0f} s, deadline_seconds={self.options.deadline_seconds:g})"
        elif num_tries and seconds >= self.options.deadline_seconds:
            text += f" (deadline_seconds={self.options.deadline_seconds:g})"
        kinds = {"short": ShortFileError, "conflict": _ConflictError, "absent": _AbsentError, "denied": DeniedError}
        return kinds.get(error.kind, StorageError)(f"{text}. {error.hint}" if error.hint else text)


def _page(transport: Transport, prefix: str, following: str) -> tuple[list[FileState], str]:
    return transport.files(prefix, following)


def _is_md5(version: str) -> bool:
    return re.fullmatch(r"[0-9a-f]{32}", version) is not None


def _forget_parent() -> None:
    for store in list(_stores):
        store._forget_process()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_parent)


class _AbsentError(StorageError):
    """Error raised if the object does not exist."""


class _ConflictError(StorageError):
    """Error raised if the object has an unexpected version, or exists although it must not."""
