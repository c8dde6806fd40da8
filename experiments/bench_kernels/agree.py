"""Whether two sides have computed the same."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

RELATIVE = 1e-3
MAY_DIFFER = 1e-5
"""Share of entries: a token next to a threshold may fall on either side of it, by rounding."""


def difference(ours: list[NDArray[Any]], theirs: list[NDArray[Any]]) -> str | None:
    """What differs, or None. Small entries are compared with the largest of their array."""
    for x, y in zip(ours, theirs, strict=True):
        if x.shape != y.shape:
            return f"shapes {x.shape} and {y.shape}"
        if not (np.isfinite(x).all() and np.isfinite(y).all()):
            return "something is not finite"
        wrong = np.abs(x - y) > RELATIVE * (np.abs(y) + 0.1 * np.abs(y).max())
        if wrong.mean() > MAY_DIFFER:
            at = np.unravel_index(np.argmax(np.abs(x - y)), x.shape)
            return f"{wrong.mean():.2%} of the entries, most of all {x[at]:.6g} and {y[at]:.6g}"
    return None
