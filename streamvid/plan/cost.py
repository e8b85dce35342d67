"""Costs of training steps, predicted from the tokens in a batch, and classes of buckets with approximately equal costs.

A batch of B samples of s tokens each takes

    constant + per_token * B * s + per_pair * B * s * s

`per_pair` is the cost of attention, where each token attends to all tokens of its sample. Without measurements,
only the ratios of costs are meaningful: the constant is 0, and attention costs as much as everything else at 12,288
tokens per sample. For a width of 2,048, this is the value of s at which 24 * width**2 operations per token per layer
equal 4 * s * width operations.

All computations, including the fit, use exact arithmetic: the same measurements give the same table, and the same table
gives the same classes, on every rank and machine.
"""

from __future__ import annotations

import math
import reprlib
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import combinations
from numbers import Integral, Real
from typing import Any

from streamvid.buckets.batch_size import tokens_of
from streamvid.buckets.bucket import Bucket
from streamvid.buckets.model import ModelRule
from streamvid.config import require_integer
from streamvid.errors import ConfigError

COST_VERSION = 1
MAX_SECONDS = 1_000_000
_MAX_BATCH_SIZE = 1 << 20
_MAX_TOKENS = 1 << 40
_PER_NANOSECOND = 10**9  # coefficients are in attoseconds, so that even the smallest keep three digits as integers
_MAX_COEFFICIENT = MAX_SECONDS * _PER_NANOSECOND**2

_EVEN_TOKENS = 12_288  # see above
_DEFAULT_PER_TOKEN = 1000 * _PER_NANOSECOND  # 1 µs; any value would do
# Fewer measurements of a batch may all be first steps, which compile and warm up.
_ENOUGH = 3
_SCALE = 1 << 100  # scale of the fit's fixed-point numbers
_DEPENDENT = Fraction(1, 10**9)  # below this share of their length, columns count as dependent


