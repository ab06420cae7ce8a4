"""The contract of every member: ours keep it, a liar is caught by the clause that is for it."""

import textwrap
import uuid
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import experiment, refusal
from pydantic import PrivateAttr
from torch import nn

from raydpfl.check import bounding, check, members_of, render, resolve_member, selection, sources
from raydpfl.check.contract import BrokenClause
from raydpfl.check.example import Example
from raydpfl.core.prng import Purpose, stream
from raydpfl.data import Data, Maker, Split, prepare
from raydpfl.methods.bounding import FAMILY as BOUNDINGS
from raydpfl.methods.bounding import BoundingQuery, Clip
from raydpfl.methods.local import Local
from raydpfl.methods.noise import Gaussian
from raydpfl.methods.noise.keyed_noise import query_noise, server_noise
from raydpfl.methods.probes import Probe
from raydpfl.methods.selection import Cohort, Selection, Uniform
from raydpfl.methods.selection.power_of_choice import PowerOfChoice
from raydpfl.methods.server import Server
from raydpfl.methods.weights import Weights
from raydpfl.models import Model
from raydpfl.models.hidden_state import changed_names
from raydpfl.privacy import Sampling, pld
from raydpfl.privacy.sampling import SCHEMES
from raydpfl.runtime.runner import run
from raydpfl.tracking import Log, Tracker

QUICK = ("bounding:clip", "weights:uniform", "sampling:full", "accountant:rdp")
MEMBERS = [
    pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in members_of()
]


@pytest.mark.parametrize("name", MEMBERS)
def test_every_member_keeps_the_promises_of_its_family(name):
    library = getattr(resolve_member(name)[1], "library", "")
    if library:
        pytest.importorskip(library)
    found = check(name)
    assert found and all(clause.kept for clause in found), render(found)


def test_a_member_is_named_as_configs_and_as_kinds_name_it():
    names = ("bounding:clip", "bounding.clip", "clip")
    assert len({resolve_member(name) for name in names}) == 1


@pytest.fixture(autouse=True)
def _fewer_cohorts(monkeypatch):
    monkeypatch.setattr(selection, "SECONDS", 1)


class SomeOften(Selection):
    """Some clients are four times as likely as the others, among more than 24."""

    examples = ({"often": tuple(range(30))},)
    cohort: int = 9
    often: tuple[int, ...]

    def select(self, seed, t, population, ask):
        odds = np.ones(len(population))
        odds[list(self.often if len(odds) > 30 else ())] = 4.0
        generator = stream(seed, Purpose.COHORT, t=t)
        chances = odds / odds.sum()
        return Cohort.of(generator.choice(len(odds), self.cohort, replace=False, p=chances))

    def sampling(self, population):
        return Sampling("fixed", len(population), self.cohort)


@pytest.mark.slow
def test_a_selection_is_tried_among_as_many_clients_as_its_fields_suit():
    follows = next(clause for clause in check(SomeOften) if clause.name == "follows sampling")
    assert not follows.kept and "hardly ever gives" in follows.finding


# --- members that lie: each keeps all clauses but those it is caught by ---


class OneClip(Clip):
    examples = ({"bound": 0.5},)


class OneGaussian(Gaussian):
    examples = ({"multiplier": 1.0},)


class OneUniform(Uniform):
    examples = ({"cohort": 6},)


class Forgetful(Tracker):
    """Begins another run where it should go on with one."""

    def open(self, run):
        return Nameless()


class Nameless(Log):
    def __init__(self):
        self.id = uuid.uuid4().hex

    def write(self, rows):
        pass


class Leaky(OneClip):
    """Lets long vectors pass a little beyond the bound."""

    def factor(self, norm: float, bound: float) -> float:
        return 1.0 if norm <= 1.4 * bound else bound / norm


class Endless(OneClip):
    """Divides by a norm of 0."""

    def factors(self, norms, bound):
        return bound / norms


class Among(OneClip):
    """Bounds a client by what the others of its block have."""

    def factors(self, norms, bound):
        return bound / torch.clamp(norms.max(), min=bound).expand_as(norms)


class OneBackend(OneClip):
    """Sends something that its inverse does not know of."""

    def send(self, updates: torch.Tensor, view: Any) -> torch.Tensor:
        return updates * 2


class Talkative(OneClip):
    """Answers with more than its query's bound."""

    def queries(self) -> tuple[BoundingQuery, ...]:
        return (BoundingQuery("norms", bound=1.0, share=0.1),)

    def answers(self, columns: Any, bound: float) -> dict[str, np.ndarray]:
        return {"norms": columns["norm"]}


