"""Replay: sound configs are not suspected; every break is noticed, also where sums hide it."""

import json
import random
from dataclasses import replace
from functools import wraps
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import refusal
from test_audit import (
    ADAPTIVE,
    BROKEN,
    BROKEN_STEPS,
    HISTOGRAMS,
    SERVER,
    STEPS,
    after,
    before,
    clipped_late,
    failed,
    instead_of,
    patched,
    small,
)

from raydpfl import Experiment
from raydpfl.audit.replay import replay
from raydpfl.check.example import BASE_CONFIG, SECTIONS
from raydpfl.core.modular_sum import ModularSum
from raydpfl.data.row_readers import ClientTable
from raydpfl.errors import ConfigError, RunError
from raydpfl.methods.bounding.quantile_clip import QuantileClip
from raydpfl.methods.noise.keyed_noise import query_noise
from raydpfl.methods.noise.laplace import LaplaceSource
from raydpfl.methods.noise.secure_sum import IntegerSource
from raydpfl.methods.noise.tree_gaussian import TreeSource
from raydpfl.methods.selection import Cohort, Population, Selection
from raydpfl.methods.selection.power_of_choice import PowerOfChoice
from raydpfl.methods.selection.with_replacement import Multinomial
from raydpfl.models.client_histogram import Histogram
from raydpfl.privacy import Mechanism, Query, Sampling, Terms, report_of
from raydpfl.privacy.individual import IndividualBudgets
from raydpfl.simulation import privacy_budget
from raydpfl.simulation.client import actor, contribution
from raydpfl.simulation.client.actor import ClientActor
from raydpfl.simulation.client.chunk_training import ChunkTraining
from raydpfl.simulation.client.contribution import Contribution, ScaledContribution
from raydpfl.simulation.client_state import ClientStates
from raydpfl.simulation.coordinator import Coordinator
from raydpfl.simulation.noise_monitor import MonitoredNoise
from raydpfl.simulation.plan import Plan
from raydpfl.simulation.recorder import join_columns
from raydpfl.simulation.resolution import resolve
from raydpfl.simulation.sampling_monitor import SamplingMonitor
from raydpfl.training.backends.base import StepNoise

# ---- sound configs ----

DATA = (
    {"sizes": {"kind": "spread"}},
    {"sizes": {"kind": "balanced"}, "samples": 20},
    {"sizes": {"kind": "lognormal"}, "samples": 30, "clients": 40},
    {"features": 2, "classes": 2, "clients": 12},
    {"features": 30, "classes": 5},
)
MODELS = ({"kind": "softmax"}, {"kind": "mlp", "hidden": 6}, {"kind": "linear"})
NOISES = (
    {"kind": "gaussian", "multiplier": 1.0, "placement": "server"},
    {"kind": "gaussian", "multiplier": 3.0, "placement": "client"},
    {"kind": "gaussian", "multiplier": 0.3},
    {"kind": "gaussian", "std": 0.7},
    {"kind": "gaussian", "epsilon": 3.0},
    {"kind": "gaussian", "multiplier": 1.0, "placement": "step"},
    {"kind": "gaussian", "placement": "step", "epsilon": {"kind": "uniform", "low": 1, "high": 9}},
    {"kind": "discrete_gaussian", "multiplier": 1.0, "bits": 12},
)
EVALUATE = (
    {"every": 100},
    {"every": 2},
    {"every": 1, "validation": 0.25},
    {"every": 2, "per_client": "accuracy", "histogram": {"std": 3.0, "bins": 4}},
)
CLIENT = ({"chunk": 4}, {"chunk": 1}, {}, {"backend": "loop"}, {"backend": "vmap"})
RELATIONS = ("auto", "auto", "replace_one", "zero_out", "add_remove")


def members(section):
    """Every example of every member of a family, as sections of a config."""
    family = SECTIONS[section].family
    return [{"kind": kind, **fields} for kind, cls in family.items() for fields in cls.examples]


