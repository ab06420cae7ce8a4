"""Synthetic(u, v): softmax data whose heterogeneity has two knobs (Li et al., FedProx, MLSys 2020,
sec. 5.1; 002 sec. VI).

Client k draws its own model and its own inputs:

    U_k ~ N(0, u),  W_k[j, c], b_k[c] ~ N(U_k, 1);   B_k ~ N(0, v),  v_k[j] ~ N(B_k, 1)
    x ~ N(v_k, diag(j^-1.2)),  y = argmax_c (x W_k + b_k)[c]

The second argument is a variance, as printed; the code that Li et al. released takes u and v for
standard deviations (the same for 0 and 1). U_k adds (1 + sum_j x_j) U_k to the score of every class
alike, so u changes no label: of the two knobs only v turns anything, and a sweep over Synthetic(u,
u) is a sweep over v. The iid form shares W and b, from N(0, 1), and has v_k = 0. Sizes follow a
power law unless `sizes` says otherwise: the largest of a thousand clients holds 13 % of all
samples, of a million 7 %. A client's samples depend on (seed, k) and on how many it has:

>>> data = Synthetic(clients=3, samples=4, u=1, v=1, sizes={"kind": "balanced"})
>>> x, y = data.split(seed=0, root=None).rows(1, 2)
>>> x.shape, x.dtype, y
((4, 60), dtype('float32'), array([2, 2, 2, 2]))
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from pydantic import Field, SerializeAsAny, model_validator

from raydpfl.core.prng import Purpose, stream
from raydpfl.data.sizes import PowerLaw, Sizes, apportion
from raydpfl.data.sources.base import Maker, SizedData, Split
from raydpfl.errors import ConfigError

# Steps of a client's stream: its model and training rows; its test rows; the model of the iid form
# (of client 0).
_TRAIN, _TEST, _SHARED = range(3)
PIECE = 1 << 22  # numbers of a client's samples that are made at once
Rows = tuple[np.ndarray, np.ndarray]


class Synthetic(SizedData):
    """Li et al.'s Synthetic(u, v), the same share of each client's own rows for testing. 002 prints
    no numbers of samples: 1111 test rows of 10,000 are the tenth that Li et al. hold out.
    """

    division: ClassVar[frozenset[str]] = SizedData.division | {"samples", "u", "v", "iid"}
    kind: str = "synthetic"
    location: ClassVar[str] = "generated"
    clients: int = Field(ge=1, le=10**9, description="N")
    examples: ClassVar[tuple[dict[str, Any], ...]] = ({"clients": 10},)
    samples: int = Field(default=100, ge=1, description="of a client, on average")
    test_samples: int = Field(default=10_000, ge=1, description="in all")
    u: float = Field(default=1.0, ge=0, description="variance of the means of clients' models")
    v: float = Field(default=1.0, ge=0, description="variance of the means of clients' inputs")
    iid: bool = Field(default=False, description="one model and no shift of inputs, for all")
    sizes: SerializeAsAny[Sizes] = Field(default=PowerLaw(), description="of the clients")
    features: int = Field(default=60, ge=1, description="numbers of a sample")
    classes: int = Field(default=10, ge=2, description="how many there are")

    @model_validator(mode="after")
    def _check_iid(self) -> Synthetic:
        for name in ("u", "v") if self.iid else ():
            if getattr(self, name) not in (0.0, 1.0):
                expected = "1, the default, or 0 with data.iid, whose clients share one model"
                raise ConfigError(f"data.{name}", getattr(self, name), expected)
        return self

    @property
    def tests_clients(self) -> bool:
        return False  # test rows are draws of their own

    def split(self, seed: int, root: Path | None) -> Split:
        generator = stream(seed, Purpose.PARTITION)
        sizes = self.sizes.counts(self.clients * self.samples, self.clients, generator)
        shared_model = self._shared_model(seed)

        def draw_samples(clients: np.ndarray, counts: np.ndarray, step: int) -> Rows:
            """Samples of these clients, one after the other."""
            x = np.empty((int(counts.sum()), self.features), np.float32)
            y = np.empty(len(x), np.int64)
            start = 0
            for client, count in zip(clients.tolist(), counts.tolist(), strict=True):
                for piece_x, piece_y in self._pieces(seed, shared_model, step, client, count):
                    row_slice = slice(start, start + len(piece_y))
                    x[row_slice], y[row_slice] = piece_x, piece_y
                    start = row_slice.stop
            return x, y

        def rows(first: int, last: int) -> Rows:
            return draw_samples(np.arange(first, last), sizes[first:last], _TRAIN)

        def test() -> Rows:
            counts = apportion(self.test_samples, sizes)
            return draw_samples(np.flatnonzero(counts), counts[counts > 0], _TEST)

        return Split(sizes, (self.features,), self.classes, rows, test)

    def maker(self, seed: int) -> Maker:
        return partial(self._pieces, seed, self._shared_model(seed), _TRAIN)

    def identity(self, root: Path | None) -> list:
        # before, every client had as many: other rows, so another name, of which noise is keyed
        return ["test rows by size"]

    def _model(self, generator: np.random.Generator) -> np.ndarray:
        """Float32 [2 + features classes + classes + features]: normals for U, B, W, b, v."""
        count = 2 + (self.features + 1) * self.classes + self.features
        return generator.standard_normal(count, np.float32)

    def _shared_model(self, seed: int) -> np.ndarray | None:
        """The model of all clients in the iid form, as `_model` gives one."""
        return self._model(stream(seed, Purpose.DATA, step=_SHARED)) if self.iid else None

    def _pieces(
        self, seed: int, shared_model: np.ndarray | None, step: int, client: int, count: int
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Samples of a client, some at a time: x float32 [rows, features], y int64 [rows]."""
        weights = self.features * self.classes
        scale = (np.arange(1, self.features + 1) ** -0.6).astype(np.float32)
        shift = np.sqrt(np.array([self.u, self.v], np.float32))
        generator = stream(seed, Purpose.DATA, client=client)
        model = self._model(generator) if shared_model is None else shared_model
        if step == _TEST:
            generator = stream(seed, Purpose.DATA, client=client, step=_TEST)
        linear = model[2 : -self.features]
        if shared_model is None:
            linear = linear + shift[0] * model[0]
        max_rows = max(1, PIECE // self.features)
        for start in range(0, count, max_rows):
            x = np.empty((min(max_rows, count - start), self.features), np.float32)
            generator.standard_normal(out=x, dtype=np.float32)
            x *= scale
            if shared_model is None:
                x += model[-self.features :] + shift[1] * model[1]
            scores = x @ linear[:weights].reshape(self.features, self.classes) + linear[weights:]
            yield x, scores.argmax(1)
