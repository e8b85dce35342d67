from __future__ import annotations

from typing import Any

import pytest

from streamvid.errors import ConfigError
from streamvid.plan import World


def test_one_rank_by_default() -> None:
    assert World() == World(rank=0, num_ranks=1)


@pytest.mark.parametrize(
    ("rank", "num_ranks", "message"),
    [
        (0, 0, "num_ranks=0"),
        (0, 2.0, "num_ranks=2.0"),
        (2, 2, "rank=2: .* 0 to 1"),
        (-1, 2, "rank=-1"),
        (True, 2, "rank=True"),
    ],
)
def test_invalid_ranks_are_refused(rank: Any, num_ranks: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        World(rank, num_ranks)
