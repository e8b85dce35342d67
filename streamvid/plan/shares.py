"""From the weights of several datasets to how often an epoch repeats each: exact fractions, the same everywhere."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from typing import Literal, TypeAlias, get_args

from streamvid.errors import ConfigError

MixBy: TypeAlias = Literal["samples", "tokens"]

_MAX_PARTS = 1 << 40  # numerators and denominators; floor arithmetic on them is exact whatever they are
_ROUNDING = Fraction(1, 10**12)  # more than a few operations in floating point are off by, as a share


def exact_fraction(name: str, value: object) -> Fraction:
    """A number above 0 as it is written: 0.1 is 1/10. Takes int, float, Fraction, Decimal and texts such as "3/2".

    ConfigError for others, and for numbers of more than about 12 digits such as 1 / 3 in floating point.
    """
    try:
        if isinstance(value, bool) or not isinstance(value, int | float | str | Fraction | Decimal):
            raise ValueError("no number")
        fraction = Fraction(value) if isinstance(value, int | Fraction | str) else Fraction(Decimal(str(value)))
    except (ValueError, ZeroDivisionError, InvalidOperation, OverflowError) as error:
        raise ConfigError(f"{name}={value!r}: expected a number above 0, such as 2, 0.5 or '3/2'") from error
    if not fraction > 0 or not _is_short(fraction):
        raise ConfigError(
            f"{name}={value!r}: allowed are numbers above 0 with at most 12 digits, such as 2, 0.5 or '1/3'"
            + (_remedy(fraction) if fraction > 0 else "")
        )
    return fraction


def _is_short(fraction: Fraction) -> bool:
    return max(fraction.numerator, fraction.denominator) <= _MAX_PARTS


def _remedy(fraction: Fraction) -> str:
    """How to write what 1 / 3 or 1 - 0.7 meant before floating point made many digits of it."""
    meant = fraction.limit_denominator(1000)
    if abs(meant - fraction) > fraction * _ROUNDING or not _is_short(meant):
        return "; round it"
    return f"; write the text '{meant}' or fractions.Fraction({meant.numerator}, {meant.denominator})"


def repeats_of_weights(
    weights: Sequence[Fraction],
    num_samples: Sequence[int],
    num_tokens: Sequence[int],
    samples_per_epoch: int | None,
    by: MixBy,
) -> list[Fraction]:
    """How often an epoch takes each dataset's samples, so that its share is its weight's share of all weights.

    num_samples, num_tokens: of each dataset, once. samples_per_epoch: of all together; None: as many as there are.
    by: "samples" or "tokens", what the shares are counted in.
    """
    if by not in get_args(MixBy):
        raise ConfigError(f"mix_by={by!r}: allowed are {', '.join(map(repr, get_args(MixBy)))}")
    total = sum(num_samples) if samples_per_epoch is None else samples_per_epoch
    if isinstance(total, bool) or not isinstance(total, int) or not 1 <= total <= 1 << 40:
        raise ConfigError(f"samples_per_epoch={samples_per_epoch!r}: allowed are the integers 1 to {1 << 40}")
    sizes = num_samples if by == "samples" else num_tokens
    # Dataset i is taken scale * weight / size times; together that makes `total` samples.
    per_scale = sum((w * n / size for w, n, size in zip(weights, num_samples, sizes, strict=True)), Fraction(0))
    return [total / per_scale * weight / size for weight, size in zip(weights, sizes, strict=True)]
