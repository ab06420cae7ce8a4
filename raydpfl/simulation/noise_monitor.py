"""Noise of a user-defined class, tested against its declared distribution in every round of a run.

Every draw is tested before it is released: the server's on a sum, the clients' and their sum, those
on side queries and on histograms. With independent N(0, std^2 I) of the std that accountants count
on, these statistics have exact distributions, conditional on the draws before:

- the squared norm over std^2 is chi-squared, of a draw and of the last 2, 4, 8, ... together, so
  that noise that is right for some rounds is detected when it changes;
- the mean, and the projections on the exact sum that it hides, on the draws of the 8 rounds before
  and of one half of the coordinates on the other, are standard normal, and so are their sums; the
  sums of their squares are chi-squared;
- the counts of coordinates below 23 quantiles, and close to 0, are binomial;
- the squares of single coordinates, and the square of all sums, over draws 2, 3 to 4, 5 to 8, ...,
  are chi-squared;
- the correlation with earlier draws, by 512 coordinates, has the distribution of an angle on a
  sphere;
- the sums of products of coordinates some places from each other (of one number a round, some
  rounds from each other) are below a Bernstein bound (Boucheron, Lugosi, Massart 2013, sec. 2.4: of
  a quadratic form of n pairs, with variance n and scale 2).

Every round, window and kind of test has its part of `FALSE_ALARM`, so that a run with sound noise
ends with probability 1e-6 at most, however long it is and however often it is resumed. Draws that
follow the distribution but can be predicted pass: no sequence of draws shows that. Of noise that is
correlated over the rounds what `Noise.whitening` makes of it is tested.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from scipy.special import betainc, chdtr, chdtrc, erf, erfc, ndtri

from raydpfl.errors import RunError
from raydpfl.methods.hook_values import array_of
from raydpfl.methods.noise import Whitening
from raydpfl.privacy import Event, Mechanism

if TYPE_CHECKING:
    from raydpfl.core.messages import ChunkResult, Work
    from raydpfl.methods.noise import Noise, SideQuery
    from raydpfl.simulation.plan import Plan

FALSE_ALARM = 1e-6  # of a whole run with sound noise
TESTS = 256  # at most, of one draw and window
LAGS = 8
SKETCH = 512  # coordinates by which draws are compared with those of many rounds
KEPT_SKETCHES = 2048  # draws that the next are compared with
COMPARED_COORDINATES = 1 << 16  # coordinates that are compared with each other
TAILS = np.array([1e-5, 1e-4, 1e-3, 1e-2])
LEVELS = np.concatenate([TAILS, np.arange(1, 16) / 16, 1 - TAILS[::-1]])
QUANTILES = ndtri(LEVELS)
NEAR_RADII = np.array([1e-2, 1e-3, 1e-4])
ROOT = math.sqrt(2)

Numbers = Mapping[str, np.ndarray]


def numbers(z: np.ndarray, hidden_arrays: Sequence[np.ndarray] = ()) -> Numbers:
    """The statistics of k draws.

    Args:
        z: float64 [k, d], independent standard normals if they have their distribution.
        hidden_arrays: arrays [k, d] that they may not depend on, such as sums they are added to.

    Returns:
        By name, float64 [k], but for `below` [k, 23], the coordinates below each quantile, `near 0`
        [k, 3], and `sketch` [k, m], some coordinates.
    """
    k, d = z.shape
    half = d // 2
    below_counts = [np.count_nonzero(z < quantile, axis=1) for quantile in QUANTILES]
    near_counts = [np.count_nonzero(np.abs(z) < radius, axis=1) for radius in NEAR_RADII]
    return {
        "square": (z * z).sum(1),
        "dimensions": np.full(k, float(d)),
        "largest": np.abs(z).max(1, initial=0.0),
        "mean": z.sum(1) / math.sqrt(d),
        "halves": _projection(z[:, half : 2 * half], z[:, :half]),
        "neighbours": _projection(z[:, 1 : 2 * half : 2], z[:, : 2 * half : 2]),
        "sketch": z[:, np.linspace(0, d - 1, min(d, SKETCH)).astype(int)],
        **{f"hidden {place}": _projection(z, array) for place, array in enumerate(hidden_arrays)},
        "below": np.stack(below_counts, axis=1).astype(np.float64),
        "near 0": np.stack(near_counts, axis=1).astype(np.float64),
    }


def _projection(z: np.ndarray, directions: np.ndarray) -> np.ndarray:
    """The length of every row of z, [k, n], along that of `directions`; NaN along zeros."""
    size = np.abs(directions).max(1, initial=0.0)
    with np.errstate(invalid="ignore", divide="ignore"):
        rows = directions / size[:, None]
        return (z * rows).sum(1) / np.sqrt((rows * rows).sum(1))


def products(values: np.ndarray) -> float:
    """A bound on the probability that independent normals have sums of products, of values the same
    number of places from each other, as large as these.
    """
    n = len(values)
    spectrum = np.abs(np.fft.rfft(values, 2 * n)) ** 2
    sums = np.abs(np.fft.irfft(spectrum)[1:n])
    pairs = 2.0 * np.arange(n - 1, 0, -1)
    deviations = ((np.sqrt(pairs + 8 * sums) - np.sqrt(pairs)) / 4) ** 2
    return min(1.0, 2 * n * math.exp(-float(deviations.max())))


def tail(squares: Any, dof: Any) -> Any:
    """The smaller tail probability of chi-squared numbers of these degrees of freedom."""
    return np.minimum(chdtr(dof, squares), chdtrc(dof, squares))


WORDS = {  # by the first word of a statistic that is standard normal
    "size": "the size",
    "mean": "the mean",
    "halves": "the part along another part of it",
    "neighbours": "the part along neighbouring coordinates",
    "hidden": "the part along what it hides",
    "lag": "the part along an earlier draw",
}
Test = tuple[float, str]  # the chance of what is seen, if the noise is sound, and it in words


class Draws:
    """All draws of one kind in a run, such as those of the server on sums: `name` names them in
    messages, and no other kind of the run has the number `nth`, from 0.
    """

    def __init__(self, name: str, nth: int):
        self._name = name
        self._level = FALSE_ALARM / (TESTS * (nth + 1) * (nth + 2))
        # by test, after every draw: what has been added up until then
        self._totals: dict[str, list[np.ndarray]] = {}
        self._recent_sketches: deque[np.ndarray] = deque(maxlen=LAGS)
        self._rows = np.empty((0, 0))
        self._single: list[float] = []
        self._sums = np.zeros((2, 0))  # of coordinates, and of their squares
        self._count = 0  # draws in these

    def see(
        self, t: int, std: float, statistics: Numbers, clients: np.ndarray | None = None
    ) -> None:
        """Takes up k draws of round t, by `clients` int64 [k], as `numbers` gave them for this std.
        Raises `RunError` where independent N(0, std^2 I) would hardly ever be like them.
        """
        for chance, finding in self._tests(std, statistics, clients):
            if not chance >= self._level / ((t + 1) * (t + 2)):
                accounted_noise = f"N(0, {std:.6g}^2) was accounted for"
                raise RunError(f"{self._name} in round {t} {finding}, where {accounted_noise}")

    def _tests(self, std: float, statistics: Numbers, clients: np.ndarray | None) -> Iterator[Test]:
        square = statistics["square"]
        dimensions = statistics["dimensions"]
        d = dimensions.sum()
        for share, window, (total, dof) in self._windows("square", square.sum(), d):
            ratio = math.sqrt(total / dof)
            std_finding = f"has std {ratio * std:.6g} {window}, {ratio:.4g} of it"
            yield 2 * tail(total, dof) * share, std_finding
        sketch = statistics["sketch"]
        low = chdtr(dimensions, square)
        high = chdtrc(dimensions, square)
        size = -ndtri(np.clip(np.minimum(low, high), 1e-300, 1))
        normals = {"size": np.where(low < high, -size, size)}
        normals |= {name: statistics[name] for name in statistics if name.split()[0] in WORDS}
        if "z" in statistics:
            for lag, earlier_sketch in enumerate(reversed(self._recent_sketches), 1):
                normals[f"lag {lag}"] = _projection(sketch, earlier_sketch)
            self._recent_sketches.append(sketch)
        for name, values in normals.items():
            yield from self._normal(name, values, clients)
        largest = statistics["largest"].max()
        yield d * erfc(largest / ROOT), "has too large a coordinate"
        for name, chances, finding in (
            ("below", LEVELS, "is not Gaussian"),
            ("near 0", erf(NEAR_RADII / ROOT), "is too often 0 or too seldom"),
        ):
            for share, window, totals in self._windows(name, *statistics[name].sum(0), d):
                yield _binomial(totals[:-1], totals[-1], chances) * share, f"{finding} {window}"
        if "z" in statistics:
            yield from self._single_draw(statistics["z"])
        yield self._angles(sketch), "is correlated with another draw"

    def _normal(self, name: str, values: np.ndarray, clients: np.ndarray | None) -> Iterator[Test]:
        """Of standard normals [k], NaN left out."""
        finite = ~np.isnan(values)
        values = values[finite]
        if not len(values):
            return
        quantity = WORDS[name.split()[0]]
        place = int(np.abs(values).argmax())
        owner = "" if clients is None else f" of client {clients[finite][place]}"
        yield len(values) * erfc(abs(values[place]) / ROOT), f"has {quantity}{owner} too far from 0"
        sums = self._windows(name, values.sum(), (values**2).sum(), len(values))
        for share, window, (total, squares, count) in sums:
            chance = erfc(abs(total) / math.sqrt(2 * count)) * share
            yield chance, f"has {quantity} too far from 0 {window}"
            chance = 2 * tail(squares, count) * share
            yield chance, f"has {quantity} with other variations {window}"

    def _single_draw(self, z: np.ndarray) -> Iterator[Test]:
        """Of one draw over std, float64 [d], by its coordinates, alone and over the rounds."""
        if len(z) == 1:
            self._single.append(float(z[0]))
            n = len(self._single)
            if n >= 64 and n & (n - 1) == 0:
                yield products(np.array(self._single)), f"repeats itself {_window_text(n)}"
        elif len(z) >= 64:
            yield products(z[:COMPARED_COORDINATES]), "has coordinates that depend on each other"
        if not self._count:
            self._sums = np.zeros((2, len(z)))
        self._sums += z, z * z
        self._count += 1
        n = len(self._totals["square"]) - 1
        if n & (n - 1):
            return
        sums, squares = self._sums
        tails = tail(squares, self._count)
        window = _window_text(self._count)
        place = int(tails.argmin())
        share = math.sqrt(squares[place] / self._count)
        yield 2 * len(z) * tails[place], f"has {share:.4g} of it at number {place} {window}"
        chance = 2 * tail(float(sums @ sums) / self._count, len(z))
        self._count = 0
        yield chance, f"has other sums than independent draws {window}"

    def _windows(self, test: str, *values: float) -> Iterator[tuple[int, str, np.ndarray]]:
        """The sums of a test's values over the last 1, 2, 4, 8, ... draws, these in words, and what
        a chance is multiplied by there, so that those of all windows may be added.
        """
        totals = self._totals.setdefault(test, [np.zeros(len(values))])
        totals.append(totals[-1] + values)
        last = len(totals) - 1
        for j in range(last.bit_length()):
            yield (j + 1) * (j + 2), _window_text(1 << j), totals[last] - totals[last - (1 << j)]

    def _angles(self, sketch: np.ndarray) -> float:
        """The chance of a correlation as large as that of two of these rows, [k, m], or of one with
        a row before.
        """
        k, m = sketch.shape
        if m < 2:
            return 1.0
        rows = sketch / np.linalg.norm(sketch, axis=1, keepdims=True)
        earlier_rows = self._rows.reshape(-1, m)
        self._rows = np.concatenate([earlier_rows, rows])[-KEPT_SKETCHES:]
        cosines = np.append(rows @ earlier_rows.T, (rows @ rows.T)[np.triu_indices(k, 1)])
        rest = max(1 - float(np.abs(cosines).max(initial=0.0)) ** 2, 1e-14)
        return len(cosines) * float(betainc((m - 1) / 2, 0.5, rest)) if len(cosines) else 1.0


def _binomial(counts: np.ndarray, trials: float, chances: np.ndarray) -> float:
    """Twice the least chance that one of these counts is as small, or as large."""
    upper_tail = betainc(np.maximum(counts, 1), trials - counts + 1, chances)
    lower_tail = betainc(np.maximum(trials - counts, 1), counts + 1, 1 - chances)
    upper_tail = np.where(counts > 0, upper_tail, 1.0)
    return 2 * float(np.minimum(upper_tail, np.where(counts < trials, lower_tail, 1.0)).min())


def _window_text(length: int) -> str:
    return "alone" if length == 1 else f"over the last {length} draws"


def check_whitening(plan: Plan) -> None:
    """Raises `RunError` where the earliest participations of a client, of which any number may be
    all, move the sums that a user-defined noise is said to be independent in by more than was
    accounted for.
    """
    noise = plan.experiment.noise
    if plan.mechanism is None or not (noise.is_user_defined and noise.correlated):
        return
    mechanism = cast(Mechanism, plan.mechanism)  # the server draws it
    event = Event(mechanism.sampling, 1.0, squares=mechanism.squares)
    separation = plan.experiment.selection.separation
    rounds = range(plan.experiment.rounds)
    squares = np.zeros(plan.experiment.selection.most_participations(len(rounds)))
    for t in rounds:
        row = noise.whitening(t)
        lags = t - separation * np.arange(len(squares))  # rounds since every participation
        lag_mask = (lags >= 0) & (lags < len(row))
        squares += np.where(lag_mask, row[np.where(lag_mask, lags, 0)], 0.0).cumsum() ** 2
    limits = event.effective_counts(np.arange(1, len(squares) + 1))
    excess_indices = np.flatnonzero(squares > limits * (1 + 1e-9))
    if len(excess_indices):
        n = int(excess_indices[0])
        raise RunError(
            f"noise.kind {noise.kind}: {n + 1} participations move the sums whitened by "
            f"whitening() by {math.sqrt(squares[n]):.6g}, where {math.sqrt(limits[n]):.6g} was "
            "accounted for"
        )


class MonitoredNoise:
    """Draws the noise of a run from round t on, and tests what a user-defined class draws: all
    methods, and the constructor, raise `RunError` for noise other than was accounted for. `sum_std`
    gives that std on a round's sum, from the round and its bound; None: none is accounted for.
    """

    def __init__(
        self,
        noise: Noise,
        seed: int,
        d: int,
        t: int,
        sum_std: Callable[[int, float | None], float] | None,
    ):
        self._noise = noise
        self._source = noise.on_server(seed, d)
        self._sum_std = sum_std or (lambda t, bound: 0.0)
        self._is_tested = noise.is_user_defined and sum_std is not None
        if not self._is_tested:
            return
        self._whiten = Whitening(noise)
        source = noise.on_server(seed, d)
        for past_round in range(t if noise.correlated else 0):
            past_noise = source.on_sum(past_round, 1.0)
            self._whiten(np.zeros(d) if past_noise is None else past_noise)
        self._kinds: dict[str, Draws] = {}
        self._refuted_stds: set[tuple[str, int]] = set()
        # numbers that side queries may not depend on
        self._independent_values: list[np.ndarray] = []

    def on_sum(self, t: int, std: float, total: np.ndarray) -> np.ndarray | None:
        """The server's noise on the sum `total` of round t; see `NoiseSource.on_sum`."""
        noise = self._source.on_sum(t, std)
        if not (self._is_tested and std) or (noise is None and self._noise.drawn_by() != "server"):
            return noise
        self._check_std(t, noise is not None, "of the server", 0.0, std)
        noise = array_of(f"noise.kind {self._noise.kind}: on_sum", noise, total.shape)
        z = self._whiten(self._noise.scores(noise, std))
        self._see_sum(t, "of the server", noise, z, std, total)
        return noise

    def check_client_noise(
        self, work: Work, cohort: int, results: Sequence[ChunkResult], total: np.ndarray
    ) -> None:
        """Tests what the clients of a round have drawn, whose sum is `total`, float64 [d]."""
        if not self._is_tested:
            return
        t, std, sum_std = work.t, work.client_std, self._sum_std(work.t, work.bound)
        parts = [result.drawn for result in results if result.drawn]
        name = f"of {cohort} clients"
        self._independent_values = []
        if self._noise.drawn_by() == "client":
            drawn_std = std * math.sqrt(cohort)
            self._check_std(t, drawn_std >= sum_std * (1 - 1e-9), name, drawn_std, sum_std)
        if not std:
            return
        rows = sum(len(part["client"]) for part in parts)
        self._check_std(t, rows == cohort, name, std * math.sqrt(rows), sum_std)
        if not cohort:
            return
        names = [name for name in parts[0] if name != "sum"]
        statistics = {name: np.concatenate([part[name] for part in parts]) for name in names}
        self._draws("of clients").see(t, std, statistics, statistics["client"])
        noise_sum = np.sum([part["sum"] for part in parts], axis=0)
        exact_total = total - noise_sum
        if np.linalg.norm(exact_total) < 1e-6 * np.linalg.norm(noise_sum):  # what rounding has left
            exact_total = np.zeros_like(exact_total)
        total_std = std * math.sqrt(cohort)
        z = self._noise.scores(noise_sum, total_std)
        self._see_sum(t, "of all clients", noise_sum, z, total_std, exact_total)

    def on_query(self, query: SideQuery, answers: float) -> float:
        """The noise on the sum of the answers to a side query; see `Noise.on_query`."""
        noise = self._noise.on_query(query)
        if not (self._is_tested and query.std):
            return noise
        value = np.array([noise], np.float64)
        hidden_arrays = [np.array([answers]), *self._independent_values]
        # where clients draw, each may draw as much as the round with the fewest needs
        part = self._noise.client_std(query.std, query.clients_left) * math.sqrt(len(query.clients))
        several = self._noise.drawn_by() == "client" and part >= query.std
        sound = False
        error = None
        for place, std in enumerate([query.std, part] if several else [query.std]):
            if (query.name, place) in self._refuted_stds:
                continue
            try:
                draws = self._draws(f"on the query {query.name}", f" {place}")
                self._see(draws, query.t, std, value / std, hidden_arrays)
                sound = True
            except RunError as rejection:
                self._refuted_stds.add((query.name, place))
                error = error or rejection
        if error and not sound:
            raise error
        self._independent_values.append(value)
        return noise

    def on_survey(
        self, seed: int, t: int, std: float, counts: np.ndarray, clients: int
    ) -> np.ndarray:
        """The noise on the counts of a histogram, float64 [bins]; see `Noise.on_survey`."""
        noise = self._noise.on_survey(seed, t, std, len(counts), clients)
        if self._is_tested:
            noise = array_of(f"noise.kind {self._noise.kind}: on_survey", noise, counts.shape)
            self._see(self._draws("on the histogram"), t, std, noise / std, [counts])
        return noise

    def _draws(self, role: str, name: str = "") -> Draws:
        words = f"noise.kind {self._noise.kind}: the noise {role}"
        return self._kinds.setdefault(f"{role}{name}", Draws(words, len(self._kinds)))

    def _see_sum(
        self, t: int, role: str, noise: np.ndarray, z: np.ndarray, std: float, total: np.ndarray
    ) -> None:
        self._see(self._draws(role), t, std, z, [total])
        self._independent_values += [noise[:1], noise[-1:], noise.sum(keepdims=True)]

    def _see(
        self, draws: Draws, t: int, std: float, z: np.ndarray, hidden_arrays: Sequence[np.ndarray]
    ) -> None:
        statistics = numbers(z[None], [array[None] for array in hidden_arrays])
        draws.see(t, std, {**statistics, "z": z})

    def _check_std(self, t: int, sound: bool, role: str, std: float, target: float) -> None:
        if not sound:
            raise RunError(
                f"noise.kind {self._noise.kind}: the noise {role} in round {t} has std "
                f"{std:.6g}, where N(0, {target:.6g}^2) was accounted for"
            )
