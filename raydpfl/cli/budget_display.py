"""The calculator's answers for a terminal of 80 columns or more."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from raydpfl.cli import guarantee_table
from raydpfl.privacy import Composition, Guarantee, tightest_guarantees
from raydpfl.privacy.calculator import MOST_ROUNDS, Answer, Budget, PersonalBudget
from raydpfl.privacy.guarantee import SHARES
from raydpfl.privacy.papers import PAPERS
from raydpfl.privacy.tradeoff import LOW_RATE

WIDTH = 80  # columns of the terminal
MOST_ROWS = 5  # clients that are shown
PROFILE = (0.0, 0.25, 0.5, 1.0, 1.5)  # of the stated epsilon, where delta is shown
RATES = (1e-4, 1e-3, 0.01, 0.05, 0.1)  # of false positives, likewise
_CALIBRATIONS = {
    "rigorous": "to meet each client's budget",
    "paper": f"by the formula of {PAPERS['003']}",
    "tcdp": f"by the formula of {PAPERS['002']} (tCDP)",
}


def render_budget(budget: Budget | PersonalBudget | Composition) -> RenderableType:
    """A budget of sums, or of clients with noise at local steps, or of several runs: what is
    released, the answers in tables, what they rely on, and the sentence.
    """
    if isinstance(budget, Composition):
        return _render_composition(budget)
    parts = _client_parts(budget) if isinstance(budget, PersonalBudget) else _sum_parts(budget)
    notes = [Text(f"- {note}") for note in budget.notes]
    return Group(*parts, *_curves(budget), *notes, "", Text(budget.sentence(), style="bold"))


def _curves(budget: Budget | PersonalBudget) -> Iterator[RenderableType]:
    """Of every guarantee that holds the nearest Gaussian and the power of attacks; of the first
    delta at some epsilons, and that power at some false-positive rates.
    """
    curves = [(one, one.curve()) for one in tightest_guarantees(budget.guarantees) if one.curve]
    if not curves:
        return
    curve_table = guarantee_table.plain("Trade-off curves: no attack does better")
    curve_table.add_column("against an observer of")
    heads = ("mu of nearest Gaussian", "regret", f"true positives at {LOW_RATE:g}")
    numbers = [(*f.nearest_gaussian(), float(f.true_positives(LOW_RATE))) for _, f in curves]
    lines = [[f"{value:.4g}" for value in row] for row in numbers]
    guarantee_table.add_numbers(curve_table, heads, lines)
    for (one, _), line in zip(curves, lines, strict=True):
        curve_table.add_row(guarantee_table.against(one), *line)
    yield from (curve_table, "")
    one, curve = curves[0]
    curve_table = guarantee_table.plain(f"The first of them, by {one.accountant}")
    for head in ("epsilon", "delta", "false positives", "true positives at most"):
        curve_table.add_column(head, justify="right")
    for share, rate in zip(PROFILE, RATES, strict=True):
        delta, power = curve.delta(share * one.epsilon), curve.true_positives(rate)
        cells = (share * one.epsilon, float(delta), rate, float(power))
        curve_table.add_row(*(f"{value:.4g}" for value in cells))
    yield from (curve_table, "")


def _render_composition(joint: Composition) -> RenderableType:
    head = Table.grid(padding=(0, 2))
    for run in joint.runs:
        head.add_row(Text(run.name), Text(str(run)))
    first_guarantee = joint.guarantees[0]
    subject = joint.subject or f"{len(joint.runs)} runs together"
    title = f"Epsilon of {subject}, at delta {first_guarantee.delta:g}"
    cells = [(one, _epsilon_text(one)) for one in joint.guarantees]
    exclusions = [f"not accounted for: {words}" for words in first_guarantee.exclusions]
    failures = [f"{one.accountant}: {w}" for one in joint.guarantees for w in one.conditions_failed]
    notes = [Text(f"- {note}") for note in dict.fromkeys([*joint.notes, *failures, *exclusions])]
    return Group(
        head, "", guarantee_table.table(cells, title), *notes,
        "", Text((joint.epsilon or first_guarantee).detection(), style="bold"),
    )  # fmt: skip


def _sum_parts(budget: Budget) -> Iterator[RenderableType]:
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
    query_note = f", the {sums} queries of a round together" if sums > 1 else ""
    multiplier = f"{noise['noise_multiplier']:.4g}"
    head.add_row("noise multiplier", f"{multiplier} (std of the sum / bound{query_note})")
    yield from (head, "", _answer_table(budget), "")
    guarantees = [one for one in budget.guarantees if one.unit != "person"]
    if budget.unknown != "epsilon":  # the epsilons at the noise and rounds of the first answer
        setting = f"noise multiplier {multiplier}"
        if budget.unknown == "rounds":
            setting = f"{budget.rounds} {budget.rounds_name}"
        title = f"Epsilon at delta {budget.delta:g} with {setting}"
        yield guarantee_table.table([(one, _epsilon_text(one)) for one in guarantees], title)
        yield ""
    yield from _persons(budget)
    for answer in budget.answers:
        if answer.guarantee.formula:
            yield Text(_worth(budget, answer), style="red" if answer.overclaims else "")
    participations = [one.sampling.participations for one in guarantees]
    notes = [f"cohort known: {counts}" for counts in participations if counts]
    rigorous = [answer.guarantee for answer in budget.answers if not answer.guarantee.formula]
    notes += [
        f"{guarantee_table.against(one)}: {one.zcdp_sentence()}"
        for one in guarantees
        if one.rho is not None
    ]
    notes += [f"{one.accountant}: {text}" for one in rigorous for text in one.conditions_failed]
    yield from (Text(f"- {note}") for note in dict.fromkeys(notes))


def _persons(budget: Budget | PersonalBudget) -> Iterator[RenderableType]:
    """What holds for a person's samples together, with what the numbers rely on."""
    if budget.persons:
        title = f"Epsilon at delta {budget.persons[0].delta:g} of a person's samples together"
        yield guarantee_table.table([(one, _epsilon_text(one)) for one in budget.persons], title)
        for one in budget.persons:
            yield Text(
                f"- {one.accountant}: {'; '.join((*one.conditions_failed, one.sampling.words))}"
            )
        yield ""


