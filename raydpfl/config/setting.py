"""What a member may know of the other sections of its experiment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Setting:
    """The facts of an experiment that cross its families: all that a member's `check`, `warnings`
    and the like may read of the other sections. `Experiment.setting` makes it.

    Args:
        section: the section that the member is in, as `local` or `evaluate.fine_tune`.
        kinds: the kind of each section that has one, by its name: `{"bounding": "clip", ...}`.
            `personal` and `evaluate.fine_tune` are there where the config has them.
        user_defined: the sections whose member is of a user-defined class.
        rounds: of the run.
        drawn_by: who draws the noise: `client`, `server`, or `step` (each client at its local
            steps); None: the run claims no privacy.
        virtual_cohort: whether guarantees are about clients that do not run.
        bound: on what a client sends, an L2 norm, in the first round; None: there is none.
        per_sample_bound: on each sample's gradient in a local step, an L2 norm; None: there is
            none.
        adaptive_bound: whether the bound may change from round to round.
        sends_model: whether clients send models, not updates.
        queries: each `raydpfl.methods.bounding.BoundingQuery` that clients answer in a round.
        stateful: of `local` and `bounding`, the sections by which clients keep a vector from one of
            their rounds to the next.
        plain_steps: whether each local step is x - lr g, and clients keep nothing.
        epochs: local epochs of a round; None: clients make `local.steps`.
        dropout: probability that a client of a cohort does not answer.
        cohort_hidden: whether the size of a cohort is a secret.
        min_separation: the fewest rounds from one participation of a client to its next.
        asks_losses: whether cohorts are chosen by losses that clients are asked for.
        loss_query: their answers as accountants count them (`raydpfl.privacy.Query`); None: not.
        data_weighted: whether the plain mean of a cohort already weighs clients by their data.
        uncounted: what noise at local steps is sized without, in words; None: nothing.
        weighted: whether clients' weights differ.
        momentum: beta of a server that moves along v <- beta v + u, else 0.
        shared_samples: whether several clients may hold the same sample.
        local_parameters: whether a part of the model stays with each client.
        tested: whether the model is evaluated on the test set.
        held_out: the share of each client's rows that is held out of training; or, as
            `{"clients": share}`, of the clients.
        survey: the histogram that all clients are asked for (`raydpfl.privacy.Survey`); None: none.
        accountants: those that the config asks for.
        relation: the neighbouring relation that the config asks for; may be `auto`.
        budget: epsilon that the run may not exceed; None: any.
        precision: of the products of training.
        drops_failures: whether a client that fails is dropped from its round.
        exclusions: what no accountant counts of the sections but the noise, in words.
        sample_exclusions: what none counts of the data besides, where samples are protected.
    """

    section: str
    kinds: Mapping[str, str]
    user_defined: frozenset[str]
    rounds: int
    drawn_by: str | None
    virtual_cohort: bool
    bound: float | None
    per_sample_bound: float | None
    adaptive_bound: bool
    sends_model: bool
    queries: tuple[Any, ...]
    stateful: tuple[str, ...]
    plain_steps: bool
    epochs: float | None
    dropout: float
    cohort_hidden: bool
    min_separation: int
    asks_losses: bool
    loss_query: Any
    data_weighted: bool
    uncounted: str | None
    weighted: bool
    momentum: float
    shared_samples: bool
    local_parameters: bool
    tested: bool
    held_out: float | dict[str, float]
    survey: Any
    accountants: tuple[str, ...]
    relation: Any
    budget: float | None
    precision: str
    drops_failures: bool
    exclusions: tuple[str, ...]
    sample_exclusions: tuple[str, ...]
