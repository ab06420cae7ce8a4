"""From an experiment to the plan of its run: `resolve(experiment)`.

What a config leaves open is decided here, once, before the first round: the data are prepared, the
backend is chosen and the noise is calibrated. What the data or the accountants cannot give is
refused here.
"""

import math
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
from torch import nn

from raydpfl import models
from raydpfl.config.setting import Setting
from raydpfl.core.hardware import single_blas, threads
from raydpfl.data import Shards, prepare
from raydpfl.errors import ConfigError, rename_fields
from raydpfl.experiment import Experiment, report_config_fields
from raydpfl.methods.noise import RunFacts
from raydpfl.methods.population import check_composed_rounds, check_means, client_weights
from raydpfl.methods.selection import Population
from raydpfl.models.tasks import Form
from raydpfl.privacy import Sampling, budgets
from raydpfl.privacy.individual import IndividualBudgets
from raydpfl.sections import Client
from raydpfl.simulation import provenance
from raydpfl.simulation.plan import DISPLAY_SECTIONS, Plan
from raydpfl.simulation.recorder import table_columns
from raydpfl.simulation.scheduler import chunk_width, max_gpu_width
from raydpfl.training.backend_choice import choose_backend
from raydpfl.training.backend_timing import StepTimes, Workload
from raydpfl.training.backends import BACKENDS
from raydpfl.training.validation import check_counts


def preview(experiment: Experiment, data_root: Path | None) -> Setting:
    """Checks what the config determines before the data are touched, and outlines what is released:
    of so many clients with one sample each, where their number is known. Raises `ConfigError` for a
    user-defined class that is not complete, a selection that does not fit so many clients, or one
    that no accountant covers.
    """
    setting = experiment.setting()
    experiment.check_user_methods()
    count = experiment.data.clients
    if count is not None:
        selection = experiment.selection
        selection.fits(count)
        population = Population.balanced(count, selection.table(count, data_root))
        experiment.noise.outline(setting, lambda: selection.sampling(population))
    return setting