def _answer_table(budget: Budget) -> Table:
    """The answers to the question."""
    guarantee_text = f"epsilon {budget.epsilon or 0:.4g} at delta {budget.delta:g}"
    title = {
        "epsilon": f"Epsilon at delta {budget.delta:g}",
        "noise": f"Noise multiplier that {guarantee_text} needs",
        "rounds": f"{budget.rounds_name.capitalize()} that {guarantee_text} allows",
    }[budget.unknown]
    cells = [(answer.guarantee, _cell(budget, answer)) for answer in budget.answers]
    if budget.unknown == "epsilon":
        cells += [(one, _epsilon_text(one)) for one in budget.individual]
    return guarantee_table.table(cells, title)


def _client_parts(budget: PersonalBudget) -> Iterator[RenderableType]:
    """Quantiles over the clients, those that spend most, and broken guarantees."""
    mechanism = budget.mechanism
    head = Table.grid(padding=(0, 2))
    head.add_row("released", budget.released)
    sensitivity = f"replacing one moves the mean over B by {2 * mechanism.bound:.4g} / B"
    head.add_row("bound", f"{mechanism.bound:.4g} for each sample's gradient; {sensitivity}")
    calibration = mechanism.calibration
    head.add_row(
        "noise", f"at each step, {_CALIBRATIONS[calibration.method] if calibration else 'as given'}"
    )
    query = mechanism.side_query
    if query:
        noise = f"with noise of std {query.std:.4g}"
        head.add_row("also", f"the {query.name} of a client in each of its rounds, {noise}")
    names = _columns(budget)
    yield from (head, "", _spread(budget, names), "", _worst(budget, names), "")
    yield from _persons(budget)
    if budget.violation:
        yield from (Text(f"{budget.violation[0].upper()}{budget.violation[1:]}.", style="red"), "")
    for one in budget.guarantees:
        if one.formula and one.conditions_failed:
            condition_note = "conditions that fail for the client it finds worst"
            yield Text(f"- {one.accountant}: {condition_note}: {'; '.join(one.conditions_failed)}")


