"""Runs on the same people: dp-accounting's composition, and one Gaussian for shared cohorts."""

import math
import re
from dataclasses import replace

import numpy as np
import pytest
from conftest import experiment, mechanism, messages
from dp_accounting import dp_event
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant
from scipy.stats import norm

from raydpfl import privacy
from raydpfl.errors import ConfigError
from raydpfl.experiment import overridden
from raydpfl.privacy import (
    Mechanism,
    Query,
    RunRelease,
    Sampling,
    compose_step_runs,
    pld,
    segments_of,
    together,
)
from raydpfl.privacy.accountants import ACCOUNTANTS
from raydpfl.privacy.guarantee import Observer
from raydpfl.simulation.composed_runs import StoredRun, compose, compose_trials
from raydpfl.simulation.resolution import resolve

BOTH = ["pld", "rdp"]


def released(kind, cohort, z, rounds, seed=0, cohorts="", relation="add_remove"):
    run = mechanism(kind, 1000, cohort, z, rounds)
    return RunRelease(f"{kind} {z}", run, relation, rounds, None, seed, cohorts)


def hidden(joint):
    """Epsilon by pld and by rdp with the cohorts hidden."""
    return [one.epsilon for one in joint.guarantees if one.sampling.knows == "cohort hidden"]


def test_runs_of_other_seeds_compose_as_dp_accounting_composes_them():
    runs = [
        released("poisson", 10, 1.0, 100, seed=0),
        released("poisson", 100, 2.6, 80, seed=1),
        released("full", 1000, 20.0, 10, seed=2),
    ]
    events = [
        dp_event.SelfComposedDpEvent(
            dp_event.PoissonSampledDpEvent(q, dp_event.GaussianDpEvent(z)), rounds
        )
        for q, z, rounds in ((0.01, 1.0, 100), (0.1, 2.6, 80), (1.0, 20.0, 10))
    ]
    library = [PLDAccountant(value_discretization_interval=1e-3), RdpAccountant()]
    for accountant in library:
        for event in events:
            accountant.compose(event)
    expected = [accountant.get_epsilon(1e-6) for accountant in library]
    assert hidden(together(runs, 1e-6, BOTH)) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("cohort, z, rounds", [(10, 0.6, 50), (100, 2.6, 100), (500, 30.0, 3)])
