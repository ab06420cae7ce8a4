"""Arms whose models must be equal, bit by bit: identities that a paper's mathematics gives, and
that hold or are broken whatever the accuracy.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from raydpfl.errors import ConfigError
from raydpfl.study.cells import Cell, label


@dataclass(frozen=True)
class Identity:
    """`arms` have one model at every one of the `places`: cells that differ by their arms alone."""

    arms: tuple[str, ...]
    labels: Mapping[str, str]  # where it is claimed
    places: Sequence[Sequence[Cell]]


def identities(given: Iterable[Any], cells: Sequence[Cell]) -> list[Identity]:
    """Those that `study.same_bits` claims, each a list of arms and, last, a mapping of labels.

    Raises `ConfigError` for arms, axes or labels that the study does not have.
    """
    return [_identity(f"study.same_bits.{k}", each, cells) for k, each in enumerate(given)]


def _identity(where: str, given: Any, cells: Sequence[Cell]) -> Identity:
    parts = list(given) if isinstance(given, (list, tuple)) else []
    last = parts.pop() if parts and isinstance(parts[-1], Mapping) else {}
    labels = {axis: label(name) for axis, name in last.items()}
    arms = tuple(label(name) for name in parts)
    known = list(dict.fromkeys(cell.arm for cell in cells))
    if len(set(arms)) < 2 or not set(arms) <= set(known):
        accepted = f"a list of at least two arms ({', '.join(known)}), then a mapping of labels"
        raise ConfigError(where, given, accepted)
    axes = {*cells[0].labels, "accounting"}
    if not labels.keys() <= axes:
        raise ConfigError(where, last, f"labels of the axes {', '.join(sorted(axes))}")
    places: dict[tuple[Any, ...], list[Cell]] = {}
    for cell in cells:
        if cell.arm in arms and cell.at(labels):
            place = (*cell.labels.values(), cell.accounting)
            places.setdefault(place, []).append(cell)
    return Identity(arms, labels, [each for each in places.values() if len(each) > 1])


def looked_at(
    identity: Identity, models: Mapping[Cell, Mapping[int, tuple[str, str] | None]]
) -> dict[str, Any]:
    """Whether it holds, for summary.json: `held` is None where nothing could be compared.

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
        "held": None if not compared else not broken,
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
        return f"{arms} have the same bits{where}: not compared, as a run is missing"
    if found["held"]:
        apart = found["compared"] - found["one_run"]
        shared = f"; {found['one_run']} are one run" if found["one_run"] else ""
        return f"{arms} have the same bits{where}: held in {apart} of {found['compared']}{shared}"
    first = found["broken"][0]
    digests = ", ".join(f"{arm} {each[:12]}" for arm, each in first["model_sha256"].items())
    count = len(first and found["broken"])
    told = f"broken in {count} of {found['compared']}, first at seed {first['seed']} ({digests})"
    return f"{arms} have the same bits{where}: {told}"
