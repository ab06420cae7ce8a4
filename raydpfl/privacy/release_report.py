"""What a release costs: one report for sums over cohorts and for noise at local steps.

>>> from raydpfl.privacy.mechanism import Query
>>> from raydpfl.privacy.sampling import Sampling
>>> run = Mechanism(Sampling("fixed", 1920, 80), (Query("update", 1.0, 4.0),), rounds=100)
>>> costs = report_of(run, ["pld"], Terms("replace_one", 1e-5))
>>> costs.curves(None, np.array([1, 2, 3]))["pld"].round(4)
array([0.1479, 0.1813, 0.2065])
>>> steps = LocalSteps([600, 600], batch=10, steps=300, bound=1.0, delta=1e-2, stds=[0.35, 0.61])
>>> costs = report_of(steps, ["pld"])
>>> costs.curves([[0], [1], [1]], np.array([1, 2, 3]))["pld"].round(3)  # of the worst client
array([0.289, 0.289, 0.289])
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, cast

import numpy as np
from numpy.typing import ArrayLike

from raydpfl.errors import BudgetError
from raydpfl.privacy import accounting
from raydpfl.privacy.accountants import FORMULAS, accountant_of, resolve_accountants
from raydpfl.privacy.accounting import NOISELESS, UNREACHED_DELTA
from raydpfl.privacy.group import group_sampling
from raydpfl.privacy.guarantee import GROUP, SHARES, Guarantee, Observer, Scope, column
from raydpfl.privacy.local_steps import LocalSteps, Participations, Release, client_list
from raydpfl.privacy.local_steps_calibration import formula_of
from raydpfl.privacy.mechanism import Event, Mechanism
from raydpfl.privacy.observers import views
from raydpfl.privacy.types import Terms

_GROUPS = 32  # different numbers of surveys in a curve, so that few are composed
_MARGIN = 1e-6  # relative: how far a true epsilon may exceed a claim


@dataclass
class SumsReport:
    """Of sums over cohorts. What an accountant does not cover has infinite epsilons."""

    mechanism: Mechanism
    accountants: Sequence[str]
    terms: Terms

    def curves(
        self,
        draws: Sequence[ArrayLike] | None,
        rounds: np.ndarray,
        surveys: np.ndarray | None = None,
    ) -> dict[str, np.ndarray]:
        """Epsilon of any client after every round, by every accountant: float64 [T]. Of many
        surveys it may count some early.

        Args:
            draws: for every release its clients, int64, listed as often as drawn; the last of them
                are those of the `rounds`. Read where the mechanism has a `proof_gap`: rigorous
                epsilons are then those against the first observer with a proof; None: a client
                may be in every round.
            rounds: int64 [T], the number of releases composed after a round.
            surveys: int64 [T], how often all clients were asked until then; None: never.
        """
        curves = {name: np.full(len(rounds), np.inf) for name in self.accountants}
        surveys = np.zeros(len(rounds), int) if surveys is None else surveys
        max_surveys = int(surveys.max(initial=0))
        step = max(1, -(-max_surveys // _GROUPS))
        survey_counts = np.minimum(-(-surveys // step) * step, max_surveys)
        sums_view = (self.mechanism, rounds, self.terms)
        proved_view = self._proved_view(draws, rounds) if self.mechanism.proof_gap else sums_view
        for name in self.accountants:
            view = proved_view if accounting.rigorous([name]) else sums_view
            if view is None or accounting.covers(name, view[0], view[2].relation):
                continue
            mechanism, counts, terms = view
            for times in np.unique(survey_counts).tolist():
                group = survey_counts == times
                release = mechanism.with_surveys(times)
                curves[name][group] = _curve(release, name, counts[group], terms)
        return curves

    def _proved_view(
        self, draws: Sequence[ArrayLike] | None, rounds: np.ndarray
    ) -> tuple[Mechanism, np.ndarray, Terms] | None:
        """Mechanism, rounds int64 [T] and terms of the first observer with a proof, or None."""
        max_draws: list[int | None] = [None] * len(rounds)
        if draws is not None:
            counts = Counter[int]()  # clients of all groups, where these take turns
            for t, clients in enumerate(draws, len(rounds) - len(draws)):
                counts.update(np.asarray(clients, np.int64).tolist())
                if t >= 0:
                    max_draws[t] = max(counts.values(), default=0)
        totals = np.zeros(len(rounds), np.int64)
        proved_view = None
        for t, (count, times) in enumerate(zip(rounds.tolist(), max_draws, strict=True)):
            observer_views = views(self.mechanism, self.terms.relation, count, times)
            view = next((view for view in observer_views if not view.mechanism.proof_gap), None)
            if view is None:
                return None
            totals[t] = view.rounds
            proved_view = view.mechanism, totals, replace(self.terms, relation=view.relation)
        return proved_view

    def guarantees(
        self, participations: Participations | None, rounds: int, surveys: int = 0
    ) -> list[Guarantee]:
        """What holds after `rounds` releases and so many `surveys`, by every accountant and against
        every observer. `participations`: of clients, by id or int64 [N]; None: unknown.
        """
        limit = None
        if isinstance(participations, Mapping):
            limit = max(participations.values(), default=0)
        elif participations is not None:
            limit = int(np.max(participations, initial=0))
        relation, delta, v = self.terms.relation, self.terms.delta, self.terms.v
        mechanism = self.mechanism.with_surveys(surveys)
        return accounting.guarantees(mechanism, relation, delta, rounds, self.accountants, limit, v)

    def warnings(self, participations: Participations) -> tuple[str, ...]:
        return ()

    def check_claims(self, participations: Participations) -> None:
        """Nothing was promised to single clients."""


def _curve(mechanism: Mechanism, accountant: str, rounds: np.ndarray, terms: Terms) -> np.ndarray:
    """Epsilon, float64 [k], after these numbers of rounds, int64 [k], never falling."""
    first = max(int(rounds[0]), 1)
    last = max(int(rounds[-1]), 1)
    curve = accounting.epsilon_curve(
        mechanism, terms.relation, terms.delta, last, accountant, v=terms.v, first=first
    )
    epsilons = curve[np.maximum(rounds, 1) - first]
    has_surveys = mechanism.survey is not None and mechanism.survey.times
    return epsilons if has_surveys else np.where(rounds, epsilons, 0.0)


@lru_cache(maxsize=4096)
def _event_curve(name: str, event: Event, delta: float, first: int, last: int) -> np.ndarray:
    """Epsilon after first, ..., last events: one for all trials of a search."""
    curve = accountant_of(name).curve(event, delta, np.arange(first, last + 1))
    curve.flags.writeable = False
    return curve


class LocalStepsReport:
    """Of noise at local steps, client by client. Among the accountants `paper` stands for
    `FORMULAS`. Clients that are alike are accounted for once.
    """

    def __init__(self, release: LocalSteps, accountants: Sequence[str]):
        self.release = release
        self.names = resolve_accountants(accountants, release.unit)
        self._curves: dict[tuple, np.ndarray] = {}  # by kind of client

    def epsilons(self, name: str, participations: Participations, group: int = 1) -> np.ndarray:
        """Epsilon of any `group` samples of every client together, float64 [N], by an accountant or
        one of `FORMULAS`, at the release's delta (002 Theorem 5 has its own): 0 for a client that
        took no part, infinite for one that took part without noise.
        """
        release = self.release
        counts, exposed_mask = self._exposure(participations)
        epsilons = np.where(exposed_mask & (release.stds == 0), math.inf, 0.0)
        noisy = np.flatnonzero(exposed_mask & (release.stds > 0))
        # float64, exact for these integers
        facts = (release.samples, release.batches, release.client_steps, release.stds, counts)
        kinds = np.stack([values[noisy] for values in facts], 1)
        _, first_index, member = np.unique(kinds, axis=0, return_index=True, return_inverse=True)
        samples, batch, steps, stds, times = (values[noisy[first_index]] for values in facts)
        if name in FORMULAS:
            client = {"bound": release.bound, "batch": batch, "samples": samples, "steps": steps}
            kind_epsilons = FORMULAS[name].claims(stds, release.delta, times, **client)
        else:
            pairs = zip(noisy[first_index].tolist(), times.tolist(), strict=True)
            kind_epsilons = np.array([self._curve(name, k, n, n, group)[0] for k, n in pairs])
        epsilons[noisy] = kind_epsilons[member.reshape(-1)]
        return epsilons

    def _exposure(self, participations: Participations) -> tuple[np.ndarray, np.ndarray]:
        """How often clients took part, int64 [N], and whether any of their samples did."""
        counts = self.release.counts(participations)
        return counts, (counts > 0) & (self.release.samples > 0)

    def _curve(self, name: str, k: int, first: int, last: int, group: int = 1) -> np.ndarray:
        """Epsilon of client k after first, ..., last participations, once for clients alike."""
        release = self.release
        arguments = release.formula_arguments(k, 1)
        std = float(release.stds[k])
        key = (name, *arguments.values(), std, first, last, group)
        if key not in self._curves:
            counts = np.arange(first, last + 1)
            if name in FORMULAS:
                curve = FORMULAS[name].claims(std, release.delta, counts, **arguments)
            else:
                curve = _event_curve(name, release.event(k, group), release.delta, first, last)
            self._curves[key] = curve
        return self._curves[key]

    def curves(
        self,
        draws: Sequence[ArrayLike] | None,
        rounds: np.ndarray | None = None,
        surveys: np.ndarray | None = None,
    ) -> dict[str, np.ndarray]:
        """The largest epsilon of any client's samples after every round, by every accountant:
        float64 [T], public clients left out; the last is the largest of `epsilons`, to the bit.
        Arguments as of `SumsReport.curves`; None: one round for every item of `draws`.
        """
        assert draws is not None
        releases = [np.unique(np.asarray(draw, np.int64), return_counts=True) for draw in draws]
        finals = np.zeros(len(self.release.samples), np.int64)
        for clients, times in releases:
            finals[clients] += times
        last = len(releases) if rounds is None else len(rounds)
        return {name: self._worst(name, releases, finals)[-last:] for name in self.names}

    def _worst(
        self, name: str, releases: list[tuple[np.ndarray, np.ndarray]], finals: np.ndarray
    ) -> np.ndarray:
        """The largest epsilon of any client after every release (clients, how often each), which
        `finals` int64 [N] sums up: float64 [releases].
        """
        max_epsilons = np.where(self._covered_mask(name), self.epsilons(name, finals), 0.0)
        counts = np.zeros_like(finals)
        worst = 0.0
        curve = np.zeros(len(releases))
        for t, (clients, times) in enumerate(releases):
            counts[clients] += times
            # First those with nothing to come, whose epsilons need no curve; nor does a client that
            # cannot exceed the worst.
            order = np.lexsort((-max_epsilons[clients], finals[clients] - counts[clients]))
            for k in clients[order].tolist():
                if max_epsilons[k] <= worst:
                    continue
                cost = max_epsilons[k]
                if counts[k] < finals[k] and math.isfinite(cost):
                    cost = min(self._curve(name, k, 1, int(finals[k]))[int(counts[k]) - 1], cost)
                worst = max(worst, float(cost))
            curve[t] = worst
        return curve

    def guarantees(
        self, participations: Participations | None, rounds: int | None = None, surveys: int = 0
    ) -> list[Guarantee]:
        """`sample_guarantees` in these `participations`, and `person_guarantees` of all samples."""
        assert participations is not None
        return self.sample_guarantees(participations) + self.person_guarantees(participations)

    def sample_guarantees(self, participations: Participations) -> list[Guarantee]:
        """What holds for one sample of the client that has spent most, by every accountant; its id
        and quantiles over clients are in `sampling`. Public clients are exclusions; if only they
        take part, epsilon is infinite.
        """
        counts, mask = self._exposure(participations)
        return [self._guarantee(name, counts, np.flatnonzero(mask)) for name in self.names]

    def person_guarantees(
        self, participations: Participations, group: int | None = None
    ) -> list[Guarantee]:
        """What holds for `group` samples of one client together; None: all samples of any."""
        counts, mask = self._exposure(participations)
        names = [name for name in self.names if name not in FORMULAS]
        if group is not None:  # others know nothing of groups in a batch
            names = [name for name in names if self._covers_group(name, group)]
        group = self.release.largest if group is None else group
        return [self._guarantee(name, counts, np.flatnonzero(mask), group) for name in names]

    def _guarantee(
        self, name: str, counts: np.ndarray, clients: np.ndarray, group: int = 0
    ) -> Guarantee:
        """For the worst of the clients that it covers: for a sample, or for a person's `group`."""
        release = self.release
        covered_clients = clients[self._covered_mask(name)[clients]]
        public = int(release.public[clients].sum())
        unfit = self._unfit_words() if len(clients) - len(covered_clients) > public else ()
        epsilon = 0.0
        delta = release.delta
        failures: tuple[str, ...] = ()
        curve = None
        scope = Scope("public clients alone took part" if len(clients) else "no client took part")
        if len(covered_clients):
            epsilons = self.epsilons(name, counts, max(group, 1))[covered_clients]
            worst = int(covered_clients[np.argmax(epsilons)])
            epsilon = float(epsilons.max())
            scope = scope_of(release, worst, int(counts[worst]), epsilons, group)
            # hidden batches of fixed size have curves of groups
            if release.sampling == "epochs" and 0 < group < release.samples[worst]:
                scope = scope.add_words(GROUP)
            delta, failures = self._conditions(name, worst, int(counts[worst]), epsilon)
            if name not in FORMULAS and release.stds[worst]:
                event = release.event(worst, max(group, 1))
                curve = partial(accountant_of(name).tradeoff_of, event, int(counts[worst]))
        elif len(clients):
            epsilon = math.inf
            failures = (NOISELESS,)
        formula = FORMULAS.get(name)
        return Guarantee(
            "paper" if formula else "rigorous", name, "person" if group else release.unit,
            formula.relation if formula else "replace_one", Observer.UPDATES, scope, epsilon, delta,
            (*release.exclusions, *unfit, *_public_words(public)), failures, curve=curve,
        )  # fmt: skip

    def _covers_group(self, name: str, group: int) -> bool:
        """Whether an accountant covers any `group` samples of every client together."""
        release = self.release
        clients = np.flatnonzero(release.amplified & (release.samples > group))
        schemes = (group_sampling(release.batch_sampling(k), group)[0].scheme for k in clients[:1])
        return all(scheme.gives(accountant_of(name).needs) for scheme in schemes)

    def _covered_mask(self, name: str) -> np.ndarray:
        """Bool [N]: clients not public, with noise of the formula where it calibrates any."""
        release = self.release
        private = ~release.public
        calibration = release.calibration
        if calibration and calibration.unfit and name == self._formula:
            fit = private & (release.stds > 0)
            fit[list(calibration.unfit)] = False
            return fit if fit.any() else private
        return private

    def _conditions(
        self, name: str, k: int, count: int, epsilon: float
    ) -> tuple[float, tuple[str, ...]]:
        """The delta, and the conditions that fail, of `epsilon` for client k."""
        release = self.release
        std = float(release.stds[k])
        if std == 0:
            return release.delta, (NOISELESS,)
        if name not in FORMULAS:
            return release.delta, (UNREACHED_DELTA.format(name),) * math.isinf(epsilon)
        arguments = release.formula_arguments(k, count)
        delta, failures = FORMULAS[name].conditions(epsilon, std, release.delta, **arguments)
        return delta, failures + release.unmet_conditions()

    def client_table(self, participations: Participations) -> list[dict[str, Any]]:
        """A row for a client that took part: sizes, participations, steps, noise (`noise_std` on
        the mean gradient, `calibrated_by` an accountant, a formula or None), `epsilon_claimed` (or
        None), those of all accountants, and `conditions_failed`, "formula: condition".
        """
        release = self.release
        counts = release.counts(participations)
        epsilons_by_name = {name: self.epsilons(name, counts) for name in self.names}
        rows = []
        for k in np.flatnonzero(counts).tolist():
            row: dict[str, Any] = {
                "client": k,
                "samples": int(release.samples[k]),
                "batch": int(release.batches[k]),
                "participations": int(counts[k]),
                "steps": int(release.client_steps[k] * counts[k]),
                "noise_std": float(release.stds[k]),
                "delta": release.delta,
                "calibrated_by": self._calibrated_by(k),
                "epsilon_claimed": None if release.claims is None else float(release.claims[k]),
            }
            failures = []
            for name in self.names:
                epsilon = float(epsilons_by_name[name][k])
                row[column(name)] = epsilon
                delta, reasons = self._conditions(name, k, int(counts[k]), epsilon)
                failures += [f"{name}: {reason}" for reason in reasons]
                if name in FORMULAS and FORMULAS[name].has_own_delta():
                    row[column(name).replace("epsilon", "delta", 1)] = delta
            rows.append(row | {"conditions_failed": failures})
        return rows

    def check_claims(self, participations: Participations) -> None:
        """Raises `BudgetError` naming clients whose true epsilon exceeds their claims."""
        claims = self.release.claims
        if claims is None:
            return
        truth = self.epsilons("pld", participations)
        victims = np.flatnonzero(truth > claims * (1 + _MARGIN))
        if not len(victims):
            return
        worst = victims[np.argsort(claims[victims] / truth[victims], kind="stable")][:5].tolist()
        clients = ", ".join(
            f"client {k} (claimed epsilon {claims[k]:.4g}, true {truth[k]:.4g})" for k in worst
        )
        rest_text = f" and {len(victims) - 5} more" if len(victims) > 5 else ""
        calibration = self.release.calibration
        rigorous = calibration is not None and calibration.method == "rigorous"
        raise BudgetError(
            f"the noise of {'this run' if rigorous else self._formula} protects {len(victims)} of "
            f"{int((truth > 0).sum())} clients less than it claims: {clients}{rest_text}"
        )

    def warnings(self, participations: Participations) -> tuple[str, ...]:
        """Deltas that would allow publishing, noise not of the formula, and public clients."""
        release = self.release
        exposed_mask = release.counts(participations) > 0
        public = int((exposed_mask & release.public).sum())
        words = (*self._unfit_words(), *_public_words(public))
        ids = np.flatnonzero(exposed_mask & (release.delta * release.samples > 1)).tolist()
        if not ids:
            return words
        text = f"delta {release.delta:g} is above 1/n for {len(ids)} clients ({client_list(ids)}):"
        return (f"{text} it would allow a sample to be published outright", *words)

    @property
    def _formula(self) -> str:
        """The name of the formula that calibrated the noise; 003's for any other noise."""
        calibration = self.release.calibration
        return formula_of(calibration.method if calibration else "paper").name

    def _calibrated_by(self, k: int) -> str | None:
        """What calibrated client k's noise; None: nothing, or there is no noise."""
        calibration = self.release.calibration
        if calibration is None or self.release.stds[k] == 0:
            return None
        by_formula = calibration.method != "rigorous" and k not in calibration.unfit
        return self._formula if by_formula else calibration.accountant

    def _unfit_words(self) -> tuple[str, ...]:
        release = self.release
        calibration = release.calibration
        if calibration is None or not calibration.unfit:
            return ()
        unfit = calibration.unfit
        k, reasons = next(iter(unfit.items()))
        private = int((release.stds > 0).sum())
        return (
            f"{self._formula} does not calibrate the noise of {len(unfit)} of {private} clients "
            f"({client_list(list(unfit))}), for whom conditions of it fail, and who have that of "
            f"{calibration.accountant} instead; for client {k}, with {release.samples[k]} samples "
            f"and batches of {release.batches[k]}: {'; '.join(reasons)}",
        )