def sound(seed):
    """A valid private config, drawn by this seed from all members of all families."""
    draw = random.Random(seed)
    while True:
        tree = {
            **BASE_CONFIG,
            "seed": draw.randrange(1000),
            "rounds": draw.choice((1, 2, 4, 7)),
            "data": {**BASE_CONFIG["data"], **draw.choice(DATA)},
            "model": draw.choice(MODELS),
            "noise": {**draw.choice((*NOISES, *members("noise"))), "delta": 1e-3},
            "privacy": {"accountants": ["pld", "rdp"], "relation": draw.choice(RELATIONS)},
            "client": {"actors": 0, **draw.choice(CLIENT)},
            "evaluate": draw.choice(EVALUATE),
        }
        for section in ("selection", "local", "bounding", "weights", "server"):
            if draw.random() < 0.7:
                tree[section] = draw.choice(members(section))
        if tree["local"]["kind"] == "sgd" and draw.random() < 0.3:
            tree["local"] = {**tree["local"], "momentum": 0.5}
        if draw.random() < 0.25:
            tree["selection"] = {**tree["selection"], "dropout": 0.2}
        try:
            made = Experiment.from_dict(tree)
            if made.private and made.noise.repeatable:
                resolve(made)
                return made
        except ConfigError:
            continue


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(30))
def test_no_sound_config_is_suspected(seed):
    done = replay(sound(seed))
    assert done.passed, done.verdict


@pytest.mark.slow
def test_a_histogram_of_clients_that_are_held_out_is_replayed():
    """There are fewer scores than clients, one of whom differs."""
    evaluate = {**HISTOGRAMS["evaluate"], "validation": {"clients": 0.2}}
    done = replay(small(**{**HISTOGRAMS, "evaluate": evaluate}))
    assert done.passed, done.verdict


def test_draws_of_one_client_may_drop_out_one_by_one():
    """A replay of such a config found a monitor that ended the run."""
    monitor = SamplingMonitor(
        Multinomial(cohort=3, dropout=0.3), Population.balanced(5), np.arange(1, 9), 0, False
    )
    monitor.check(0, Cohort(np.array([3, 3]), np.array([0, 2]), 1), {})
    with pytest.raises(RunError, match="counted a client's draws wrongly in round 1"):
        monitor.check(1, Cohort(np.array([3, 3]), np.array([1, 1]), 1), {})


def test_clients_with_state_are_counted_in_all_groups():
    """A group has fewer clients than the population, whose ids are drawn."""
    sampling = Sampling("fixed", population=4, cohort=2)
    mechanism = Mechanism(sampling, (Query("updates", 1.0, 2.0),), 2, stateful="one")
    report = report_of(mechanism, ("pld",), Terms("replace_one", 1e-5))
    curves = report.curves([np.array([9]), np.array([9])], np.array([1, 2]))
    assert 0 < curves["pld"][0] < curves["pld"][1] < np.inf


# ---- broken mechanisms ----


def watching(note):
    """Has `note(coordinator, sum, columns of the clients)` see what comes of every round."""

    def seeing(made, self, t, cohort):
        total, results = made
        note(self, total, join_columns(results))
        return made

    return after(Coordinator, "collect", seeing)


def the_longest_left_out(patch):
    """The server leaves out of a round who was longest in the last."""
    select = Coordinator.select

    def note(self, total, columns):
        self.longest_client = columns["client"][np.nanargmax(columns["norm"])]

    def avoiding(self, t):
        cohort = select(self, t)
        others = cohort.clients != getattr(self, "longest_client", -1)
        return replace(cohort, clients=cohort.clients[others], draws=cohort.draws[others])

    watching(note)(patch)
    patch.setattr(Coordinator, "select", avoiding)


def the_mean_over_those_who_moved(patch):
    """The divisor is the number of clients whose update is finite."""

    def note(self, total, columns):
        self.moved = int(np.isfinite(columns["norm"]).sum())

    def divided(mean, self, t, cohort, total):
        return mean * (len(cohort) / max(1, self.moved))

    watching(note)(patch)
    after(Coordinator, "aggregate", divided)(patch)


