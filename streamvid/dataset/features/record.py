"""What is kept of each finished shard of a sidecar until it is sealed, and what its shards must have in common."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

from streamvid.dataset.features.sidecar import TensorInfo
from streamvid.dataset.features.tables import SidecarShard
from streamvid.dataset.features.tensors import RawTensor, check_name
from streamvid.errors import ConfigError, DatasetError


@dataclass(frozen=True, slots=True)
class Record:
    """A finished shard: how its files stand in the table, and what tensors it has."""

    shard: SidecarShard
    tensors: Mapping[str, TensorInfo]
    shapes: Mapping[str, list[int]]

    def to_json(self) -> bytes:
        return json.dumps(asdict(self), sort_keys=True).encode()

    @staticmethod
    def from_json(data: bytes, where: str) -> Record:
        try:
            value = json.loads(data)
            tensors = {name: TensorInfo(**told) for name, told in value["tensors"].items()}
            return Record(SidecarShard(**value["shard"]), tensors, value["shapes"])
        except (ValueError, KeyError, TypeError) as error:
            raise DatasetError(f"{where} is damaged ({error}); remove it, and the shard is made again") from error


@dataclass
class Kinds:
    """What the samples of a shard have in common. shapes: of ragged tensors without the first size."""

    tensors: dict[str, TensorInfo] = field(default_factory=dict)
    shapes: dict[str, list[int]] = field(default_factory=dict)

    def add(self, key: str, tensors: Mapping[str, RawTensor]) -> None:
        kinds = {name: TensorInfo(one.dtype, one.is_ragged) for name, one in tensors.items()}
        shapes = {name: list(one.shape[1:] if one.is_ragged else one.shape) for name, one in tensors.items()}
        if not self.tensors:
            self.tensors, self.shapes = _check_kinds(kinds), shapes
        elif (kinds, shapes) != (self.tensors, self.shapes):
            raise ConfigError(
                f"sample {key} has the tensors {_described(kinds, shapes)}, those before it have "
                f"{_described(self.tensors, self.shapes)}; a shard's samples have the same, but for the first size of "
                "ragged ones"
            )


def _check_kinds(kinds: dict[str, TensorInfo]) -> dict[str, TensorInfo]:
    for name, kind in kinds.items():
        if kind.is_ragged and f"{check_name(name)}_mask" in kinds:
            raise ConfigError(f"tensors {name!r} and '{name}_mask': a ragged tensor's mask has that name; rename one")
    return kinds


def _described(kinds: Mapping[str, TensorInfo], shapes: Mapping[str, list[int]]) -> str:
    return ", ".join(
        f"{name} {kind.dtype} {['*', *shapes[name]] if kind.is_ragged else shapes[name]}"
        for name, kind in sorted(kinds.items())
    )


def in_common(records: Sequence[Record]) -> dict[str, TensorInfo]:
    """The tensors that all shards have, of one shape in a bucket."""
    first: Record | None = None
    of_bucket: dict[str, Record] = {}
    for one in records:
        if not one.tensors:  # none of its samples could be made
            continue
        first = first or one
        near = of_bucket.setdefault(one.shard.bucket_id, one)
        if one.tensors != first.tensors or one.shapes != near.shapes:
            other = first if one.tensors != first.tensors else near
            raise DatasetError(
                f"shard {one.shard.bucket_id}-{one.shard.number:06d} has the tensors "
                f"{_described(one.tensors, one.shapes)}, others have {_described(other.tensors, other.shapes)}; "
                "make the sidecar anew"
            )
    if first is None:
        raise DatasetError("no sample could be made: there is nothing to seal")
    return dict(first.tensors)


def check_null(null: Mapping[str, RawTensor], record: Record) -> None:
    for name, one in null.items():
        kind = record.tensors.get(name)
        shape = list(one.shape[1:] if kind is not None and kind.is_ragged else one.shape)
        if kind is None or kind.dtype != one.dtype or shape != record.shapes[name]:
            raise ConfigError(
                f"null: {name!r} of dtype {one.dtype} and shape {one.shape} cannot stand in for those of the samples, "
                f"{_described(record.tensors, record.shapes)}"
            )