class Collapsing(BOUNDINGS["quantile_clip"]):
    """A bound that can become negative."""

    examples = ({"bound": 0.5},)

    def adapt(self, bound: float, sums: Any, clients: float, state: Any) -> float:
        return bound - self.lr * sums["count"]


class Exact(OneClip):
    """The next bound is the last norm of the clients, as they have it."""

    _norms: list[float] = PrivateAttr(default_factory=list)

    def queries(self) -> tuple[BoundingQuery, ...]:
        return (BoundingQuery("norms", bound=1.0, share=0.1),)

    def answers(self, columns: Any, bound: float) -> dict[str, np.ndarray]:
        self._norms[:] = np.nan_to_num(columns["norm"][-1:]).clip(1e-3, 1e3).tolist()
        return {"norms": np.zeros(len(columns["norm"]))}

    def adapt(self, bound: float, sums: Any, clients: float, state: Any) -> float:
        return (self._norms or [bound])[0]


SEEN: list[float] = []


class Remembering(Server):
    """Keeps a momentum where no checkpoint finds it."""

    def direction(self, update: np.ndarray, state: Any) -> np.ndarray:
        SEEN.append(float(update.mean()))
        return update + np.mean(SEEN)


class Growing(Server):
    """A state whose shape changes."""

    def start(self, d: int) -> dict[str, np.ndarray]:
        return {"past": np.zeros(1)}

    def direction(self, update: np.ndarray, state: Any) -> np.ndarray:
        state["past"] = np.append(state["past"], update.mean())
        return update


class Mixing(Local):
    """A step along the mean over all clients of a chunk."""

    def step(self, x: torch.Tensor, gradient: torch.Tensor, state: Any, at: Any) -> Any:
        return x - at.lr * gradient.mean(0, keepdim=True).expand_as(gradient), state


NORMS: list[float] = []


class First(OneClip):
    """Bounds by the first norm that it meets."""

    def factor(self, norm: float, bound: float) -> float:
        if not NORMS:
            NORMS.append(norm)
        return bound / (bound + norm + NORMS[0])


class Half(OneGaussian):
    """Draws half the noise that it is told to."""

    def on_clients(self, seed, t, clients, draws, std, d):
        drawn = super().on_clients(seed, t, clients, draws, std, d)
        return None if drawn is None else drawn / 2


class Shared(OneGaussian):
    """All clients draw the same noise."""

    def on_clients(self, seed, t, clients, draws, std, d):
        return super().on_clients(seed, t, np.zeros_like(clients), draws, std, d)


class Repeating(OneGaussian):
    """The noise on a side query is that of a coordinate of the sum."""

    def on_query(self, query):
        return float(server_noise(query.seed, query.t, query.std, 8)[5])


class Twin(OneGaussian):
    """The noise on all side queries of a round is one draw."""

    def on_query(self, query):
        return super().on_query(replace(query, name="count"))


class Stinting(OneGaussian):
    """Has each client draw as if twice as many did."""

    def client_std(self, std: float, clients_left: int) -> float:
        return super().client_std(std, 2 * clients_left)


class Uneven(Weights):
    """Weights that add up to more."""

    def of(self, sizes: np.ndarray, samples: int, population: int) -> np.ndarray:
        return sizes / sizes.max()


class Favouring(OneUniform):
    """Client 0 is drawn twice as often as its sampling scheme says."""

    def select(self, seed, t, population, ask):
        clients = super().select(seed, t, population, ask).clients
        if 0 not in clients and t % 3 == 0:
            clients = np.append(clients[1:], 0)
        return Cohort.of(clients)


class Nosy(PowerOfChoice):
    """Answers exactly, where it declares noise."""

    examples = ({"cohort": 5, "pool": 12, "loss_bound": 3.0, "loss_std": 1.0},)

    def answer(self, losses, noise_seed, t, client):
        return super().answer(losses, noise_seed, t, client) - query_noise(
            noise_seed, t, self.loss_std, client, query="losses"
        )


class OneDraw(Nosy):
    """The noise of every round is that of the first."""

    def answer(self, losses, noise_seed, t, client):
        return PowerOfChoice.answer(self, losses, noise_seed, 0, client)


