"""Options for object stores. They never contain access keys, which come from the usual AWS sources."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from streamvid.config import check_options, option, options_of
from streamvid.errors import ConfigError

MAX_RANGE_BYTES = 16 * 2**20
"""Maximum size of a request. A failed request is repeated as a whole, and parts of a larger read run concurrently."""


@dataclass(frozen=True, slots=True)
class StorageOptions:
    """Options for object stores. Local folders ignore these options."""

    endpoint_url: str | None = option(
        None,
        help="Endpoint URL (such as http://127.0.0.1:9000) of an S3-compatible store other than AWS.",
        metavar="URL",
        shown_default="AWS_ENDPOINT_URL or ~/.aws/config",
    )
    region: str | None = option(
        None, help="Region of the S3 bucket.", metavar="R", shown_default="AWS_REGION or ~/.aws/config"
    )
    profile: str | None = option(
        None, help="Name of a profile in the AWS config files.", metavar="P", shown_default="AWS_PROFILE"
    )
    anon: bool = option(False, help="Read public buckets without access keys.")
    requester_pays: bool = option(False, help="Pay for reads from requester-pays buckets.")
    deadline_seconds: float = option(
        50.0, help="Time limit for one read or write, including retries, in seconds.", flag="", maximum=86400
    )
    connect_seconds: float = option(5.0, help="Connection timeout in seconds.", flag="", maximum=86400)
    stall_seconds: float = option(
        10.0, help="Seconds without data after which a request is retried.", flag="", maximum=86400
    )
    max_requests: int = option(
        128, help="Maximum number of concurrent requests per machine.", flag="", minimum=1, maximum=1 << 30
    )
    max_bytes_in_flight: int = option(
        2**30,
        help="Maximum total size of pending responses per machine, in bytes.",
        flag="",
        minimum=MAX_RANGE_BYTES,
        maximum=1 << 50,
    )
    cache_dir: str | Path | None = option(
        None, help="Local cache folder, which all ranks and jobs on a machine can share.", flag=""
    )
    cache_bytes: int | None = option(None, help="Size limit of cache_dir, in bytes.", flag="", minimum=1)

    def __post_init__(self) -> None:
        check_options(self)
        for name in ("endpoint_url", "region", "profile"):
            if getattr(self, name) == "":
                raise ConfigError(f"{name}='': must be non-empty text, or None")
        if self.endpoint_url is not None:
            _check_endpoint(self.endpoint_url)
        if self.anon and self.profile is not None:
            raise ConfigError(
                f"profile={self.profile!r} cannot be combined with anon=True, which uses no keys; omit one of them"
            )
        for name in ("deadline_seconds", "connect_seconds", "stall_seconds"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}={getattr(self, name)}: must be above 0")
        if (self.cache_dir is None) != (self.cache_bytes is None):
            raise ConfigError(
                f"cache_dir={self.cache_dir!r} and cache_bytes={self.cache_bytes!r}: one of them is missing; set both "
                "or neither"
            )
        if self.cache_dir is not None:  # stored as text, because options are sent to worker processes as JSON
            object.__setattr__(self, "cache_dir", str(Path(self.cache_dir).expanduser()))

    @staticmethod
    def of(value: StorageOptions | Mapping[str, Any] | None) -> StorageOptions:
        """Return an instance unchanged, or build one from a mapping of fields or from None (all defaults)."""
        unknown = set(value) - {field.name for field in fields(StorageOptions)} if isinstance(value, Mapping) else None
        try:
            return options_of(StorageOptions, value, "storage")
        except ConfigError as error:
            if not unknown:
                raise
            raise ConfigError(
                f"{error}. Credentials are read from AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, the AWS config files "
                "or an IAM role"
            ) from None


def _check_endpoint(url: str) -> None:
    try:
        parts = urlsplit(url)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        parts, is_url = urlsplit(""), False
    if not is_url or parts.username is not None or parts.password is not None or parts.query:
        raise ConfigError(
            "endpoint_url must be a server's http(s) URL, such as https://minio.example.org:9000; remove any keys or "
            "query from it"
        )
