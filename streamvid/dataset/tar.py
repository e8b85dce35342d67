"""Shards as tars, and the extra files that let Megatron-Energon open a dataset without preparation.

README.md specifies the rules that make tars readable by webdataset, wids and Megatron-Energon. `write_shard` follows
the rules, and `scan_tar` verifies them header by header.
"""

from __future__ import annotations

import io
import json
import re
import struct
import tarfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import BinaryIO

from streamvid.dataset.manifest import ShardInfo
from streamvid.errors import ConfigError, IntegrityError

BLOCK_BYTES = 512
MAX_NAME_BYTES = 100
MAX_MEMBER_BYTES = 8 * 2**30 - 1
ENERGON_VERSION = "7.4.1"
KEY = re.compile(r"[A-Za-z0-9_-]+")
_OFFSET_BYTES = 8
_EXTENSION = re.compile(r"[a-z0-9]+(\.[a-z0-9]+)*")


@dataclass(frozen=True, slots=True)
class Member:
    """One file in a tar: its name, the offset of its data, and its size in bytes."""

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
    """Raise ConfigError for a member that some WebDataset readers would lose or confuse with another member."""
    name = f"{key}.{extension}"
    if not KEY.fullmatch(key):
        raise ConfigError(f"key {key!r} is not allowed; use only ASCII letters, digits, '_' and '-' (at least one)")
    if not _EXTENSION.fullmatch(extension):
        raise ConfigError(
            f"extension {extension!r} is not allowed; use lowercase ASCII letters and digits, in one or more parts "
            "joined by dots"
        )
    if len(name) > MAX_NAME_BYTES:
        raise ConfigError(
            f"member name {name!r} is {len(name)} bytes long, but at most {MAX_NAME_BYTES} fit in a tar header; "
            "shorten the key or the extension"
        )
    if num_bytes > MAX_MEMBER_BYTES:
        raise ConfigError(
            f"member {name!r} is {num_bytes} bytes long, but at most {MAX_MEMBER_BYTES} fit in a tar member; use a "
            "smaller file"
        )


def write_shard(file: BinaryIO, samples: Iterable[tuple[str, Mapping[str, bytes]]]) -> None:
    """Write an uncompressed USTAR tar with reproducible bytes. samples: (key, {extension: data}) for each sample.

    The members of a sample are adjacent, in the order of their extensions. Raises ConfigError for a key, an extension
    or a size that some readers do not support.
    """
    with tarfile.open(fileobj=file, mode="w|", format=tarfile.USTAR_FORMAT) as tar:
        for key, members in samples:
            for extension, data in sorted(members.items()):
                check_member(key, extension, len(data))
                member = tarfile.TarInfo(f"{key}.{extension}")
                # A fixed mtime, owner and mode make the bytes reproducible.
                member.size, member.mtime, member.mode = len(data), 0, 0o444
                member.uname = member.gname = "streamvid"
                tar.addfile(member, io.BytesIO(data))


def scan_tar(file: BinaryIO) -> Iterator[Member]:
    """Yield the members of a tar, reading headers only.

    Raises IntegrityError for links and other special files, for headers in other formats (such as PAX or GNU), for a
    wrong header checksum, and for a tar that ends early. A damaged tar is therefore never mistaken for a shorter tar.
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
    """Return the member that a 512-byte USTAR header at `offset` describes.

    Raises IntegrityError for an invalid header.
    """
    computed = sum(header[:148]) + 8 * 32 + sum(header[156:])
    try:
        stored = int(header[148:156].split(b"\0")[0], 8)
        name = header[:MAX_NAME_BYTES].split(b"\0")[0].decode("ascii", "strict")
        num_bytes = int(header[124:136].strip(b"\0 "), 8)
    except ValueError as error:
        raise IntegrityError(f"there is no valid tar header at byte {offset}") from error
    if header[257:262] != b"ustar" or stored != computed or num_bytes < 0:
        raise IntegrityError(f"there is no valid tar header at byte {offset}")
    if header[156:157] not in (b"0", b"\0") or header[345:500].strip(b"\0"):
        raise IntegrityError(
            f"the tar member at byte {offset} is not a regular file, or its name is longer than {MAX_NAME_BYTES} bytes"
        )
    return Member(name, offset + BLOCK_BYTES, num_bytes)


def tar_index(members: Sequence[Member]) -> bytes:
    """Return the bytes of Energon's `.tar.idx`: the offsets of the samples and of the end, as little-endian uint64."""
    offsets: list[int] = []
    last_key = None
    for member in members:
        if member.key != last_key:
            offsets.append(member.header_offset)
            last_key = member.key
    end = members[-1].offset + -(-members[-1].num_bytes // BLOCK_BYTES) * BLOCK_BYTES
    return struct.pack(f"<{len(offsets) + 1}Q", *offsets, end)


def energon_files(shards: Iterable[ShardInfo]) -> dict[str, bytes]:
    """Return the three files of `.nv-meta/` as a mapping from path to content.

    Energon reads whole tars, so its counts include samples that were removed from the index but are still stored.
    """
    counts: dict[str, int] = {}
    parts: dict[str, list[str]] = {"train": [], "val": [], "test": []}
    for shard in shards:
        counts[shard.path] = shard.offsets_num_bytes // _OFFSET_BYTES - 1
        parts.setdefault(shard.split, []).append(shard.path)
    values = {
        ".info.json": {"energon_version": ENERGON_VERSION, "shard_counts": counts},
        "dataset.yaml": {"__class__": "CrudeWebdataset", "__module__": "megatron.energon"},
        "split.yaml": {"exclude": [], "split_parts": parts},
    }
    # JSON is valid YAML, and its bytes do not depend on a YAML library.
    return {
        f".nv-meta/{name}": (json.dumps(value, indent=1, sort_keys=True) + "\n").encode()
        for name, value in values.items()
    }
