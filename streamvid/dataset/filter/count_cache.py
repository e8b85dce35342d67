"""A filter's count a shard, kept between runs in a local folder and between the processes of a machine."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from streamvid.host.lock import wait_for_lock
from streamvid.host.resources import user_cache

_log = logging.getLogger(__name__)

_VERSION = 1  # of the file, and of what conditions mean
_DIGEST_BYTES = 32
_ITEM_BYTES = 8


@dataclass(frozen=True, slots=True)
class CountCache:
    """One entry: a header as a line of JSON, little-endian int64 counts, and the SHA-256 of all that.

    Nothing here raises for a file or a folder: what cannot be read is counted again, what cannot be written is not
    kept.
    """

    path: Path
    header: bytes

    @classmethod
    def of(cls, folder: str | Path | None, content_fingerprint: str, text: str) -> CountCache:
        """The entry of a dataset's content and a filter's text; `folder` None: that of the user's caches."""
        if folder is None:
            folder = user_cache("filters")
        fields = {"version": _VERSION, "content": content_fingerprint, "where": text}
        header = json.dumps(fields, sort_keys=True).encode() + b"\n"
        return cls(Path(folder) / f"{hashlib.sha256(header).hexdigest()[:32]}.counts", header)

    def read(self, most: npt.NDArray[np.int64]) -> npt.NDArray[np.int64] | None:
        """The counts that were written, none negative or above `most`; None where there is no such file, or damage."""
        num_bytes = len(self.header) + _ITEM_BYTES * len(most) + _DIGEST_BYTES
        try:
            with self.path.open("rb") as file:
                data = file.read(num_bytes + 1)
        except FileNotFoundError:
            return None
        except OSError as error:
            _log.warning("cannot read the filter's counts in %s (%s); the index is scanned again", self.path, error)
            return None
        body, digest = data[:-_DIGEST_BYTES], data[-_DIGEST_BYTES:]
        if len(data) == num_bytes and hashlib.sha256(body).digest() == digest and body.startswith(self.header):
            counts = np.frombuffer(body[len(self.header) :], "<i8").astype(np.int64)
            if ((counts >= 0) & (counts <= most)).all():
                return counts
        _log.warning("the filter's counts in %s are damaged; the index is scanned again", self.path)
        return None

    def write(self, counts: npt.NDArray[np.int64]) -> None:
        """Keep the counts, whole or not at all."""
        body = self.header + counts.astype("<i8").tobytes()
        temporary: str | None = None
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            descriptor, temporary = tempfile.mkstemp(prefix=f".{self.path.name}.", dir=self.path.parent)
            with os.fdopen(descriptor, "wb") as file:
                file.write(body + hashlib.sha256(body).digest())
            Path(temporary).replace(self.path)
        except OSError as error:
            _log.warning("cannot keep the filter's counts in %s (%s); the next run scans again", self.path, error)
            if temporary is not None:
                with contextlib.suppress(OSError):
                    Path(temporary).unlink()

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Alone with the entry among the processes of this machine; the lock ends with who holds it."""
        with contextlib.ExitStack() as held:
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                held.enter_context(wait_for_lock(self.path.with_suffix(".lock")))
            except (ImportError, OSError) as error:
                _log.info("no lock in %s (%s): processes that start together each scan", self.path.parent, error)
            yield