def row_quantiles(rows: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    """Quantiles at `SHARES` of a column of `LocalStepsReport.client_table`, over the clients that
    are not public; empty where there is nothing in it.
    """
    private = (row[name] for row in rows if row["epsilon_claimed"] != math.inf)
    return _quantiles([value for value in private if value is not None])


def _quantiles(values: Sequence[float]) -> list[float]:
    return np.quantile(values, SHARES, method="inverted_cdf").tolist() if len(values) else []


def scope_of(
    release: LocalSteps, k: int, count: int, epsilons: Sequence[float] = (), group: int = 0
) -> Scope:
    """What a guarantee of client k relies on after `count` participations. `epsilons`: the epsilons
    of all clients that took part, if known; `group`: the samples of a person, 0: of any one.
    """
    scope = Scope.from_batches(release.batch_sampling(k))
    batch, samples = int(release.batches[k]), int(release.samples[k])
    whole = group >= samples > 1  # every batch is hers, whichever samples it has
    words = f"batches: {batch} of {samples}" if whole else scope.words
    knows = "" if whole else scope.knows
    if not scope.knows and batch < samples:
        gaussians = int(release.compositions[k]) * count
        words = f"batches: {batch} of {samples} in shuffled epochs, order known, {gaussians} "
        words += "Gaussians without amplification"
    steps = int(release.client_steps[k]) * count
    words += f"; client {k}, {steps} steps in {count} participations"
    if release.side_query:
        words += f", the {release.side_query.name} released at each"
    if len(epsilons) > 1:
        values = ", ".join(f"{value:.4g}" for value in _quantiles(epsilons))
        words += f", the worst of {len(epsilons)} whose epsilons have quartiles {values}"
    if group:
        person_samples = f"{group} of its {samples}" if group < samples else f"all its {samples}"
        words += f"; a person has {person_samples} samples"
    return Scope(words, knows, client=k)


def _public_words(count: int) -> tuple[str, ...]:
    words = f"{count} public clients, who have an infinite budget and draw no noise"
    return (words,) if count else ()


ReleaseReport = SumsReport | LocalStepsReport


def report_of(
    release: Release,
    accountants: Sequence[str] = ("pld", "rdp", "paper"),
    terms: Terms | None = None,
) -> ReleaseReport:
    """The `ReleaseReport` of a release.

    Args:
        release: with noise on the sums of rounds, or at local steps.
        accountants: names of those that state an epsilon.
        terms: of noise on sums; noise at local steps has its own.
    """
    if release.by_draws:
        return LocalStepsReport(cast(LocalSteps, release), accountants)
    assert terms is not None
    return SumsReport(cast(Mechanism, release), accountants, terms)