class Loud(Nosy):
    """Answers with twice the range."""

    def answer(self, losses, noise_seed, t, client):
        clipped = np.clip(np.nan_to_num(losses), 0, 2 * self.loss_bound).mean()
        return clipped + query_noise(noise_seed, t, self.loss_std, client, query="losses")


@pytest.mark.parametrize(
    "liar, said",
    [(Nosy, "same noise|of its std"), (OneDraw, "the same noise"), (Loud, "the range is 3")],
)
def test_answers_about_losses_have_the_declared_noise_and_range(liar, said):
    section, _, path = resolve_member(liar)
    with pytest.raises(BrokenClause, match=said):
        selection.answers(Example(section, {"kind": path, **liar.examples[0]}))
    kind = {"kind": "power_of_choice", **liar.examples[0]}
    assert "of the std over" in selection.answers(Example(section, kind))


DRAWN: list[int] = []


class Unrepeatable(OneUniform):
    """Draws what nobody can draw again."""

    def select(self, seed, t, population, ask):
        DRAWN.append(t)
        return super().select(seed, len(DRAWN), population, ask)


class Boasting(type(SCHEMES["poisson"])):
    """Claims the amplification of half the chance."""

    def curves(self, sampling: Sampling, mu: float, relation: Any) -> Any:
        return pld.poisson_curves(sampling.q / 2, mu)

    def renyi(self, sampling: Sampling, mu: float, relation: Any) -> np.ndarray:
        return super().renyi(sampling, mu, relation) / 4


class Boasted(OneUniform):
    """Is drawn by a sampling scheme that boasts."""

    def sampling(self, population: Any) -> Sampling:
        return Sampling(Bragging(), len(population), self.cohort)


class Bragging(type(SCHEMES["fixed"])):
    """Fixed size, with the curve of half the size."""

    def curves(self, sampling: Sampling, mu: float, relation: Any) -> Any:
        curve = pld.fixed_size_curve(sampling.q / 2, mu)
        return ((curve, curve),)


class Undeclared(Probe):
    """Gives a column that it does not declare."""

    def chunk(self, sent: Any) -> dict[str, np.ndarray]:
        return {"first": sent.vectors[:, 0].numpy().copy()}


class Mixed(Model):
    """Takes the mean of the batch away from each row."""

    def module(self, shape: Any, outputs: int) -> nn.Module:
        return Minus(shape[-1], outputs)


