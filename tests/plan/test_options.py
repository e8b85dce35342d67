from __future__ import annotations

import json
from typing import Any

import pytest

from streamvid.errors import ConfigError
from streamvid.plan import PlanOptions


def test_the_order_key_contains_what_positions_depend_on() -> None:
    """PLAN-1: a resumed run may change its tail, but not the options that define what a position means."""
    key = PlanOptions(seed=3, window=8).order_key()
    assert json.loads(json.dumps(key)) == {"seed": 3, "shuffle": "window", "window": 8}
    assert PlanOptions(seed=3, window=8, tail="drop").order_key() == key


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"seed": -1}, "seed=-1"),
        ({"seed": 2**63}, "seed="),
        ({"seed": "0"}, "seed='0'"),
        ({"window": 0}, "window=0"),
        ({"shuffle": "all"}, "shuffle='all': must be 'none', 'shards' or 'window'"),
        ({"tail": "wrap"}, "tail='wrap': must be 'carry', 'drop', 'pad', 'shrink' or 'uneven'"),
        ({"sync": "time"}, "sync='time': must be 'bucket' or 'cost'"),
        ({"order": "random"}, "order='random': must be 'mixed' or 'largest-first'"),
        ({"accumulate": 0}, "accumulate=0"),
        ({"accumulate": 2000}, "must be an integer from 1 to 1024"),
        ({"shard_locality": 0}, "shard_locality=0"),
        ({"tail": "uneven", "accumulate": 2}, "accumulate=2 cannot be combined with tail='uneven'.*use tail='carry'"),
    ],
)
def test_invalid_options_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PlanOptions(**fields)
