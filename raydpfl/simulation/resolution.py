"""From an experiment to the plan of its run: `resolve(experiment)`.

What a config leaves open is decided here, once, before the first round: the data are prepared, the
backend is chosen and the noise is calibrated. What the data or the accountants cannot give is
refused here.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
from torch import nn

from raydpfl import models
from raydpfl.core import device, hardware
from raydpfl.core.hardware import single_blas
from raydpfl.data import Shards, prepare
from raydpfl.errors import ConfigError
from raydpfl.experiment import Experiment, as_fields
from raydpfl.methods.noise import RunFacts
from raydpfl.methods.probes import Problem
from raydpfl.methods.selection import Population, Selection
from raydpfl.models.tasks import Form
from raydpfl.privacy import Mechanism, Sampling
from raydpfl.simulation import provenance
from raydpfl.simulation.plan import SHOWS, Plan, client_weights
from raydpfl.training.backend_choice import choose_backend
from raydpfl.training.backends import BACKENDS
from raydpfl.training.validation import check_counts

log = logging.getLogger("raydpfl")

CHUNK = 32  # clients at most, for the backends that train a whole chunk at once


def resolve(
    experiment: Experiment,
    data_root: Path | None = None,
    prepare: Callable[..., Path] = prepare,
) -> Plan:
    """The plan of a run of `experiment`. Raises `ConfigError` for what the data or the accountants
    cannot give.

    Args:
        experiment: as it was read.
        data_root: the folder of data sets; None: the default.
        prepare: in place of `raydpfl.data.prepare`.
    """
    experiment.complete()
    with as_fields(), single_blas():
        foreseen = preview(experiment, data_root)  # before the data are touched
        held_out = experiment.evaluate.held_out
        path = prepare(experiment.data, experiment.seed, data_root, validation=held_out)
        shards = Shards.open(path)
        sizes = shards.sizes  # on the file's map: a copy would take 8 bytes a client
        selection = experiment.selection
        selection.fits(len(sizes))
        form = shards.form(experiment.data.task)
        module = models.build(experiment.model, form, experiment.seed)
        d = models.parameter_count(module)
        check_counts(experiment.local, sizes)
        backend = _backend(experiment, module, form)
        population = clients(experiment, sizes, d, data_root)
        check_means(experiment, population)
        check_measures(experiment, problem_of(experiment, shards, population))
        cohorts = selection.sampling(population)
        experiment = resolved(experiment, backend, cohorts.cohort, module, shards)
        noise = experiment.noise.resolved(experiment.setting(), cohorts)
        experiment = experiment.model_copy(update={"noise": noise})
        rounds = experiment.rounds
        weight = float(np.abs(client_weights(experiment, population)).max(initial=0.0))
        left = selection.clients_left(experiment.seed, rounds, population)
        composed_rounds = composed(selection, experiment.seed, rounds, population)
        outline = template(experiment, population, foreseen)
        if outline and outline.survey:
            scored = len(shards.client_rows) if experiment.evaluate.per_client else 0
            outline = replace(outline, survey=replace(outline.survey, clients=scored))
        first = noise.calibrated_over(rounds) or rounds
        facts = RunFacts(
            setting=experiment.setting(),
            seed=experiment.seed,
            local=experiment.local,
            sizes=population.sizes,
            rounds=int(composed_rounds[-1]) or rounds,
            calibrated=int(composed_rounds[first - 1]) or first,
            weight=weight,
            clients_left=left,
            draws=partial(_calibration_draws, experiment, population),
            surveys=rounds // experiment.evaluate.every,
            calibrated_surveys=first // experiment.evaluate.every,
            data_root=data_root,
        )
        mechanism = noise.calibrated(outline, facts)
    # the noise of a virtual cohort is scaled down to the clients that are simulated
    stds = mechanism.sum_stds(cohorts.cohort) if mechanism else {}
    queries = experiment.bounding.queries()
    unseen = experiment.model_copy(update=dict.fromkeys(SHOWS, ()))
    plan = Plan(
        experiment=experiment,
        shards=path,
        population=population,
        d=d,
        weight=weight,
        clients_left=left,
        composed_rounds=composed_rounds,
        ratio=stds.get("updates", 0.0),
        side_stds={query.name: stds.get(query.name, 0.0) * query.bound for query in queries},
        mechanism=mechanism,
        platform=provenance.of(unseen),
    )
    plan.check_budget()
    return plan


def _calibration_draws(experiment: Experiment, population: Population) -> list[np.ndarray]:
    """The clients whose participations noise is sized for, round by round, with repeats; at last
    those who are exposed and have not come up, once.
    """
    selection = experiment.selection
    rounds = range(experiment.rounds)
    exposed = [selection.exposed(experiment.seed, t, population) for t in rounds]
    if selection.uncounted is None:
        return exposed
    assumed = [selection.assumed(experiment.seed, t, population) for t in rounds]
    return [*assumed, np.setdiff1d(np.concatenate(exposed), np.concatenate(assumed))]


def _backend(experiment: Experiment, module: nn.Module, form: Form) -> str:
    """The backend to train with; warns where its precision is a slow one."""
    client = experiment.client
    if client.precision == "bfloat16" and not client.num_gpus and not hardware.has_bfloat16():
        log.warning(
            "client.precision bfloat16 is slower than float32 here: this processor has no "
            "instructions for it"
        )
    return choose_backend(
        module,
        experiment.local,
        form,
        client.backend,
        clip=experiment.bounding.sample_bound,
        gpu=client.num_gpus > 0,
        precision=client.precision,
    )


def clients(
    experiment: Experiment, sizes: np.ndarray, d: int, data_root: Path | None
) -> Population:
    """What is public of clients with these samples, int64 [N], and a model of d parameters."""
    selection = experiment.selection

    def variances() -> np.ndarray | None:
        samples = np.maximum(sizes, 1)  # a client without samples is never drawn
        batches = experiment.local.batch_sizes(samples)
        return experiment.noise.variances(experiment.seed, samples, batches, data_root)

    table = selection.table(len(sizes), data_root)
    return Population(sizes, selection.costs(d, variances), table)


def resolved(
    experiment: Experiment, backend: str, cohort: int, module: nn.Module, shards: Shards
) -> Experiment:
    """With the backend and the width of a chunk, so that the bits do not depend on what
    another machine would choose, and the whole path of the weights that it starts from.
    """
    chunk = experiment.client.chunk
    if chunk == "auto":
        most = held_at_once(experiment, module, shards) if experiment.client.num_gpus > 0 else CHUNK
        chunk = 1 if BACKENDS[backend].one_by_one else chunk_width(cohort, most)
    client = experiment.client.model_copy(update={"backend": backend, "chunk": chunk})
    model = experiment.model
    if model.init is not None:  # as actors stand in other directories
        model = model.model_copy(update={"init": os.path.abspath(model.init)})
    return experiment.model_copy(update={"client": client, "model": model})


def chunk_width(cohort: int, most: int = CHUNK) -> int:
    """How many clients of a cohort train at once: an even number of chunks, evenly filled, of at
    most `most`; one chunk where that holds more than `CHUNK`, as on a GPU, and the whole cohort.

    >>> chunk_width(150), chunk_width(80), chunk_width(10)
    (25, 20, 5)
    >>> chunk_width(150, most=1000), chunk_width(150, most=100)
    (150, 75)
    """
    if most > CHUNK and cohort <= most:
        return cohort
    return math.ceil(cohort / (2 * math.ceil(cohort / (2 * most))))


def held_at_once(experiment: Experiment, module: nn.Module, shards: Shards) -> int:
    """How many clients' training takes about half of an actor's share of a GPU's memory, two at
    least.
    """
    rule = experiment.local
    rows = int(rule.rows_used(np.array([shards.sizes.max()]))[0])
    # weights, gradients and updates, these and the noise in float64, and what is in the making
    numbers = 16 * models.parameter_count(module)
    numbers += 2 * rows * math.prod(shards.shape)
    form = shards.form(experiment.data.task)
    numbers += 4 * rule.batch_size(rows) * models.activations(module, form)
    return max(2, device.memory(experiment.client.num_gpus) // (2 * 4 * numbers))


def check_means(experiment: Experiment, population: Population) -> None:
    """Raises `ConfigError` where the server's quotient is not the mean that a member needs."""
    selection = experiment.selection
    stateful = experiment.stateful
    if experiment.bounding.sends_model() and not selection.means(population):
        expected = (
            "one whose cohorts all have the size that the sum is divided by, without weights or "
            "dropouts: the new model is the mean of those sent"
        )
    elif stateful and selection.corrections(population) is not None:
        expected = (
            f"one without weights of its own, as {stateful.kind} keeps the plain mean over all "
            "clients"
        )
    else:
        return
    raise ConfigError("selection.kind", selection.kind, expected)


