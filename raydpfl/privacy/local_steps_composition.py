"""What several runs with noise at local steps spend together, for a sample of the client that
spends most.

>>> from raydpfl.privacy import LocalSteps
>>> def run(name, seed, std):
...     release = LocalSteps([600], batch=10, steps=20, bound=1.0, delta=1e-3, stds=std)
...     return StepsRelease(name, release, np.array([3]), seed, (), "")
>>> joint = compose_step_runs([run("a", 0, 0.4), run("b", 1, 0.3)], 1e-3, ["pld"])
>>> round(joint.guarantees[0].epsilon, 2)
0.31

Runs with batches of their own (other seeds) compose adaptively. Runs of one seed have the same
batches: if none depends on another, they release at every step one Gaussian over one batch; else
the batches amplify nothing by proof (docs/proofs.md, Runs of one seed).
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from raydpfl.privacy.accountants import accountant_of
from raydpfl.privacy.accountants.base import Part
from raydpfl.privacy.accounting import NOISELESS, UNREACHED_DELTA
from raydpfl.privacy.composition import Composition, StepsRelease, shared_sample_parts
from raydpfl.privacy.guarantee import HIDDEN_BATCH, Guarantee, Observer, Scope
from raydpfl.privacy.sampling import Sampling


def compose_step_runs(
    runs: Sequence[StepsRelease], delta: float, accountants: Sequence[str], adaptive: bool = True
) -> Composition:
    """What holds for one sample of one client against an observer of every update of all the runs.

    Args:
        runs: on the same clients, no two with the same noise.
        delta, accountants, adaptive: as of `raydpfl.privacy.together`.
    """
    reason = _secrecy_refusal(runs, adaptive)
    counts = np.array([run.participations for run in runs])  # [runs, N]
    public = ((counts > 0) & [run.release.public for run in runs]).any(axis=0)
    exposed_mask = counts.any(axis=0) & (runs[0].release.samples > 0)
    clients = np.flatnonzero(exposed_mask & ~public).tolist()
    parts_of = _parts if reason is None else _open_parts
    noisy = np.all([(run.release.stds > 0) | (run.participations == 0) for run in runs], axis=0)
    parts = {k: parts_of(runs, k) for k in clients if noisy[k]}
    exclusions = [words for run in runs for words in run.release.exclusions]
    if (exposed_mask & public).any():
        words = "clients who are public in one of the runs, where they have an infinite budget"
        exclusions.append(f"{(exposed_mask & public).sum()} {words}")
    guarantees = []
    for name in accountants:
        epsilon, worst = _worst(name, parts, delta)
        failed_conditions = (UNREACHED_DELTA.format(name),) * math.isinf(epsilon)
        words = f"client {worst}, the worst of {len(clients)}"
        if len(parts) < len(clients) or (exposed_mask.any() and not clients):
            epsilon, failed_conditions = math.inf, (NOISELESS,)
            words = "clients without noise"
        elif not clients:
            words = "no client took part"
        is_hidden = any(event.sampling.hidden for event, _ in parts.get(worst, ()))
        scope = Scope(
            f"{len(runs)} runs together, noise at local steps; {words}",
            HIDDEN_BATCH if is_hidden else "",
            client=worst if math.isfinite(epsilon) and clients else None,
        )
        one = Guarantee(
            "rigorous", name, "sample", "replace_one", Observer.UPDATES, scope, epsilon, delta,
            tuple(dict.fromkeys(exclusions)), failed_conditions,
        )  # fmt: skip
        guarantees.append(one)
    notes = () if reason is None else (f"no epsilon with the batches hidden: {reason}",)
    return Composition(tuple(runs), tuple(guarantees), notes)


def _secrecy_refusal(runs: Sequence[StepsRelease], adaptive: bool) -> str | None:
    """Why the secrecy of the batches is not known to compose; None: it does."""
    for seed in dict.fromkeys(run.seed for run in runs):
        seed_runs = [run for run in runs if run.seed == seed]
        if len(seed_runs) == 1 or not any(run.release.amplified.any() for run in seed_runs):
            continue
        names = " and ".join(run.name for run in seed_runs[:2])
        if not all(run.has_same_batches(seed_runs[0]) for run in seed_runs[1:]):
            return f"{names} draw different batches from the same seed {seed}, not independently"
        if adaptive:
            return (
                f"{names} have the same seed {seed}, so the same batches, which amplify by proof "
                "only where runs do not depend on each other (other seeds, with data.seed for the "
                "same clients, compose)"
            )
    return None


def _parts(runs: Sequence[StepsRelease], k: int) -> list[Part]:
    """What composes of client k. At each step runs of one seed release sums over the same hidden
    batch.
    """
    parts: list[Part] = []
    for seed in dict.fromkeys(run.seed for run in runs):
        seed_runs = [run for run in runs if run.seed == seed and run.participations[k]]
        events = [(run.release.event(k), int(run.participations[k])) for run in seed_runs]
        is_shared = len(events) > 1 and events[0][0].sampling.hidden
        parts += shared_sample_parts(events) if is_shared else events
    return parts


def _open_parts(runs: Sequence[StepsRelease], k: int) -> list[Part]:
    """The same against an observer who knows the batches: a sample may be in every one."""
    n = int(runs[0].release.samples[k])
    everyone = Sampling("full", n, n)
    return [
        (replace(run.release.event(k), sampling=everyone), int(run.participations[k]))
        for run in runs
        if run.participations[k]
    ]


def _worst(accountant: str, parts: dict[int, list[Part]], delta: float) -> tuple[float, int]:
    """The largest epsilon of any client, and which has it (-1: none). No epsilon exceeds that by
    rdp, which tells who cannot be the worst.
    """
    client_by_parts = {tuple(part): k for k, part in reversed(parts.items())}
    rdp = {part: accountant_of("rdp").together(part, delta) for part in client_by_parts}
    largest, worst = 0.0, -1
    for part in sorted(client_by_parts, key=lambda part: -rdp[part]):
        if worst >= 0 and rdp[part] <= largest:
            break
        epsilon = accountant_of(accountant).together(part, delta)
        if worst < 0 or epsilon > largest:
            largest, worst = epsilon, client_by_parts[part]
    return largest, worst
