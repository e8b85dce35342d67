"""Every error that streamvid raises on purpose, in one tree.

A message names the field, the value, what is allowed and the remedy.
"""

from __future__ import annotations

import copy


class StreamvidError(Exception):
    """Root of all errors that streamvid raises on purpose."""


class ConfigError(StreamvidError, ValueError):
    """An option or a configuration that cannot be."""


class SourceError(StreamvidError):
    """The user's metadata or folder cannot be read as asked."""


class Rejected(StreamvidError):
    """A record that cannot become a sample; the message is the reason that is kept, `kind` the same in a word."""

    kind: str = ""

    def __init__(self, reason: str, *, kind: str = "") -> None:
        super().__init__(reason)
        if kind:
            self.kind = kind


class ProbeError(Rejected):
    """The file is no usable video or image, or breaks a limit."""


class NoBucketError(Rejected):
    """No bucket takes a clip of this length, size and shape."""


class DecodeError(StreamvidError):
    """Right bytes that do not decode to the frames that were promised."""


class StorageError(StreamvidError):
    """A store cannot be opened, read or written."""


class DatasetError(StreamvidError):
    """No dataset there, or one that cannot be read."""


class IntegrityError(DatasetError):
    """Bytes differ from what the manifest or the index says."""


class SealedError(DatasetError):
    """A sealed dataset stands where another should be built."""


class PlanError(StreamvidError):
    """No plan is possible: nothing to deliver."""


class StateError(StreamvidError):
    """A loader state that does not belong to this dataset or plan."""


class LoaderError(StreamvidError):
    """The loader cannot go on."""


class WorkerError(LoaderError):
    """A decode worker died; `task_id` is the loader's number of the sample it was on, None where it was idle."""

    task_id: int | None = None


class SampleError(LoaderError):
    """A stored sample cannot be delivered; the message names dataset, shard, key and bucket."""


class SharedBatchError(LoaderError):
    """Processes that share a batch were given different ones; names the step, the processes and what differs."""


class RingFullError(LoaderError):
    """The caller holds every batch that the ring has room for."""


def fresh(error: StreamvidError) -> StreamvidError:
    """Return a copy to raise: a raised error holds the frames it passes through, and all that lives in them."""
    again = copy.copy(error)
    again.__cause__ = error.__cause__
    return again