def _client(
    experiment: Experiment,
    shards: Shards,
    form: Form,
    module: nn.Module,
    bound: float | None,
    cohort: int,
) -> tuple[Client, float]:
    """`client` with its backend and chunk, and `Plan.train_seconds`; `bound`: of gradients."""
    client, local = experiment.client, experiment.local
    gpus, chunk = client.num_gpus, client.chunk
    if chunk == "auto":
        max_width = max_gpu_width(local, shards, form, module, gpus) if gpus > 0 else None
        chunk = chunk_width(cohort, max_width)
    work = Workload.of(local, shards.sizes, chunk, cohort, experiment.rounds)
    times = None
    if gpus == 0:
        times = StepTimes(module, local, form, bound, client.precision, work)
    backend_options = (client.backend, bound, gpus > 0, client.precision, times)
    backend = choose_backend(module, local, form, *backend_options)
    kind = BACKENDS[backend]
    seconds = 0.0
    if times and client.actors == "auto" and not (kind.threads and threads() > 1):
        step = times.of(backend)
        # what fails does so in this process
        seconds = step * work.steps if step < math.inf else 0.0
    if client.chunk == "auto" and kind.one_by_one:
        chunk = 1
    return client.model_copy(update={"backend": backend, "chunk": chunk}), seconds


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
    with report_config_fields(), single_blas():
        setting = preview(experiment, data_root)
        seed, rounds = experiment.seed, experiment.rounds
        selection, local = experiment.selection, experiment.local
        path = prepare(experiment.data, seed, data_root, validation=setting.held_out)
        shards = Shards.open(path)
        sizes = shards.sizes  # on the file's map: a copy would take 8 bytes a client
        selection.fits(len(sizes))
        form = shards.form(experiment.data.task)
        model = experiment.model
        if model.init is not None:  # the whole path, as actors stand in other directories
            model = model.model_copy(update={"init": os.path.abspath(model.init)})
        module = models.build(model, form, seed)
        models.check_parameters(module, model, form)
        d = models.parameter_count(module)
        check_counts(local, sizes)
        samples = np.maximum(sizes, 1)  # a client without samples is never drawn
        batches = local.batch_sizes(samples)
        ids = shards.ids()
        variances = partial(experiment.noise.variances, seed, samples, batches, data_root, ids)
        table = selection.table(len(sizes), data_root)
        population = Population(sizes, selection.costs(d, variances), table)
        cohorts = selection.sampling(population)
        bound = setting.per_sample_bound
        client, seconds = _client(experiment, shards, form, module, bound, cohorts.cohort)
        noise = experiment.noise.resolve(setting, cohorts)
        check_means(selection, experiment.bounding, experiment.stateful, population)
        weight = float(
            np.abs(client_weights(experiment.weights, selection, population)).max(initial=0.0)
        )
        clients_left = selection.clients_left(seed, rounds, population)
        composed_rounds = check_composed_rounds(selection, seed, rounds, population)
        outline = noise.outline(setting, lambda: cohorts)
        if outline:
            turns = bool((composed_rounds != np.arange(1, rounds + 1)).any())
            outline = replace(outline, turns=turns)
        if outline and outline.survey:
            scored_clients = len(shards.client_rows) if experiment.evaluate.per_client else 0
            outline = replace(outline, survey=replace(outline.survey, clients=scored_clients))
        calibrated_rounds = noise.calibrated_over(rounds) or rounds
        interval = experiment.evaluate.every
        facts = RunFacts(
            setting=setting,
            seed=seed,
            local=local,
            sizes=population.sizes,
            rounds=int(composed_rounds[-1]) or rounds,
            calibrated=int(composed_rounds[calibrated_rounds - 1]) or calibrated_rounds,
            weight=weight,
            clients_left=clients_left,
            draws=partial(selection.calibration_draws, seed, rounds, population),
            d=d,
            surveys=rounds // interval,
            calibrated_surveys=calibrated_rounds // interval,
            data_root=data_root,
            ids=ids,
        )
        mechanism = noise.calibrated(outline, facts)
        individual = _individual_budgets(experiment, cohorts, facts)
    # the noise of a virtual cohort is scaled down to the clients that are simulated
    stds = mechanism.sum_stds(cohorts.cohort) if mechanism else {}
    experiment = experiment.model_copy(update={"client": client, "model": model, "noise": noise})
    untracked_experiment = experiment.model_copy(update=dict.fromkeys(DISPLAY_SECTIONS, ()))
    plan = Plan(
        experiment=experiment,
        shards=path,
        population=population,
        d=d,
        weight=weight,
        clients_left=clients_left,
        composed_rounds=composed_rounds,
        ratio=stds.get("updates", 0.0),
        side_stds={
            query.name: stds.get(query.name, 0.0) * query.bound for query in setting.queries
        },
        mechanism=mechanism,
        individual=individual,
        train_seconds=seconds,
        platform={
            **provenance.platform_facts(untracked_experiment),
            **provenance.file_facts(untracked_experiment, data_root),
        },
        factors=mechanism.factors if mechanism else (),
    )
    plan.check(shards)
    table_columns(plan)  # which refuses names that are taken
    return plan


def _individual_budgets(
    experiment: Experiment, cohorts: Sampling, facts: RunFacts
) -> IndividualBudgets | None:
    """Clients' own budgets. Raises `ConfigError` where they spend by more than norms."""
    budget_spec = experiment.privacy.individual
    if budget_spec is None:
        return None
    setting = facts.setting
    refusals = {
        "noise that is Gaussian, on sums of updates, independent in every round and of those that "
        "run": not experiment.noise.by_norms(),
        "clients that release nothing but their updates (no adaptive bound, losses or histogram)": (
            setting.queries or setting.adaptive_bound or setting.asks_losses or setting.survey
        ),
        "clients whose state does not hold their own noise": (
            "local" in setting.stateful and setting.drawn_by == "client"
        ),
        "a selection that draws no client twice in a round": cohorts.repeats,
    }
    for expected, fails in refusals.items():
        if fails:
            raise ConfigError("privacy.individual", str(budget_spec), f"none without {expected}")
    with rename_fields(lambda name: name.replace("noise.epsilon", "privacy.individual")):
        epsilons = budgets.distribution(budget_spec).draw(
            facts.seed, len(facts.sizes), facts.data_root, facts.ids
        )
    terms = experiment.terms
    return IndividualBudgets(epsilons, terms.delta, terms.relation)
