"""Submodules by dotted name, and their names in messages."""

from __future__ import annotations

from collections.abc import Collection

from torch import nn

LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
"""Layers that hold most weights: these can have adapters, and weights in 8 bits."""

NUM_SHOWN = 5


def part_of(module: nn.Module, name: str) -> nn.Module | None:
    """Return the submodule with a dotted name, or None."""
    try:
        return module.get_submodule(name)
    except AttributeError:
        return None


def child_names(module: nn.Module) -> str:
    """List the children of a module for a message."""
    return ", ".join(name for name, _ in module.named_children()) or "none, it has no children"


def some(names: Collection[str]) -> str:
    """List the first few of many names, and their number."""
    ordered = list(names)
    shown = ", ".join(ordered[:NUM_SHOWN])
    return shown if len(ordered) <= NUM_SHOWN else f"{shown}, … ({len(ordered)} in all)"
