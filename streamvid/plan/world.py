"""Where a process stands among the ranks that share a dataset."""

from __future__ import annotations

from dataclasses import dataclass

from streamvid.errors import ConfigError

MAX_NUM_RANKS = 1 << 24


@dataclass(frozen=True, slots=True)
class World:
    """Data-parallel position only: processes that share a batch (sequence, tensor, context parallel) share a rank."""

    rank: int = 0
    num_ranks: int = 1

    def __post_init__(self) -> None:
        validate_num_ranks(self.num_ranks)
        if isinstance(self.rank, bool) or not isinstance(self.rank, int) or not 0 <= self.rank < self.num_ranks:
            raise ConfigError(
                f"rank={self.rank!r} of num_ranks={self.num_ranks}: allowed are the integers 0 to {self.num_ranks - 1}"
            )


def validate_num_ranks(num_ranks: int) -> None:
    """ConfigError unless `num_ranks` can be a number of ranks."""
    if isinstance(num_ranks, bool) or not isinstance(num_ranks, int) or not 1 <= num_ranks <= MAX_NUM_RANKS:
        raise ConfigError(f"num_ranks={num_ranks!r}: allowed are the integers 1 to {MAX_NUM_RANKS}")
