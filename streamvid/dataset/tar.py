"""Shards as tars: written through webdataset's TarWriter, read back by offset.

The rules that make one file readable by webdataset, wids and Megatron-Energon alike are in this
folder's README.md; `write_shard` keeps them and `scan_tar` checks them, header by header.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import BinaryIO

from streamvid.errors import ConfigError, IntegrityError

BLOCK_BYTES = 512
MAX_NAME_BYTES = 100
MAX_MEMBER_BYTES = 8 * 2**30 - 1
_KEY = re.compile(r"[A-Za-z0-9_-]+")
_EXTENSION = re.compile(r"[a-z0-9]+(\.[a-z0-9]+)*")


@dataclass(frozen=True, slots=True)
class Member:
    """One file in a tar: its name, where its data starts, and how long it is, in bytes."""

    name: str
    offset: int
    num_bytes: int

    @property
    def header_offset(self) -> int:
        return self.offset - BLOCK_BYTES

    @property
    def key(self) -> str:
        return self.name.partition(".")[0]

    @property
    def extension(self) -> str:
        return self.name.partition(".")[2]


def check_member(key: str, extension: str, num_bytes: int) -> None:
    """Raise ConfigError for a member that some reader of WebDataset tars would lose or merge."""
    name = f"{key}.{extension}"
    if not _KEY.fullmatch(key):
        raise ConfigError(f"key {key!r} is not allowed: letters, digits, '_' and '-' only (readers cut at a dot)")
    if not _EXTENSION.fullmatch(extension):
        raise ConfigError(f"extension {extension!r} is not allowed: lowercase letters and digits only")
    if len(name) > MAX_NAME_BYTES:
        raise ConfigError(f"member name {name!r} has {len(name)} bytes, {MAX_NAME_BYTES} are allowed in a tar header")
    if num_bytes > MAX_MEMBER_BYTES:
        raise ConfigError(f"member {name!r} has {num_bytes} bytes, a tar header holds up to {MAX_MEMBER_BYTES}")


def write_shard(file: BinaryIO, samples: Iterable[tuple[str, Mapping[str, bytes]]]) -> None:
    """Write (key, {extension: data}) samples as an uncompressed USTAR tar; the same samples give the same bytes.

    Members of a sample lie next to each other, in the order of their extensions. Raises ConfigError for a key,
    an extension or a size that readers would not survive.
    """
    from webdataset.writer import TarWriter  # imports torch: only who writes pays for it

    # Fixed mtime, owner and mode keep bytes equal; a float mtime would add a PAX header to every member.
    writer = TarWriter(file, user="streamvid", group="streamvid", mode=0o444, mtime=0, encoder=False, compress=False)
    with writer:
        for key, members in samples:
            for extension, data in members.items():
                check_member(key, extension, len(data))
            writer.write({"__key__": key, **members})


def scan_tar(file: BinaryIO) -> Iterator[Member]:
    """Members of a tar, reading headers only.

    Raises IntegrityError for anything but plain USTAR files (no links, no PAX or GNU headers), for a wrong
    header checksum and for a tar that ends early: a damaged tar is never read as a shorter one.
    """
    offset = 0
    while True:
        file.seek(offset)
        header = file.read(BLOCK_BYTES)
        if len(header) < BLOCK_BYTES:
            raise IntegrityError(f"the tar ends at byte {offset + len(header)} without its closing blocks")
        if header == bytes(BLOCK_BYTES):
            return
        member = parse_header(header, offset)
        yield member
        offset = member.offset + -(-member.num_bytes // BLOCK_BYTES) * BLOCK_BYTES


def parse_header(header: bytes, offset: int) -> Member:
    """The member that a 512-byte USTAR header at `offset` describes."""
    computed = sum(header[:148]) + 8 * 32 + sum(header[156:])
    try:
        stored = int(header[148:156].split(b"\0")[0], 8)
        name = header[:MAX_NAME_BYTES].split(b"\0")[0].decode("ascii", "strict")
        num_bytes = int(header[124:136].strip(b"\0 "), 8)
    except ValueError as error:
        raise IntegrityError(f"no valid tar header at byte {offset}") from error
    if header[257:262] != b"ustar" or stored != computed or num_bytes < 0:
        raise IntegrityError(f"no valid tar header at byte {offset}")
    if header[156:157] not in (b"0", b"\0") or header[345:500].strip(b"\0"):
        raise IntegrityError(f"the tar member at byte {offset} is no plain file with a short name")
    return Member(name, offset + BLOCK_BYTES, num_bytes)
