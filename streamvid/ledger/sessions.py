"""Names of a ledger's folders and files."""

from __future__ import annotations

import re
from pathlib import Path

SESSION_FILE = "session.json"
_SESSION = re.compile(r"session-([0-9]{6,9})")
_RANK = re.compile(r"rank-([0-9]{5,8})\.ledger")


def session_numbers(folder: Path) -> list[int]:
    """Return the numbers of the sessions in a ledger, in order."""
    found = (_SESSION.fullmatch(entry.name) for entry in folder.iterdir())
    return sorted(int(match[1]) for match in found if match)


def newest_session(folder: Path) -> int:
    """Return the number of the newest session, or 0 if the ledger has no session."""
    return max(session_numbers(folder), default=0)


def session_folder(folder: Path, number: int) -> Path:
    """Return the folder of a session."""
    return folder / f"session-{number:06d}"


def rank_file(session: Path, rank: int) -> Path:
    """Return the path of a rank's log in a session. The log consists of compressed blocks."""
    return session / f"rank-{rank:05d}.ledger"


def tail_file(session: Path, rank: int) -> Path:
    """Return the path of the file that holds a rank's last batches, which are not yet in the rank's log."""
    return session / f"rank-{rank:05d}.tail"


def ranks_in(session: Path) -> list[int]:
    """Return the ranks that have a log in a session, in order."""
    found = (_RANK.fullmatch(entry.name) for entry in session.iterdir())
    return sorted(int(match[1]) for match in found if match)
