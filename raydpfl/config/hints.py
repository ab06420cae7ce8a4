"""What a key was probably meant to be: the nearest one, or what other tools' name for it is here.

>>> said("local.lrr", ["kind", "lr", "steps"])
'; nearest: lr'
>>> said("local.learning_rate", ["kind", "lr", "steps"])
'; what others call learning_rate is local.lr here'
>>> said("bounding.bound", ["kind"])
'; other kinds of bounding have it'
>>> said("FedAvgM", ["sgd", "momentum"])
'; what others call FedAvgM is server.kind=momentum here'
>>> said("local.colour", ["kind", "lr", "steps"])
''
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

# Keys of Flower, pfl-research, Opacus, TensorFlow Federated, FedJAX and papers, by what they are
# here. A key that the section has itself is never asked for.
FOREIGN: dict[str, str] = {
    **dict.fromkeys(
        ("n_clients", "num_clients", "num_supernodes", "num_users", "population"),
        "data.clients",
    ),
    **dict.fromkeys(
        ("clients_per_round", "cohort_size", "num_clients_per_round", "clients_per_step"),
        "selection.cohort",
    ),
    **dict.fromkeys(
        ("fraction", "fraction_fit", "fraction_train", "client_fraction", "participation_rate",
         "sampling_rate"),
        "selection.cohort (a number of clients)",
    ),
    **dict.fromkeys(
        ("num_rounds", "n_rounds", "num_server_rounds", "central_num_iterations", "iterations"),
        "rounds",
    ),
    **dict.fromkeys(("learning_rate", "client_lr", "local_lr", "client_learning_rate"), "local.lr"),
    **dict.fromkeys(("server_lr", "global_lr", "server_learning_rate", "eta_g"), "server.lr"),
    **dict.fromkeys(("batch_size", "local_batch_size", "train_batch_size"), "local.batch"),
    **dict.fromkeys(("local_epochs", "num_epochs", "n_epochs", "epochs"), "local.epochs"),
    **dict.fromkeys(("local_steps", "local_num_steps", "num_steps", "max_steps"), "local.steps"),
    **dict.fromkeys(("mu", "proximal_mu", "prox"), "local.proximal"),
    **dict.fromkeys(
        ("clip", "clip_norm", "clipping_norm", "clipping_bound", "clipping_threshold",
         "max_grad_norm", "l2_norm_clip", "threshold"),
        "bounding.bound",
    ),
    **dict.fromkeys(("target_unclipped_quantile", "target_quantile"), "bounding.quantile"),
    **dict.fromkeys(("noise_multiplier", "z", "sigma"), "noise.multiplier"),
    **dict.fromkeys(("noise_std", "noise_scale", "stddev"), "noise.std"),
    **dict.fromkeys(("target_epsilon", "eps"), "noise.epsilon"),
    "epsilon": "noise.epsilon (what a run must stay below: privacy.budget)",
    **dict.fromkeys(("target_delta", "delta"), "noise.delta"),
    **dict.fromkeys(("alpha", "dirichlet_alpha"), "data.partition.psi (kind: dirichlet)"),
    "bound": "bounding.bound",
    **dict.fromkeys(("random_seed", "random_state"), "seed"),
    **dict.fromkeys(("dataset", "dataset_name"), "data.kind"),
    **dict.fromkeys(("architecture", "net", "model_name"), "model.kind"),
    **dict.fromkeys(("aggregator", "strategy", "server_optimizer"), "server.kind"),
    **dict.fromkeys(("optimizer", "client_optimizer"), "local.kind"),
    **dict.fromkeys(("accountant", "accounting"), "privacy.accountants"),
    **dict.fromkeys(("evaluation_frequency", "eval_every", "test_every"), "evaluate.every"),
    **dict.fromkeys(("val_split", "validation_split", "val_fraction"), "evaluate.validation"),
    **dict.fromkeys(("gpus", "gpus_per_client", "client_gpus"), "client.num_gpus"),
    **dict.fromkeys(("cpus", "client_cpus"), "client.num_cpus"),
    **dict.fromkeys(("workers", "num_workers", "processes"), "client.actors"),
    "mechanism": "noise.kind",
}  # fmt: skip
# Names of methods, likewise, in lower case.
METHODS: dict[str, str] = {
    **dict.fromkeys(("fedavg", "fedsgd"), "server.kind=sgd"),
    "fedavgm": "server.kind=momentum",
    "fedadam": "server.kind=adam",
    "fedyogi": "server.kind=yogi",
    "fedadagrad": "server.kind=adagrad",
    "fedprox": "local.proximal",
    "ditto": "personal (kind: sgd, with proximal)",
    "random": "selection.kind=uniform",
    "round_robin": "selection.kind=cyclic",
    **dict.fromkeys(
        ("lda", "latent_dirichlet", "label_skew", "non_iid", "noniid"),
        "data.partition.kind=dirichlet",
    ),
    "pathological": "data.partition.kind=shards",
    **dict.fromkeys(("adaptive", "adaptive_clipping"), "bounding.kind=quantile_clip"),
    **dict.fromkeys(("dpsgd", "dp_sgd"), "bounding.kind=per_sample_clip"),
    **dict.fromkeys(
        ("dp_ftrl", "dpftrl", "matrix_factorization", "tree"), "noise.kind=banded_gaussian"
    ),
    **dict.fromkeys(("logistic_regression", "logreg"), "model.kind=softmax"),
    "num_examples": "weights.kind=data",
}
# What there is not, and what there is instead.
ABSENT: dict[str, str] = {
    "noise.schedule": "noise has one std in all rounds; local and server have schedules, of lr",
    **dict.fromkeys(
        ("laplace", "laplacian"), "no accountant here counts Laplace noise: gaussian bounds in L2"
    ),
}


def said(where: str, known: Iterable[str]) -> str:
    """The end of a message on a key or a kind that there is not; empty where nothing comes near.

    Args:
        where: the dotted key that was given, or the name of the kind.
        known: the keys that there are.
    """
    section, _, key = where.rpartition(".")
    name = key.lower().replace("-", "_")
    absent = ABSENT.get(where) or ABSENT.get(name)
    if absent:
        return f"; {absent}"
    meant = FOREIGN.get(key) or METHODS.get(name, "")
    if meant.partition(" ")[0] == where:
        return f"; other kinds of {section} have it"
    if meant:
        return f"; what others call {key} is {meant} here"
    return nearest(key, known)


def nearest(key: str, known: Iterable[str]) -> str:
    """As `said`, of a key that other tools have no name for."""
    near = difflib.get_close_matches(key.lower(), list(known), n=1, cutoff=0.6)
    return f"; nearest: {near[0]}" if near else ""


def misspelt(name: str, known: Iterable[str]) -> str:
    """The known name that this one is next to: by at most two letters that are added, left out or
    changed, and a third of its letters. Empty: none.

    >>> misspelt("factr", ["factor", "send"]), misspelt("half", ["factor", "send"])
    ('factor', '')
    """
    most = min(2, len(name) // 3)
    near = [other for other in known if 0 < _distance(name, other) <= most]
    return min(near, key=lambda other: _distance(name, other), default="")


def _distance(one: str, other: str) -> int:
    """The edit distance of Levenshtein."""
    row = [*range(len(other) + 1)]
    for i, a in enumerate(one, 1):
        above, row = row, [i]
        for j, b in enumerate(other, 1):
            row.append(min(above[j] + 1, row[-1] + 1, above[j - 1] + (a != b)))
    return row[-1]