def the_server_steps_by_the_exact_sum(patch):
    """What is recorded is noisy, and the model is not."""
    release, aggregate = Coordinator.release, Coordinator.aggregate

    def keeping(self, t, total):
        self.exact = total.copy()
        return release(self, t, total)

    patch.setattr(Coordinator, "release", keeping)
    patch.setattr(
        Coordinator, "aggregate", lambda self, t, cohort, _: aggregate(self, t, cohort, self.exact)
    )


# the noise of a round is another for another sum
noise_keyed_by_the_sum = after(
    MonitoredNoise,
    "on_sum",
    lambda drawn, self, t, std, total: np.roll(drawn, int(abs(total).sum() * 1e6) % len(drawn)),
)
# by a millionth of a standard deviation, which no statistic of a run can see
noise_that_grows_a_little_with_the_sum = after(
    MonitoredNoise,
    "on_sum",
    lambda drawn, self, t, std, total: drawn * (1 + 1e-6 * np.tanh(total[0])),
)
a_bound_on_the_largest_coordinate = patched(
    contribution, "vector_norms", lambda _: lambda rows: rows.double().abs().amax(1).numpy()
)


@instead_of(Contribution, "finite_norms")
def a_failed_client_sends_its_last_words(finite, self, state, slots, vectors, lengths):
    """A vector that is not finite is set to a large number, after the norms are taken."""
    vectors[~np.isfinite(lengths)] = 3.0
    lengths[~np.isfinite(lengths)] = 1e-3
    return finite(self, state, slots, vectors, lengths)


def a_weight_that_grows_with_the_loss(patch):
    """Weights are looked up again, once the norms of the round before are known."""
    seen = {}

    def note(self, total, columns):
        seen.update(zip(columns["client"].tolist(), columns["norm"].tolist(), strict=True))

    def shrunk(weights, self, clients):
        long = np.array([np.nan_to_num(seen.get(k, 0.0)) > 1e6 for k in clients.tolist()], bool)
        return weights * np.where(long, 0.5, 1.0)

    watching(note)(patch)
    after(Plan, "weights", shrunk)(patch)


@instead_of(ClientStates, "keep")
def states_dealt_to_the_wrong_clients(keep, self, results):
    """Each client goes on with what its neighbour kept."""
    for result in results:
        result.memory = {name: np.roll(rows, 1, 0) for name, rows in result.memory.items()}
    keep(self, results)


def the_largest_norm_ever_as_a_bound(patch):
    """Clients are scaled by the longest update that any has had so far."""
    longest = [0.0]

    def scaled(factors, self, state, slots, norms):
        longest[0] = max(longest[0], float(np.nanmax(norms, initial=0.0)))
        return factors / (1 + np.log1p(longest[0]) / 100)

    after(Contribution, "bounding_factors", scaled)(patch)


# client 23, by a thousandth
a_bound_that_only_one_client_passes = after(
    Contribution,
    "bounding_factors",
    lambda factors, self, state, slots, norms: (
        factors * np.where(state.chunk.clients[slots] == 23, 1.001, 1.0)
    ),
)


def a_learning_rate_by_the_losses(patch):
    """Rounds of large losses are damped."""

    def note(self, total, columns):
        losses = np.nan_to_num(columns["train_loss"], posinf=0.0)
        self.damped = 1 / (1 + float(losses.clip(0, 1e3).mean()))

    watching(note)(patch)
    after(Coordinator, "aggregate", lambda mean, self, *given: mean * self.damped)(patch)


@instead_of(Coordinator, "collect")
def last_rounds_sum_again(collect, self, t, cohort):
    """A client's part of a round is released in the next one as well."""
    total, results = collect(self, t, cohort)
    earlier = getattr(self, "sum_before", 0.0)
    self.sum_before = total.copy()
    return total + earlier, results


def the_exact_sum_broadcast(patch):
    """Clients of the next round are sent the exact sum."""

    def note(self, total, columns):
        self.exact = total.copy()

    def telling(made, self):
        exact = getattr(self, "exact", np.zeros(1)).astype(np.float32)
        return replace(made, states={**made.states, "bounding": {"exact": exact}})

    watching(note)(patch)
    after(Coordinator, "_broadcast", telling)(patch)


