"""Adapters of layers. The adapters of several layers can be fused into one adapter, which can be split again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from streamvid.errors import ConfigError


@dataclass(frozen=True, eq=False)
class Adapter:
    """Adapter for one layer. It adds alpha / rank · up @ down to the layer's weight.

    down: tensor of shape (rank, inputs, …), also called A.
    up: tensor of shape (outputs, rank, …), also called B.
    """

    down: Tensor
    up: Tensor
    alpha: float

    @property
    def rank(self) -> int:
        return self.down.shape[0]

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    def scaled(self) -> Adapter:
        """Return an equivalent adapter whose alpha equals its rank, for formats that cannot store alpha."""
        return self if self.scale == 1 else Adapter(self.down, self.up * self.scale, float(self.rank))


def paired(tensors: Mapping[str, Tensor], scales: Mapping[str, float], where: str) -> dict[str, Adapter]:
    """Pair the LoRA tensors of each layer, and return a mapping from layer names to adapters.

    tensors: maps NAME.lora_A.weight and NAME.lora_B.weight to the tensors of each layer NAME.
    scales: maps each layer name to alpha / rank.
    where: description of the file, used in error messages.
    """
    found: dict[str, Adapter] = {}
    for key in tensors:
        layer, _, part = key.removesuffix(".weight").rpartition(".")
        down, up = (tensors.get(f"{layer}.{name}.weight") for name in ("lora_A", "lora_B"))
        if part not in ("lora_A", "lora_B") or down is None or up is None:
            raise ConfigError(
                f"{where} contains {key}, which does not belong to a pair of LoRA tensors; allowed: lora_A and lora_B "
                "(or lora_down and lora_up) for each layer, and alpha"
            )
        if down.ndim < 2 or up.ndim < 2 or up.shape[1] != down.shape[0]:
            raise ConfigError(
                f"{where}: the adapters of {layer} have shapes {tuple(down.shape)} and {tuple(up.shape)}, which do "
                "not match; copy the file again"
            )
        found[layer] = Adapter(down, up, scales[layer] * down.shape[0])
    return found


def unpaired(adapters: Mapping[str, Adapter]) -> dict[str, Tensor]:
    """Return the tensors of all adapters, with the names that `paired` expects."""
    found: dict[str, Tensor] = {}
    for layer, adapter in adapters.items():
        found |= {f"{layer}.lora_A.weight": adapter.down, f"{layer}.lora_B.weight": adapter.up}
    return found


def fuse(parts: Sequence[Adapter | None], shares: Sequence[int]) -> Adapter:
    """Fuse the adapters of several layers into one adapter for a layer that computes the concatenated outputs.

    parts: adapters of the layers in the order of their outputs; None for a layer without an adapter. At least one layer
        must have an adapter.
    shares: relative number of outputs per layer.
    If all down projections are equal, the result uses that projection. Otherwise, its rank is the sum of the ranks.
    """
    present = [part.scaled() for part in parts if part is not None]
    unit = next(part.up.shape[0] // share for part, share in zip(parts, shares, strict=True) if part is not None)
    is_shared = all(torch.equal(part.down, present[0].down) for part in present)
    rank = present[0].rank if is_shared else sum(part.rank for part in present)
    up = present[0].up.new_zeros(unit * sum(shares), rank)
    row, column, left = 0, 0, iter(present)
    for part, share in zip(parts, shares, strict=True):
        rows = unit * share
        if part is not None:
            own = next(left)
            up[row : row + rows, column : column + own.rank] = own.up
            column += 0 if is_shared else own.rank
        row += rows
    down = present[0].down if is_shared else torch.cat([part.down for part in present])
    return Adapter(down, up, float(rank))


def split(adapter: Adapter, shares: Sequence[int], where: str) -> list[Adapter]:
    """Split the adapter of a fused layer into one adapter per original layer.

    All resulting adapters share the down projection.
    """
    rows = adapter.up.shape[0]
    if rows % sum(shares):
        raise ConfigError(f"{where}: the adapter has {rows} outputs; allowed: a multiple of {sum(shares)}")
    sizes = [rows // sum(shares) * share for share in shares]
    # Copies, because a file cannot hold the same tensor twice.
    return [Adapter(adapter.down.clone(), up.clone(), adapter.alpha) for up in torch.split(adapter.up, sizes)]
