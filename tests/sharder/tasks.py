"""Good and bad units of work for the tests of the pool, imported by worker processes."""

from __future__ import annotations

import importlib
import os
import sys
import time
from typing import Any

from streamvid.errors import SourceError


def handle(task: list[Any]) -> Any:
    kind, value = task
    match kind:
        case "echo":
            return value
        case "environment":
            return sorted(os.environ)
        case "modules":
            importlib.import_module(value)
            if "pyarrow" in sys.modules:
                assert sys.modules["pyarrow"].array([value, None]).null_count == 1
            return sorted(sys.modules)
        case "signal":
            os.kill(os.getpid(), value)
        case "exit":
            os._exit(value)
        case "sleep":
            time.sleep(value)
        case "raise":
            raise SourceError(value)
        case "divide":
            return 1 / value
        case "allocate":
            try:
                return len(bytearray(value))
            except MemoryError:
                return "MemoryError"
    return None
