"""Arms whose models must be equal, bit by bit: identities that a paper's mathematics gives, and
that hold or are broken whatever the accuracy.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from raydpfl.errors import ConfigError
from raydpfl.sweep.study.cells import Cell, label, plain


@dataclass(frozen=True)
class Identity:
    """`arms` have one model at every one of the `places`: cells that differ by their arms alone."""

    arms: tuple[str, ...]
    labels: Mapping[str, str]  # where it is claimed
    places: Sequence[Sequence[Cell]]


def claims(given: Iterable[Any]) -> list[tuple[str, list[Any], Mapping[str, Any]]]:
    """Of each that `study.same_bits` claims: its field, the arms, and the mapping of labels that
    stands last in its list.
    """
    found = []
    for number, each in enumerate(given):
        parts = list(each) if isinstance(each, (list, tuple)) else []
        labels = parts.pop() if parts and isinstance(parts[-1], Mapping) else {}
        found.append((f"study.same_bits.{number}", parts, labels))
    return found


def identities(
    given: Iterable[Any],
    cells: Sequence[Cell],
    axes: Sequence[str],
    places: Mapping[tuple[Any, ...], Sequence[str]],
) -> list[Identity]:
    """Those that `study.same_bits` claims.

    Args:
        given: The section.
        cells: Those of the scale, which may have no place where a claim could be looked at.
        axes: Of the panels, and last the accounting.
        places: By the labels on these axes, the arms that stand there, whatever the scale.

    Raises:
        ConfigError: For arms that the study does not have, and for a claim about no place.
    """
    return [_identity(*claim, cells, axes, places) for claim in claims(given)]


def _identity(
    where: str,
    parts: Sequence[Any],
    at: Mapping[str, Any],
    cells: Sequence[Cell],
    axes: Sequence[str],
    places: Mapping[tuple[Any, ...], Sequence[str]],
) -> Identity:
    arms = tuple(label(name) for name in parts)
    labels = {plain(axis): label(name) for axis, name in at.items()}
    known = list(dict.fromkeys(arm for there in places.values() for arm in there))
    if len(set(arms)) < 2 or not set(arms) <= set(known):
        expected = f"a list of at least two arms ({', '.join(known)}), then a mapping of labels"
        raise ConfigError(where, [*parts], expected)
    asked = {axes.index(axis): name for axis, name in labels.items()}
    standing = [
        len({*arms}.intersection(there))
        for place, there in places.items()
        if all(place[axis] == name for axis, name in asked.items())
    ]
    if max(standing, default=0) < 2:
        raise ConfigError(where, dict(at), "labels at which two of the arms stand")
    found: dict[tuple[Any, ...], list[Cell]] = {}
    for cell in cells:
        if cell.arm in arms and cell.at(labels):
            found.setdefault((*cell.labels.values(), cell.accounting), []).append(cell)
    return Identity(arms, labels, [each for each in found.values() if len(each) > 1])


def looked_at(
    identity: Identity, models: Mapping[Cell, Mapping[int, tuple[str, str] | None]]
) -> dict[str, Any]:
    """Whether it holds, for summary.json: `held` is None where no two runs could be compared.

    Args:
        identity: The claim.
        models: By cell and seed, the directory of the final run and the digest of its model; None
            for a run that has none.
    """
    compared = 0
    shared = 0
    broken = []
    digests = []
    for cells, seed, found in _pairs(identity, models):
        shared += len({directory for directory, _ in found}) == 1
        compared += 1
        same = {digest for _, digest in found}
        if len(same) == 1:
            digests += [{"seed": seed, "model_sha256": found[0][1], **_place(cells[0])}]
        else:
            each = {cell.arm: digest for cell, (_, digest) in zip(cells, found, strict=True)}
            broken += [{"seed": seed, "model_sha256": each, **_place(cells[0])}]
    return {
        "arms": list(identity.arms),
        "at": dict(identity.labels),
        "held": not broken if compared > shared else None,
        "compared": compared,
        "one_run": shared,  # of these, those where all arms are one run: it says nothing there
        "equal": digests,
        "broken": broken,
    }


def _pairs(
    identity: Identity, models: Mapping[Cell, Mapping[int, tuple[str, str] | None]]
) -> Iterator[tuple[Sequence[Cell], int, list[tuple[str, str]]]]:
    """The cells of a place, a seed, and what each has there, wherever all have something."""
    for cells in identity.places:
        for seed in models.get(cells[0], {}):
            found = [models.get(cell, {}).get(seed) for cell in cells]
            known = [each for each in found if each is not None]
            if len(known) == len(cells):
                yield cells, seed, known


def _place(cell: Cell) -> dict[str, Any]:
    return {"labels": dict(cell.labels), "accounting": cell.accounting}


def words(found: Mapping[str, Any]) -> str:
    """An identity that was looked at, in one line."""
    arms = ", ".join(found["arms"][:-1]) + f" and {found['arms'][-1]}"
    at = "".join(f" {axis}={name}" for axis, name in found["at"].items())
    where = f" at{at}" if at else ""
    if found["held"] is None:
        why = "all arms are one run" if found["compared"] else "there are no two runs"
        return f"{arms} have the same bits{where}: not compared, as {why}"
    if found["held"]:
        apart = found["compared"] - found["one_run"]
        shared = f"; {found['one_run']} are one run" if found["one_run"] else ""
        return f"{arms} have the same bits{where}: held in {apart} of {found['compared']}{shared}"
    first = found["broken"][0]
    digests = ", ".join(f"{arm} {each[:12]}" for arm, each in first["model_sha256"].items())
    count = len(found["broken"])
    told = f"broken in {count} of {found['compared']}, first at seed {first['seed']} ({digests})"
    return f"{arms} have the same bits{where}: {told}"