@watching
def a_run_that_ends_on_large_norms(self, total, columns):
    if np.nanmax(columns["norm"]) > 1e30 and self.state.t > 0:
        raise RunError("the updates diverged")


# a client's count is its score, whatever that is
scores_by_value = after(
    Histogram,
    "counts",
    lambda counts, self, values: np.bincount(
        np.zeros(len(values), int), np.nan_to_num(values, posinf=9, neginf=-9), self.bins
    ),
)


def answers_twice_as_large(patch):
    """Past the check of what clients answer."""

    class Wide(float):
        def __ge__(self, other):
            return True

    def widened(queries, self):
        return tuple(replace(query, bound=Wide(query.bound)) for query in queries)

    def doubled(answers, self, *given):
        return {name: 2 * values for name, values in answers.items()}

    after(QuantileClip, "queries", widened)(patch)
    after(QuantileClip, "answers", doubled)(patch)


def blocks_changed(change):
    """Has `change(block)` see every block of updates before their norms are taken."""

    @instead_of(ChunkTraining, "blocks")
    def changed(blocks, *given):
        for block in blocks(*given):
            change(block)
            yield replace(block, norms=None)

    @wraps(change)
    def control(patch):
        changed(patch)
        patch.setattr(actor, "choose", lambda state, training: ScaledContribution)

    return control


@blocks_changed
def updates_that_know_of_each_other(block):
    """Each client of a chunk is trained a little towards the mean of all."""
    block.updates.add_(1e-3 * block.updates.mean(0, keepdim=True))


# mu is that of the updates alone, once a count is asked for besides
an_account_of_half_the_queries = after(
    Mechanism,
    "mu",
    lambda mu, self, relation: (
        (2 if relation == "replace_one" else 1) * self.queries[0].bound / self.queries[0].std
    ),
)
a_budget_that_nothing_holds = patched(privacy_budget, "check_budget", lambda _: lambda *of: None)
losses_unclipped = after(
    PowerOfChoice,
    "answer",
    lambda answer, self, losses, noise_seed, t, client: (
        float(losses.mean()) + query_noise(noise_seed, t, self.loss_std, client, query="losses")
    ),
)


def a_cohort_by_the_sizes_of_losses(patch):
    """Who is asked depends on who answered what in the round before."""
    exposed = PowerOfChoice.exposed
    seen = [0.0]

    def kept(answers, self, *given):
        seen[0] = answers[0]
        return answers

    def shifted(self, seed, t, population):
        return exposed(self, seed + int(seen[0] > 3.0), t, population)

    after(ClientActor, "losses", kept)(patch)
    patch.setattr(PowerOfChoice, "exposed", shifted)


# in one round of many
a_count_without_noise = patched(
    MonitoredNoise,
    "on_query",
    lambda draw: lambda self, query, exact: 0.0 if query.t == 1 else draw(self, query, exact),
)
# the server's noise has the std of the first round in all
a_schedule_that_is_not_drawn = after(
    Plan, "drawn_std", lambda std, self, t, bound: self.sum_std(0, bound)
)


def noise_of_one_client_a_little_smaller(patch):
    def smaller(drawn, self, state, slots):
        drawn[state.chunk.clients[slots] == 7] *= 0.99
        return drawn

    after(Contribution, "noise", smaller)(patch)
    patch.setattr(actor, "choose", lambda state, training: ScaledContribution)


# from the third round on the member itself draws less
a_tree_of_small_noise = after(
    TreeSource, "on_sum", lambda drawn, self, t, std: drawn * (1.0 if t < 3 else 0.9)
)
# noise of the std that is asked for, and of another distribution
uniform_for_laplace = after(
    LaplaceSource, "on_sum", lambda drawn, self, t, std: np.clip(drawn, -std, std)
)
a_clipping_in_l2 = after(
    Contribution, "lengths", lambda lengths, self, rows: contribution.vector_norms(rows)
)


