"""A selection's draws are tested against the scheme that it declares."""

from collections import Counter
from contextlib import nullcontext
from itertools import product

import numpy as np
import pytest
from conftest import experiment
from pydantic import Field

from raydpfl import run
from raydpfl.cli.run_display import epsilon
from raydpfl.core.prng import Purpose, stream
from raydpfl.errors import ConfigError, RunError
from raydpfl.methods.bounding.quantile_clip import QuantileClip
from raydpfl.methods.local.sgd import Sgd
from raydpfl.methods.selection import Cohort, Population, Selection
from raydpfl.methods.selection.first_responders import Exponential
from raydpfl.methods.selection.periodic import Availability
from raydpfl.methods.selection.poisson import Poisson
from raydpfl.methods.selection.power_of_choice import PowerOfChoice
from raydpfl.methods.selection.random_allocation import RandomAllocation
from raydpfl.methods.selection.uniform import Uniform
from raydpfl.methods.selection.with_replacement import Multinomial
from raydpfl.methods.weights import Weights
from raydpfl.privacy import Guarantee, Sampling
from raydpfl.privacy.sampling import SamplingScheme
from raydpfl.simulation import sampling_monitor
from raydpfl.simulation.resolution import resolve
from raydpfl.simulation.sampling_monitor import SamplingMonitor

CLIENTS = {"kind": "fashion_mnist_mini", "clients": 300, "partition": {"kind": "iid"}}
STEPS = {
    "bounding": {"kind": "per_sample_clip", "bound": 1.0},
    "noise": {"kind": "gaussian", "multiplier": 1.0},
}


def chosen(generator, count, cohort):
    return generator.choice(count, cohort, replace=False)


