"""Reader for single bits, and for the start codes between parts of a stream."""

from __future__ import annotations

_HEAD_BYTES = 32


class Bits:
    """Reader for the first bits in `data`, most significant bit first.

    Bits past the end are read as 1, so that truncated data never looks like the header of an intra-coded picture.
    """

    def __init__(self, data: bytes | memoryview, max_bytes: int = _HEAD_BYTES) -> None:
        self._data, self._at = bytes(data[:max_bytes]) + b"\xff" * _HEAD_BYTES, 0

    def take(self, *sizes: int) -> list[int]:
        """Read consecutive unsigned numbers with the given sizes in bits, and return the numbers."""
        found = []
        for size in sizes:
            end = self._at + size
            number = int.from_bytes(self._data[self._at // 8 : -(-end // 8)], "big")
            found.append(number >> -end % 8 & ((1 << size) - 1))
            self._at = end
        return found

    def ones(self, most: int) -> int:
        """Return the number of 1 bits before the next 0 bit, up to `most`."""
        return next((number for number in range(most) if not self.take(1)[0]), most)

    def golomb(self) -> int:
        """Read an unsigned Exp-Golomb number (ITU-T H.264, 9.1)."""
        zeros = next((number for number in range(32) if self.take(1)[0]), 32)
        return (1 << zeros) - 1 + self.take(zeros)[0]

    def signed_golomb(self) -> int:
        """Read a signed Exp-Golomb number (ITU-T H.264, 9.1.1)."""
        number = self.golomb()
        return (number + 1) // 2 if number % 2 else -(number // 2)


def after(packet: memoryview, start_code: bytes) -> Bits:
    """Return a reader for the bits after the first `start_code`. If there is no start code, all bits are read as 1."""
    data = bytes(packet)
    at = data.find(start_code)
    return Bits(data[at + len(start_code) :] if at >= 0 else b"")
