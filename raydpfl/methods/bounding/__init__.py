"""Bounds on a client's influence: clipping, normalising, and their adaptive and smoothed forms.

The contract of a member: a client sends `factor(norm, bound)` times the vector that it would have
sent, where `norm` is that vector's L2 norm, and the result's norm is at most `bound` for every
finite `norm`. Of norm 0 it sends 0 (001 sec. 5). A norm that is infinite or NaN is the client's
error, raised with its id.

>>> clip, normalize = FAMILY["clip"](bound=1.0), FAMILY["normalize"](bound=1.0)
>>> clip.factor(4.0, 1.0), clip.factor(0.5, 1.0)
(0.25, 1.0)
>>> normalize.factor(0.5, 1.0), normalize.factor(0.0, 1.0)
(2.0, 0.0)

The sensitivity of the sum over a cohort is `bound` when a client is added, removed or zeroed out,
and 2 `bound` when one is replaced. Norm and factor are computed in float64, so the bound holds to
1e-15. What a client sends, noise included, is then rounded once, to a grid below 1e-9 of the bound
(`raydpfl.core.exact_sum`). A bound is from 1e-12 to 1e15, where squares are exact in float32.
"""

from raydpfl.config.registry import family
from raydpfl.methods.bounding.base import Bounding, BoundingQuery
from raydpfl.methods.bounding.clip import Clip

FIRST = (
    "none", "clip", "model_clip", "normalize", "smooth_normalize", "quantile_clip",
    "per_sample_clip",
)  # fmt: skip
FAMILY: dict[str, type[Bounding]] = family(__name__, Bounding, leading_kinds=FIRST)

__all__ = ["FAMILY", "Bounding", "BoundingQuery", "Clip"]