def a_buffer_of_the_client_before(patch):
    """Of any two clients that train together; they are rarely those that an adversary is."""
    kept = []

    def mixed(block):
        for last in kept[-1:]:
            block.updates[0] += 0.01 * last
        kept.append(block.updates[-1].clone().nan_to_num(0, 0, 0))

    blocks_changed(mixed)(patch)


@instead_of(ClientTable, "__init__")
def a_row_of_the_client_before(init, self, folder):
    """Rows begin one too early in the file, and end so."""
    init(self, folder)
    self.first = np.maximum(self.first - 1, 0)


LAPLACE = {
    "noise": {"kind": "laplace", "multiplier": 3.0, "delta": 1e-3},
    "bounding": {"kind": "clip_l1", "bound": 0.5},
}
TINY = {
    "data": BASE_CONFIG["data"],
    "model": BASE_CONFIG["model"],
    "selection": BASE_CONFIG["selection"],
}
TREE = {
    **TINY,
    "noise": {"kind": "tree_gaussian", "multiplier": 2.0},
    "selection": {"kind": "full"},
}
STATE = {"bounding": {"kind": "alpha_norm_ec", "bound": 0.3}, "selection": {"kind": "full"}}
ASKED = {
    "selection": {"kind": "power_of_choice", "cohort": 10, "pool": 25}
    | {"loss_bound": 3.0, "loss_std": 1.0}
}
BUDGET = {**SERVER, "privacy": {"accountants": ["pld"], "budget": 3.0}}
POISSON = {**SERVER, "selection": {"kind": "poisson", "cohort": 20}}
PAIRS = {**SERVER, "rounds": 30, "selection": {"kind": "uniform", "cohort": 2}}
SCHEDULED = {**TINY, "noise": {**SERVER["noise"], "schedule": {"decay": 1.01}}}


def the_divisor_is_the_cohort(patch):
    """Where its size is a secret."""
    after(
        Selection, "divisor", lambda _, self, population: float(self.sampling(population).cohort)
    )(patch)
    after(
        Coordinator,
        "aggregate",
        lambda mean, self, t, cohort, total: mean * (20 / max(1, len(cohort))),
    )(patch)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("control", "change"),
    [
        (the_longest_left_out, SERVER),
        (the_mean_over_those_who_moved, SERVER),
        (the_server_steps_by_the_exact_sum, SERVER),
        (noise_keyed_by_the_sum, SERVER),
        (noise_that_grows_a_little_with_the_sum, SERVER),
        (a_bound_on_the_largest_coordinate, SERVER),
        (a_failed_client_sends_its_last_words, SERVER),
        (a_weight_that_grows_with_the_loss, SERVER),
        (states_dealt_to_the_wrong_clients, STATE),
        (the_largest_norm_ever_as_a_bound, SERVER),
        (a_bound_that_only_one_client_passes, SERVER),
        (a_learning_rate_by_the_losses, SERVER),
        (last_rounds_sum_again, SERVER),
        (the_exact_sum_broadcast, SERVER),
        (a_run_that_ends_on_large_norms, SERVER),
        (scores_by_value, HISTOGRAMS),
        (answers_twice_as_large, {**ADAPTIVE, **SERVER}),
        (updates_that_know_of_each_other, SERVER),
        (an_account_of_half_the_queries, {**ADAPTIVE, **SERVER}),
        (a_budget_that_nothing_holds, BUDGET),
        (losses_unclipped, ASKED),
        (a_cohort_by_the_sizes_of_losses, ASKED),
        (the_divisor_is_the_cohort, POISSON),
        (a_count_without_noise, {**ADAPTIVE, **SERVER}),
        (a_schedule_that_is_not_drawn, SCHEDULED),
        (noise_of_one_client_a_little_smaller, TINY),
        (a_tree_of_small_noise, TREE),
        (uniform_for_laplace, {**TINY, **LAPLACE}),
        (a_clipping_in_l2, {**TINY, **LAPLACE}),
        (a_row_of_the_client_before, SERVER),
        (a_row_of_the_client_before, {**SERVER, "local": {"kind": "sgd", "batch": 2, "epochs": 1}}),
        (a_buffer_of_the_client_before, PAIRS),
    ],
)
def test_what_no_statistic_of_sums_sees_is_noticed(control, change, monkeypatch):
    assert replay(small(**change)).passed
    control(monkeypatch)
    done = replay(small(**change))
    assert not done.passed and done.verdict.startswith("What ran is not what was accounted for")


