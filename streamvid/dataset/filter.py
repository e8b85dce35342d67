"""Which samples of a dataset a condition on its columns admits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True, slots=True)
class Filter:
    """A parsed condition.

    text: the condition in one spelling, so that equal conditions are equal. columns: the index columns it reads.
    """

    text: str
    columns: tuple[str, ...]

    def matching(self, table: pa.Table) -> npt.NDArray[np.int32]:
        """Row numbers, ascending, of the rows that the condition admits; `table` has at least `columns`."""
        raise NotImplementedError
