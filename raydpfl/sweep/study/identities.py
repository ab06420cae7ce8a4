"""Arms whose models must be equal, bit by bit: identities that a paper's mathematics gives, and
that hold or are broken whatever the accuracy.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from raydpfl.errors import ConfigError
from raydpfl.report.labels import join_names
from raydpfl.sweep.study.cells import StudyCell, label, strip_mark


@dataclass(frozen=True)
class Identity:
    """`arms` have one model in every one of the `groups`: cells that differ by their arms alone."""

    arms: tuple[str, ...]
    labels: Mapping[str, str]  # where it is claimed
    groups: Sequence[Sequence[StudyCell]]


def split(claim: Any) -> tuple[list[Any], Mapping[str, Any]]:
    """The arms of an item of `study.same_bits`, and the mapping of labels that ends its list."""
    arms = list(claim) if isinstance(claim, (list, tuple)) else []
    labels = arms.pop() if arms and isinstance(arms[-1], Mapping) else {}
    return arms, labels


def identity(
    field: str,
    claim: Any,
    cells: Iterable[StudyCell],
    placements: Sequence[Mapping[str, str | None]],
) -> Identity:
    """The identity that an item of `study.same_bits`, at the key `field`, claims. Raises
    `ConfigError` for arms that the study does not have, and for labels without two of them. `cells`
    are those of the scale; `placements` the labels of all cells at any scale, `arm` the last.
    """
    arm_names, at_labels = split(claim)
    arms = tuple(label(name) for name in arm_names)
    labels = {strip_mark(axis): label(name) for axis, name in at_labels.items()}
    names = dict.fromkeys(str(place["arm"]) for place in placements)
    if len(set(arms)) < 2 or not names.keys() >= set(arms):
        expected = f"a list of at least two arms ({', '.join(names)}), then a mapping of labels"
        raise ConfigError(field, arm_names, expected)
    arm_counts = Counter(
        tuple(place.values())[:-1]
        for place in placements
        if place["arm"] in arms and labels.items() <= place.items()
    )
    if max(arm_counts.values(), default=0) < 2:
        raise ConfigError(field, dict(at_labels), "labels at which two of the arms stand")
    groups: dict[tuple[Any, ...], list[StudyCell]] = {}
    for cell in cells:
        if cell.arm in arms and cell.at(labels):
            groups.setdefault((*cell.labels.values(), cell.accounting), []).append(cell)
    return Identity(arms, labels, [group for group in groups.values() if len(group) > 1])


def compare(
    identity: Identity, models: Mapping[StudyCell, Mapping[int, tuple[str, str] | None]]
) -> dict[str, Any]:
    """Whether it holds, for summary.json: `held` is None where no two runs could be compared.
    `models` are by cell and seed the directory of the final run and the digest of its model; None
    for a run that has none.
    """
    one_run = 0  # where all arms are one run, which says nothing
    rows: dict[bool, list[dict[str, Any]]] = {True: [], False: []}  # by whether models are equal
    for cells in identity.groups:
        place = {"labels": dict(cells[0].labels), "accounting": cells[0].accounting}
        for seed in models.get(cells[0], {}):
            runs = {cell.arm: models.get(cell, {}).get(seed) for cell in cells}
            finished_runs = {arm: run for arm, run in runs.items() if run is not None}
            if len(finished_runs) == len(cells):
                one_run += len({folder for folder, _ in finished_runs.values()}) == 1
                digests = {arm: digest for arm, (_, digest) in finished_runs.items()}
                equal = len({*digests.values()}) == 1
                model_digests = digests[cells[0].arm] if equal else digests
                rows[equal].append({"seed": seed, "model_sha256": model_digests, **place})
    comparison_count = len(rows[True]) + len(rows[False])
    return {
        "arms": list(identity.arms),
        "at": dict(identity.labels),
        "held": not rows[False] if comparison_count > one_run else None,
        "compared": comparison_count,
        "one_run": one_run,
        "equal": rows[True],
        "broken": rows[False],
    }


def words(outcome: Mapping[str, Any]) -> str:
    """The outcome of `compare` in one line."""
    label_text = "".join(f" {axis}={name}" for axis, name in outcome["at"].items())
    arms = join_names(outcome["arms"])
    claim = f"{arms} have the same bits{f' at{label_text}' if label_text else ''}"
    count, one_run = outcome["compared"], outcome["one_run"]
    if outcome["held"] is None:
        reason = "all arms are one run" if count else "there are no two runs"
        return f"{claim}: not compared, as {reason}"
    if outcome["held"]:
        one_run_note = f"; {one_run} are one run" if one_run else ""
        return f"{claim}: held in {count - one_run} of {count}{one_run_note}"
    row = outcome["broken"][0]
    digests = ", ".join(f"{arm} {digest[:12]}" for arm, digest in row["model_sha256"].items())
    breakage = f"broken in {len(outcome['broken'])} of {count}, first at seed {row['seed']}"
    return f"{claim}: {breakage} ({digests})"