# ---- in late rounds, and of few lengths ----

LATE = {**SERVER, "rounds": 20, "selection": {"kind": "uniform", "cohort": 4}}
LOCAL_STEPS = {**STEPS, "client": {"backend": "fused"}}


def late(control):
    """Breaks a mechanism from round 15 on, of methods whose first argument is the round."""

    def control_late(patch):
        def from_then_on(owner, name, broken):
            sound = getattr(owner, name)
            patch.setattr(
                owner, name, lambda self, t, *of: (broken if t >= 15 else sound)(self, t, *of)
            )

        control(SimpleNamespace(setattr=from_then_on))

    return control_late


def bounded_beyond(most):
    """Updates longer than the bound are sent as they are, if they are no longer than `most`."""
    return after(
        Contribution,
        "bounding_factors",
        lambda factors, self, state, slots, norms: np.where(
            (norms > state.work.bound) & (norms <= most * state.work.bound), 1.0, factors
        ),
    )


@pytest.mark.slow
def test_sound_rounds_are_all_compared():
    done = replay(small(**LATE))
    assert done.passed and done.unseen == ()


@pytest.mark.slow
def test_rounds_in_which_no_client_differs_are_named():
    """Whoever keeps a state differs in all rounds, and is not in all of them."""
    state = {"bounding": {"kind": "alpha_norm_ec", "bound": 0.3}}
    done = replay(small(**{**TINY, **LATE, **state}))
    assert done.passed and "rounds in which no client differs (4, 7, " in done.verdict


@pytest.mark.slow
@pytest.mark.parametrize("place", ["norm <= 1.5 * bound", "norm < bound or 3.2 < norm / bound < 4"])
def test_a_bounding_of_ones_own_that_lets_lengths_pass_is_noticed(place, own_module):
    own_module(
        "mine",
        "from raydpfl.methods.bounding import Bounding\n\n\n"
        "class Slack(Bounding):\n    bound: float = 1.0\n\n"
        f"    def factor(self, norm, bound):\n        return 1.0 if {place} else bound / norm\n",
    )
    done = replay(small(**{**TINY, **SERVER, "bounding": {"kind": "mine:Slack", "bound": 1.0}}))
    assert "factors" in failed(done)


@pytest.mark.slow
def test_noise_that_two_local_steps_share_is_noticed(monkeypatch):
    """Updates done again have it too."""
    draw = StepNoise.__call__
    monkeypatch.setattr(
        StepNoise, "__call__", lambda self, slots, step: draw(self, slots, step // 2 * 2)
    )
    done = replay(small(**LOCAL_STEPS))
    assert "keys of steps" in failed(done)


# ---- sums of integers, and clients' own budgets ----

INTEGERS = (
    {"kind": "discrete_gaussian", "multiplier": 1.0},
    {"kind": "discrete_gaussian", "multiplier": 1.0, "placement": "client"},
    {"kind": "skellam", "multiplier": 1.0, "bits": 12, "rotation": False},
)


def of_integers(place):
    privacy, selection = {"accountants": ["rdp"]}, {"kind": "uniform", "cohort": 5}
    return {"noise": INTEGERS[place], "privacy": privacy, "selection": selection}


def individually(placement="server", relation="replace_one", budget=4.0, rounds=12):
    noise = {"kind": "gaussian", "multiplier": 4.0, "placement": placement, "delta": 1e-3}
    privacy = {"individual": budget, "relation": relation}
    return dict(noise=noise, privacy=privacy, rounds=rounds, selection={"kind": "full"})


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        *map(of_integers, range(3)),
        *(
            individually(placement, relation, budget)
            for placement in ("server", "client")
            for relation in ("replace_one", "zero_out")
            for budget in (4.0, {"kind": "uniform", "low": 1.0, "high": 9.0})
        ),
    ],
)
def test_sums_of_integers_and_clients_with_budgets_of_their_own_are_replayed(change):
    done = replay(small(**change))
    assert done.passed, done.verdict


