"""The calculator's answers for a terminal of 80 columns or more."""

import math
from collections.abc import Iterator
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from raydpfl.cli import guarantee_table
from raydpfl.privacy import Composition, Guarantee, holding
from raydpfl.privacy.calculator import MOST_ROUNDS, Answer, Budget, PersonalBudget
from raydpfl.privacy.guarantee import SHARES
from raydpfl.privacy.papers import PAPERS
from raydpfl.privacy.tradeoff import LOW_RATE

MOST_ROWS = 5  # clients that are shown
PROFILE = (0.0, 0.25, 0.5, 1.0, 1.5)  # of the stated epsilon, where delta is shown
RATES = (1e-4, 1e-3, 0.01, 0.05, 0.1)  # of false positives, likewise
_PROMISED = {
    "rigorous": "to meet each client's budget",
    "paper": f"by the formula of {PAPERS['003']}",
    "tcdp": f"by the formula of {PAPERS['002']} (tCDP)",
}


def shown(budget: Budget | PersonalBudget | Composition) -> RenderableType:
    """A budget of sums, or of clients with noise at local steps, or of several runs: what is
    released, the answers in tables, what they rely on, and the sentence.
    """
    if isinstance(budget, Composition):
        return _of_runs(budget)
    parts = _of_clients(budget) if isinstance(budget, PersonalBudget) else _of_sums(budget)
    notes = [Text(f"- {note}") for note in budget.notes]
    return Group(*parts, *_curves(budget), *notes, "", Text(budget.sentence(), style="bold"))


def _curves(budget: Budget | PersonalBudget) -> Iterator[RenderableType]:
    """Of every guarantee that holds the nearest Gaussian and the power of attacks; of the first
    delta at some epsilons, and that power at some false-positive rates.
    """
    held = [(one, one.curve()) for one in holding(budget.guarantees) if one.curve]
    if not held:
        return
    made = guarantee_table.plain("Trade-off curves: no attack does better")
    made.add_column("against an observer of")
    heads = ("mu of nearest Gaussian", "regret", f"true positives at {LOW_RATE:g}")
    found = [(*f.nearest_gaussian(), float(f.true_positives(LOW_RATE))) for _, f in held]
    lines = [[f"{value:.4g}" for value in row] for row in found]
    guarantee_table.add_numbers(made, heads, lines)
    for (one, _), line in zip(held, lines, strict=True):
        made.add_row(guarantee_table.against(one), *line)
    yield from (made, "")
    one, curve = held[0]
    made = guarantee_table.plain(f"The first of them, by {one.accountant}")
    for head in ("epsilon", "delta", "false positives", "true positives at most"):
        made.add_column(head, justify="right")
    for share, rate in zip(PROFILE, RATES, strict=True):
        delta, most = curve.delta(share * one.epsilon), curve.true_positives(rate)
        cells = (share * one.epsilon, float(delta), rate, float(most))
        made.add_row(*(f"{value:.4g}" for value in cells))
    yield from (made, "")


def _of_runs(joint: Composition) -> RenderableType:
    head = Table.grid(padding=(0, 2))
    for run in joint.runs:
        head.add_row(Text(run.name), Text(str(run)))
    first = joint.guarantees[0]
    subject = joint.subject or f"{len(joint.runs)} runs together"
    title = f"Epsilon of {subject}, at delta {first.delta:g}"
    cells = [(one, _spent(one)) for one in joint.guarantees]
    excluded = [f"not accounted for: {words}" for words in first.exclusions]
    failed = [f"{one.accountant}: {w}" for one in joint.guarantees for w in one.conditions_failed]
    notes = [Text(f"- {note}") for note in dict.fromkeys([*joint.notes, *failed, *excluded])]
    return Group(
        head, "", guarantee_table.table(cells, title), *notes,
        "", Text(first.detection(), style="bold"),
    )  # fmt: skip


