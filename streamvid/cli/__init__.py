"""The command line: one file per verb in verbs/, loaded when the verb is called.

flags.py derives flags from option dataclasses; shared_flags.py has flags that several verbs share; console.py and
report.py print. May import every other room; nothing imports it. Read flags.py first, then any verb.
"""

from __future__ import annotations


def main() -> None:
    """Entry point of the `streamvid` command."""
    from streamvid.cli.main import cli, run

    run(cli)
