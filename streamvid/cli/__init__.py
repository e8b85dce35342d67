"""Command line of streamvid. Each verb is a file in verbs/ that is imported when the verb is called.

flags.py derives flags from option dataclasses; shared_flags.py declares flags that several verbs share; console.py
and report.py print. The package may import every other package; no other package imports it. Read flags.py first, then
any verb.
"""

from __future__ import annotations


def main() -> None:
    """Run the `streamvid` command."""
    from streamvid.cli.main import cli, run

    run(cli)
