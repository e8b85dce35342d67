"""How large the models are, and what of them trains: the table at the start of a run."""

from __future__ import annotations

import collections
from dataclasses import dataclass

import torch
from torch import nn

from streamvid.modules import fp8

OWN = "(own)"
"""The row of what belongs to the training module itself, not to one of its children."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One model. Counts are of values, a tensor that several share is counted with the first; bytes: with buffers;
    dtypes: that of most values first."""

    name: str
    kind: str
    num_parameters: int
    num_trainable: int
    num_bytes: int
    dtypes: tuple[str, ...]


@dataclass(frozen=True)
class Summary:
    """A row a child of the training module, in its order."""

    rows: tuple[Row, ...]

    @property
    def num_parameters(self) -> int:
        return sum(row.num_parameters for row in self.rows)

    @property
    def num_trainable(self) -> int:
        return sum(row.num_trainable for row in self.rows)

    @property
    def num_bytes(self) -> int:
        return sum(row.num_bytes for row in self.rows)

    def __str__(self) -> str:
        lines = [("model", "class", "parameters", "trainable", "bytes", "dtype")]
        lines += [
            (row.name, row.kind, f"{row.num_parameters:,}", f"{row.num_trainable:,}", _size(row.num_bytes),
             ", ".join(row.dtypes))
            for row in self.rows
        ]  # fmt: skip
        if len(self.rows) > 1:
            lines += [("sum", "", f"{self.num_parameters:,}", f"{self.num_trainable:,}", _size(self.num_bytes), "")]
        widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
        right = (False, False, True, True, True, False)
        padded = (
            (text.rjust(width) if is_right else text.ljust(width)
             for text, width, is_right in zip(line, widths, right, strict=True))
            for line in lines
        )  # fmt: skip
        return "\n".join("  ".join(cells).rstrip() for cells in padded)


def summarize(module: nn.Module) -> Summary:
    """Parameters, trainable ones, bytes and dtypes of each child of `module`; `str()` of it is a table.

    Weights that are stored in 8 bits count as the parameters that they stand for, and their scales only as bytes.
    """
    seen: set[int] = set()
    own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
    rows = [_row(OWN, type(module).__name__, own, seen)] if own else []
    for name, child in module.named_children():
        tensors = [*child.named_parameters(), *child.named_buffers()]
        rows.append(_row(name, type(child).__name__, tensors, seen))
    return Summary(tuple(rows))


def _row(name: str, kind: str, tensors: list[tuple[str, torch.Tensor]], seen: set[int]) -> Row:
    parameters = trainable = size = 0
    values: collections.Counter[str] = collections.Counter()
    for key, tensor in tensors:
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        size += tensor.numel() * tensor.element_size()
        if not isinstance(tensor, nn.Parameter) or fp8.is_scale(key):
            continue
        parameters += tensor.numel()
        trainable += tensor.numel() * tensor.requires_grad
        values[fp8.NAME if fp8.is_stored(key) else str(tensor.dtype).removeprefix("torch.")] += tensor.numel()
    dtypes = tuple(dtype for dtype, _ in values.most_common())
    return Row(name=name, kind=kind, num_parameters=parameters, num_trainable=trainable, num_bytes=size, dtypes=dtypes)


def _size(num_bytes: int) -> str:
    size = float(num_bytes)
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:,.1f} GB"
