"""The budget calculator: its three unknowns agree with each other and with the accountants."""

import io
import json
import math
from dataclasses import replace

import numpy as np
import pytest
import yaml
from conftest import SMALL, experiment, messages, refusal
from rich.console import Console
from scipy.special import ndtr, ndtri

from raydpfl import privacy, run
from raydpfl.cli import budget_display
from raydpfl.errors import ConfigError
from raydpfl.methods.noise import FAMILY
from raydpfl.privacy import Mechanism, Query, Sampling, calculator
from raydpfl.privacy.factorization import STRATEGIES
from raydpfl.simulation import planned_guarantee

CLIENTS = {"population": 1920, "cohort": 80}  # PRIVACY.md sec. 2
SMALLER = {"population": 200, "cohort": 20}
EVERYONE = {"population": 50, "sampling": "full"}
SCHEMES = {
    "fixed": SMALLER,
    "Poisson": {**SMALLER, "sampling": "poisson"},
    "Poisson, zero out": {**SMALLER, "sampling": "poisson", "relation": "zero_out"},
    "with replacement": {**SMALLER, "sampling": "with_replacement"},
    "full": EVERYONE,
    "full, add or remove": {**EVERYONE, "relation": "add_remove", "placement": "server"},
}
MNIST = {"samples": 600, "batch": 10, "steps": 300}  # 002, PRIVACY.md sec. 4
SHORT = {"samples": 100, "batch": 10, "steps": 20}
LOCAL = {
    "fixed": SHORT,
    "Poisson": {**SHORT, "sampling": "poisson"},
    "with replacement": {**SHORT, "sampling": "with_replacement"},
}
ALL = {f"clients, {name}": ("client", given) for name, given in SCHEMES.items()}
ALL |= {f"samples, {name}": ("sample", given) for name, given in LOCAL.items()}


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("RAYDPFL_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


def ask(unit, given, rounds=None, **options) -> calculator.Budget:
    repeated = {"rounds" if unit == "client" else "participations": rounds} if rounds else {}
    return calculator.from_options(unit, **given, **options, **repeated)


def test_brackets_in_the_name_of_a_run_are_shown():
    mechanism = Mechanism(Sampling("fixed", 100, 10), (Query("updates", 1.0, 2.0),), 3)
    named = [
        privacy.RunRelease(f"runs/a[{k}]", mechanism, "replace_one", 3, None, k, "")
        for k in ("x", "y")
    ]
    text = shown(privacy.together(named, 1e-5, ["pld"]))
    assert "runs/a[x]" in text and "runs/a[y]" in text


def shown(found, width: int = 100) -> str:
    console = Console(width=width, file=io.StringIO(), highlight=False)
    console.print(budget_display.render_budget(found))
    return console.file.getvalue()


def by_accountant(found) -> dict[str, calculator.Answer]:
    """The answer of each accountant against the observer who sees least."""
    return {answer.guarantee.accountant: answer for answer in reversed(found.answers)}


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ALL)
def test_noise_and_rounds_found_meet_the_target_and_hardly_less_or_one_more_would_not(scheme):
    """Against every observer, by every rigorous accountant; the slow reference is
    `privacy.guarantees` of the whole mechanism.
    """
    unit, given = ALL[scheme]

    found = ask(unit, given, rounds=4, epsilon=2.0)
    views = sum(answer.guarantee.accountant == "pld" for answer in found.answers)
    enough = found.answers[views - 1].noise_multiplier
    lasting = ask(unit, given, noise_multiplier=enough, epsilon=2.0)

    def spent(name, place, z, rounds):
        run = replace(found.mechanism.with_noise(z), rounds=rounds * lasting.steps)
        return privacy.guarantees(run, found.relation, 1e-5, accountants=[name])[place].epsilon

    for place, answer in enumerate(found.answers):
        if answer.guarantee.kind == "paper" or answer.guarantee.conditions_failed:
            continue
        where = (answer.guarantee.accountant, place % views)
        z = answer.noise_multiplier
        rounds = lasting.answers[place].rounds
        assert spent(*where, z, 4) <= 2.0 < spent(*where, z * (1 - 3e-4), 4)
        assert rounds == 0 or spent(*where, enough, rounds) <= 2.0
        assert spent(*where, enough, rounds + 1) > 2.0