def _of_sums(budget: Budget) -> Iterator[RenderableType]:
    mechanism = budget.mechanism
    noise = budget.noise
    head = Table.grid(padding=(0, 2))
    head.add_row("released", budget.released)
    sensitivity = f"sensitivity of the sum {noise['sensitivity']:.4g} under {budget.relation}"
    head.add_row("bound", f"{noise['bound']:.4g} for each {mechanism.unit}; {sensitivity}")
    stds = [
        f"{value:.4g} {name.removeprefix('std_').replace('_', ' ')}"
        for name, value in noise.items()
        if name.startswith("std_")
    ]
    head.add_row("noise", f"std {', '.join(stds)}")
    sums = len(mechanism.sums)
    together = f", the {sums} queries of a round together" if sums > 1 else ""
    multiplier = f"{noise['noise_multiplier']:.4g}"
    head.add_row("noise multiplier", f"{multiplier} (std of the sum / bound{together})")
    yield from (head, "", _found(budget), "")
    guarantees = [one for one in budget.guarantees if one.unit != "person"]
    if budget.unknown != "epsilon":  # the epsilons at the noise and rounds of the first answer
        which = f"noise multiplier {multiplier}"
        if budget.unknown == "rounds":
            which = f"{budget.rounds} {budget.repeated}"
        title = f"Epsilon at delta {budget.delta:g} with {which}"
        yield guarantee_table.table([(one, _spent(one)) for one in guarantees], title)
        yield ""
    yield from _persons(budget)
    for answer in budget.answers:
        if answer.guarantee.formula:
            yield Text(_worth(budget, answer), style="red" if answer.overclaims else "")
    known = [one.sampling.participations for one in guarantees if one.sampling.participations]
    notes = [f"cohort known: {participations}" for participations in known]
    rigorous = [answer.guarantee for answer in budget.answers if not answer.guarantee.formula]
    notes += [
        f"{guarantee_table.against(one)}: {one.concentrated()}"
        for one in guarantees
        if one.rho is not None
    ]
    notes += [f"{one.accountant}: {why}" for one in rigorous for why in one.conditions_failed]
    yield from (Text(f"- {note}") for note in dict.fromkeys(notes))


def _persons(budget: Budget | PersonalBudget) -> Iterator[RenderableType]:
    """What holds for a person's samples together, with what the numbers rely on."""
    if budget.persons:
        title = f"Epsilon at delta {budget.persons[0].delta:g} of a person's samples together"
        yield guarantee_table.table([(one, _spent(one)) for one in budget.persons], title)
        for one in budget.persons:
            yield Text(
                f"- {one.accountant}: {'; '.join((*one.conditions_failed, one.sampling.words))}"
            )
        yield ""


def _found(budget: Budget) -> Table:
    """The answers to the question."""
    at = f"epsilon {budget.epsilon or 0:.4g} at delta {budget.delta:g}"
    title = {
        "epsilon": f"Epsilon at delta {budget.delta:g}",
        "noise": f"Noise multiplier that {at} needs",
        "rounds": f"{budget.repeated.capitalize()} that {at} allows",
    }[budget.unknown]
    cells = [(answer.guarantee, _cell(budget, answer)) for answer in budget.answers]
    if budget.unknown == "epsilon":
        cells += [(one, _spent(one)) for one in budget.individual]
    return guarantee_table.table(cells, title)


def _of_clients(budget: PersonalBudget) -> Iterator[RenderableType]:
    """Quantiles over the clients, those that spend most, and broken guarantees."""
    mechanism = budget.mechanism
    head = Table.grid(padding=(0, 2))
    head.add_row("released", budget.released)
    moves = f"replacing one moves the mean over B by {2 * mechanism.bound:.4g} / B"
    head.add_row("bound", f"{mechanism.bound:.4g} for each sample's gradient; {moves}")
    calibration = mechanism.calibration
    head.add_row(
        "noise", f"at each step, {_PROMISED[calibration.method] if calibration else 'as given'}"
    )
    query = mechanism.side_query
    if query:
        noise = f"with noise of std {query.std:.4g}"
        head.add_row("also", f"the {query.name} of a client in each of its rounds, {noise}")
    names = _columns(budget)
    yield from (head, "", _spread(budget, names), "", _worst(budget, names), "")
    yield from _persons(budget)
    if budget.broken:
        yield from (Text(f"{budget.broken[0].upper()}{budget.broken[1:]}.", style="red"), "")
    for one in budget.guarantees:
        if one.formula and one.conditions_failed:
            of = "conditions that fail for the client it finds worst"
            yield Text(f"- {one.accountant}: {of}: {'; '.join(one.conditions_failed)}")


