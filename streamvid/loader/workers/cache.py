"""Cache of recently used values, limited in size. If several threads need the same value, one of them computes it."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeAlias, TypeVar

from streamvid.errors import StreamvidError, fresh
from streamvid.storage import is_wanted, wait_while_wanted


class _Sized(Protocol):
    @property
    def num_bytes(self) -> int: ...


_Value = TypeVar("_Value", bound=_Sized)
Name: TypeAlias = tuple[int | str, ...]


@dataclass(eq=False)
class _Making:
    is_over: threading.Event = field(default_factory=threading.Event)
    error: StreamvidError | None = None


class SharedCache(Generic[_Value]):
    """Cache that maps names to recently used values. It holds at least one value. Thread-safe.

    max_bytes: maximum total size of the values, unless a single value is larger.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.num_bytes = 0
        self._values: OrderedDict[Name, _Value] = OrderedDict()
        self._making: dict[Name, _Making] = {}
        self._lock = threading.Lock()

    def has(self, name: Name) -> bool:
        """Return True if the value is cached or is being computed."""
        return name in self._values or name in self._making

    def get(self, name: Name, make: Callable[[], _Value]) -> _Value:
        """Return the value with this name. The first thread that needs the value computes it with `make`.

        Threads that request the value in the meantime wait and get the same value or error. If the first thread is
        cancelled, another thread computes the value.
        """
        while True:
            with self._lock:
                if name in self._values:
                    self._values.move_to_end(name)
                    return self._values[name]
                making = self._making.get(name)
                if making is None:
                    making = self._making[name] = _Making()
                    break
            wait_while_wanted(making.is_over)
            if making.error is not None:
                raise fresh(making.error)
        try:
            value = make()
            with self._lock:
                self._values[name] = value
                self.num_bytes += value.num_bytes
                while self.num_bytes > self._max_bytes and len(self._values) > 1:
                    self.num_bytes -= self._values.popitem(last=False)[1].num_bytes
            return value
        except StreamvidError as error:
            # Without a shared error, each thread in turn would wait just as long for a store that does not answer.
            if is_wanted():
                making.error = fresh(error)
            raise
        finally:
            with self._lock:
                del self._making[name]
            making.is_over.set()