@pytest.mark.parametrize("strategy", ["tree", "square_root", "banded", "buffered"])
def test_noise_by_a_strategy_is_answered_with_its_zcdp(strategy):
    """The Gaussian that the most rounds of a client amount to, and the noise that it needs."""
    asked = {"population": 10**6, "cohort": 100, "rounds": 60, "sampling": "public"}
    asked |= {"relation": "zero_out", "strategy": strategy, "separation": 20, "participations": 2}
    answer = calculator.client_budget(**asked, noise_multiplier=5.0).answers[0].guarantee
    square = STRATEGIES[strategy](60, 20, 2)[-1] / 25
    assert answer.rho == pytest.approx(square / 2)
    assert answer.epsilon == pytest.approx(float(privacy.gaussian_epsilon(math.sqrt(square), 1e-5)))
    assert f"zCDP with rho {square / 2:.4g}" in answer.sentence()
    found = calculator.client_budget(**asked, epsilon=answer.epsilon).answers[0].noise_multiplier
    assert found == pytest.approx(5.0, rel=1e-3)


@pytest.mark.parametrize(
    ("strategy", "shape", "matters"),
    [
        ("tree", {"restart": 30}, True),
        ("banded", {"bands": 5}, False),  # participations cost the same within the separation
        ("buffered", {"buffers": 1}, True),
    ],
)
def test_a_strategy_is_answered_in_the_shape_of_its_noise(strategy, shape, matters):
    """As the noise of a config is, fitted to such a run."""
    asked = {"population": 10**6, "cohort": 100, "rounds": 60, "sampling": "public"}
    asked |= {"strategy": strategy, "separation": 20, "noise_multiplier": 5.0}
    noise = FAMILY[f"{strategy}_gaussian"](multiplier=5.0, **shape)
    turns = {"kind": "min_separation", "cohort": 2, "min_separation": 20}
    setting = experiment(rounds=60, selection=turns, server={"kind": "sgd"}).setting()
    fitted = noise.fit_matrix(setting)
    answer = calculator.client_budget(**asked, **shape)
    assert answer.mechanism.squares == pytest.approx(fitted.squares(60, 20, 3))
    usual = calculator.client_budget(**asked).mechanism.squares
    assert (answer.mechanism.squares != pytest.approx(usual)) is matters


@pytest.mark.parametrize("strategy", ["tree", "banded"])
@pytest.mark.parametrize("separation", [0, -3])
def test_a_separation_below_one_is_refused(strategy, separation):
    asked = {"population": 600, "cohort": 20, "rounds": 10, "sampling": "public"}
    asked |= {"noise_multiplier": 3.0, "strategy": strategy, "separation": separation}
    with refusal("at least 1", begins="separation: "):
        calculator.client_budget(**asked)


def test_the_guarantees_are_those_of_the_mechanism():
    found = ask("client", CLIENTS, 100, std=0.4, bound=0.5, participations=7)
    query = Query("updates", 0.5, 0.4 * math.sqrt(80))
    mechanism = Mechanism(Sampling("fixed", 1920, 80), (query,), 100, placement="client")
    assert found.noise["std_of_one_client"] == pytest.approx(0.4)
    assert found.noise["sensitivity"] == 1.0
    expected = privacy.guarantees(mechanism, "replace_one", 1e-5, participations=7)
    for ours, theirs in zip(found.guarantees, expected, strict=True):
        assert ours.epsilon == pytest.approx(theirs.epsilon, rel=1e-9)
        assert ours.sampling == theirs.sampling