@dataclass(frozen=True, slots=True)
class CostTable:
    """Table that predicts the duration of a training step, in nanoseconds, from the step's bucket and batch size.

    tokens: bucket id → number of tokens per sample.
    constant, per_token, per_pair: coefficients of the cost formula (see cost.py), in attoseconds.
    measured: (bucket id, batch size) → measured nanoseconds, used in place of the prediction.
    Raises ConfigError for invalid values.
    """

    tokens: Mapping[str, int]
    constant: int = 0
    per_token: int = _DEFAULT_PER_TOKEN
    per_pair: int = _DEFAULT_PER_TOKEN // _EVEN_TOKENS
    measured: Mapping[tuple[str, int], int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.tokens, Mapping) or not all(isinstance(name, str) for name in self.tokens):
            raise ConfigError(
                f"cost table tokens={reprlib.repr(self.tokens)}: must be a mapping from bucket ids to integers"
            )
        for name, tokens in self.tokens.items():
            require_integer(f"cost table tokens[{name!r}]", tokens, 1, _MAX_TOKENS)
        for name in ("constant", "per_token", "per_pair"):
            require_integer(f"cost table {name}", getattr(self, name), 0, _MAX_COEFFICIENT)
        if not self.constant + self.per_token + self.per_pair:
            raise ConfigError(
                "cost table constant=0, per_token=0, per_pair=0: at least one of these values must be above 0"
            )
        if not isinstance(self.measured, Mapping) or not all(_is_row(batch, 2) for batch in self.measured):
            raise ConfigError(
                f"cost table measured={reprlib.repr(self.measured)}: must be a mapping from (bucket id, batch size) "
                "to nanoseconds; fit_costs creates one from measured steps"
            )
        for (bucket_id, batch_size), nanoseconds in self.measured.items():
            _validate_batch(bucket_id, batch_size, self.tokens)
            require_integer(f"cost table measured[{bucket_id!r}, {batch_size}]", nanoseconds, 1, MAX_SECONDS * 10**9)
        object.__setattr__(self, "tokens", dict(sorted(self.tokens.items())))
        object.__setattr__(self, "measured", dict(sorted(self.measured.items())))

    def step_nanoseconds(self, bucket_id: str, batch_size: int) -> int:
        """Return the measured or predicted nanoseconds per step. Raises ConfigError for an unknown bucket."""
        _validate_batch(bucket_id, batch_size, self.tokens)
        if (bucket_id, batch_size) in self.measured:
            return self.measured[bucket_id, batch_size]
        columns = _columns(self.tokens[bucket_id], batch_size)
        coefficients = (self.constant, self.per_token, self.per_pair)
        attoseconds = sum(amount * each for amount, each in zip(columns, coefficients, strict=True))
        return max(1, (attoseconds + _PER_NANOSECOND // 2) // _PER_NANOSECOND)

    def costs(self, batch_sizes: Mapping[str, int]) -> dict[str, int]:
        """Map each bucket id to the nanoseconds per step with the bucket's batch size, as input for `cost_classes`."""
        return {bucket_id: self.step_nanoseconds(bucket_id, size) for bucket_id, size in batch_sizes.items()}

    def to_json(self) -> dict[str, Any]:
        """Return the table as JSON values; `from_json` reads them."""
        return {
            "version": COST_VERSION,
            "tokens": dict(self.tokens),
            "attoseconds": {"constant": self.constant, "per_token": self.per_token, "per_pair": self.per_pair},
            "measured": [[*batch, nanoseconds] for batch, nanoseconds in self.measured.items()],
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> CostTable:
        """Create a table from the result of `to_json`. Raises ConfigError if the value is invalid."""
        if not isinstance(value, Mapping):
            raise ConfigError(f"the cost table has type {type(value).__name__}; pass the result of CostTable.to_json()")
        if (version := value.get("version")) != COST_VERSION:
            raise ConfigError(
                f"cost table version={version!r}: only version {COST_VERSION} can be read; fit the costs again"
            )
        try:
            rates = value["attoseconds"]
            measured = {(bucket_id, size): nanoseconds for bucket_id, size, nanoseconds in value["measured"]}
            return cls(value["tokens"], rates["constant"], rates["per_token"], rates["per_pair"], measured)
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"the cost table is damaged ({type(error).__name__}: {error}); fit the costs again"
            ) from error


def default_costs(buckets: Iterable[Bucket], model: ModelRule | None = None) -> CostTable:
    """Return a cost table without measurements.

    Attention has its default share of the cost, and only cost ratios are meaningful.

    model: model whose VAE and patch sizes determine the number of tokens; None uses `Bucket.tokens`.
    """
    return CostTable(_tokens_of(buckets, model))


def fit_costs(
    measurements: Iterable[tuple[str, int, float]], buckets: Iterable[Bucket], model: ModelRule | None = None
) -> CostTable:
    """Fit a cost table to measured steps, given as (bucket id, batch size, seconds) in any order.

    Slow first steps may be included, because the cost of a batch that was measured at least three times is the median
    of its measurements. Other costs are predicted with three non-negative coefficients, which minimize the sum of the
    squared relative errors. The fit uses the medians of the batches that were measured at least three times, or of all
    batches if no batch was measured that often. If all measurements have the same number of tokens per sample,
    attention keeps its default share of the non-constant cost.

    model: see `default_costs`.

    Numbers may be numpy scalars. Raises ConfigError if the list is empty, an entry is malformed, a bucket is unknown,
    or a duration is not above 0 and at most 1,000,000 seconds.
    """
    tokens = _tokens_of(buckets, model)
    groups: dict[tuple[str, int], list[int]] = {}
    for bucket_id, batch_size, seconds in _triples(measurements):
        _validate_batch(bucket_id, batch_size, tokens)
        groups.setdefault((str(bucket_id), batch_size), []).append(_nanoseconds(bucket_id, batch_size, seconds))
    if not groups:
        raise ConfigError(
            "measurements=[]: must contain a (bucket id, batch size, seconds) tuple for at least one step"
        )
    medians = {batch: int(statistics.median(values)) for batch, values in sorted(groups.items())}
    trusted = {batch: median for batch, median in medians.items() if len(groups[batch]) >= _ENOUGH}
    rows = [(_columns(tokens[name], size), median) for (name, size), median in (trusted or medians).items()]
    return CostTable(tokens, *_fit(rows), trusted)


def cost_classes(costs: Mapping[str, int], tolerance: float = 0.10) -> dict[str, int]:
    """Map each bucket id to the number of the bucket's cost class. Class 0 is the cheapest class.

    A class contains the buckets that cost at most (1 + `tolerance`) times as much as the class's cheapest bucket.

    costs: bucket id → cost, an integer of at least 1.
    tolerance: allowed difference as a multiple of the lowest cost in the class, from 0 to 10.
    Raises ConfigError for invalid values.
    """
    if isinstance(tolerance, bool) or not isinstance(tolerance, int | float) or not 0 <= tolerance <= 10:
        raise ConfigError(f"tolerance={tolerance!r}: must be a number from 0 to 10, such as 0.1 for 10%")
    for name, cost in costs.items():
        require_integer(f"cost table costs[{name!r}]", cost, 1)
    # Exact arithmetic, so that rounding never puts a bucket into another class on another machine.
    most = 1 + Fraction(tolerance).limit_denominator(10**6)
    classes: dict[str, int] = {}
    number, cheapest = -1, 0
    for cost, bucket_id in sorted((cost, bucket_id) for bucket_id, cost in costs.items()):
        if number < 0 or cost > cheapest * most:
            number, cheapest = number + 1, cost
        classes[bucket_id] = number
    return classes


def _columns(tokens: int, batch_size: int) -> tuple[int, int, int]:
    """Return the factors by which the cost formula multiplies its three coefficients."""
    return 1, batch_size * tokens, batch_size * tokens * tokens


def _fit(rows: Sequence[tuple[tuple[int, int, int], int]]) -> tuple[int, int, int]:
    """Return the coefficients (constant, per_token, per_pair) in attoseconds."""
    if len({pairs // tokens for (_, tokens, pairs), _ in rows}) > 1:
        constant, per_token, per_pair = _non_negative(rows)
    else:
        # Tokens and pairs cannot be separated: the default gives their ratio.
        whole = [((1, tokens * _EVEN_TOKENS + pairs), median) for (_, tokens, pairs), median in rows]
        constant, per_pair = _non_negative(whole if len(rows) > 1 else [((0, row[1]), median) for row, median in whole])
        per_token = per_pair * _EVEN_TOKENS
    rounded = (min(_MAX_COEFFICIENT, round(value * _PER_NANOSECOND)) for value in (constant, per_token, per_pair))
    result = next(rounded), next(rounded), next(rounded)
    return result if any(result) else (1, 0, 0)


def _non_negative(rows: Sequence[tuple[Sequence[int], int]]) -> list[Fraction]:
    """Return the non-negative coefficients that minimize the sum of (prediction / value - 1)**2 over all rows.

    The function tries all subsets of nonzero coefficients.

    rows: (amounts, value) with value > 0. At most len(rows) coefficients are nonzero. The solution is exact, apart
        from the rounding of amounts / value.
    """
    num_columns = len(rows[0][0])
    relative = [[amount * _SCALE // value for amount in amounts] for amounts, value in rows]
    products = [[sum(row[i] * row[j] for row in relative) for j in range(num_columns)] for i in range(num_columns)]
    totals = [sum(row[i] for row in relative) * _SCALE for i in range(num_columns)]
    best = [Fraction(0)] * num_columns
    most_explained = Fraction(0)
    for size in range(1, min(num_columns, len(rows)) + 1):
        for chosen in combinations(range(num_columns - 1, -1, -1), size):
            solution = _solve([[products[i][j] for j in chosen] for i in chosen], [totals[i] for i in chosen])
            if solution is None or min(solution) < 0:
                continue
            # The remaining squares are len(rows) minus this; subsets with the same value tie.
            explained = sum((x * totals[i] for x, i in zip(solution, chosen, strict=True)), Fraction(0)) / _SCALE**2
            if explained > most_explained + Fraction(1, 10**15):
                most_explained = explained
                best = [Fraction(0)] * num_columns
                for x, i in zip(solution, chosen, strict=True):
                    best[i] = x
    return best


def _solve(matrix: list[list[int]], right: list[int]) -> list[Fraction] | None:
    """Return the solution of a symmetric system of linear equations, or None if the system is singular."""
    rows = [[Fraction(value) for value in [*row, end]] for row, end in zip(matrix, right, strict=True)]
    for i, pivot_row in enumerate(rows):
        # The part of a column that is independent of the columns before it, relative to its length.
        if pivot_row[i] <= matrix[i][i] * _DEPENDENT:
            return None
        for k, row in enumerate(rows):
            if k != i:
                share = row[i] / pivot_row[i]
                rows[k] = [value - share * pivot for value, pivot in zip(row, pivot_row, strict=True)]
    return [row[-1] / row[i] for i, row in enumerate(rows)]


def _tokens_of(buckets: Iterable[Bucket], model: ModelRule | None) -> dict[str, int]:
    if not isinstance(buckets, Iterable):
        raise ConfigError(
            f"buckets={buckets!r}: must be an iterable of streamvid.Bucket objects, such as loader.buckets"
        )
    tokens = {}
    for number, bucket in enumerate(buckets):
        if not isinstance(bucket, Bucket):
            raise ConfigError(f"buckets[{number}]={bucket!r}: must be a streamvid.Bucket, as in loader.buckets")
        tokens[bucket.id] = tokens_of(bucket, model)
    if not tokens:
        raise ConfigError("buckets=(): must contain at least one bucket of a dataset")
    return tokens


def _triples(measurements: Iterable[tuple[str, int, float]]) -> Iterator[tuple[str, int, float]]:
    expected = "(bucket id, batch size, seconds), such as ('832x480-81f', 4, 0.75)"
    if not isinstance(measurements, Iterable) or isinstance(measurements, Mapping | str | bytes):
        raise ConfigError(
            f"measurements={reprlib.repr(measurements)}: must be a list of measured steps of the form {expected}"
        )
    for number, entry in enumerate(measurements):
        if not _is_row(entry, 3):
            raise ConfigError(
                f"measurements[{number}]={reprlib.repr(entry)}: must be a measured step of the form {expected}"
            )
        bucket_id, batch_size, seconds = entry
        is_whole = isinstance(batch_size, Integral) and not isinstance(batch_size, bool)
        yield bucket_id, int(batch_size) if is_whole else batch_size, seconds


def _is_row(value: object, length: int) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes) and len(value) == length


def _nanoseconds(bucket_id: str, batch_size: int, seconds: object) -> int:
    try:
        value = float(seconds) if isinstance(seconds, Real) and not isinstance(seconds, bool) else math.nan
    except OverflowError:
        value = math.inf
    if not 0 < value <= MAX_SECONDS:
        raise ConfigError(
            f"measurement ({bucket_id!r}, {batch_size!r}, {seconds!r}): seconds must be a number above 0 and at most "
            f"{MAX_SECONDS}; omit steps that were not timed"
        )
    return max(1, round(Fraction(value) * 10**9))


def _validate_batch(bucket_id: object, batch_size: object, tokens: Mapping[str, int]) -> None:
    if not isinstance(bucket_id, str) or bucket_id not in tokens:
        known = ", ".join(sorted(tokens)[:10]) + ", …" * (len(tokens) > 10)
        raise ConfigError(
            f"bucket {bucket_id!r} is not in the cost table, which contains {known or 'no buckets'}; create the table "
            "for all buckets of the dataset (loader.buckets)"
        )
    require_integer(f"cost table batch size for {bucket_id!r}", batch_size, 1, _MAX_BATCH_SIZE)
