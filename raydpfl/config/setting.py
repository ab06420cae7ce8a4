"""What a member may know of the other sections of its experiment."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Setting:
    """The facts of an experiment that cross its families: all that a member's `check`, `warnings`
    and the like may read of the other sections. `Experiment.setting` makes it.
    """

    section: str  # the section that the member is in, as `local` or `evaluate.fine_tune`
    # the kind of each section that has one, by its name: `{"bounding": "clip", ...}`. `personal`
    # and `evaluate.fine_tune` are there where the config has them.
    kinds: Mapping[str, str]
    user_defined: frozenset[str]  # the sections whose member is of a user-defined class
    rounds: int  # of the run
    # who draws the noise: `client`, `server`, or `step` (each client at its local steps); None: the
    # run claims no privacy
    drawn_by: str | None
    virtual_cohort: bool  # whether guarantees are about clients that do not run
    # on what a client sends, an L2 norm, in the first round; None: there is none
    bound: float | None
    bound_order: int  # of the norm that it bounds: 2 (L2) or 1
    # on each sample's gradient in a local step, an L2 norm; None: there is none
    per_sample_bound: float | None
    adaptive_bound: bool  # whether the bound may change from round to round
    sends_model: bool  # whether clients send models, not updates
    # each `raydpfl.methods.bounding.BoundingQuery` that clients answer in a round
    queries: tuple[Any, ...]
    # of `local` and `bounding`, the sections by which clients keep a vector from one of their
    # rounds to the next
    stateful: tuple[str, ...]
    plain_steps: bool  # whether each local step is x - lr g, and clients keep nothing
    epochs: float | None  # local epochs of a round; None: clients make `local.steps`
    dropout: float  # probability that a client of a cohort does not answer
    cohort_hidden: bool  # whether the size of a cohort is a secret
    min_separation: int  # the fewest rounds from one participation of a client to its next
    most_participations: int  # the most rounds of the run that a client takes part in
    asks_losses: bool  # whether cohorts are chosen by losses that clients are asked for
    loss_query: Any  # their answers as accountants count them (`raydpfl.privacy.Query`); None: not
    data_weighted: bool  # whether the plain mean of a cohort already weighs clients by their data
    uncounted: str | None  # what noise at local steps is sized without, in words; None: nothing
    weighted: bool  # whether clients' weights differ
    momentum: float  # beta of a server that moves along v <- beta v + u, else 0
    shared_samples: bool  # whether several clients may hold the same sample
    local_parameters: bool  # whether a part of the model stays with each client
    tested: bool  # whether the model is evaluated on the test set
    # the share of each client's rows that is held out of training; or, as `{"clients": share}`, of
    # the clients
    held_out: float | dict[str, float]
    # the histogram that all clients are asked for (`raydpfl.privacy.Survey`); None: none
    survey: Any
    accountants: tuple[str, ...]  # those that the config asks for
    colluders: int  # clients against whom there are guarantees too
    relation: Any  # the neighbouring relation that the config asks for; may be `auto`
    individual: bool  # whether clients have budgets of their own, by the norms of what they send
    budget: float | None  # epsilon that the run may not exceed; None: any
    precision: str  # of the products of training
    drops_failures: bool  # whether a client that fails is dropped from its round
    exclusions: tuple[str, ...]  # what no accountant counts of the sections but the noise, in words
    # what none counts of the data, where samples are protected
    sample_exclusions: tuple[str, ...]