@pytest.mark.parametrize(
    ("unit", "given", "z"),
    [
        ("client", {**CLIENTS, "std": 2.0, "bound": 0.5}, 4 * math.sqrt(80)),
        ("client", {**CLIENTS, "std": 2.0, "bound": 0.5, "placement": "server"}, 4.0),
        ("sample", {**MNIST, "std": 0.343, "bound": 1.0}, 3.43),
    ],
)
def test_a_std_is_of_what_the_placement_draws(unit, given, z):
    found = ask(unit, given, 1)
    assert found.noise["noise_multiplier"] == pytest.approx(z)
    assert given["std"] in [
        pytest.approx(value) for name, value in found.noise.items() if name.startswith("std_")
    ]


SCHEME = {
    "truncated_poisson": {"cohort": 10, "cap": 12},
    "random_allocation": {"epoch": 10, "per_epoch": 2},
}


@pytest.mark.parametrize("sampling", SCHEME)
def test_batches_may_be_capped_or_allocated_as_cohorts_are(sampling):
    asked = {"sampling": sampling, "noise_multiplier": 2.0, **SCHEME[sampling]}
    found = calculator.client_budget(population=100, rounds=20, **asked)
    if "cohort" in asked:
        asked["batch"] = asked.pop("cohort")
    batches = calculator.sample_budget(samples=100, steps=5, participations=4, **asked)
    assert batches.mechanism.sampling == found.mechanism.sampling
    assert batches.guarantees[0].epsilon == pytest.approx(found.guarantees[0].epsilon)


@pytest.mark.slow
def test_a_participation_cap_counts_only_where_the_cohort_is_known():
    few, all_of_them = (
        ask("client", CLIENTS, 100, noise_multiplier=4.0, participations=most).answers
        for most in (12, None)
    )
    assert few[0].guarantee.epsilon == all_of_them[0].guarantee.epsilon
    assert few[1].guarantee.epsilon < all_of_them[1].guarantee.epsilon
    capped = ask("client", CLIENTS, noise_multiplier=60.0, epsilon=2.0, participations=3)
    assert capped.answers[1].rounds == calculator.MOST_ROUNDS and ">= 1048576" in shown(capped)


@pytest.mark.parametrize(
    ("claim", "client", "truth"), [(1.0, (500, 128, 50), 0.395), (20.0, (500, 250, 1), 22.5)]
)
def test_003_is_printed_beside_the_truth_and_marked_where_it_claims_too_little(
    claim, client, truth
):
    """PRIVACY.md sec. 5: claimed 1, truth 0.395; claimed 20, truth 22.5."""
    given = dict(zip(("samples", "batch", "steps"), client, strict=True))
    noise = ask("sample", given, 1, epsilon=claim)
    answer = by_accountant(noise)["Xu 2026"]
    assert answer.true_epsilon == pytest.approx(truth, rel=5e-3)
    assert answer.overclaims == (truth > claim)
    z = answer.noise_multiplier
    text = f"Xu 2026, as printed, asks for noise multiplier {z:.4g}; the epsilon there is "
    text += f"{answer.true_epsilon:.4g}{', more than it claims.' if truth > claim else '.'}"
    assert text in " ".join(shown(noise).split())
    back = by_accountant(ask("sample", given, 1, noise_multiplier=z))["Xu 2026"]
    assert back.guarantee.epsilon == pytest.approx(claim, rel=1e-9)


@pytest.mark.parametrize("name", ["Chen 2024 tCDP", "Xu 2026"])
def test_a_formula_allows_the_most_rounds_that_it_claims_for(name):
    client = {"samples": 600, "batch": 10, "steps": 20}
    allowed = by_accountant(ask("sample", client, noise_multiplier=20.0, epsilon=0.4))[name].rounds
    claims = [
        by_accountant(ask("sample", client, t, noise_multiplier=20.0))[name].guarantee.epsilon
        for t in (allowed, allowed + 1)
    ]
    assert claims[0] <= 0.4 < claims[1]


