"""How a store is reached: what is no secret of it. Keys come from where AWS tools look for them, never from here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any
from urllib.parse import urlsplit

from streamvid.config import option
from streamvid.errors import ConfigError

MAX_RANGE_BYTES = 16 * 2**20
"""No request asks for more: what fails is asked for again, and large reads go side by side."""


@dataclass(frozen=True, slots=True)
class StorageOptions:
    """Settings of object stores; local folders need none of them.

    endpoint_url: of a server that is not AWS, as "http://127.0.0.1:9000". region, profile: as in ~/.aws/config.
        None: AWS_ENDPOINT_URL, AWS_REGION, AWS_PROFILE or the files of AWS decide. Keys are taken from the usual
        variables, files and roles alone.
    anon: read public buckets without keys.   requester_pays: whoever reads pays.
    deadline_seconds: how long one read or write may take with all that is tried again; then it is an error.
    connect_seconds, stall_seconds: of one request: until it is connected, and without a byte; then it is sent again.
    max_requests: at the same time, of all ranks of this machine.   max_bytes_in_flight: likewise, of their bodies.

    Raises ConfigError for values that cannot be.
    """

    endpoint_url: str | None = option(
        None, help="Object store server that is not AWS, such as http://127.0.0.1:9000.", metavar="URL"
    )
    region: str | None = option(None, help="Region.", metavar="R", shown_default="AWS_REGION or ~/.aws/config")
    profile: str | None = option(None, help="Profile in ~/.aws.", metavar="P", shown_default="AWS_PROFILE")
    anon: bool = option(False, help="Read without keys.")
    requester_pays: bool = option(False, help="Pay for reading.")
    deadline_seconds: float = option(50.0, help="Seconds for one read or write with all retries.", flag="")
    connect_seconds: float = option(5.0, help="Seconds for connecting.", flag="")
    stall_seconds: float = option(10.0, help="Seconds without a byte until a request is repeated.", flag="")
    max_requests: int = option(128, help="Simultaneous requests of all ranks of this machine.", flag="")
    max_bytes_in_flight: int = option(2**30, help="Response bytes in flight on this machine.", flag="")

    def __post_init__(self) -> None:
        for name in ("endpoint_url", "region", "profile"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                raise ConfigError(f"{name}={value!r}; a text is allowed, or None")
        if self.endpoint_url is not None:
            _check_endpoint(self.endpoint_url)
        for name in ("anon", "requester_pays"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name}={getattr(self, name)!r}; allowed are True and False")
        if self.anon and self.profile is not None:
            raise ConfigError(f"profile={self.profile!r} stands beside anon=True, which uses no keys; leave one out")
        for name in ("deadline_seconds", "connect_seconds", "stall_seconds"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 86400:
                raise ConfigError(f"{name}={value!r}; above 0 to 86400 seconds are allowed")
        for name, least in (("max_requests", 1), ("max_bytes_in_flight", MAX_RANGE_BYTES)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**50:
                raise ConfigError(f"{name}={value!r}; a whole number of {least} or more is allowed")

    @staticmethod
    def of(value: StorageOptions | Mapping[str, Any] | None) -> StorageOptions:
        """Options as a caller gives them; a mapping has the fields' names."""
        if isinstance(value, StorageOptions):
            return value
        if value is not None and not isinstance(value, Mapping):
            raise ConfigError(f"storage={type(value).__name__}; a StorageOptions or a mapping is allowed, or None")
        known = [field.name for field in fields(StorageOptions)]
        for name in value or ():
            if name not in known:  # its value may be a key, and is not shown
                raise ConfigError(
                    f"storage: {name!r} is unknown; allowed are {', '.join(known)}. Keys come from AWS_ACCESS_KEY_ID "
                    "and AWS_SECRET_ACCESS_KEY, from the files of AWS or from a role"
                )
        return StorageOptions(**(value or {}))


def _check_endpoint(url: str) -> None:
    try:
        parts = urlsplit(url)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        parts, is_url = urlsplit(""), False
    if not is_url or parts.username is not None or parts.password is not None or parts.query:
        raise ConfigError(
            "endpoint_url is no http(s) URL of a server alone, as https://minio.example.org:9000; keys do not belong "
            "into it"
        )
