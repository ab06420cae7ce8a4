"""Arms whose models must be equal, bit by bit: identities that a paper's mathematics gives, and
that hold or are broken whatever the accuracy.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from raydpfl.errors import ConfigError
from raydpfl.sweep.study.cells import StudyCell, label, plain


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
    where: str,
    claim: Any,
    cells: Iterable[StudyCell],
    placements: Sequence[Mapping[str, str | None]],
) -> Identity:
    """The identity that an item of `study.same_bits`, the field `where`, claims. Raises
    `ConfigError` for arms that the study does not have, and for labels without two of them. `cells`
    are those of the scale; `placements` the labels of all cells at any scale, `arm` the last.
    """
    given, at = split(claim)
    arms = tuple(label(name) for name in given)
    labels = {plain(axis): label(name) for axis, name in at.items()}
    known = dict.fromkeys(str(place["arm"]) for place in placements)
    if len(set(arms)) < 2 or not known.keys() >= set(arms):
        expected = f"a list of at least two arms ({', '.join(known)}), then a mapping of labels"
        raise ConfigError(where, given, expected)
    here = Counter(
        tuple(place.values())[:-1]
        for place in placements
        if place["arm"] in arms and labels.items() <= place.items()
    )
    if max(here.values(), default=0) < 2:
        raise ConfigError(where, dict(at), "labels at which two of the arms stand")
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
            ended = {arm: run for arm, run in runs.items() if run is not None}
            if len(ended) == len(cells):
                one_run += len({folder for folder, _ in ended.values()}) == 1
                digests = {arm: digest for arm, (_, digest) in ended.items()}
                equal = len({*digests.values()}) == 1
                shown = digests[cells[0].arm] if equal else digests
                rows[equal].append({"seed": seed, "model_sha256": shown, **place})
    compared = len(rows[True]) + len(rows[False])
    return {
        "arms": list(identity.arms),
        "at": dict(identity.labels),
        "held": not rows[False] if compared > one_run else None,
        "compared": compared,
        "one_run": one_run,
        "equal": rows[True],
        "broken": rows[False],
    }


def words(outcome: Mapping[str, Any]) -> str:
    """The outcome of `compare` in one line."""
    arms = ", ".join(outcome["arms"][:-1]) + f" and {outcome['arms'][-1]}"
    at = "".join(f" {axis}={name}" for axis, name in outcome["at"].items())
    claim = f"{arms} have the same bits{f' at{at}' if at else ''}"
    compared, one_run = outcome["compared"], outcome["one_run"]
    if outcome["held"] is None:
        why = "all arms are one run" if compared else "there are no two runs"
        return f"{claim}: not compared, as {why}"
    if outcome["held"]:
        shared = f"; {one_run} are one run" if one_run else ""
        return f"{claim}: held in {compared - one_run} of {compared}{shared}"
    first = outcome["broken"][0]
    digests = ", ".join(f"{arm} {digest[:12]}" for arm, digest in first["model_sha256"].items())
    where = f"broken in {len(outcome['broken'])} of {compared}, first at seed {first['seed']}"
    return f"{claim}: {where} ({digests})"