FEW = {**LOCAL["with replacement"], "samples": 20, "batch": 30}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("client", "reason"),
    # more draws with replacement than samples leave the formulas nothing to say
    [(LOCAL["Poisson"], "one fixed size"), (FEW, "from at least as many samples")],
)
def test_a_formula_says_when_the_sampling_is_not_its_own(client, reason):
    found = ask("sample", client, 1, epsilon=2.0)
    printed = [answer for answer in found.answers if answer.guarantee.kind == "paper"]
    failed = [" ".join(answer.guarantee.conditions_failed) for answer in printed]
    assert len(printed) == 3 and all(reason in text for text in failed)
    if client is FEW:
        assert all(answer.noise_multiplier == math.inf for answer in printed)
    assert math.isfinite(by_accountant(found)["pld"].noise_multiplier)


def test_what_an_accountant_does_not_cover_is_shown_with_the_reason_and_no_number():
    found = ask("client", SCHEMES["with replacement"], 10, noise_multiplier=20.0)
    assert by_accountant(found)["rdp"].guarantee.epsilon == math.inf
    reason = "rdp: draws with replacement are not covered by rdp; nearest: pld"
    assert reason in shown(found) and "inf" not in shown(found)


def test_rdp_has_no_noise_where_pld_alone_has_enough():
    everyone = {"population": 10, "cohort": 10, "sampling": "full"}
    found = by_accountant(ask("client", everyone, 100, epsilon=1e-3, delta=1e-12))
    assert found["rdp"].noise_multiplier == math.inf > found["pld"].noise_multiplier > 0


@pytest.mark.parametrize("mu", [0.2, 1.0, 3.0])
def test_the_sentence_bounds_what_the_best_test_detects(mu):
    """Full participation, one round: the best test of N(0, 1) against N(mu, 1) at 5% false alarms
    detects Phi(Phi^-1(0.05) + mu).
    """
    found = ask("client", EVERYONE, 1, noise_multiplier=2 / mu)
    claimed = float(found.sentence().split("at most ")[1].split("%")[0]) / 100
    assert ndtr(ndtri(0.05) + mu) < claimed <= 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "scheme", ["clients, fixed", "clients, Poisson", "clients, with replacement", "samples, fixed"]
)
@pytest.mark.parametrize("unknown", ["epsilon", "noise", "rounds"])
def test_the_table_fits_a_hundred_columns_and_the_json_is_strict(scheme, unknown):
    unit, given = ALL[scheme]
    asked = {"noise_multiplier": 20.0, "epsilon": 3.0, "rounds": 3}
    asked.pop({"noise": "noise_multiplier"}.get(unknown, unknown))
    found = ask(unit, given, **asked)
    lines = shown(found).splitlines()
    assert max(map(len, lines)) <= 100 and not any("…" in line for line in lines)
    tree = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert tree["unknown"] == found.unknown == unknown
    assert len(tree["answers"]) == len(found.answers)
    assert {"noise_multiplier", "bound", "sensitivity", "std_of_the_sum"} <= tree["noise"].keys()
    assert tree["relation"] and tree["sampling"]["cohort"]
    assert tree["sentence"].startswith("Epsilon")
    for one in tree["holds"]:
        profile = one["curve"]["epsilon"], np.log(one["curve"]["delta"])
        stated = np.interp(one["epsilon"], *profile)
        assert stated == pytest.approx(np.log(one["delta"]), rel=0.06)


@pytest.mark.parametrize("sampling", ["fixed", "poisson", "with_replacement", "full"])
def test_every_combination_is_answered_or_refused_with_one_that_is_answered(sampling):
    """The nearest combination named is one option away, and taken up it is accepted."""
    cohort = 10 if sampling == "full" else 5
    common = {"population": 10, "cohort": cohort, "rounds": 1, "noise_multiplier": 5.0}
    refused = 0
    for relation in ("replace_one", "add_remove", "zero_out"):
        for placement in ("client", "server"):
            asked = common | {"sampling": sampling, "relation": relation, "placement": placement}
            try:
                calculator.client_budget(**asked)
            except ConfigError as error:
                refused += 1
                for change in error.expected.partition(": ")[0].split(" or "):
                    name, value = change.removeprefix("--").split(" ")
                    answered = calculator.client_budget(**asked | {name: value})
                    assert math.isfinite(answered.guarantees[0].epsilon)
    assert refused == {"full": 1, "fixed": 0, "poisson": 3, "with_replacement": 4}[sampling]