def _columns(budget: PersonalBudget) -> dict[str, str]:
    """The columns that are shown, with their headings."""
    from raydpfl.report.labels import accountant  # which takes 3 s, for torch

    names = {"participations": "rounds", "noise_std": "std", "epsilon_claimed": ""}
    for name in budget.rows[0] if budget.rows else ():
        if "epsilon_" in name:
            names[name] = accountant(name)
    names["epsilon_claimed"] = "promised"
    return names


def _spread(budget: PersonalBudget, names: dict[str, str]) -> RenderableType:
    delta = budget.mechanism.delta
    title = f"Epsilon of a client's samples at delta {delta:g}: quantiles over clients"
    lines = {}
    if budget.rows:
        quantiles = [budget.quantiles(name) for name in names]
        for place, share in enumerate(SHARES):
            lines[f"{share:.0%}"] = [column[place] for column in quantiles]
    return _client_table(title, "share", [*names.values()], lines)


def _worst(budget: PersonalBudget, names: dict[str, str]) -> RenderableType:
    """The clients that spend most, by the first accountant."""
    columns = (name for name in names if name.startswith("epsilon_") and name != "epsilon_claimed")
    key = next(columns, "noise_std")
    worst_rows = sorted(budget.private_rows, key=lambda row: row[key], reverse=True)[:MOST_ROWS]
    lines = {str(row["client"]): [row[name] for name in names] for row in worst_rows}
    title = f"The {len(worst_rows)} clients that spend most"
    return _client_table(title, "client", [*names.values()], lines)


def _client_table(
    title: str | None, heading: str, heads: Sequence[str], lines: dict[str, list[Any]]
) -> RenderableType:
    """A table of numbers, or several of fewer columns where one is too wide for `WIDTH`; the first
    column has the keys of `lines`.
    """
    table = guarantee_table.plain(title)
    table.add_column(heading, no_wrap=True, min_width=max(map(len, (heading, *lines))))
    rows = [["-" if value is None else f"{value:.4g}" for value in row] for row in lines.values()]
    guarantee_table.add_numbers(table, heads, rows, head_width=1)
    for label, row in zip(lines, rows, strict=True):
        table.add_row(label, *row)
    if sum((column.min_width or 0) + 2 for column in table.columns) <= WIDTH:
        return table
    half = len(heads) // 2
    parts = ((title, slice(half)), (None, slice(half, None)))
    tables = [
        _client_table(text, heading, heads[part], {key: row[part] for key, row in lines.items()})
        for text, part in parts
    ]
    return Group(*tables)


def _epsilon_text(guarantee: Guarantee) -> str:
    failed_conditions = guarantee.conditions_failed
    if guarantee.kind == "rigorous" and failed_conditions:
        return "-"
    return f"{guarantee.epsilon:.4g}{'*' if failed_conditions else ''}"


def _cell(budget: Budget, answer: Answer) -> str:
    """What was found, in print."""
    epsilon_text = _epsilon_text(answer.guarantee)
    if budget.unknown == "epsilon" or epsilon_text == "-":
        return epsilon_text
    answer_text = f"{answer.rounds}"
    if (answer.rounds + 1) * budget.steps > MOST_ROUNDS:
        answer_text = f">= {answer_text}"
    if budget.unknown == "noise":
        z = answer.noise_multiplier
        answer_text = f"{z:.4g}" if math.isfinite(z) else "none"
    return answer_text + "*" * epsilon_text.endswith("*")


def _worth(budget: Budget, answer: Answer) -> str:
    """A formula's claim, what it is worth, and the conditions that fail."""
    guarantee = answer.guarantee
    claim = {
        "epsilon": f"claims epsilon {guarantee.epsilon:.4g}",
        "noise": f"asks for noise multiplier {answer.noise_multiplier:.4g}",
        "rounds": f"allows {answer.rounds} {budget.rounds_name}",
    }[budget.unknown]
    text = f"{guarantee_table.label(guarantee)}, as printed, {claim}"
    if answer.true_epsilon is not None:
        text += f"; the epsilon there is {answer.true_epsilon:.4g}"
        text += ", more than it claims" if answer.overclaims else ""
    if guarantee.conditions_failed:
        return f"{text}. Conditions that fail (*): {'; '.join(guarantee.conditions_failed)}."
    return f"{text}."