def nothing(drawn, self, *given):
    return None if drawn is None else 0 * drawn


# where it is large, as it is on the sum of a run
half_the_std = before(
    IntegerSource, "on_sum", lambda self, t, std: (t, std / 2 if std > 9 else std)
)
released_without_its_noise = patched(
    Coordinator,
    "release",
    lambda _: lambda self, t, total: self.plan.modular_sum(t, self.state.bound).decode(total),
)
no_noise_of_clients = after(Contribution, "noise", nothing)
no_noise_of_the_server = after(MonitoredNoise, "on_sum", nothing)
integers_too_long = after(ModularSum, "encode", lambda rows, self, *given: rows + np.sign(rows))
spent_but_half = before(
    IndividualBudgets, "spend", lambda self, clients, lengths, *of: (clients, 0.7 * lengths, *of)
)
a_client_that_pays_for_another = before(
    IndividualBudgets, "spend", lambda self, clients, *of: (np.roll(clients, 1), *of)
)
beyond_the_limit = after(IndividualBudgets, "limits", lambda most, self, *given: 1.5 * most)
a_little_less_noise_of_clients = after(Plan, "client_std", lambda std, *_: 0.999 * std)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("control", "change"),
    [
        *((control, change) for control, change, _ in BROKEN),  # what an audit notices
        *((control, LOCAL_STEPS) for control, _ in BROKEN_STEPS),
        (late(the_server_steps_by_the_exact_sum), LATE),
        (late(the_mean_over_those_who_moved), LATE),
        (late(noise_that_grows_a_little_with_the_sum), LATE),
        *((bounded_beyond(most), LATE) for most in (1.5, 3.0, 8.0)),
        (integers_too_long, of_integers(0)),
        (integers_too_long, of_integers(2)),
        (no_noise_of_clients, of_integers(1)),
        (no_noise_of_clients, of_integers(2)),
        (no_noise_of_the_server, of_integers(0)),
        (half_the_std, of_integers(0)),
        (released_without_its_noise, of_integers(0)),
        (spent_but_half, individually()),
        (spent_but_half, individually(budget=8.0, rounds=40)),
        (a_client_that_pays_for_another, individually()),
        (beyond_the_limit, individually()),
        (a_little_less_noise_of_clients, {}),
    ],
)
def test_what_is_broken_is_noticed(control, change, monkeypatch):
    control(monkeypatch)
    assert not replay(small(**change)).passed


# ---- what comes of it ----


@pytest.mark.slow
def test_early_stopping_is_said_not_to_be_looked_at():
    evaluate = {"every": 1, "validation": 0.25, "stop": {"patience": 3}}
    done = replay(small(**SERVER, rounds=2, evaluate=evaluate))
    assert done.passed and done.verdict.endswith("Not looked at: early stopping (evaluate.stop).")


def test_without_noise_there_is_nothing_to_replay():
    with refusal("nothing is claimed, and there is nothing to replay"):
        replay(small(noise={"kind": "none"}))


@pytest.mark.slow
def test_the_command_replays_a_config_or_a_run_and_leaves_a_page(tmp_path, monkeypatch, typed):
    run, config = tmp_path / "run", tmp_path / "small.yaml"
    config.write_text(small(rounds=2).to_yaml())
    assert typed("run", config, "--out", run, "--quiet")[0] == 0
    code, said, _ = typed("audit", run, "--replay", "--out", tmp_path / "sound")
    assert code == 0 and "passed  control flow: " in said
    assert typed("report", tmp_path / "sound")[0] == 0
    code, _, said = typed("audit", config, "--replay", "--canaries", "10")
    assert code == 2 and "as a replay guesses nothing" in said
    clipped_late(1.5)(monkeypatch)
    code, out, said = typed("audit", config, "--replay", "--json", "--out", tmp_path / "broken")
    assert code == 1 and "not as private as it claims" in said
    assert json.loads(out) == json.loads((tmp_path / "broken" / "audit.json").read_text())
