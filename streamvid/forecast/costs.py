"""Cost table files, as written by `streamvid train --profile` and read by `--costs` and schedule.costs."""

from __future__ import annotations

import json
from pathlib import Path

from streamvid.errors import ConfigError
from streamvid.plan.cost import CostTable

MAX_COSTS_BYTES = 16 << 20


def read_costs(path: str | Path, name: str) -> CostTable:
    """Read a JSON file that contains a CostTable.

    Raises ConfigError if the file is invalid. The message begins with `name` and the path.
    """
    try:
        with Path(path).open("rb") as file:
            content = file.read(MAX_COSTS_BYTES + 1)
        if len(content) > MAX_COSTS_BYTES:
            raise ConfigError(f"the file is larger than {MAX_COSTS_BYTES} bytes; fit the costs again")
        return CostTable.from_json(json.loads(content))
    except ConfigError as error:
        raise ConfigError(f"{name} {path}: {error}") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"not valid JSON ({error})"
        raise ConfigError(
            f"{name} {path}: {reason}; pass a JSON file that contains the result of CostTable.to_json(), such as the "
            "file that `streamvid train --profile` writes"
        ) from error
