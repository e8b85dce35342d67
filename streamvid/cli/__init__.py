"""The command line: one file a verb, each loaded when it is asked for."""

from __future__ import annotations


def main() -> None:
    """Entry point of the `streamvid` command."""
    from streamvid.cli.main import cli, run

    run(cli)