@pytest.mark.parametrize("kind", ["poisson", "fixed"])
def test_a_run_in_two_halves_is_the_run(kind, cohort, z, rounds):
    relation = "add_remove" if kind == "poisson" else "replace_one"
    whole = released(kind, cohort, z, rounds, relation=relation)
    event = whole.mechanism.event(relation)
    for name in BOTH:
        halves = [(event, rounds // 2), (event, rounds - rounds // 2)]
        found = ACCOUNTANTS[name].together(halves, 1e-5)
        assert found == pytest.approx(
            privacy.epsilon(whole.mechanism, relation, 1e-5, rounds, name), 1e-6
        )


def test_runs_of_one_seed_are_one_gaussian_while_both_last():
    """Sums over the same cohort are one Gaussian of mu sqrt(2); then the longer run goes on."""
    short, long = (released("poisson", 100, 2.0, rounds) for rounds in (30, 50))
    joint = long.mechanism.event("add_remove")
    both = replace(joint, mu=joint.mu * math.sqrt(2))
    expected = [ACCOUNTANTS[name].together([(both, 30), (joint, 20)], 1e-5) for name in BOTH]
    found = hidden(together([short, long], 1e-5, BOTH))
    assert found == pytest.approx(expected, rel=1e-12)
    independent = hidden(together([short, replace(long, seed=1)], 1e-5, BOTH))
    assert np.all(np.array(independent) < found)


@pytest.mark.parametrize("second", ["same", "opposite", "only high", "smooth"])
def test_adaptive_runs_of_one_seed_show_no_more_than_that_gaussian(second):
    """One round each, one dimension, the second contribution chosen by the first release: the
    exact divergences, against the theorem of docs/proofs.md.
    """
    q, z, e = 0.2, 1.0, 0.7
    y = np.linspace(-8, 9, 801)
    first, then = np.meshgrid(y, y, indexing="ij")
    chosen = {
        "same": np.ones_like(first),
        "opposite": -np.sign(first),
        "only high": (first > 0.5).astype(float),
        "smooth": np.tanh(first),
    }[second]
    absent = norm.pdf(first) * norm.pdf(then)
    there = (1 - q) * absent + q * norm.pdf(first - 1 / z) * norm.pdf(then - chosen / z)
    runs = [released("poisson", 200, z, 1) for _ in range(2)]
    event = runs[0].mechanism.event("add_remove")
    joint = replace(event, mu=event.mu * math.sqrt(2))
    bound = ACCOUNTANTS["pld"].delta_of(joint, e, 1)
    area = (y[1] - y[0]) ** 2
    for one, other in ((there, absent), (absent, there)):
        assert np.maximum(one - math.exp(e) * other, 0).sum() * area <= bound * (1 + 1e-3)


def test_what_seeds_and_schemes_forbid_is_said():
    fixed = [released("fixed", 100, 4.0, 20, relation="replace_one") for _ in range(2)]
    joint = together(fixed, 1e-5, ["pld"])
    assert not hidden(joint) and "same seed 0" in joint.notes[0]
    planned = together(fixed, 1e-5, ["pld"], adaptive=False)  # as the runs of a grid
    assert hidden(planned) and hidden(planned)[0] < joint.guarantees[0].epsilon
    other = together([fixed[0], replace(fixed[1], cohorts="other")], 1e-5, ["pld"], adaptive=False)
    assert not hidden(other) and "different cohorts from the same seed" in other.notes[0]
    sampling = replace(fixed[1].mechanism.sampling, population=100_000)
    virtual = replace(fixed[1], mechanism=replace(fixed[1].mechanism, sampling=sampling))
    for runs in ([fixed[0], virtual], [virtual, fixed[0]]):
        other = together(runs, 1e-5, ["pld"], adaptive=False)
        assert not hidden(other) and "accounted for by other samplings" in other.notes[0]
    with pytest.raises(ConfigError, match="one relation for all runs"):
        together([fixed[0], released("poisson", 100, 4.0, 20)], 1e-5, ["pld"])


def test_poisson_cohorts_of_one_seed_hide_no_client_that_is_replaced_in_later_runs():
    runs = [released("poisson", 100, 4.0, 20, relation="replace_one") for _ in range(2)]
    assert not hidden(together(runs, 1e-5, ["pld"]))
    assert hidden(together(runs, 1e-5, ["pld"], adaptive=False))


def test_directions_of_other_schemes_are_not_taken_to_stand_in_the_same_order():
    """Where they do the sum is what it is; where they do not it may be no less."""
    runs = [
        released(kind, 300, z, 3, seed=k, relation="zero_out")
        for k, (kind, z) in enumerate([("poisson", 0.8), ("fixed", 1.5)])
    ]
    events = [run.mechanism.event("zero_out") for run in runs]
    curves = [e.sampling.scheme.curves(e.sampling, e.mu, "zero_out") for e in events]
    orders = [[(curves[0], 3), (curves[1][::turn], 3)] for turn in (1, -1)]
    expected = max(pld.composed_epsilon(parts, 1e-5) for parts in orders)
    assert hidden(together(runs, 1e-5, ["pld"])) == pytest.approx([expected], rel=1e-9)


@pytest.mark.slow
def test_hidden_cohorts_never_cost_more_than_known_ones():
    """At a delta that is out of reach of the losses of two schemes."""
    allocated = Sampling("random_allocation", 1000, 100, epoch=10, per_epoch=1)
    query = Query("updates", 1.0, 2.0)
    one = RunRelease("a", Mechanism(allocated, (query,), 20), "add_remove", 20, None, 0, "")
    other = released("poisson", 100, 2.0, 20, seed=1)
    secret, known = together([one, other], 1e-17, ["pld"]).guarantees
    assert secret.epsilon <= known.epsilon < math.inf


@pytest.mark.slow
def test_a_thousand_kinds_of_rounds_are_composed_by_levels():
    """Next to rdp, which takes each as it is, and to the loudest of all rounds."""
    run = released("poisson", 100, 1.0, 1000)
    factors = tuple(np.linspace(3.0, 5.0, 1000).tolist())
    schedule = replace(run, mechanism=replace(run.mechanism, factors=factors))
    loud = replace(run, mechanism=run.mechanism.with_noise(5.0))
    quiet = replace(run, mechanism=run.mechanism.with_noise(3.0))
    other = released("poisson", 100, 5.0, 10, seed=1)
    by_pld, by_rdp = hidden(together([schedule, other], 1e-5, BOTH))
    least, most = (hidden(together([one, other], 1e-5, ["pld"]))[0] for one in (loud, quiet))
    assert least < by_pld < most and by_pld < by_rdp


# ---- noise at local steps ----


def of_steps(std, seed=0, counts=(3, 0, 2, 5), batch=10, rows=""):
    release = privacy.LocalSteps(
        [600, 600, 40, 8], batch=batch, steps=20, bound=1.0, delta=1e-3, stds=std
    )
    return privacy.StepsRelease(f"{std}", release, np.array(counts), seed, ("a", "b"), rows)


@pytest.mark.parametrize("name", BOTH)
def test_steps_of_other_seeds_compose_client_by_client(name):
    runs = [of_steps(0.8), of_steps(0.5, seed=1, counts=(1, 4, 9, 0), batch=30)]
    (joint,) = compose_step_runs(runs, 1e-3, [name]).guarantees
    each = []
    for k in range(4):
        with_client = [run for run in runs if run.participations[k]]
        parts = [(run.release.event(k), int(run.participations[k])) for run in with_client]
        each.append(ACCOUNTANTS[name].together(parts, 1e-3))
    assert joint.epsilon == max(each) and joint.sampling.client == int(np.argmax(each))
    assert (joint.unit, joint.relation) == ("sample", "replace_one")
    assert joint.observer == Observer.UPDATES


def test_a_run_of_steps_in_two_halves_is_the_run():
    whole = of_steps(0.8, counts=(4, 2, 6, 8))
    halves = [of_steps(0.8, seed, counts=(2, 1, 3, 4)) for seed in (0, 1)]
    truth = privacy.report_of(whole.release, BOTH)
    for one in compose_step_runs(halves, 1e-3, BOTH).guarantees:
        expected = truth.epsilons(one.accountant, whole.participations).max()
        assert one.epsilon == pytest.approx(expected, rel=1e-6)


def test_steps_of_one_seed_are_one_gaussian_where_no_run_depends_on_another():
    short, long = of_steps(0.8, counts=(1, 0, 2, 0)), of_steps(0.5, counts=(3, 0, 2, 0))
    event, other = (run.release.event(0) for run in (short, long))
    both = replace(event, mu=math.hypot(event.mu, other.mu))
    steps = [(both, 1), (other, 2)]
    second = [run.release.event(2) for run in (short, long)]
    joint = replace(second[0], mu=math.hypot(*(one.mu for one in second)))
    expected = max(ACCOUNTANTS["pld"].together(parts, 1e-3) for parts in (steps, [(joint, 2)]))
    planned = compose_step_runs([short, long], 1e-3, ["pld"], adaptive=False)
    assert planned.guarantees[0].epsilon == pytest.approx(expected, rel=1e-12)
    assert not planned.notes
    open_ones = compose_step_runs([short, long], 1e-3, ["pld"])
    assert "have the same seed 0, so the same batches" in open_ones.notes[0]
    assert open_ones.guarantees[0].sampling.knows == ""
    squares = [20 * (event.mu**2 + 3 * other.mu**2), 40 * sum(one.mu**2 for one in second)]
    known = pld.gaussian_epsilon(math.sqrt(max(squares)), 1e-3)
    assert open_ones.guarantees[0].epsilon == pytest.approx(known, rel=1e-9)
    longer = replace(long, cohorts=("a", "b", "c"))
    assert not compose_step_runs([short, longer], 1e-3, ["pld"], False).notes
    for other in (replace(long, rows="other"), replace(long, cohorts=("a", "c"))):
        notes = compose_step_runs([short, other], 1e-3, ["pld"], False).notes
        assert "draw different batches from the same seed 0" in notes[0]


def test_public_clients_are_left_out_and_a_client_without_noise_is_not():
    run = of_steps(np.array([0.8, 0.0, 0.8, 0.8]))
    (joint,) = compose_step_runs([run, of_steps(0.5, 1)], 1e-3, ["pld"]).guarantees
    assert math.isfinite(joint.epsilon)  # client 1 takes part in neither
    bare = replace(run, participations=np.array([0, 1, 0, 0]))
    (joint,) = compose_step_runs([bare, of_steps(0.5, 1)], 1e-3, ["pld"]).guarantees
    assert joint.epsilon == math.inf and joint.conditions_failed
    claims = np.array([1.0, math.inf, 1.0, 1.0])
    public = replace(bare, release=replace(run.release, claims=claims))
    other = of_steps(0.5, 1, counts=(3, 9, 2, 5))
    (joint,) = compose_step_runs([public, other], 1e-3, ["pld"]).guarantees
    assert math.isfinite(joint.epsilon) and "1 clients who are public" in joint.exclusions[-1]
    assert joint.sampling.client != 1
    absent = replace(public, participations=np.array([1, 0, 0, 0]))  # public where it is not
    (joint,) = compose_step_runs([absent, other], 1e-3, ["pld"]).guarantees
    assert "the worst of 4" in str(joint.sampling) and not joint.exclusions
    (joint,) = compose_step_runs([public, public], 1e-3, ["pld"]).guarantees
    assert joint.epsilon == math.inf and joint.conditions_failed
    nobody = replace(run, participations=np.zeros(4, int))
    (joint,) = compose_step_runs([nobody], 1e-3, ["pld"]).guarantees
    assert joint.epsilon == 0 and "no client took part" in str(joint.sampling)


PRIVATE = {
    "noise": {"kind": "gaussian", "multiplier": 2.0, "delta": 1e-3},
    "bounding": {"kind": "clip", "bound": 1.0},
    "rounds": 4,
}
REFUSED = messages("runs together")


def stored(name, *changes):
    tree = overridden(experiment(**PRIVATE).to_dict(), changes)
    return StoredRun(name, type(experiment()).from_dict(tree))


@pytest.mark.parametrize("case", REFUSED)
def test_runs_that_do_not_compose_are_refused_by_name(case):
    *changes, said = REFUSED[case]
    with pytest.raises(ConfigError, match=re.escape(said)):
        compose([stored("a"), stored("b", *changes)])


def test_runs_with_common_noise_are_refused():
    runs = [
        stored(name, "noise.common=true", f"local.lr={lr}")
        for name, lr in zip("ab", (1, 2), strict=True)
    ]
    with pytest.raises(ConfigError, match=r"a and b have the same .*noise\.common"):
        compose(runs)


STEPS = (
    "bounding={kind: per_sample_clip, bound: 1.0}",
    "noise={kind: gaussian, std: 0.4, delta: 1e-3}",
    "data.seed=3",
)


@pytest.mark.slow
def test_stored_runs_with_noise_at_local_steps_compose():
    a, b = stored("a", *STEPS), stored("b", *STEPS, "seed=9")
    planned = compose([a, b])
    alone = [privacy.report_of(run.release, BOTH) for run in planned.runs]
    counts = sum(run.participations for run in planned.runs)
    for one in planned.guarantees:
        assert one.epsilon == pytest.approx(alone[0].epsilons(one.accountant, counts).max(), 1e-6)
    line = {"mechanism": planned.runs[0].release.round_digest(), "epsilon": {}, "key": "a"}
    part = compose([replace(a, ledger=[{**line, "round": 0}]), b])
    assert part.runs[0].participations.sum() == 20  # one cohort
    assert part.epsilon.epsilon < planned.epsilon.epsilon
    again = replace(a, ledger=[{**line, "round": 0}, {**line, "round": 1, "restart": 1}])
    for joined in (compose, compose_trials):
        with pytest.raises(ConfigError, match="a run without --fresh-noise"):
            joined([again, b])
    # another server's rate is no other release, so that both share a plan
    alike = replace(stored("c", *STEPS, "server.lr=0.5"), ledger=again.ledger)
    with pytest.raises(ConfigError, match=r"--fresh-noise, .*c had it"):
        compose_trials([replace(a, ledger=[]), alike])


@pytest.mark.parametrize("field, values", [("local.steps", (5, 50)), ("local.batch", (5, 1))])
def test_trials_that_differ_in_their_steps_or_batches_do_not_share_a_release(field, values):
    runs = [stored(f"{value}", *STEPS, f"{field}={value}") for value in values]
    (joint,) = compose_trials(runs)
    expected = compose(runs)
    assert [one.epsilon for one in joint.guarantees] == [one.epsilon for one in expected.guarantees]
    assert "draw different batches" in joint.notes[0]


def test_trials_with_other_stds_share_their_batches():
    runs = [stored(f"{std}", *STEPS, f"noise.std={std}") for std in (0.4, 0.5)]
    (joint,) = compose_trials([*runs, stored("short", *STEPS, "rounds=3", "noise.std=0.6")])
    assert not joint.notes


def test_a_sample_is_in_the_trials_of_every_seed_that_divides_its_file_anew():
    shared = [stored(f"{seed}", *STEPS, f"seed={seed}") for seed in (3, 4)]
    assert len(compose_trials(shared)) == 1
    anew = [stored(f"{seed}", *STEPS[:2], f"seed={seed}") for seed in (3, 4)]
    with pytest.raises(ConfigError, match="each sample is in those of every seed"):
        compose_trials(anew)


@pytest.mark.parametrize(
    "change, other, is_shared",
    [
        ("rounds=3", "seed=4", True),
        ("evaluate.validation=0.2", "seed=4", True),
        ("evaluate.validation={clients: 0.2}", "seed=4", True),
        ("data.partition.least=2", "seed=4", True),
        ("rounds=3", "data.seed=4", True),
        # by one seed draws the same clients by number, who are others
        ("evaluate.validation={clients: 0.2}", "data.seed=4", False),
    ],
)
def test_clients_that_the_data_name_are_in_the_runs_of_every_seed(
    change, other, is_shared, tmp_path
):
    rows = [f"u{i % 20:02d},{i % 7},{i % 2}\n" for i in range(400)]
    (tmp_path / "t.csv").write_text("".join(["user,x,y\n", *rows]))
    data = f"{{kind: table, train: {tmp_path}/t.csv, x: x, y: y, client: user, "
    changes = (f"data={data}partition: {{kind: natural, most: 9}}}}", "privacy.accountants=[pld]")
    changes += ("selection={kind: poisson, cohort: 5}", "noise.placement=auto", change)
    a, b = stored("a", *changes), stored("b", *changes, "local.lr=0.3", other)
    (joint,) = compose_trials([a, b])
    assert len(joint.runs) == 2 and bool(hidden(joint)) == is_shared
    assert joint.epsilon.epsilon > compose_trials([a])[0].epsilon.epsilon
    assert compose([a, b]).epsilon == joint.epsilon
    fewer = replace(b, experiment=stored("b", *changes, other, "data.partition.most=5").experiment)
    assert len(compose_trials([a, fewer])) == 1


def test_stored_runs_compose_with_the_rounds_of_their_ledgers():
    a, b = stored("a", "data.seed=3"), stored("b", "data.seed=3", "seed=1")
    planned = compose([a, b])
    line = {"mechanism": planned.runs[0].mechanism.round_digest(), "epsilon": {}}
    begun = [{**line, "round": t, "key": "a"} for t in range(2)]
    again = [{**line, "round": 1, "restart": 1, "key": "a1"}]  # released twice: three releases
    part = compose([replace(a, ledger=begun), b])
    twice = compose([replace(a, ledger=begun + again), b])
    assert [joint.runs[0].rounds for joint in (planned, part, twice)] == [4, 2, 3]
    spent = [hidden(joint)[0] for joint in (part, twice, planned)]
    assert spent == sorted(spent) and spent[0] < spent[1] < spent[2]
    other = replace(a, ledger=[{**begun[0], "mechanism": "other"}])
    with pytest.raises(ConfigError, match="whose ledger has the mechanism of its config"):
        compose([other, b])


def test_runs_of_one_seed_share_their_cohorts_if_they_were_restarted_alike():
    run = stored("a", "selection={kind: poisson, cohort: 8}", "noise.placement=auto")
    line = {"mechanism": resolve(run.experiment).mechanism.round_digest(), "epsilon": {}}

    def restarted(key, *restarts):
        facts = enumerate(restarts)
        ledger = [{**line, "round": t, "restart": restart, "key": key} for t, restart in facts]
        return replace(run, ledger=ledger)

    # none repeats a round
    whole, late = restarted("a", 0, 0, 0, 0), restarted("b", 0, 0, 1, 1)
    for other in (whole, restarted("c", 0, 1, 1, 1)):
        assert "different cohorts from the same seed" in compose([late, other]).notes[0]
    assert hidden(compose([late, restarted("d", 0, 0, 1, 1)]))


@pytest.mark.parametrize(
    "noise",
    [
        "noise={kind: gaussian, multiplier: 1.0, schedule: {decay: 2.0}}",
        "noise={kind: tree_gaussian, multiplier: 1.0}",
    ],
)
def test_a_restarted_run_composes_the_noise_of_every_release(noise):
    run = stored("a", "rounds=8", "selection={kind: full}", "privacy.accountants=[pld]", noise)
    plan = resolve(run.experiment)
    line = {"mechanism": plan.mechanism.round_digest(), "epsilon": {}, "key": "a"}
    restarts = [0, 0, 0, 1, 1, 1]
    ledger = [{**line, "round": i % 3, "restart": n} for i, n in enumerate(restarts)]
    restarted = plan.extend_history(segments_of(ledger))
    expected = restarted.curves()["pld"][2]
    joint = compose([replace(run, ledger=ledger)])
    assert joint.epsilon.epsilon == pytest.approx(expected, rel=1e-6)
    assert joint.epsilon.epsilon > plan.curves()["pld"][5]


def test_colluders_of_all_runs_are_composed():
    runs = [released("fixed", 100, 3.0, 5, seed, relation="zero_out") for seed in (0, 1)]
    shared = replace(runs[0].mechanism, placement="client", colluders=5)
    joint = together([replace(run, mechanism=shared) for run in runs], 1e-5, ["pld"])
    (known,) = [one for one in joint.guarantees if one.observer == Observer.COLLUDERS]
    seen = shared.with_colluders(known_cohorts=True).with_known_cohorts()
    assert known.epsilon == pytest.approx(privacy.epsilon(seen, "zero_out", 1e-5, 10, "pld"), 1e-6)
