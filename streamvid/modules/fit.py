"""Whose weights these are: a file's keys and shapes against those of each child of the training module."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from streamvid.errors import ConfigError

SHOWN = 5


@dataclass(frozen=True)
class Match:
    """How a file's tensors fit a child. names: key in the file → name in the training module."""

    child: str
    names: dict[str, str]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    other_shape: tuple[str, ...]


def choose(
    module: nn.Module,
    child: str | None,
    state: Mapping[str, Tensor],
    *,
    what: str,
    may_lack: Sequence[str] | None,
    skips_strangers: bool,
    allow_missing: bool,
    allow_unexpected: bool,
) -> Match | None:
    """The child that `state` is of, and how; None for a file of a model that this task does without.

    child: the one that the user named, None for any.   what: the file, for messages.
    Raises ConfigError if it fits none, or several.
    """
    if child is not None and not isinstance(part_of(module, child), nn.Module):
        if may_lack is None or child in may_lack:
            return None
        raise ConfigError(f"{what} is for {child!r}, which the training module has not; {_children(module)}")
    twins = _twins(module)
    candidates = [child] if child is not None else ["", *(name for name, _ in module.named_children())]
    matches = [match for name in candidates for match in _matches(module, name, state, twins)]
    if not matches:
        raise ConfigError(f"{what}: there are no weights to load into; {_children(module)}")
    fitting = [m for m in matches if m.names and _is_allowed(m, allow_missing, allow_unexpected)]
    # By names before shapes: the same model of another size is nearer than one with a bias of this length.
    nearest = max(matches, key=lambda m: (len(m.names) + len(m.other_shape), len(m.names), -len(m.missing)))
    if not fitting:
        # By names alone here too: the model of another size is no stranger, but a mistake.
        known = len(nearest.names) + len(nearest.other_shape)
        if child is None and skips_strangers and 2 * known < len(state):
            return None
        raise ConfigError(_misfit(what, nearest, allow_missing, allow_unexpected))
    best = max(len(match.names) for match in fitting)
    ways = {frozenset(match.names.values()): match for match in reversed(fitting) if len(match.names) == best}
    if len(ways) > 1:
        children = ", ".join(sorted(match.child for match in ways.values()))
        raise ConfigError(f"{what} fits several models ({children}); say whose it is, as paths: {{CHILD: {what}}}")
    # A child's file with its name before the keys fits the whole module as well: the child is meant.
    return max((match for match in fitting if len(match.names) == best), key=lambda match: match.child)


def part_of(module: nn.Module, name: str) -> nn.Module | None:
    """The submodule of a dotted name, None if there is none."""
    try:
        return module.get_submodule(name)
    except AttributeError:
        return None


def some(names: Collection[str]) -> str:
    """The first few of many names, and how many there are."""
    ordered = list(names)
    shown = ", ".join(ordered[:SHOWN])
    return shown if len(ordered) <= SHOWN else f"{shown}, … ({len(ordered)} in all)"


def _matches(
    module: nn.Module, child: str, state: Mapping[str, Tensor], twins: Mapping[str, frozenset[str]]
) -> Iterator[Match]:
    tensors = module.get_submodule(child).state_dict(keep_vars=True)
    own = {name: tensor.shape for name, tensor in tensors.items() if isinstance(tensor, Tensor)}
    if not own:
        return
    before = f"{child}." if child else ""
    for prefix in dict.fromkeys(("", before, f"pipe.{before}", "model.", "module.")):
        if not all(key.startswith(prefix) for key in state):
            continue
        cut = {key.removeprefix(prefix): key for key in state}
        same = {name: key for name, key in cut.items() if name in own and state[key].shape == own[name]}
        there = {twin for name in cut if name in own for twin in twins.get(before + name, ())}
        yield Match(
            child,
            {key: before + name for name, key in same.items()},
            tuple(before + name for name in own if name not in cut and before + name not in there),
            tuple(key for name, key in cut.items() if name not in own),
            tuple(
                f"{before}{name} {_shape(own[name])} here and {_shape(state[key].shape)} there"
                for name, key in cut.items()
                if name in own and name not in same
            ),
        )


def _twins(module: nn.Module) -> dict[str, frozenset[str]]:
    """Names of parameters that are one tensor, by each of them: a file needs to have it once."""
    groups: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    return {name: frozenset(group) for group in groups.values() if len(group) > 1 for name in group}


def _is_allowed(match: Match, allow_missing: bool, allow_unexpected: bool) -> bool:
    return not (
        match.other_shape or (match.missing and not allow_missing) or (match.unexpected and not allow_unexpected)
    )


def _misfit(what: str, match: Match, allow_missing: bool, allow_unexpected: bool) -> str:
    nearest = match.child or "the whole training module"
    parts = [f"{what} fits no model; nearest is {nearest}, {len(match.names)} of whose tensors it has"]
    if match.missing and not allow_missing:
        hint = "; if it is one of several shards, put them in one list" if not match.unexpected else ""
        parts.append(f"missing: {some(match.missing)} (allow_missing would leave them as the factory made them{hint})")
    if match.unexpected and not allow_unexpected:
        parts.append(f"unexpected: {some(match.unexpected)} (allow_unexpected would leave them out)")
    if match.other_shape:
        parts.append(f"of another shape: {some(match.other_shape)}")
    return "; ".join(parts)


def _children(module: nn.Module) -> str:
    return "allowed: " + _joined(name for name, _ in module.named_children())


def _joined(names: Iterable[str]) -> str:
    return ", ".join(names) or "none, it has no children"


def _shape(shape: torch.Size) -> str:
    return "×".join(map(str, shape)) or "scalar"