def pairs(generator, count, cohort, declares):
    """Clients 2 k and 2 k + 1; as many as by independent chances, but for one."""
    size = int(generator.binomial(count, cohort / count)) if declares == "poisson" else cohort
    first = chosen(generator, count // 2, size // 2)
    return np.concatenate([2 * first, 2 * first + 1])


def families(generator, count, cohort, declares):
    """Ten clients share a coin, so that whoever takes part brings nine others."""
    first = chosen(generator, count // 10, cohort // 10)
    if declares == "poisson":
        first = np.flatnonzero(generator.random(count // 10) < cohort / count)
    return (10 * first[:, None] + np.arange(10)).ravel()


# how a cohort is drawn: from a generator, the round, the number of clients, the cohort's size and
# the scheme that is declared
HOW = {
    "the same": lambda g, t, n, c, d: np.arange(c),
    "a favourite": lambda g, t, n, c, d: np.append(1 + chosen(g, n - 1, c - 1), 0),
    "turns": lambda g, t, n, c, d: (np.arange(c) + c * t) % n,
    # each half by turns, from which a part is drawn: every client as often as it should be
    "two halves": lambda g, t, n, c, d: chosen(g, n // 2, c) + (t % 2) * (n // 2),
    "more": lambda g, t, n, c, d: chosen(g, n, int(g.binomial(n, 1.5 * c / n))),
    "fewer": lambda g, t, n, c, d: chosen(g, n, int(g.binomial(n, 0.5 * c / n))),
    "short": lambda g, t, n, c, d: chosen(g, n, c - (t == 3)),
    "twice": lambda g, t, n, c, d: np.append(chosen(g, n, c - 1), [7] if t else [8]).clip(0, 9),
    "beyond": lambda g, t, n, c, d: np.append(np.sort(chosen(g, n, c))[:-1], n - (t < 2)),
    # who takes part keeps another out, where by coins of their own nobody would
    "one size": lambda g, t, n, c, d: chosen(g, n, c),
    "coins": lambda g, t, n, c, d: np.flatnonzero(g.random(n) < c / n),
    "families": lambda g, t, n, c, d: families(g, n, c, d),
    "pairs": lambda g, t, n, c, d: pairs(g, n, c, d),
    "doubled": lambda g, t, n, c, d: np.repeat(g.integers(n, size=c // 2), 2),
    # after one round of rest, where it says two
    "restless": lambda g, t, n, c, d: np.arange(c) + c * (t % (3 if t < 4 else 2)),
}


class Liar(Selection):
    """A member that declares one scheme and draws by another: `how`."""

    kind: str = "liar"
    how: str = "one size"
    declares: str = "fixed"
    cohort: int = 30
    most: int = 10**9  # the rounds that it has composed

    def sampling(self, population: Population) -> Sampling:
        count = len(population)
        return Sampling(self.declares, count, count if self.declares == "full" else self.cohort)

    def composed_rounds(self, seed, rounds, population):
        return np.minimum(np.arange(1, rounds + 1), self.most)

    @property
    def separation(self) -> int:
        return 3 if self.how == "restless" else 1

    def select(self, seed, t, population, ask):
        return Cohort.of(self.members(stream(seed, Purpose.COHORT, t=t), t, len(population)))

    def members(self, generator, t, count):
        return HOW[self.how](generator, t, count, self.cohort, self.declares)


class Owing(Liar):
    """Twice as many clients as it says, the others lost less than never."""

    def select(self, seed, t, population, ask):
        drawn = np.sort(chosen(stream(seed, Purpose.COHORT, t=t), len(population), 60))
        return Cohort(drawn, np.zeros(60, np.int64), lost=-self.cohort)


@pytest.mark.parametrize(
    "how,declares,within,said",
    [
        ("the same", "fixed", 30, "clients in common"),
        ("the same", "poisson", 30, "clients in common"),
        ("the same", "with_replacement", 30, "more often than others"),
        ("a favourite", "fixed", 30, "drew one client too often"),
        ("turns", "fixed", 30, "more often than others"),
        ("two halves", "fixed", 60, "in common"),
        ("more", "poisson", 30, "sizes by round"),
        ("fewer", "poisson", 30, "sizes by round"),
        ("short", "fixed", 4, "drew 29 clients in round 3, where its sampling .* gives 30"),
        ("short", "full", 1, "drew 30 clients in round 0, where its sampling .* gives 300"),
        ("twice", "fixed", 1, "twice in round 0"),
        ("beyond", "fixed", 3, "not ascending from 0 to 299"),
        ("one size", "poisson", 60, "sizes by round"),
        ("families", "fixed", 30, "in common with the cohort before|together"),
        ("families", "poisson", 30, "sizes by round"),
        ("owing", "fixed", 1, "lost -30 clients in round 0"),
        ("the same", "public", 4, "took client 0 in 4 of 4 rounds, where at most 3 are accounted"),
    ],
)
def test_a_selection_that_draws_by_another_scheme_than_it_declares_ends_the_run(
    how, declares, within, said, tmp_path
):
    placement = "client" if declares in ("fixed", "public") else "server"
    relation = "add_remove" if declares == "poisson" else "replace_one"
    most = 3 if declares == "public" else 10**9
    lying = experiment(
        selection=Owing() if how == "owing" else Liar(how=how, declares=declares, most=most),
        noise={"kind": "gaussian", "multiplier": 1.0, "placement": placement},
        privacy={"accountants": ["pld"], "relation": relation},
        data=CLIENTS,
        rounds=within,
        evaluate={"every": 99},
    )
    with pytest.raises(RunError, match=f"selection.kind .* .*{said}.*no accountant covers"):
        run(lying, tmp_path / "run")


def follow(monitor, cohorts, seen: Counter, first=0) -> None:
    """Checks cohorts round by round; `seen`: how often clients were drawn."""
    for t, cohort in enumerate(cohorts, first):
        monitor.check(t, cohort, seen)
        seen.update(cohort.clients.tolist())


def monitor_of(member, clients=300, rounds=400, least=0, secret=True, **more) -> SamplingMonitor:
    """A monitor of a run, of so many clients or of these."""
    population = Population.balanced(clients) if isinstance(clients, int) else clients
    return SamplingMonitor(member, population, np.arange(1, rounds + 1), least, secret, **more)


def first_alarm(member, clients, rounds, seed=0, **more):
    """The round in which the draws of a member are refused; None: they are not."""
    monitor = monitor_of(member, clients, rounds, **more)
    seen: Counter = Counter()
    for t in range(rounds):
        try:
            follow(monitor, [member.draw(seed, t, clients)], seen, t)
        except RunError:
            return t
    return None


@pytest.mark.slow
@pytest.mark.parametrize(
    "member",
    [
        Uniform(cohort=4),
        Uniform(cohort=15),
        Uniform(cohort=8, dropout=0.3),
        Poisson(cohort=1),
        Poisson(cohort=4, dropout=0.3),
        Multinomial(cohort=4),
        Availability(period=3, window=2, cohort=3),
    ],
    ids=lambda member: member.kind,
)
def test_sound_draws_are_refused_no_oftener_than_the_false_alarm_rate(member):
    """Of 100 runs at a rate of 0.05, 20 or more are refused with probability below 1e-6."""
    clients = Population(np.arange(1, 17))
    alarms = [
        first_alarm(member, clients, 30, seed, pairs=True, false_alarm=0.05) for seed in range(100)
    ]
    assert alarms.count(None) > 80


def test_of_several_draws_of_a_client_the_first_may_drop_out():
    clients = Population(np.full(300, 10))
    member = Multinomial(cohort=100, dropout=0.3)
    assert [first_alarm(member, clients, 40, seed, pairs=True) for seed in range(4)] == [None] * 4


class Favouring(Liar):
    """The first `few` clients are `odds` times as likely as the others."""

    few: int = 100
    odds: float = 1.5

    def members(self, generator, t, count):
        odds = np.where(np.arange(count) < self.few, self.odds, 1.0)
        if self.declares == "poisson":
            return np.flatnonzero(generator.random(count) < odds * self.cohort / odds.sum())
        chances = odds / odds.sum()
        again = self.declares == "with_replacement"
        return generator.choice(count, self.cohort, replace=again, p=chances)


@pytest.mark.parametrize("declares", ["fixed", "poisson", "with_replacement"])
@pytest.mark.parametrize(
    "few,odds", [(100, 2.0), (100, 1.5), (10, 2.0), (450, 1.5), (1, 4.0), (1, 0.0), (300, 0.5)]
)
def test_a_subgroup_that_is_drawn_too_often_or_too_seldom_is_noticed(declares, few, odds):
    """All of these are noticed in 400 rounds by 9 seeds of 10; the seed is fixed."""
    if declares == "with_replacement" and (few, odds) == (1, 0.0):
        pytest.skip("no client is drawn more often than it should be by more than 1 / 899")
    member = Favouring(declares=declares, cohort=90, few=few, odds=odds)
    assert first_alarm(member, Population.balanced(900), 400) is not None


@pytest.mark.parametrize(
    "how,declares,rounds",
    [("pairs", "fixed", 40), ("pairs", "poisson", 40), ("doubled", "with_replacement", 2)],
)
def test_clients_that_come_together_are_noticed(how, declares, rounds):
    member = Liar(how=how, declares=declares, cohort=90)
    assert first_alarm(member, Population.balanced(900), rounds, pairs=True) is not None


def test_a_run_that_goes_on_is_checked_as_if_it_had_not_ended():
    member = Favouring(declares="fixed", cohort=30, few=60, odds=2.0)
    noise = {"kind": "gaussian", "multiplier": 1.0}
    plan = resolve(experiment(selection=member, noise=noise, data=CLIENTS, rounds=400))
    seed = plan.cohort_seed()
    clients = plan.population
    refused = first_alarm(member, clients, 400, seed, pairs=True)
    assert refused is not None
    seen = Counter()
    for t in range(refused):
        seen.update(member.draw(seed, t, clients).clients.tolist())
    monitor = sampling_monitor.of_run(plan, refused, None)
    with pytest.raises(RunError, match=f"by round {refused}"):
        monitor.check(refused, member.draw(seed, refused, clients), seen)


def test_fewer_clients_than_the_noise_counts_on_are_never_released():
    """Each draws its own noise, sized for 20: 19 would leave the sum with less of it."""
    monitor = monitor_of(Uniform(cohort=20, dropout=0.1), 100, least=20)
    with pytest.raises(RunError, match="left 19 clients in round 0, where the noise counts on 20"):
        monitor.check(0, Cohort(np.arange(19), np.zeros(19, int), lost=1), Counter())


def test_participations_are_as_far_apart_as_correlated_noise_counts_on(tmp_path):
    banded = {"kind": "banded_gaussian", "multiplier": 1.0, "bands": 3}
    asked = {"accountants": ["pld"], "relation": "zero_out"}
    member = Liar(how="restless", declares="public")
    restless = experiment(selection=member, noise=banded, privacy=asked, data=CLIENTS, rounds=9)
    said = r"took client \d+ in round 4 again, less than 3 rounds between them"
    with pytest.raises(RunError, match=said):
        run(restless, tmp_path / "run")


def test_a_choice_beyond_the_candidates_is_noticed():
    monitor = monitor_of(Uniform(cohort=2), 10, secret=False)
    monitor.check_candidates(0, np.array([1, 2, 3]))
    monitor.check(0, Cohort.of(np.array([1, 2])), Counter())
    monitor.check_candidates(1, np.array([1, 2, 3]))
    with pytest.raises(RunError, match="chose clients in round 1 that are no candidates"):
        monitor.check(1, Cohort.of(np.array([1, 4])), Counter())
    monitor.check_candidates(2, np.array([1, 2, 3]))
    with pytest.raises(RunError, match="asked for losses twice in round 2"):
        monitor.check_candidates(2, np.array([4]))


CALLS: Counter = Counter()


class Wavering(Liar):
    """Says one thing to the accountants and another while it runs."""

    def sampling(self, population):
        CALLS["sampling"] += 1
        few = Sampling("fixed", len(population), 1)
        return few if CALLS["sampling"] < CALLS["lies"] else super().sampling(population)


def test_a_scheme_that_changes_after_it_was_accounted_for_ends_the_run(tmp_path):
    CALLS.clear()
    CALLS["lies"] = 10**9
    noise = {"kind": "gaussian", "multiplier": 1.0}
    resolve(experiment(selection=Wavering(), data=CLIENTS, noise=noise))
    CALLS["lies"], CALLS["sampling"] = CALLS["sampling"] + 1, 0
    said = "declares fixed size 30 of 300, and declared fixed size 1 of 300 when that was accounted"
    with pytest.raises(RunError, match=said):
        run(experiment(selection=Wavering(), data=CLIENTS), tmp_path / "run")


class SeldomAvailable(Liar):
    declared: list = Field(default_factory=lambda: [1, 1, 1, 1])

    def composed_rounds(self, seed, rounds, population):
        return self.declared


@pytest.mark.parametrize(
    "declared", [[1, 1, 1, 1], [1, 2, 3], [4, 3, 2, 1], [1.0, 2.0, 3.0, 4.0], None]
)
def test_composed_rounds_that_the_scheme_cannot_have_are_refused(declared):
    with pytest.raises(ConfigError, match=r"selection\.kind = .*SeldomAvailable.*composed_rounds"):
        resolve(experiment(selection=SeldomAvailable(declared=declared or []), data=CLIENTS))
    cyclic = {"kind": "cyclic", "period": 3, "cohort": 5}
    for sound in (cyclic, {"kind": "availability", "period": 7, "window": 3, "cohort": 4}):
        resolve(experiment(selection=sound, rounds=23))


class Restive(Liar):
    """Other draws each time they are asked for: it counts its calls."""

    def select(self, seed, t, population, ask):
        CALLS["draws"] += 1
        return super().select(seed, CALLS["draws"], population, ask)


def test_draws_that_are_counted_in_advance_are_those_of_the_run(tmp_path):
    """A client's noise and epsilon at local steps are for the rounds that it was promised."""
    said = "drew other clients in round 0 than those that were accounted for"
    with pytest.raises(RunError, match=said):
        run(experiment(selection=Restive(cohort=20), **STEPS), tmp_path / "run")


class Asking(PowerOfChoice):
    """Asks always the same clients for their losses, once the accountants have looked."""

    def exposed(self, seed, t, population):
        CALLS["asked"] += 1
        first = 10 * (t % 4) if CALLS["asked"] <= 4 else 0
        return np.arange(first, first + self.pool)


def test_clients_are_asked_for_their_losses_no_oftener_than_accounted_for(tmp_path):
    CALLS.clear()
    asking = Asking(cohort=5, pool=10, loss_bound=1.0, loss_std=1.0)
    said = "asked client 0 in 2 of 2 rounds, where at most 1 are accounted for"
    with pytest.raises(RunError, match=said):
        run(experiment(selection=asking), tmp_path / "run")


def test_separation_holds_when_a_run_goes_on():
    """What the coordinator tells it of the rounds before."""
    monitor = monitor_of(Liar(how="restless"), secret=False, separation=3)
    monitor.resume(0, [np.arange(30), np.arange(30, 60)], asks=False)
    with pytest.raises(RunError, match="round 2 again, less than 3 rounds between them"):
        monitor.check(2, Cohort.of(np.arange(30)), Counter())


def test_the_size_of_a_secret_cohort_moves_no_adaptive_bound(tmp_path, monkeypatch):
    """The count is divided by the mean size where the scheme keeps the size to itself."""
    shares = []
    following = QuantileClip.adapt

    def adapt(self, bound, sums, clients, state):
        shares.append(min(sums["count"] / clients + 0.5, 1.0))
        return following(self, bound, sums, clients, state)

    monkeypatch.setattr(QuantileClip, "adapt", adapt)
    asked = {"accountants": ["pld"], "relation": "add_remove"}
    quiet = {"kind": "gaussian", "multiplier": 1e-3, "placement": "server"}
    adaptive = {"kind": "quantile_clip", "bound": 1e6}
    coins = Liar(how="coins", declares="poisson")
    sections = {"noise": quiet, "privacy": asked, "bounding": adaptive, "data": CLIENTS}
    run(experiment(selection=coins, **sections), tmp_path / "run")
    sizes = [len(coins.draw(3, t, Population.balanced(300))) for t in range(4)]
    np.testing.assert_allclose(shares, [min(size / 60 + 0.5, 1.0) for size in sizes], atol=0.01)
    assert len(set(sizes)) > 1


class GroupsScheme(SamplingScheme):
    kind = "groups"

    def as_in_the_papers(self, sampling):
        return False

    def words(self, sampling):
        return f"one of {sampling.population // sampling.cohort} groups"


class OneGroup(Selection):
    """A uniformly drawn group of clients takes part, the same groups in every round."""

    def select(self, seed, t, population, ask):
        group = int(np.random.default_rng([seed, t]).integers(10))
        return Cohort.of(np.arange(group, len(population), 10))

    def sampling(self, population):
        return Sampling(GroupsScheme(), len(population), len(population) // 10)


def test_a_user_defined_scheme_may_draw_clients_in_groups():
    selection = OneGroup()
    draws = (selection.select(3, t, Population.balanced(300), None) for t in range(200))
    follow(monitor_of(selection), draws, Counter())


class Steps(Sgd):
    """As its base, but user-defined."""


class Half(Uniform):
    """As its base, but user-defined."""


class HalfWeight(Weights):
    def of(self, sizes, samples, population):
        return np.full(len(sizes), 0.5)


class Slow(Exponential):
    """Client 0 answers later."""

    def times(self, generator, count):
        return super().times(generator, count) * (1 + (np.arange(count) == 0))


def test_pairs_are_looked_for_where_response_times_are_of_a_users_class():
    first = {"kind": "first_responders", "cohort": 20}
    for selection, looked in (first, False), ({**first, "response": Slow()}, True):
        plan = resolve(experiment(data=CLIENTS, selection=selection))
        monitor = sampling_monitor.of_run(plan, 0, None)
        assert ("pairs" in monitor._bets._bets) == looked


@pytest.mark.parametrize(
    "parts,said",
    [
        ({}, []),
        ({"selection": Half(cohort=20)}, ["cohorts that differ from the sampling scheme"]),
        (
            {"selection": {"kind": "first_responders", "cohort": 20, "response": Slow()}},
            ["cohorts that differ from the sampling scheme"],
        ),
        ({"weights": HalfWeight()}, ["weights above the largest"]),
        ({"local": Steps(steps=2, batch=5, lr=0.1)}, []),
        (
            {"local": Steps(steps=2, batch=5, lr=0.1), **STEPS},
            ["batches that differ from the sampling scheme"],
        ),
    ],
)
def test_what_user_defined_classes_declare_is_not_printed_as_proved(parts, said):
    defaults = {"noise": {"kind": "gaussian", "multiplier": 1.0}, "data": CLIENTS, "rounds": 4}
    plan = resolve(experiment(**{**defaults, **parts}))
    for one in plan.guarantees(4, plan.participations(4)):
        assert [
            words.split(" declared by test_sampling_monitor:")[0] for words in one.declared
        ] == said
        assert all(words.endswith("(tested, not proved)") for words in one.declared)
        assert ("tested, not proved" in one.brief().sentence()) == bool(said)
        assert Guarantee.from_dict(one.to_dict()).declared == one.declared
        assert epsilon(one).endswith("^") == (bool(said) and np.isfinite(one.epsilon))


def epochs_of(kind, t, generator, count, epoch, k):
    """The cohort of round t of what is no random allocation of k in `epoch` rounds, or is one."""
    number, place = divmod(t, epoch)
    fresh = stream(1, Purpose.COHORT, t=0 if kind == "the same again" else number)
    rounds = fresh.permuted(np.tile(np.arange(epoch), (count, 1)), axis=1)[:, :k]
    if kind == "the last never":
        rounds = rounds % (epoch - 1)
    if kind == "even":  # rounds of one size: who is in one keeps others out
        rounds = np.sort(fresh.permutation(np.arange(count) % epoch))[fresh.permutation(count)]
        rounds = rounds[:, None]
    clients = np.flatnonzero((rounds == place).any(1))
    if kind == "poisson":
        clients = np.flatnonzero(generator.random(count) < k / epoch)
    if kind == "once more" and t == epoch + 5:
        clients = np.union1d(clients, np.flatnonzero((rounds == place - 1).any(1))[:1])
    return clients


ALLOCATIONS = ["sound", "the same again", "the last never", "poisson", "once more"]


@pytest.mark.parametrize(("kind", "k"), [*product(ALLOCATIONS, [1, 3]), ("even", 1)])
def test_what_is_no_random_allocation_is_noticed(kind, k):
    epoch, count = 10, 300
    monitor = monitor_of(RandomAllocation(epoch=epoch, per_epoch=k), count)
    generator = np.random.default_rng(0)
    seen: Counter[int] = Counter()
    draws = (Cohort.of(epochs_of(kind, t, generator, count, epoch, k)) for t in range(400))
    sound = nullcontext()
    with sound if kind == "sound" else pytest.raises(RunError, match="random allocation"):
        follow(monitor, draws, seen)
    if kind == "once more":
        assert sum(seen.values()) < 3 * k * count  # before another epoch began


@pytest.mark.slow
def test_dropouts_and_a_start_within_an_epoch_are_no_fault_of_an_allocation():
    for k in (1, 3):
        member = RandomAllocation(epoch=10, per_epoch=k, dropout=0.3)
        monitor = monitor_of(member)
        draws = [member.draw(5, t, Population.balanced(300)) for t in range(3, 400)]
        monitor.replay(draws[:24], 3)
        follow(monitor, draws[24:], Counter(), 27)
