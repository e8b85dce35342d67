"""Division of work into shares that run on any number of machines in any order."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from streamvid.errors import ConfigError

_Unit = TypeVar("_Unit")
MAX_SHARES = 100_000
_SHARE = re.compile(r"(\d{1,6})/(\d{1,6})")


@dataclass(frozen=True, slots=True)
class Share:
    """One of `num_shares` shares of the work. `number` starts at 0."""

    number: int = 0
    num_shares: int = 1

    def __str__(self) -> str:
        return f"{self.number}/{self.num_shares}"

    @property
    def is_whole(self) -> bool:
        """True if this share is all of the work."""
        return self.num_shares == 1

    def of(self, units: Sequence[_Unit]) -> Sequence[_Unit]:
        """Return the units in this share. All shares must be computed from the same units in the same order."""
        return units[self.number :: self.num_shares]


WHOLE = Share()


def parse_share(text: str | None, name: str) -> Share:
    """Return the share that "I/N" describes. None describes all of the work.

    Raises ConfigError if the text is invalid. name: name of the option, for the message.
    """
    if text is None:
        return WHOLE
    found = _SHARE.fullmatch(text)
    number, num_shares = map(int, found.groups()) if found else (0, 0)
    if not number < num_shares <= MAX_SHARES:
        raise ConfigError(
            f"{name}={text!r}: must be I/N, such as 0/8, with N from 1 to {MAX_SHARES} and I from 0 to N-1"
        )
    return Share(number, num_shares)