def _columns(budget: PersonalBudget) -> dict[str, str]:
    """The columns that are shown, with their headings."""
    from raydpfl.report.labels import accountant  # which takes 3 s, for torch

    names = {"participations": "rounds", "noise_std": "std", "epsilon_claimed": ""}
    for name in budget.rows[0] if budget.rows else ():
        if "epsilon_" in name:
            names[name] = accountant(name)
    names["epsilon_claimed"] = "promised"
    return names


def _spread(budget: PersonalBudget, names: dict[str, str]) -> Table:
    delta = budget.mechanism.delta
    title = f"Epsilon of a client's samples at delta {delta:g}: quantiles over clients"
    quantiles = {name: budget.quantiles(name) for name in names} if budget.rows else {}
    lines = [
        (f"{share:.0%}", [column[place] for column in quantiles.values()])
        for place, share in enumerate(SHARES)
    ]
    return _client_table(title, "share", names, lines if budget.rows else [])


def _worst(budget: PersonalBudget, names: dict[str, str]) -> Table:
    """The clients that spend most, by the first accountant."""
    spent = (name for name in names if name.startswith("epsilon_") and name != "epsilon_claimed")
    key = next(spent, "noise_std")
    worst = sorted(budget.protected, key=lambda row: row[key], reverse=True)[:MOST_ROWS]
    lines = [(str(row["client"]), [row[name] for name in names]) for row in worst]
    return _client_table(f"The {len(worst)} clients that spend most", "client", names, lines)


def _client_table(
    title: str, first: str, names: dict[str, str], lines: list[tuple[str, list[Any]]]
) -> Table:
    table = guarantee_table.plain(title)
    table.add_column(first, no_wrap=True)
    rows = [["-" if each is None else f"{each:.4g}" for each in values] for _, values in lines]
    guarantee_table.add_numbers(table, [*names.values()], rows)
    for (label, _), row in zip(lines, rows, strict=True):
        table.add_row(label, *row)
    return table


def _spent(guarantee: Guarantee) -> str:
    failed = guarantee.conditions_failed
    if guarantee.kind == "rigorous" and failed:
        return "-"
    return f"{guarantee.epsilon:.4g}{'*' if failed else ''}"


def _cell(budget: Budget, answer: Answer) -> str:
    """What was found, in print."""
    spent = _spent(answer.guarantee)
    if budget.unknown == "epsilon" or spent == "-":
        return spent
    found = f"{answer.rounds}"
    if (answer.rounds + 1) * budget.steps > MOST_ROUNDS:
        found = f">= {found}"
    if budget.unknown == "noise":
        z = answer.noise_multiplier
        found = f"{z:.4g}" if math.isfinite(z) else "none"
    return found + "*" * spent.endswith("*")


def _worth(budget: Budget, answer: Answer) -> str:
    """A formula's claim, what it is worth, and the conditions that fail."""
    guarantee = answer.guarantee
    says = {
        "epsilon": f"claims epsilon {guarantee.epsilon:.4g}",
        "noise": f"asks for noise multiplier {answer.noise_multiplier:.4g}",
        "rounds": f"allows {answer.rounds} {budget.repeated}",
    }[budget.unknown]
    text = f"{guarantee_table.label(guarantee)}, as printed, {says}"
    if answer.true_epsilon is not None:
        text += f"; the epsilon there is {answer.true_epsilon:.4g}"
        text += ", more than it claims" if answer.overclaims else ""
    if guarantee.conditions_failed:
        return f"{text}. Conditions that fail (*): {'; '.join(guarantee.conditions_failed)}."
    return f"{text}."
