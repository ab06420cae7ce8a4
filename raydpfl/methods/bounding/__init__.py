"""Bounds on a client's influence: clipping, normalising, and their adaptive and smoothed forms.

The contract of a member: a client sends `factor(norm, bound)` times the vector that it would have
sent, where `norm` is that vector's L2 norm, and the result's norm is at most `bound` for every
finite `norm`.

>>> clip, normalize = FAMILY["clip"](bound=1.0), FAMILY["normalize"](bound=1.0)
>>> clip.factor(4.0, 1.0), clip.factor(0.5, 1.0)
(0.25, 1.0)
>>> normalize.factor(0.5, 1.0), normalize.factor(0.0, 1.0)
(2.0, 0.0)

Edge cases, the same for every member:

| norm            | sent                                                                     |
|-----------------|--------------------------------------------------------------------------|
| 0               | 0 (normalisation has no direction to keep; 001 sec. 5 defines it so)      |
| infinite or NaN | nothing: it is the client's error, raised with its id                    |

The sensitivity of the sum over a cohort is `bound` when a client is added, removed or zeroed out,
and 2 `bound` when one is replaced. Norm and factor are computed in float64, so the bound holds to
1e-15. What a client sends, noise included, is then rounded once, to a grid below 1e-9 of the bound
(`raydpfl.core.exact_sum`). A bound is from 1e-12 to 1e15, where squares are exact in float32.

`per_sample_clip` bounds inside the local steps instead: every sample's gradient is clipped, the
update is sent as it is, and samples are protected (002, 003). `alpha_norm_ec` bounds the difference
from the client's state.

A client sends the update Delta = x^Q - x, or Delta / lr, minus the sum of its local gradients
(`scaling: gradient`; 001 Alg. 1-2 bound that, and the server multiplies by the local learning rate
again), or the model x^Q itself (`model_clip`). In every form the server moves along +Delta.
"""

from raydpfl.config.registry import family
from raydpfl.methods.bounding.base import Bounding, BoundingQuery
from raydpfl.methods.bounding.clip import Clip

FIRST = (
    "none", "clip", "model_clip", "normalize", "smooth_normalize", "quantile_clip",
    "per_sample_clip",
)  # fmt: skip
FAMILY: dict[str, type[Bounding]] = family(__name__, Bounding, first=FIRST)

__all__ = ["FAMILY", "Bounding", "BoundingQuery", "Clip"]