class Minus(nn.Module):
    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.last = nn.Linear(inputs, outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(x - x.mean(0))


class Levelled(nn.Linear):
    """Divides by the largest number of the batch where that is above 1."""

    def __init__(self) -> None:
        super().__init__(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x / x.abs().amax().clamp(min=1))


class Idle(nn.Linear):
    """Has a layer that it never uses."""

    def __init__(self) -> None:
        super().__init__(8, 3)
        self.other = nn.Linear(2, 2)


class Chance(nn.Linear):
    """Begins with what the process happens to draw."""

    def __init__(self) -> None:
        super().__init__(8, 3)
        with torch.no_grad():
            self.weight += NOW.standard_normal()


NOW = np.random.default_rng(0)
FIRST_ROWS: list[float] = []


class FirstRow(nn.Linear):
    """Shifts all that it is given by the first number that it meets."""

    def __init__(self) -> None:
        super().__init__(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not FIRST_ROWS:
            FIRST_ROWS.append(float(x.detach().flatten()[0]))
        return super().forward(x) + FIRST_ROWS[0]


class Rows(Data):
    """A source that keeps its clauses."""

    clients: int = 5

    def numbers(self, seed: int) -> tuple[np.ndarray, np.ndarray]:
        generator = stream(seed, Purpose.DATA)
        x = generator.standard_normal((4 * self.clients, 6)).astype(np.float32)
        return x, generator.integers(3, size=len(x))

    def split(self, seed: int, root: Any) -> Split:
        x, y = self.numbers(seed)

        def rows(first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
            return x[4 * first : 4 * last], y[4 * first : 4 * last]

        sizes = np.full(self.clients, 4)
        return Split(sizes, (6,), 3, rows, lambda: (x[:7], y[:7]))


class Drawing(Rows):
    """Draws from the generator of the process."""

    def numbers(self, seed: int) -> tuple[np.ndarray, np.ndarray]:
        x, y = super().numbers(seed)
        return x + np.float32(np.random.rand()), y


class Beyond(Rows):
    """A class too many."""

    def numbers(self, seed: int) -> tuple[np.ndarray, np.ndarray]:
        x, y = super().numbers(seed)
        return x, y + 1


class Shifted(Rows):
    """The rows of one client, asked for by itself, are the next one's."""

    def split(self, seed: int, root: Any) -> Split:
        found = super().split(seed, root)

        def rows(first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
            by = int(last - first == 1 and last < self.clients)
            return found.rows(first + by, last + by)

        return replace(found, rows=rows)


class Remade(Rows):
    """The rows that it makes of one client are another draw's."""

    def maker(self, seed: int) -> Maker:
        other = self.split(seed + 1, None)
        return lambda client, count: iter([other.rows(client, client + 1)])


class Wide(Rows):
    """Numbers in float64."""

    def numbers(self, seed: int) -> tuple[np.ndarray, np.ndarray]:
        x, y = super().numbers(seed)
        return x.astype(np.float64), y


class Tiring(Local):
    """Takes smaller batches of more rows."""

    examples = ({"batch": 4, "steps": 3},)

    def batch_sizes(self, sizes: np.ndarray) -> np.ndarray:
        return np.where(sizes > 10, 1, np.minimum(sizes, 4))


LIARS = {
    Leaky: "bound",
    Endless: "bound",
    Among: "each alone",
    OneBackend: "inverse",
    Talkative: "answers",
    Collapsing: "adapt",
    Exact: "adapt",
    Remembering: "no hidden state",
    Growing: "state",
    Mixing: "rule",
    Tiring: "numbers",
    First: "no shared state",
    Half: "std",
    Shared: "independent",
    Repeating: "independent queries",
    Twin: "independent queries",
    Stinting: "as accounted",
    Uneven: "mean",
    Favouring: "follows sampling",
    Unrepeatable: "cohorts",
    Boasting: "no more private than a lone client",
    Boasted: "accounted",
    Undeclared: "columns",
    Forgetful: "gone on with",
    Mixed: "each row alone",
    Levelled: "each row alone",
    Idle: "every parameter",
    Chance: "initial parameters",
    FirstRow: "no shared state",
    Drawing: "same rows twice",
    Beyond: "values",
    Shifted: "any clients",
    Remade: "made",
    Wide: "types",
}


FIRST = (Leaky, Remembering)


@pytest.mark.parametrize(
    "liar",
    [pytest.param(cls, marks=() if cls in FIRST else pytest.mark.slow) for cls in LIARS],
    ids=lambda cls: cls.__name__,
)
def test_a_member_that_lies_is_caught_by_the_promise_that_is_for_it(liar):
    found = check(liar)
    broken = {clause.name: clause.finding for clause in found if not clause.kept}
    assert LIARS[liar] in broken, render(found)


def test_the_next_bound_and_what_is_kept_show_exact_answers():
    section, _, path = resolve_member(Exact)
    case = Example(section, {"kind": path, "bound": 0.5})
    before = case.first_state
    with pytest.raises(BrokenClause, match="after other answers"):
        bounding.adapt(case)
    case.member.answers({"norm": np.array([2.0])}, 0.5)
    assert changed_names(before, case.state()) == ["_norms"]


@pytest.mark.slow
def test_what_the_file_of_a_function_keeps_is_found(own_module):
    source = """
        from torch import nn

        FIRST = []

        class Net(nn.Linear):
            def forward(self, x):
                FIRST or FIRST.append(float(x.detach().sum()))
                return super().forward(x)

        def net() -> nn.Module:
            return Net(8, 3)
    """
    own_module("kept_by_a_file", textwrap.dedent(source))
    broken = {one.name: one.finding for one in check("kept_by_a_file:net") if not one.kept}
    assert "kept_by_a_file.FIRST changes" in broken["no shared state"]


def test_a_length_that_rounds_to_the_bound_is_shown_with_what_is_above_it():
    class Barely(Clip):
        def factor(self, norm: float, bound: float) -> float:
            return min(1.0, bound / norm * (1 + 1e-9)) if norm else 1.0

    with pytest.raises(BrokenClause, match=r"with length 0\.50000000\d+, above the bound of 0\.5"):
        bounding.bound(SimpleNamespace(member=Barely(bound=0.5)))


class Falling(Server):
    """Fails once it has seen a mean update of a real run."""

    lr: float = 1.0

    def direction(self, update: np.ndarray, state: dict[str, np.ndarray]) -> np.ndarray:
        if np.abs(update).min() > 0 and np.abs(update).max() < 1:
            raise ArithmeticError("no direction")
        return update


def net() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(60, 4))


@pytest.mark.slow
def test_a_function_that_makes_a_module_is_checked_on_samples_that_are_told():
    path = f"{__name__}:net"
    wide = ["data.shape=[60]", "data.classes=4"]
    found = check(path, wide)
    assert all(clause.kept for clause in found), render(found)
    backends = next(clause.finding for clause in found if clause.name == "every backend")
    assert backends.startswith("a run takes ") and "not convolutional" in backends
    assert "vmap" in backends
    (broken,) = (clause for clause in check(path) if not clause.kept)
    assert broken.name == "fits" and "data.shape=[60]" in broken.finding


@pytest.mark.slow
def test_a_source_of_ones_own_that_is_right_keeps_all_promises():
    found = check(Rows)
    assert len(found) == 21 and all(clause.kept for clause in found), render(found)


def test_rows_that_are_not_what_a_source_says_are_refused_by_name(tmp_path):
    for liar, said in ((Beyond, "targets are from 0 to 2"), (Short, "rows have a target each")):
        with refusal(f"data.kind = .*a source whose {said}"):
            prepare(liar(), 0, cache=tmp_path)


class Sharing(Rows):
    """All clients hold the same samples, and it does not say so."""

    def split(self, seed: int, root: Any) -> Split:
        split = super().split(seed, root)
        each = int(split.sizes[0])
        return replace(split, samples=lambda first, last: np.tile(np.arange(each), last - first))


def test_a_source_whose_clients_share_samples_must_say_so():
    said = r"rows are of samples that others hold, and overlaps\(\) is"
    with pytest.raises(BrokenClause, match=said):
        sources.held_out(SimpleNamespace(member=Sharing()))


class Short(Rows):
    """A target too few."""

    def numbers(self, seed: int) -> tuple[np.ndarray, np.ndarray]:
        x, y = super().numbers(seed)
        return x, y[:-1]


class Making(Rows):
    """Makes its rows, or what is wrong with them."""

    wrong: str = ""

    def maker(self, seed: int) -> Maker:
        rows = self.split(seed, None).rows

        def made(client: int, count: int) -> Any:
            x, y = rows(client, client + 1)
            if self.wrong == "raises":
                raise ValueError("no rows today")
            if self.wrong == "classes":
                y = y + 3
            if self.wrong == "shape":
                x = x[:, :1]
            yield x[:3], y[:3]
            if self.wrong != "few":
                yield x[3:], y[3:]

        return made


@pytest.mark.slow
def test_rows_that_a_source_of_ones_own_makes_are_those_it_gives(monkeypatch, tmp_path):
    monkeypatch.setenv("RAYDPFL_CACHE", str(tmp_path / "cache"))
    given = {"clients": 8}
    sections = {"selection": {"kind": "uniform", "cohort": 5}, "model": {"kind": "softmax"}}

    def trained(client: dict, **keys: Any) -> str:
        source = {"kind": f"{__name__}:Making", **given, **keys}
        e = experiment(**sections, data=source, client={"actors": 0, **client})
        return run(e, tmp_path / uuid.uuid4().hex).summary["model_sha256"]

    written = trained({})
    monkeypatch.setenv("RAYDPFL_CACHE", str(tmp_path / "other"))
    monkeypatch.setattr("raydpfl.data.shard_writer.GENERATED_BYTES", 0)
    assert trained({}) == written
    for wrong, said in (
        ("raises", "ValueError: no rows today"),
        ("classes", "targets are from 0 to 2"),
        ("shape", "x of a row is of shape"),
        ("few", r"makes 4 rows of client \d \(it makes 3\)"),
    ):  # a source's error is no client's, who would be dropped for it
        with refusal(f"data.kind = .*{said}"):
            trained({"on_error": "drop"}, wrong=wrong)


def test_what_needs_a_run_that_fails_is_not_tried():
    found = check(Falling)
    kept = {clause.name: clause.kept for clause in found}
    runs = [name for name in kept if name.startswith("same bits") or name == "epsilon"]
    assert kept["runs"] is False and kept["pickles"] is True
    assert runs and all(kept[name] is None for name in runs)
    table = render(found)
    assert "not tried  epsilon" in table
    narrow = render(found, 60)
    assert "".join(narrow.split()) == "".join(table.split())
    assert max(map(len, narrow.splitlines())) <= 60
    assert f"{sum(map(bool, kept.values()))} of {len(kept)} clauses are kept, 7 not tried" in table
