"""A selection's draws are held against the law that it declares."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from conftest import experiment
from scipy.stats import binom

from raydpfl import run
from raydpfl.errors import RunError
from raydpfl.keys import Purpose, stream
from raydpfl.plan import Plan
from raydpfl.privacy import Sampling
from raydpfl.selection import Cohort, Population, Selection
from raydpfl.selection.subsets import Poisson, Uniform
from raydpfl.selection.witness import Witness, _chernoff, _tail

CLIENTS = {"kind": "fashion_mnist_mini", "clients": 300, "partition": {"kind": "iid"}}


class Liar(Selection):
    """A member that declares one law and draws by another."""

    kind: str = "liar"
    declares: str = "fixed"
    cohort: int = 30

    def sampling(self, population: Population) -> Sampling:
        return Sampling(self.declares, len(population), len(population) if self.declares == "full" else self.cohort)

    def select(self, seed, round, population):
        return Cohort.of(self.drawn(stream(seed, Purpose.COHORT, round=round), round, len(population)))


class TheSame(Liar):
    def drawn(self, generator, round, count):
        return np.arange(self.cohort)


class AFavourite(Liar):
    def drawn(self, generator, round, count):
        others = 1 + generator.choice(count - 1, self.cohort - 1, replace=False)
        return np.append(others, 0)


class Turns(Liar):
    def drawn(self, generator, round, count):
        return (np.arange(self.cohort) + self.cohort * round) % count


class TwoHalves(Liar):
    """Each half by turns, from which a part is drawn: every client as often as it should be."""

    def drawn(self, generator, round, count):
        return generator.choice(count // 2, self.cohort, replace=False) + (round % 2) * (count // 2)


class Crowded(Liar):
    def drawn(self, generator, round, count):
        return generator.choice(count, int(generator.binomial(count, 1.5 * self.cohort / count)), replace=False)


class Sparse(Liar):
    def drawn(self, generator, round, count):
        return generator.choice(count, int(generator.binomial(count, 0.5 * self.cohort / count)), replace=False)


class Short(Liar):
    def drawn(self, generator, round, count):
        return generator.choice(count, self.cohort - (round == 3), replace=False)


class Twice(Liar):
    def drawn(self, generator, round, count):
        return np.append(generator.choice(count, self.cohort - 1, replace=False), [7] if round else [8]).clip(0, 9)


class Beyond(Liar):
    def drawn(self, generator, round, count):
        drawn = generator.choice(count, self.cohort, replace=False)
        return np.append(np.sort(drawn)[:-1], count) if round == 2 else drawn


class OftenerThanItSays(Liar):
    declares: str = "public"

    def exposures(self, seed, rounds, population):
        return np.minimum(np.arange(1, rounds + 1), 3)

    def drawn(self, generator, round, count):
        return np.arange(self.cohort)


@pytest.mark.parametrize(
    "member,within,said",
    [
        (TheSame(), 30, "30 clients in common"),
        (TheSame(declares="poisson"), 30, "30 clients in common"),
        (TheSame(declares="with_replacement"), 30, "drew client 0 .* times in"),
        (AFavourite(), 30, "drew client 0 .* times in"),
        (Turns(), 30, "in common"),
        (TwoHalves(), 60, "in common"),
        (Crowded(declares="poisson"), 30, "drew .* clients by round"),
        (Sparse(declares="poisson"), 30, "drew .* clients by round"),
        (Short(), 4, "drew 29 clients in round 3, where its law .* gives 30"),
        (Short(declares="full"), 1, "drew 30 clients in round 0, where its law .* gives 300"),
        (Twice(), 1, "twice in round 0"),
        (Beyond(), 3, "not ascending from 0 to 299"),
        (OftenerThanItSays(), 4, "took client 0 in 4 of 4 rounds, where at most 3 are accounted for"),
    ],
    ids=lambda value: f"{type(value).__name__}-{value.declares}" if isinstance(value, Liar) else "",
)
def test_a_selection_that_draws_by_another_law_than_it_declares_ends_the_run(member, within, said, tmp_path):
    placement = "client" if member.declares in ("fixed", "public") else "server"
    noise = {"kind": "gaussian", "multiplier": 1.0, "placement": placement}
    relation = "add_remove" if member.declares == "poisson" else "replace_one"
    asked = {"accountants": ["pld"], "relation": relation}
    lying = experiment(selection=member, noise=noise, privacy=asked, data=CLIENTS, rounds=within, evaluate={"every": 99})
    with pytest.raises(RunError, match=f"selection.kind .*{type(member).__name__} .*{said}.*no accountant covers"):
        run(lying, tmp_path / "run")


SOUND = {
    "uniform": Uniform(cohort=60),
    "small": Uniform(cohort=3),
    "nearly all": Uniform(cohort=299),
    "dropouts": Uniform(cohort=60, dropout=0.4),
    "poisson": Poisson(cohort=60),
    "poisson, dropouts": Poisson(cohort=20, dropout=0.3),
    "rare": Poisson(cohort=1),
}


@pytest.mark.parametrize("name", SOUND)
def test_sound_draws_pass_for_thousands_of_rounds(name):
    """False-alarm rate 1e-6 a run, by its definition; 5 seeds of 1,000 rounds."""
    member, clients = SOUND[name], Population.balanced(300)
    for seed in range(5):
        witness = Witness(member, clients, np.arange(1, 1001), least=0, secret=True)
        seen: Counter = Counter()
        for t in range(1000):
            cohort = member.draw(seed, t, clients)
            witness.see(t, cohort, seen)
            seen.update(cohort.clients.tolist())


def test_fewer_clients_than_the_noise_counts_on_are_never_released():
    """Each draws its own noise, sized for 20: 19 would leave the sum with less of it."""
    member, clients = Uniform(cohort=20, dropout=0.1), Population.balanced(100)
    witness = Witness(member, clients, np.arange(1, 11), least=20, secret=True)
    with pytest.raises(RunError, match="left 19 clients in round 0, where the noise counts on 20"):
        witness.see(0, Cohort(np.arange(19), np.zeros(19, int), lost=1), Counter())


class Restless(Liar):
    """Says that clients rest for two rounds, and takes some after one."""

    declares: str = "public"

    @property
    def separation(self) -> int:
        return 3

    def drawn(self, generator, round, count):
        return np.arange(self.cohort) + self.cohort * (round % (3 if round < 4 else 2))


def test_participations_are_as_far_apart_as_correlated_noise_counts_on(tmp_path):
    banded = {"kind": "banded_gaussian", "multiplier": 1.0, "bands": 3}
    asked = {"accountants": ["pld"], "relation": "zero_out"}
    restless = experiment(selection=Restless(), noise=banded, privacy=asked, data=CLIENTS, rounds=9)
    with pytest.raises(RunError, match=r"took client \d+ in round 4 again, less than 3 rounds apart"):
        run(restless, tmp_path / "run")


def test_a_choice_beyond_the_candidates_is_noticed():
    member, clients = Uniform(cohort=2), Population.balanced(10)
    witness = Witness(member, clients, np.arange(1, 11), least=0, secret=False)
    witness.see(0, Cohort.of(np.array([1, 2])), Counter(), Cohort.of(np.array([1, 2, 3])))
    with pytest.raises(RunError, match="chose clients in round 1 that are no candidates"):
        witness.see(1, Cohort.of(np.array([1, 4])), Counter(), Cohort.of(np.array([1, 2, 3])))


def test_the_tails_are_those_of_the_binomial_law_and_chernoffs_bound_is_above_them():
    for trials, chance in ((10, 0.3), (500, 0.02), (1000, 0.7)):
        for least in (0, 1, trials // 2, trials - 1, trials):
            assert _tail(least, trials, chance) == pytest.approx(binom.sf(least - 1, trials, chance), rel=1e-9)
            beyond = binom.sf(least - 1, trials, chance) if least >= trials * chance else binom.cdf(least, trials, chance)
            assert beyond <= _chernoff(least, trials, chance) * (1 + 1e-9)
    assert _tail(11, 10, 0.5) == 0.0


def test_every_selection_of_a_run_is_seen(tmp_path, monkeypatch):
    seen = []
    see = Witness.see
    monkeypatch.setattr(Witness, "see", lambda self, t, *rest: (seen.append(t), see(self, t, *rest))[1])
    run(experiment(), tmp_path / "run")
    assert seen == [0, 1, 2, 3] and Plan.make(experiment()).mechanism.sampling.hidden
