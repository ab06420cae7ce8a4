"""Fixed front ends: samples become a table of columns once, before they are divided among clients,
and a small model is trained on top, `data.features`.

The contract of a member: columns float32 [rows, k] that are a function of (its fields, the rows,
the files it reads) alone. Principal components learned from rows that lie about a circle in 3
dimensions need 2 columns, centred at the rows' mean:

>>> import numpy as np
>>> angle = np.linspace(0, 2 * np.pi, 12, endpoint=False)
>>> x = np.stack([np.cos(angle), np.sin(angle), 5 + 0 * angle], 1).astype(np.float32)
>>> columns, _ = FAMILY["pca"](components=2).columns(x, x[:3], None)
>>> columns.shape, bool(np.allclose(np.linalg.norm(columns, axis=1), 1))
((12, 2), True)

What is learnt from the training rows is a query that no accountant counts, and listed among the
exclusions of the run's guarantee. Components from a file and pretrained weights count as public.
"""

from raydpfl.config.registry import family
from raydpfl.data.features.base import Features
from raydpfl.data.features.pca import principal_components

__all__ = ["FAMILY", "Features", "principal_components"]

FIRST = ("pca", "resnet18", "random_filters")
FAMILY: dict[str, type[Features]] = family(__name__, Features, FIRST)
