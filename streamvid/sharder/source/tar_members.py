"""Members of tars that other tools wrote, from their headers alone. Nothing is unpacked (SAFE-1).

Plain, GNU and PAX tars are read. A header is trusted only as far as the file reaches, and no header causes a larger
read than its kind needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

from streamvid.errors import Rejected

Read: TypeAlias = Callable[[int, int], bytes]
"""(offset, maximum number of bytes) → bytes of the tar; fewer only at its end."""

BLOCK_BYTES = 512
MAX_MEMBERS = 2_000_000
MAX_HEADER_BYTES = 2**20
MAX_SIZE_DIGITS = 19
_FILES = b"0\x007"
_LINKS = {b"1": "a hard link", b"2": "a symbolic link"}
_NO_DATA = b"123456"
_PACKERS = {
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"BZh": "bzip2",
    b"\xfd7zXZ": "xz",
    b"\x04\x22\x4d\x18": "lz4",
}


@dataclass(frozen=True, slots=True)
class TarMember:
    """A member. offset: of its data. not_file: what it is if it is not a regular file, else ""."""

    name: str
    offset: int
    num_bytes: int
    not_file: str = ""


@dataclass(frozen=True, slots=True)
class _TarHeader:
    name: str
    num_bytes: int
    kind: bytes


def tar_members(read: Read, num_bytes: int) -> Iterator[TarMember]:
    """Yield the members of a tar of this size in order, without folders.

    Raises Rejected if it can be read no further; the members before that are good.
    """
    offset = count = 0
    own: dict[str, str] = {}
    while True:
        block = read(offset, BLOCK_BYTES)
        if not offset:
            _check_packed(block)
        if len(block) < BLOCK_BYTES:
            raise Rejected(f"the tar ends at byte {num_bytes} without its closing blocks: is it cut short?")
        if not block.strip(b"\0"):
            return
        header = _parse(block, offset)
        start = offset + BLOCK_BYTES
        said = own.get("size", "")
        size = int(said) if said.isdecimal() and len(said) <= MAX_SIZE_DIGITS else header.num_bytes
        size = 0 if header.kind in _NO_DATA else size
        offset = start + -(-size // BLOCK_BYTES) * BLOCK_BYTES
        if start + size > num_bytes:
            raise Rejected(f"the tar ends at byte {num_bytes}, before {_shown(header.name)} does: is it cut short?")
        if header.kind in b"LKxg":
            _read_extra_header(own, header.kind, _payload(read, start, size))
            continue
        count += 1
        if count > MAX_MEMBERS:
            raise Rejected(f"the tar has more than {MAX_MEMBERS} members; split it")
        name = own.get("path", header.name)
        what = "a sparse file" if "sparse" in own else _not_file(header.kind)
        own = {}
        if header.kind == b"S":
            raise Rejected(f"the tar holds {_shown(name)} as a sparse file; write the tar again without --sparse")
        if header.kind != b"5" and not name.endswith("/"):
            yield TarMember(name.removeprefix("./"), start, size, what)


def _not_file(kind: bytes) -> str:
    if kind in _LINKS:
        return _LINKS[kind]
    return "" if kind in _FILES else "not a regular file"


def _payload(read: Read, start: int, size: int) -> bytes:
    if size > MAX_HEADER_BYTES:
        raise Rejected(f"the tar has a header of {size} bytes at byte {start}, {MAX_HEADER_BYTES} are allowed")
    return read(start, size)


def _read_extra_header(own: dict[str, str], kind: bytes, data: bytes) -> None:
    """Take what a header says about the member after it; global headers and targets of links are not needed."""
    if kind == b"L":
        own["path"] = _text(data.rstrip(b"\0"))
    elif kind == b"x":
        for key, value in _pax_records(data):
            if key in ("path", "size"):
                own[key] = value
            elif key.startswith("GNU.sparse."):
                own["sparse"] = value


def _pax_records(data: bytes) -> Iterator[tuple[str, str]]:
    """Yield the records of a PAX header: lines "LENGTH KEY=VALUE", where LENGTH counts the whole line."""
    while data:
        digits = data.partition(b" ")[0]
        length = int(digits) if digits.isdigit() and len(digits) < 10 else 0
        if not len(digits) + 1 < length <= len(data):
            raise Rejected("the tar has a damaged PAX header")
        key, _, value = data[len(digits) + 1 : length].removesuffix(b"\n").partition(b"=")
        yield _text(key), _text(value)
        data = data[length:]


def _check_packed(block: bytes) -> None:
    packer = next((name for magic, name in _PACKERS.items() if block.startswith(magic)), None)
    if packer is not None:
        raise Rejected(f"the tar is compressed ({packer}), so that parts of it cannot be read alone; unpack it first")


def _parse(block: bytes, offset: int) -> _TarHeader:
    unsigned = sum(block[:148]) + 8 * 32 + sum(block[156:])
    try:
        stored = int(block[148:156].strip(b"\0 ") or b"0", 8)
        num_bytes = _number(block[124:136])
    except ValueError:
        stored, num_bytes = -1, -1
    # Some old writers summed signed bytes.
    signed = unsigned - 256 * sum(byte > 127 for byte in block[:148] + block[156:])
    if stored not in (unsigned, signed) or num_bytes < 0:
        raise Rejected(f"no valid tar header at byte {offset}: the tar is damaged there, or it is not a tar")
    name = block[:100].split(b"\0")[0]
    prefix = block[345:500].split(b"\0")[0] if block[257:263] == b"ustar\0" else b""
    return _TarHeader(_text(prefix + b"/" + name if prefix else name), num_bytes, block[156:157])


def _number(field: bytes) -> int:
    if field[0] == 0x80:  # GNU writes numbers from 8 GiB on in binary
        return int.from_bytes(field[1:], "big")
    return int(field.strip(b"\0 ") or b"0", 8)


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")


def _shown(name: str) -> str:
    return ascii(name[:200])
