"""What checking a dataset found."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

MAX_PROBLEMS = 1000
MAX_KEYS = 100
MAX_EXTRA = 1000

MISSING, SIZE, CHECKSUM, UNREADABLE = "missing", "size", "checksum", "unreadable"
CONTENT = "content"
"""Right bytes that do not agree with the rest of the dataset: no copy repairs that."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong with one file.

    what: "missing", "size" (bytes), "checksum" (SHA-256), "unreadable", or "content": the file is whole and disagrees
    with the rest of the dataset. bucket_id, shard: where samples are hit, "" where it is no file of one shard.
    keys: samples that are hit, at most MAX_KEYS of them; num_keys: how many they are, 0 where no clip, caption or
    packet table is.
    """

    path: str
    what: str
    expected: str
    found: str
    bucket_id: str = ""
    shard: str = ""
    keys: tuple[str, ...] = ()
    num_keys: int = 0

    def __str__(self) -> str:
        text = f"{self.path}: {self.what}: expected {self.expected}, found {self.found}"
        if not self.num_keys:
            return text + ("; no clip of it is hit" if self.shard and self.what == CHECKSUM else "")
        named = ", ".join(self.keys[:3]) + (", …" if self.num_keys > 3 and self.keys else "")
        where = f" of bucket {self.bucket_id}" if self.bucket_id else ""
        return f"{text}; samples hit: {self.num_keys}{where}" + (f" ({named})" if named else "")


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """A dataset as it was found. `problems`, `extra`: the first of them; all are counted.

    is_complete: False where the manifest or the shard table is damaged, so that shards were not looked at. num_bytes:
    of the dataset. num_shards_resumed: shards that an interrupted run had proved, not read again. extra: files that
    belong to no dataset, None where the store does not list its files.
    """

    url: str
    is_deep: bool
    is_complete: bool = False
    num_files: int = 0
    num_shards: int = 0
    num_samples: int = 0
    num_bytes: int = 0
    num_bytes_read: int = 0
    num_shards_resumed: int = 0
    num_problems: int = 0
    num_files_wrong: int = 0
    num_extra: int | None = 0
    problems: tuple[Problem, ...] = ()
    extra: tuple[str, ...] = ()

    @property
    def is_right(self) -> bool:
        """Whether nothing is wrong."""
        return self.is_complete and not self.num_problems

    @property
    def remedy(self) -> str:
        """What to do about it; "" where nothing is wrong."""
        if self.is_right:
            return ""
        whats = {problem.what for problem in self.problems}
        if CONTENT in whats:
            return "rebuild the dataset, or verify the one that this is a copy of: right copies have the same flaw"
        check = "" if whats <= {MISSING, SIZE} else " --check-existing"
        return (
            f"copy the files that are wrong again, from a dataset that is right: streamvid copy SRC {self.url}{check}"
        )

    def to_json(self) -> dict[str, Any]:
        """Plain values, with `is_right` and `remedy`."""
        value = asdict(self)
        value["problems"] = [dict(problem, keys=list(problem["keys"])) for problem in value["problems"]]
        return {**value, "extra": list(self.extra), "is_right": self.is_right, "remedy": self.remedy}


class Findings:
    """Counts all problems and keeps the first."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []
        self.num_problems = 0
        self.paths: set[str] = set()

    def add(self, problems: Iterable[Problem]) -> None:
        for problem in problems:
            self.num_problems += 1
            self.paths.add(problem.path)
            if len(self.problems) < MAX_PROBLEMS:
                self.problems.append(problem)
