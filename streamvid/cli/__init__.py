"""Command-line interface of streamvid. Each verb is a module in verbs/ that is imported when the verb is called.

flags.py derives flags from option dataclasses; shared_flags.py declares flags that several verbs share; console.py
and report.py print. This package may import all other packages of streamvid, and none of them imports it. Read flags.py
first, then any verb.
"""

from __future__ import annotations

import sys

_RUN_CODE_OF_USERS = frozenset({"bench", "demo", "encode", "train"})


def main() -> None:
    """Run the `streamvid` command."""
    from streamvid.cli.main import cli, run
    from streamvid.host.imports import skip_pandas

    if _RUN_CODE_OF_USERS.isdisjoint(sys.argv[1:]):
        skip_pandas()
    run(cli)