ALL_THREE = {"accountants": ["pld", "rdp", "paper"]}


@pytest.mark.parametrize(
    ("unit", "given"),
    [
        ("sample", {**LOCAL["Poisson"], "relation": "add_remove", "participations": 1}),
        ("client", {**SMALLER, "rounds": 50, "relation": "add_remove", "colluders": 5}),
    ],
)
def test_no_number_is_split_in_eighty_columns(unit, given):
    found = calculator.from_options(unit, **given, noise_multiplier=2.0)
    lines = shown(found, width=80).splitlines()
    assert max(map(len, lines)) <= 80 and not any("…" in line for line in lines)
    words = " ".join(lines).split()
    for one in (answer.guarantee for answer in found.answers):
        if math.isfinite(one.epsilon):
            assert f"{one.epsilon:.4g}{'*' * bool(one.conditions_failed)}" in words


@pytest.mark.parametrize("std", [0.03217, 3.217e-5])
def test_no_number_of_a_client_is_cut_in_eighty_columns(std):
    """Small noise makes numbers so wide that two tables stand for one."""
    release = privacy.LocalSteps([100], 10, 1, 1.0, 1e-5, [std])
    found = calculator.PersonalBudget(release, [1])
    lines = shown(found, width=80).splitlines()
    assert max(map(len, lines)) <= 80
    words = " ".join(lines).split()
    for name, value in found.rows[0].items():
        if name == "noise_std" or (name.startswith("epsilon_") and value is not None):
            assert f"{value:.4g}" in words


@pytest.mark.slow
def test_a_config_is_answered_as_its_run_reports(tmp_path):
    noise = {"kind": "gaussian", "epsilon": 9.0, "delta": 1e-5}
    asked = experiment(noise=noise, bounding={"bound": 0.5}, privacy=ALL_THREE)
    found = planned_guarantee.planned_budget(asked)
    assert list(found.guarantees) == run(asked, tmp_path / "out").guarantees
    assert (found.unknown, found.epsilon, found.noise["bound"]) == ("noise", 9.0, 0.5)
    z = by_accountant(found)["pld"].noise_multiplier
    assert z == pytest.approx(found.noise["noise_multiplier"], rel=1e-9)


@pytest.mark.parametrize("noise", [{"epsilon": 9.0}, {"multiplier": 2.0}])
def test_a_config_whose_losses_are_noised_is_answered_as_its_run_reports(noise, tmp_path):
    """The multiplier that is found is the updates' alone, against every observer; the losses keep
    theirs.
    """
    losses = {"kind": "power_of_choice", "cohort": 5, "pool": 20, "loss_bound": 3.0}
    noise = {"kind": "gaussian", **noise}
    asked = experiment(selection=losses | {"loss_std": 4.0}, noise=noise, privacy=ALL_THREE)
    found = planned_guarantee.planned_budget(asked)
    assert list(found.guarantees) == run(asked, tmp_path / "out").guarantees
    tree = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert found.noise["std_of_the_losses"] == tree["noise"]["std_of_the_losses"] == 4.0
    assert "4 of the losses" in shown(found) and "not who" not in found.sentence()
    for answer in found.answers if "epsilon" in noise else ():
        if answer.guarantee.kind == "rigorous":
            assert 9.0 * (1 - 1e-3) <= answer.guarantee.epsilon <= 9.0


def test_a_config_says_how_long_its_own_budget_lasts():
    asked = experiment(rounds=50, noise={"multiplier": 8.0}, privacy={"budget": 2.0})
    found = planned_guarantee.planned_budget(asked)
    (note,) = (note for note in found.notes if note.startswith("privacy.budget"))
    lasts = privacy.rounds_for(2.0, found.mechanism, "replace_one", 1e-5, "rdp")
    assert 0 < lasts < 50 and note == f"privacy.budget 2 lasts for {lasts} of the 50 rounds, by rdp"


