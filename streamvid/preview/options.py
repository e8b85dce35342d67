"""Options for the preview server and for the report."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from pathlib import Path

from streamvid.config import check_options, option


@dataclass(frozen=True, slots=True)
class PreviewOptions:
    """Options for the preview server: its address, and the contents that it shows in addition to datasets."""

    host: str = option(
        "127.0.0.1",
        help="Address to listen on. Unless it is a loopback address, clients must supply the token in the link.",
    )
    port: int = option(8080, help="Port to listen on; 0 chooses a free port.", minimum=0, maximum=65535)
    token: bool = option(False, help="Require the token on loopback addresses too, for machines with several users.")
    run: str | Path | None = option(
        None, metavar="DIR", help="Output folder of the `streamvid train` run whose metrics are shown."
    )
    features: str | tuple[str, ...] | None = option(
        None, metavar="FOLDER", help="Precomputed features of the dataset; repeat this option for several datasets."
    )

    def __post_init__(self) -> None:
        check_options(self)

    @property
    def is_loopback(self) -> bool:
        """True if only programs on this machine can connect."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"


@dataclass(frozen=True, slots=True)
class ReportOptions:
    """Options for the contents of a report."""

    samples_per_bucket: int = option(
        12, help="Samples per contact sheet, spread evenly over the bucket.", minimum=0, maximum=1000
    )
    picture_bytes: int = option(3_000_000, help="Maximum total size of all pictures.", minimum=0, maximum=1 << 30)

    def __post_init__(self) -> None:
        check_options(self)
