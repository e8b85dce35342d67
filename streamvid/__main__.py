"""Entry point of `python -m streamvid`, for environments whose scripts are not on the PATH."""

from __future__ import annotations

from streamvid.cli import main

if __name__ == "__main__":
    main()
