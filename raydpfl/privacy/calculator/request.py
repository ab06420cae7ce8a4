"""The question and its options, whether a command line or a program asks it."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast, get_args

from raydpfl import privacy
from raydpfl.errors import ConfigError, renamed
from raydpfl.privacy import Mechanism, Query, Relation, Sampling
from raydpfl.privacy.calculator.answer import Budget, Unknown
from raydpfl.privacy.calculator.solve import Question, SampleQuestion
from raydpfl.privacy.observers import place_of
from raydpfl.privacy.sampling import scheme_of
from raydpfl.privacy.types import Placement

# What the parameters of `raydpfl.privacy` are called where samples are protected.
_OF_SAMPLES = {"population": "samples", "cohort": "batch", "rounds": "participations"}


def of_clients(
    *,
    population: int,
    cohort: int | None = None,
    rounds: int | None = None,
    epsilon: float | None = None,
    noise_multiplier: float | None = None,
    std: float | None = None,
    bound: float | None = None,
    delta: float = 1e-5,
    sampling: str = "fixed",
    relation: str = "auto",
    placement: str = "auto",
    participations: int | None = None,
    v: float = 4.0,
) -> Budget:
    """The budget where whole clients are protected: `rounds` sums over cohorts are released (000,
    001). Give two of epsilon, rounds and noise.

    Noise is `noise_multiplier`, std of the sum / `bound`; or `std`, which needs `bound`: that of
    one client's noise with placement `client`, of the noise on the sum with `server`.
    `participations` is the largest number of rounds (with replacement: of draws) of any client,
    against an observer who knows the cohorts; None: every round. For Poisson sampling `relation`
    auto is add_remove and `placement` auto is server, else replace_one and client. `v` is the
    constant of 000 Theorem 3.2. Raises `ConfigError` on the name of a parameter.
    """
    size = scheme_of(sampling).default(population) if cohort is None else cohort
    who = Sampling(sampling, population, cast(int, size))  # which refuses None
    # auto: the clients, unless their part of the noise would depend on a secret
    auto: Placement = "client" if who.coins is None else "server"
    places: dict[str, Placement] = {"auto": auto, "client": "client", "server": "server"}
    place = places.get(placement)
    if not place:
        raise ConfigError("placement", placement, "client or server")
    z = _multiplier(noise_multiplier, std, bound, place_of(place).draws(who))
    unknown = _unknown(z, epsilon, rounds, "rounds")
    query = Query("updates", bound or 1.0, 0.0)
    mechanism = Mechanism(who, (query,), 1 if rounds is None else rounds, placement=place)
    mechanism = mechanism.with_noise(z or 1.0)
    limit = math.inf if rounds is None else rounds * (who.cohort if who.repeats else 1)
    if participations is not None and not 1 <= participations <= limit:
        expected = f"an integer from 1 to {limit}" if rounds else "an integer, at least 1"
        raise ConfigError("participations", participations, expected)
    asked = _relation(relation, who)
    _check(mechanism, asked, delta)
    return Question(mechanism, asked, delta, unknown, epsilon, 1, participations, v).budget()


def of_samples(
    *,
    samples: int,
    batch: int,
    steps: int,
    participations: int | None = None,
    epsilon: float | None = None,
    noise_multiplier: float | None = None,
    std: float | None = None,
    bound: float | None = None,
    delta: float = 1e-5,
    sampling: str = "fixed",
    relation: str = "auto",
) -> Budget:
    """The budget where one client's samples are protected, by noise at every local step, against an
    observer of every update (002, 003). Give two of epsilon, participations and noise.

    `participations` are the rounds that the client takes part in, as they occur or capped; never
    T r / N. `bound` is the per-sample clip norm. Noise is `noise_multiplier`, std of the sum over a
    batch / `bound`; or `std`, which needs `bound`: that of the noise on the mean gradient. Each of
    the `steps` of a round draws a fresh batch, by `sampling`. Raises `ConfigError` on the name of a
    parameter.
    """
    with renamed(lambda name: _OF_SAMPLES.get(name, name)):
        if sampling == "epochs":
            expected = "fixed, a fresh batch at each step: shuffled epochs have no accountant"
            raise ConfigError("sampling", sampling, expected)
        for name, value in (("steps", steps), ("participations", participations)):
            if value is not None and value < 1:
                raise ConfigError(name, value, "an integer, at least 1")
        z = _multiplier(noise_multiplier, std, bound, batch)
        unknown = _unknown(z, epsilon, participations, "participations")
        who = Sampling(sampling, samples, batch)
        query = Query("gradients", bound or 1.0, 0.0)
        rounds = steps * (1 if participations is None else participations)
        mechanism = Mechanism(who, (query,), rounds, unit="sample", placement="step")
        mechanism = mechanism.with_noise(z or 1.0)
        asked = _relation(relation, who)
        _check(mechanism, asked, delta)
        return SampleQuestion(mechanism, asked, delta, unknown, epsilon, steps=steps).budget()


_UNITS: dict[str, Callable[..., Budget]] = {"client": of_clients, "sample": of_samples}


def from_options(unit: str = "client", **options: Any) -> Budget:
    """`of_clients` or `of_samples` from the options of the command line; hyphens may stand for
    underscores. Options that are None count as absent. Raises `ConfigError` on an option.
    """
    if unit not in _UNITS:
        raise ConfigError("--unit", unit, "client or sample")
    parameters = inspect.signature(_UNITS[unit]).parameters
    for name, value in options.items():
        if name not in parameters:
            takes = ", ".join(map(_flag, parameters))
            raise ConfigError(_flag(name), value, f"none with --unit {unit}, which takes {takes}")
    for name, parameter in parameters.items():
        if parameter.default is parameter.empty and name not in options:
            expected = f"a value with --unit {unit}, or a CONFIG (see raydpfl budget --help)"
            raise ConfigError(_flag(name), None, expected)
    stated = {
        name: value.replace("-", "_") if isinstance(value, str) else value
        for name, value in options.items()
    }
    names = {"kind": "sampling", "target": "epsilon"} | {name: name for name in parameters}
    with renamed(lambda name: _flag(names[name]) if name in names else name):
        return _UNITS[unit](**stated)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _relation(asked: str, sampling: Sampling) -> Relation:
    """The relation that was asked for; auto: replace_one, unless the sampling scheme refuses it."""
    if asked != "auto":
        return cast(Relation, asked)  # `_check` refuses any other word
    return "add_remove" if sampling.scheme.refuses("replace_one") else "replace_one"


def _multiplier(
    z: float | None, std: float | None, bound: float | None, count: float
) -> float | None:
    """z as stated, or from the std of one draw, `count` times which is the std of the sum."""
    for name, value in (("noise_multiplier", z), ("std", std), ("bound", bound)):
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(name, value, "a positive finite number")
    if std is not None and z is not None:
        raise ConfigError("std", std, "--noise-multiplier or --std, not both")
    if std is not None and bound is None:
        raise ConfigError("bound", None, "the L2 bound that --std is to be compared with")
    field, value = ("noise_multiplier", z) if std is None else ("std", std)
    z = z if std is None or bound is None else std * count / bound
    if z is not None and not 1e-6 <= z <= 1e6:  # its squares must not leave float64
        expected = f"a noise multiplier from 1e-06 to 1e+06; this one is {z:.4g}"
        raise ConfigError(field, value, expected)
    return z


def _unknown(z: float | None, epsilon: float | None, rounds: int | None, repeated: str) -> Unknown:
    values: dict[Unknown, float | None] = {"noise": z, "epsilon": epsilon, "rounds": rounds}
    stated = [name for name, value in values.items() if value is not None]
    if len(stated) != 2:
        expected = f"two of noise (--noise-multiplier or --std), --epsilon and --{repeated}; "
        raise ConfigError("given", stated or None, f"{expected}the third is computed")
    (missing,) = values.keys() - set(stated)
    return missing


def _check(mechanism: Mechanism, relation: Relation, delta: float) -> None:
    """Raises `ConfigError` for a delta out of range, and for what no rigorous accountant covers,
    with the nearest combination that is covered.
    """
    if not 0 < delta < 1:
        raise ConfigError("delta", delta, "a number between 0 and 1, both excluded")
    reason = privacy.covers("pld", mechanism, relation)
    if not reason:
        return
    others: tuple[Relation, ...] = get_args(Relation)
    relations = [other for other in others if not privacy.covers("pld", mechanism, other)]
    nearest = [f"--relation {relation}" for relation in relations]
    if not privacy.covers("pld", replace(mechanism, placement="server"), relation):
        nearest.append("--placement server")
    who = mechanism.sampling
    if who.cohort <= who.population:
        for kind in ("fixed", "poisson", "with_replacement"):
            drawn = replace(mechanism, sampling=replace(who, kind=kind))
            nearest += [] if privacy.covers("pld", drawn, relation) else [f"--sampling {kind}"]
    expected = f"{' or '.join(nearest)}: {reason.split('; nearest')[0]}"
    if relations:
        raise ConfigError("relation", relation, expected)
    raise ConfigError("placement", mechanism.placement, expected)
