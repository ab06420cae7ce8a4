"""Calibration: how much noise a budget needs, and how many rounds a noise allows. The epsilon of
what is returned is at most the target.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from typing import Any

from raydpfl.config.user_classes import is_user_defined
from raydpfl.errors import ConfigError
from raydpfl.privacy.accountants import accountant_of
from raydpfl.privacy.accounting import UNREACHED_DELTA, epsilon
from raydpfl.privacy.group import GroupSampling
from raydpfl.privacy.mechanism import Mechanism
from raydpfl.privacy.search import largest_count, narrow_bracket
from raydpfl.privacy.types import Relation
from raydpfl.storage.files import cache_root, check, keep_json, read_own_json

_VERSION = 8  # of what noise_for returns for the same question: part of the cache's key
_TOLERANCE = 1e-4  # relative, of z
MOST_ROUNDS = 1 << 20


def noise_for(
    target: float,
    mechanism: Mechanism,
    relation: Relation,
    delta: float,
    accountant: str = "pld",
    rounds: int | None = None,
    v: float = 4.0,
) -> float:
    """The noise multiplier z = std of the sum / bound, all queries of a round together, that spends
    at most a given epsilon: at most 1e-4 (relative) above the smallest that is enough. Answers are
    cached, but not those for a user-defined sampling scheme or accountant. Raises `ConfigError` if
    no proof is known for the mechanism, no noise is enough, any noise is, or as `epsilon`.

    Args:
        target: epsilon, positive and finite.
        mechanism: what runs. Its noise says only how its queries share z. Per-client queries and
            surveys keep theirs, and z is what the others need in addition. The others are those of
            `raydpfl.privacy.epsilon`.
    """
    _check(target, mechanism)
    rounds = mechanism.rounds if rounds is None else rounds
    arguments = (target, mechanism, relation, delta, accountant, rounds, v)
    scheme = mechanism.sampling.scheme
    scheme = scheme.scheme if isinstance(scheme, GroupSampling) else scheme
    members = scheme, accountant_of(accountant)
    question = [mechanism.with_noise(1.0).digest(), rounds, relation, delta, accountant, v, target]
    return cached_multipliers(question, lambda: _search(*arguments), *members)


def rounds_for(
    target: float,
    mechanism: Mechanism,
    relation: Relation,
    delta: float,
    accountant: str = "pld",
    v: float = 4.0,
) -> int:
    """The largest number of rounds that spend at most a given epsilon, from 0 to 2^20.

    Args:
        mechanism: with its noise. The others, and the errors, are those of `noise_for`.
    """
    _check(target, mechanism)

    def fits(rounds: int) -> bool:
        return epsilon(mechanism, relation, delta, rounds, accountant, v) <= target

    return largest_count(fits, MOST_ROUNDS)


def cached_multipliers(question: list, compute: Callable[[], Any], *members: Any) -> Any:
    """`compute()`, noise multipliers, or what was kept where the same question (what the answer
    depends on, as JSON values) was asked before. Nothing is kept where one of the `members` that
    compute it is user-defined, as a name does not say what its code computes.
    """
    if any(is_user_defined(type(member)) for member in members):
        return compute()
    versions = map(version, ("dp-accounting", "scipy", "numpy"))  # what numbers are computed with
    question = [_VERSION, *versions, *question]
    path = cache_root() / f"noise-{check(question)}.json"
    try:
        answer = read_own_json(path)
        if answer["check"] == check(question, answer["noise_multiplier"]):
            return answer["noise_multiplier"]
    except (OSError, ValueError, KeyError, TypeError):
        pass  # absent, torn or foreign: it is computed again
    noise = compute()
    answer = {"noise_multiplier": noise, "question": question, "check": check(question, noise)}
    keep_json(path, answer)
    return noise


def _search(
    target: float,
    mechanism: Mechanism,
    relation: Relation,
    delta: float,
    accountant: str,
    rounds: int,
    v: float,
) -> float:
    # so that rounding in a curve of the same mechanism cannot overstep the budget
    aim = target * (1 - 1e-6)

    def epsilon_at(z: float) -> float:
        return epsilon(mechanism.with_noise(z), relation, delta, rounds, accountant, v)

    def excess(log_z: float) -> float:
        return min(math.log(max(epsilon_at(math.exp(log_z)) / aim, 1e-9)), 20.0)

    guess = mechanism.sampling.q * math.sqrt(2 * rounds * math.log(1 / delta)) / target
    low, high = _bracket(excess, math.log(min(max(guess, 0.2), 1e6)))
    if low[1] > 0 and high[1] <= 0:
        return math.exp(narrow_bracket(excess, low, high, _TOLERANCE))
    run = f"in {rounds} rounds of {mechanism.sampling}, by {accountant}"
    extreme = mechanism.with_noise(math.exp(high[0]))
    if high[1] > 0 and extreme.integer:
        wide_release = replace(extreme, integer=replace(extreme.integer, bits=32))
        if epsilon(wide_release, relation, delta, rounds, accountant, v) <= aim:
            steps = extreme.integer.share * extreme.integer.lattice(extreme.noise_multiplier).std
            expected = f"more: sums of so few bits hold noise of {steps:.4g} steps at most, which "
            floor = epsilon_at(extreme.noise_multiplier)
            expected += f"spends {floor:.4g}" if math.isfinite(floor) else "has no guarantee"
            raise ConfigError("noise.bits", extreme.integer.bits, f"{expected} {run}")
    if high[1] > 0 and extreme.private and math.isinf(epsilon_at(extreme.noise_multiplier)):
        raise ConfigError("delta", delta, f"more: {UNREACHED_DELTA.format(accountant)} {run}")
    releases = [f"the {query.name}" for query in mechanism.queries if query.per_client]
    releases += [f"the {mechanism.survey}"] if mechanism.survey else []
    if releases:
        run += f" ({', '.join(releases)} alone, with the noise given, spend {epsilon_at(1e12):.4g})"
    if high[1] > 0:
        expected = f"more: at delta {delta:g} no noise, however large, spends so little {run}"
        raise ConfigError("target", target, expected)
    expected = "less: at this delta any noise, however small, spends less than epsilon"
    raise ConfigError("delta", delta, f"{expected} {target:g} {run}")


def _bracket(
    excess: Callable[[float], float], start: float
) -> tuple[tuple[float, float], tuple[float, float]]:
    """(x, excess) on both sides of the root of a falling function; both on one if none is near."""
    low = high = (start, excess(start))
    for step in (0.3, 0.6, 1.2, 2.4, 4.8, 9.6):
        if high[1] > 0:
            low = high
            high = (high[0] + step, excess(high[0] + step))
        elif low[1] <= 0:
            high = low
            low = (low[0] - step, excess(low[0] - step))
    return low, high


def _check(target: float, mechanism: Mechanism) -> None:
    if not (isinstance(target, (int, float)) and 0 < target < math.inf):
        raise ConfigError("target", target, "a positive finite number")
    if mechanism.proof_gap:
        expected = f"none here, as no proof holds it: {mechanism.proof_gap}; give noise.multiplier,"
        raise ConfigError("target", target, f"{expected} whose guarantees say what is proved")
