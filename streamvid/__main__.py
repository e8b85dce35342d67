"""python -m streamvid: the command, where its script is not on the path."""

from __future__ import annotations

from streamvid.cli import main

if __name__ == "__main__":
    main()
