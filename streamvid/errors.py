"""Class hierarchy of all errors that streamvid raises deliberately.

Messages state the field, its value, the allowed values and the remedy.
"""

from __future__ import annotations

import copy
from pathlib import Path

from streamvid.credentials import hide_all_credentials, hide_credentials


def printable(text: str, keep: str = "") -> str:
    """Escape non-printable characters in `text`, except those in `keep`.

    File names and keys in a dataset may contain such characters (SAFE-1).
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text)


class StreamvidError(Exception):
    """Base class of all errors that streamvid raises deliberately.

    Its message contains neither credentials nor characters that could control a terminal (SAFE-1).
    """

    def __init__(self, *args: object) -> None:
        super().__init__(*(hide_all_credentials(arg) if isinstance(arg, str) else arg for arg in args))

    def __str__(self) -> str:
        return printable(super().__str__(), keep="\n\t")


class ConfigError(StreamvidError, ValueError):
    """An option or a configuration is invalid."""


class SourceError(StreamvidError):
    """The user's metadata or folder cannot be read as requested."""


class Rejected(StreamvidError):
    """A record cannot become a sample. The message states the reason, and `kind` is a short name for it."""

    kind: str = ""

    def __init__(self, reason: str, *, kind: str = "") -> None:
        super().__init__(reason)
        if kind:
            self.kind = kind


class ProbeError(Rejected):
    """The file is not a usable video or image, or exceeds a limit."""


class NoBucketError(Rejected):
    """No bucket accepts a clip of this length, size and aspect ratio."""


class DecodeError(StreamvidError):
    """The bytes of a clip are intact, but do not decode to the expected frames."""


class StorageError(StreamvidError):
    """A store cannot be opened, read or written."""


class DatasetError(StreamvidError):
    """The dataset does not exist or cannot be read."""


class IntegrityError(DatasetError):
    """Stored bytes do not match the manifest or the index."""


class SealedError(DatasetError):
    """A different sealed dataset already exists at the destination."""


class PlanError(StreamvidError):
    """No plan is possible, because there is nothing to deliver."""


class StateError(StreamvidError):
    """A saved state is damaged, or belongs to another dataset, plan or model."""


class LoaderError(StreamvidError):
    """The loader cannot continue."""


class WorkerError(LoaderError):
    """A decode worker died.

    `task_id` identifies the sample that the worker was decoding. It is None if the worker was idle.
    """

    task_id: int | None = None


class SampleError(LoaderError):
    """A stored sample cannot be delivered. The message names the sample's dataset, shard, key and bucket."""


class SharedBatchError(LoaderError):
    """Processes that share a batch received different batches.

    The message names the step, the processes and the differences.
    """


class RingFullError(LoaderError):
    """The caller already holds as many batches as the ring can hold."""


def refuse_credentials(name: str, location: str | Path) -> None:
    """Raise ConfigError if a path or URL contains credentials.

    name: name to use for the option or argument in the message.
    """
    text = str(location)
    if (shown := hide_credentials(text)) != text:
        raise ConfigError(
            f"{name}={shown.partition('?')[0]!r}: must not contain credentials (they are omitted here); pass a path, "
            "or a URL such as s3://BUCKET/PATH. Credentials are read from AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, "
            "the AWS config files or an IAM role. If this is the name of a local file or folder, pass its absolute "
            "path"
        )


def fresh(error: StreamvidError) -> StreamvidError:
    """Return a copy of an error to raise in place of the original.

    Raising the original again would keep alive every stack frame that it has passed through.
    """
    again = copy.copy(error)
    again.__cause__ = error.__cause__
    return again