BUDGETS = {"kind": "uniform", "low": 0.5, "high": 3, "public": 0.1}
STEPS = {
    "bounding": {"kind": "per_sample_clip", "bound": 0.5},
    "noise": {"kind": "gaussian", "epsilon": BUDGETS},
    "privacy": ALL_THREE,
}


@pytest.mark.slow
def test_a_config_with_noise_at_local_steps_is_answered_client_by_client(tmp_path):
    asked = experiment(**STEPS)
    found = planned_guarantee.planned_budget(asked)
    ran = run(asked, tmp_path / "out")
    assert list(found.guarantees) == ran.guarantees and found.violation is None
    assert found.quantiles("epsilon_pld")[-1] == ran.guarantees[0].epsilon <= 3
    assert sum(row["participations"] for row in found.rows) == 4 * 20
    public = [row for row in found.rows if row["epsilon_claimed"] == math.inf]
    assert public and all(row["noise_std"] == 0 for row in public)
    assert any("public clients" in note for note in found.notes)
    assert max(found.quantiles("epsilon_claimed")) <= 3
    tree = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert len(tree["clients"]) == len(found.rows)
    assert tree["quantiles"]["at"] == [0, 0.25, 0.5, 0.75, 1]
    lines = shown(found).splitlines()
    assert max(map(len, lines)) <= 100 and "promised" in shown(found)
    assert found.sentence() in " ".join(" ".join(lines).split())


def test_claims_that_do_not_hold_are_shown_with_the_truth():
    """PRIVACY.md sec. 5: at 20, one step, r = 0.5, 003 protects only 22.5."""
    release = {"samples": [500, 500], "batch": 250, "steps": 1, "bound": 1.0, "delta": 1e-5}
    noise = {"participations": [1, 1], "budgets": [1.0, 20.0], "calibration": "paper"}
    release = privacy.calibrate_local_steps(**release, **noise)
    found = calculator.PersonalBudget(release, [1, 1])
    assert "client 1 (claimed epsilon 20, true 22.5" in found.violation
    text = "The noise of Xu 2026 protects 1 of 2 clients less than it claims"
    assert text in " ".join(shown(found).split())
    epsilons = [found.rows[1][name] for name in ("epsilon_xu_2026", "epsilon_pld")]
    assert epsilons == pytest.approx([20, 22.5], abs=0.05)


def test_without_participations_nothing_is_spent():
    found = calculator.PersonalBudget(privacy.LocalSteps([10], 5, 1, 1.0, 1e-5, [1.0]), [0])
    assert found.guarantees[0].epsilon == 0 and found.rows == [] and "Epsilon 0 " in shown(found)


def test_a_delta_above_one_over_the_population_is_noted():
    for delta in (1e-2, 1e-3):
        notes = " ".join(ask("sample", MNIST, 1, epsilon=0.3, delta=delta).notes)
        assert ("above 1/600" in notes) == (delta > 1 / 600)


@pytest.mark.slow
def test_the_command_prints_a_table_or_json(tmp_path, typed):
    options = "--population 1920 --cohort 80 --sampling with-replacement --rounds 100 --epsilon 5"
    options = options.split()
    code, table, _ = typed("budget", *options)
    words = " ".join(table.split())
    assert code == 0 and "against an observer of" in words and "blind guessing" in words
    code, text, _ = typed("budget", *options, "--json")
    assert code == 0 and json.loads(text)["sampling"]["kind"] == "with_replacement"
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(SMALL))
    code, text, _ = typed("budget", tmp_path / "small.yaml", "rounds=2", "--json")
    assert code == 0 and json.loads(text)["rounds"] == 2


@pytest.mark.parametrize(("options", "message"), messages("budgets").items())
def test_what_cannot_be_answered_is_refused_in_one_line(
    options, message, monkeypatch, tmp_path, typed
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(SMALL))
    arguments = [each.replace("\u00a0", " ") for each in options.split(" ") if each]
    code, said, complaint = typed("budget", *arguments)
    assert code == 2 and not said and complaint.count("\n") == 1
    assert complaint.removeprefix("raydpfl: ").startswith(message)
