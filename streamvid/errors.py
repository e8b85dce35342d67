"""Every error that streamvid raises on purpose, in one tree.

A message names the field, the value, what is allowed and the remedy.
"""

from __future__ import annotations

import copy


class StreamvidError(Exception):
    """Root of all errors that streamvid raises on purpose."""


class ConfigError(StreamvidError, ValueError):
    """An invalid option or configuration."""


class SourceError(StreamvidError):
    """The user's metadata or folder cannot be read as requested."""


class Rejected(StreamvidError):
    """A record that cannot become a sample; the message is the recorded reason, `kind` the reason in a word."""

    kind: str = ""

    def __init__(self, reason: str, *, kind: str = "") -> None:
        super().__init__(reason)
        if kind:
            self.kind = kind


class ProbeError(Rejected):
    """The file is not a usable video or image, or exceeds a limit."""


class NoBucketError(Rejected):
    """No bucket takes a clip of this length, size and shape."""


class DecodeError(StreamvidError):
    """Intact bytes that do not decode to the expected frames."""


class StorageError(StreamvidError):
    """A store cannot be opened, read or written."""


class DatasetError(StreamvidError):
    """The dataset does not exist or cannot be read."""


class IntegrityError(DatasetError):
    """Bytes do not match the manifest or the index."""


class SealedError(DatasetError):
    """Another sealed dataset exists at the destination."""


class PlanError(StreamvidError):
    """No plan is possible: nothing to deliver."""


class StateError(StreamvidError):
    """A loader state that does not belong to this dataset or plan."""


class LoaderError(StreamvidError):
    """The loader cannot continue."""


class WorkerError(LoaderError):
    """A decode worker died; `task_id` is the loader's number of the sample in progress, None if it was idle."""

    task_id: int | None = None


class SampleError(LoaderError):
    """A stored sample cannot be delivered; the message names dataset, shard, key and bucket."""


class SharedBatchError(LoaderError):
    """Processes that share a batch received different ones; the message names step, processes and what differs."""


class RingFullError(LoaderError):
    """The caller holds all batches that fit into the ring."""


def fresh(error: StreamvidError) -> StreamvidError:
    """Return a copy to raise, because a raised error keeps all frames that it passes through alive."""
    again = copy.copy(error)
    again.__cause__ = error.__cause__
    return again
