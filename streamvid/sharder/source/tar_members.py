"""Members of tars written by other tools, found through their headers alone. Nothing is extracted (SAFE-1).

Plain, GNU and PAX tars are supported. Sizes in headers are checked against the size of the file, and the size of each
extended header is limited.
"""

from __future__ import annotations

import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

from streamvid.errors import Rejected

Read: TypeAlias = Callable[[int, int], bytes]
"""(offset, maximum number of bytes) → bytes of the tar. There are fewer bytes only at the end of the tar."""

BLOCK_BYTES = 512
MAX_MEMBERS = 2_000_000
MAX_HEADER_BYTES = 2**20
MAX_SIZE_DIGITS = 19
_LINKS = {tarfile.LNKTYPE: "a hard link", tarfile.SYMTYPE: "a symbolic link"}
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
    """Member of a tar.

    offset: byte offset of the member's data.
    not_file: description of the member's type if it is not a regular file; otherwise "".
    """

    name: str
    offset: int
    num_bytes: int
    not_file: str = ""


def tar_members(read: Read, num_bytes: int) -> Iterator[TarMember]:
    """Yield the members of a tar, except folders, in order. num_bytes: size of the tar.

    Raises Rejected at the point where the tar becomes unreadable. The members that were already yielded are valid.
    """
    offset = count = 0
    own: dict[str, str] = {}
    while True:
        block = read(offset, BLOCK_BYTES)
        if not offset:
            _check_packed(block)
        if len(block) < BLOCK_BYTES:
            raise Rejected(f"the tar ends at byte {num_bytes} without its closing blocks; it may be truncated")
        if not block.strip(b"\0"):
            return
        header = _parse(block, offset)
        start = offset + BLOCK_BYTES
        said = own.get("size", "")
        size = int(said) if said.isdecimal() and len(said) <= MAX_SIZE_DIGITS else header.size
        size = 0 if header.type in _NO_DATA else size
        offset = start + -(-size // BLOCK_BYTES) * BLOCK_BYTES
        if start + size > num_bytes:
            raise Rejected(
                f"the tar ends at byte {num_bytes}, before the end of {_shown(header.name)}; it may be truncated"
            )
        if header.type in b"LKxg":
            if size > MAX_HEADER_BYTES:
                raise Rejected(
                    f"the tar has an extended header of {size} bytes at byte {start}; at most {MAX_HEADER_BYTES} "
                    "are allowed"
                )
            _read_extra_header(own, header.type, read(start, size))
            continue
        count += 1
        if count > MAX_MEMBERS:
            raise Rejected(f"the tar has more than {MAX_MEMBERS} members; split it into several tars")
        name = own.get("path", header.name)
        what = "" if header.isreg() else _LINKS.get(header.type, "not a regular file")
        what = "a sparse file" if "sparse" in own else what
        own = {}
        if header.type == tarfile.GNUTYPE_SPARSE:
            raise Rejected(f"the tar contains {_shown(name)} as a sparse file; create the tar again without --sparse")
        if not header.isdir() and not name.endswith("/"):
            yield TarMember(name.removeprefix("./"), start, size, what)


def _read_extra_header(own: dict[str, str], kind: bytes, data: bytes) -> None:
    """Store the values of an extended header in `own`. They apply to the next member.

    Global headers and link targets are ignored."""
    if kind == b"L":
        own["path"] = _text(data.rstrip(b"\0"))
    elif kind == b"x":
        for key, value in _pax_records(data):
            if key in ("path", "size"):
                own[key] = value
            elif key.startswith("GNU.sparse."):
                own["sparse"] = value


def _pax_records(data: bytes) -> Iterator[tuple[str, str]]:
    """Yield the (key, value) pairs of a PAX header.

    Each line is "LENGTH KEY=VALUE", where LENGTH is the length of the line.
    """
    while data:
        digits = data.partition(b" ")[0]
        length = int(digits) if digits.isdigit() and len(digits) < 10 else 0
        if not len(digits) + 1 < length <= len(data):
            raise Rejected("the tar has a damaged PAX header; download or create the tar again")
        key, _, value = data[len(digits) + 1 : length].removesuffix(b"\n").partition(b"=")
        yield _text(key), _text(value)
        data = data[length:]


def _check_packed(block: bytes) -> None:
    packer = next((name for magic, name in _PACKERS.items() if block.startswith(magic)), None)
    if packer is not None:
        raise Rejected(
            f"the tar is compressed ({packer}), so its members cannot be read individually; decompress it first"
        )


def _parse(block: bytes, offset: int) -> tarfile.TarInfo:
    try:
        header = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
    except tarfile.HeaderError:
        header = None
    if header is None or header.size < 0:
        raise Rejected(
            f"there is no valid tar header at byte {offset}, so the file is damaged or is not a tar; create or "
            "download it again"
        )
    return header


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")


def _shown(name: str) -> str:
    return ascii(name[:200])
