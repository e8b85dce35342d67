"""Where a user's caches lie on this machine."""

from __future__ import annotations

import os
from pathlib import Path


def user_cache(name: str) -> Path:
    """The folder `name` of streamvid in the folder of the user's caches; it may not be there yet."""
    home = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(home) if Path(home).is_absolute() else Path("~/.cache").expanduser()
    return base / "streamvid" / name
