"""What was made last is kept, up to a number of bytes; what several need at once is made by one of them."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, Protocol, TypeAlias, TypeVar


class _Sized(Protocol):
    @property
    def num_bytes(self) -> int: ...


_Value = TypeVar("_Value", bound=_Sized)
Name: TypeAlias = tuple[int, str, int]


class Kept(Generic[_Value]):
    """Values of the names used last, `max_bytes` of them and one at least, each made by one of those who need it."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes, self.num_bytes = max_bytes, 0
        self._values: OrderedDict[Name, _Value] = OrderedDict()
        self._making: dict[Name, threading.Event] = {}
        self._lock = threading.Lock()

    def has(self, name: Name) -> bool:
        """Whether it is there or being made."""
        return name in self._values or name in self._making

    def get(self, name: Name, make: Callable[[], _Value]) -> _Value:
        """The value; whoever is first makes it, and the others try themselves where that fails."""
        while True:
            with self._lock:
                if name in self._values:
                    self._values.move_to_end(name)
                    return self._values[name]
                made = self._making.get(name)
                if made is None:
                    made = self._making[name] = threading.Event()
                    break
            made.wait()
        try:
            value = make()
            with self._lock:
                self._values[name] = value
                self.num_bytes += value.num_bytes
                while self.num_bytes > self._max_bytes and len(self._values) > 1:
                    self.num_bytes -= self._values.popitem(last=False)[1].num_bytes
            return value
        finally:
            with self._lock:
                del self._making[name]
            made.set()