def problem_of(experiment: Experiment, shards: Shards, population: Population) -> Problem:
    """What the run is to solve, as probes are shown it."""
    members = ("seed", "rounds", "model", "selection", "local", "bounding", "weights")
    return Problem(
        **{name: getattr(experiment, name) for name in members},
        task=experiment.data.task,
        shards=shards,
        population=population,
    )


def check_measures(experiment: Experiment, problem: Problem) -> None:
    """Raises `ConfigError` for what cannot be measured of this problem, or scored."""
    form = problem.shards.form(problem.task)
    per_client = experiment.evaluate.per_client
    for metric in (*experiment.metrics, *((per_client,) if per_client else ())):
        metric.fits(form)
    for probe in experiment.measure:
        probe.fits(problem)


def composed(selection: Selection, seed: int, rounds: int, population: Population) -> np.ndarray:
    """`Selection.composed_rounds`, int64 [rounds]. Raises `ConfigError` for what no cohorts of its
    scheme can come to: where cohorts are secret, each of t rounds draws among the scheme's whole
    population, so the N clients together were available t times that number.
    """
    composed_rounds = np.asarray(selection.composed_rounds(seed, rounds, population))
    sampling = selection.sampling(population)
    if (
        composed_rounds.shape != (rounds,)
        or composed_rounds.dtype.kind not in "iu"
        or (np.diff(composed_rounds, prepend=0) < 0).any()
    ):
        expected = f"one whose composed_rounds are {rounds} whole numbers that never fall"
        raise ConfigError("selection.kind", selection.kind, expected)
    available = np.arange(1, rounds + 1) * sampling.population
    if not sampling.by_participation and (composed_rounds * len(population) < available).any():
        t = int(np.argmax(composed_rounds * len(population) < available))
        expected = (
            f"one whose composed_rounds count every round that a client can be in; {sampling} "
            f"cannot give {composed_rounds[t]} in {t + 1}"
        )
        raise ConfigError("selection.kind", selection.kind, expected)
    return composed_rounds.astype(np.int64)


def preview(experiment: Experiment, data_root: Path | None) -> Mechanism | None:
    """The template of what is released, as far as the config determines it before the data are
    touched: of so many clients with one sample each. None where the number of clients is unknown,
    or sums have no noise.

    Raises:
        ConfigError: the selection does not fit so many clients, or no accountant covers it.
    """
    count = experiment.data.clients
    if count is None:
        return None
    selection = experiment.selection
    selection.fits(count)
    return template(experiment, Population.balanced(count, selection.table(count, data_root)))


def template(
    experiment: Experiment, population: Population, foreseen: Mechanism | None = None
) -> Mechanism | None:
    """What is released, at noise multiplier 1: `foreseen` where its cohorts are sampled as those of
    this population. None where sums have no noise. Raises `ConfigError` where none of the rigorous
    accountants asked for covers it.
    """
    noise = experiment.noise

    def cohorts() -> Sampling:
        return experiment.selection.sampling(population)

    if foreseen is not None and noise.sampling(cohorts()) == foreseen.sampling:
        return foreseen
    return noise.outline(experiment.setting(), cohorts)
