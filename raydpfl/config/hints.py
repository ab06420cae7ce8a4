"""What a key was probably meant to be: the nearest one, or what other tools' name for it is here.

>>> suggestion("local.learning_rate", ["kind", "lr", "steps"])
'; what others call learning_rate is local.lr here'
>>> suggestion("bounding.bound", ["kind"]), suggestion("local.colour", ["kind", "lr", "steps"])
('; other kinds of bounding have it', '')
"""

import difflib
from collections.abc import Iterable


def _by_name(names: dict[str, str]) -> dict[str, str]:
    """What each of the names, in texts by what they are called here, is called here."""
    return {name: key for key, text in names.items() for name in text.split()}


# Keys of Flower, pfl-research, Opacus, TensorFlow Federated, FedJAX and papers, which no section
# has itself.
FOREIGN = _by_name(
    {
        "data.clients": "n_clients num_clients num_supernodes num_users population",
        "selection.cohort": "clients_per_round cohort_size num_clients_per_round clients_per_step",
        "selection.cohort (a number of clients)": (
            "fraction fraction_fit fraction_train client_fraction participation_rate sampling_rate"
        ),
        "rounds": "num_rounds n_rounds num_server_rounds central_num_iterations iterations",
        "local.lr": "lr learning_rate client_lr local_lr client_learning_rate",
        "server.lr": "server_lr global_lr server_learning_rate eta_g",
        "local.batch": "batch_size local_batch_size train_batch_size",
        "local.epochs": "local_epochs num_epochs n_epochs epochs",
        "local.steps": "local_steps local_num_steps num_steps max_steps",
        "local.proximal": "mu proximal_mu prox",
        "bounding.bound": (
            "clip clip_norm clipping_norm clipping_bound clipping_threshold max_grad_norm "
            "l2_norm_clip threshold bound"
        ),
        "bounding.quantile": "target_unclipped_quantile target_quantile",
        "noise.multiplier": "noise_multiplier z sigma",
        "noise.std": "noise_std noise_scale stddev",
        "noise.epsilon": "target_epsilon eps",
        "noise.epsilon (what a run must stay below: privacy.budget)": "epsilon",
        "noise.delta": "target_delta delta",
        "data.partition.psi (kind: dirichlet)": "alpha dirichlet_alpha",
        "seed": "random_seed random_state",
        "data.kind": "dataset dataset_name",
        "model.kind": "architecture net model_name",
        "server.kind": "aggregator strategy server_optimizer",
        "local.kind": "optimizer client_optimizer",
        "privacy.accountants": "accountant accounting",
        "evaluate.every": "evaluation_frequency eval_every test_every",
        "evaluate.validation": "val_split validation_split val_fraction",
        "client.num_gpus": "gpus gpus_per_client client_gpus",
        "client.num_cpus": "cpus client_cpus",
        "client.actors": "workers num_workers processes",
        "noise.kind": "mechanism",
    }
)
# Names of methods, likewise, in lower case.
METHODS = _by_name(
    {
        "server.kind=sgd": "fedavg fedsgd",
        "server.kind=momentum": "fedavgm",
        "server.kind=adam": "fedadam",
        "server.kind=yogi": "fedyogi",
        "server.kind=adagrad": "fedadagrad",
        "local.proximal": "fedprox",
        "personal (kind: sgd, with proximal)": "ditto",
        "selection.kind=uniform": "random",
        "selection.kind=cyclic": "round_robin",
        "data.partition.kind=dirichlet": "lda latent_dirichlet label_skew non_iid noniid",
        "data.partition.kind=shards": "pathological",
        "bounding.kind=quantile_clip": "adaptive adaptive_clipping",
        "bounding.kind=per_sample_clip": "dpsgd dp_sgd",
        "noise.kind=banded_gaussian": "dp_ftrl dpftrl matrix_factorization",
        "noise.kind=tree_gaussian": "tree tree_aggregation",
        "noise.kind=buffered_gaussian": "blt",
        "model.kind=softmax": "logistic_regression logreg",
        "weights.kind=data": "num_examples",
    }
)


def suggestion(key_path: str, names: Iterable[str]) -> str:
    """The end of a message on an unknown dotted key or kind, where `names` are those of its place;
    empty where nothing is similar.
    """
    section, _, key = key_path.rpartition(".")
    name = key.lower().replace("-", "_")
    native_key = FOREIGN.get(key) or METHODS.get(name, "")
    if native_key.partition(" ")[0] == key_path:
        return f"; other kinds of {section} have it"
    if native_key:
        return f"; what others call {key} is {native_key} here"
    return nearest_key_hint(key, names)


def nearest_key_hint(key: str, names: Iterable[str]) -> str:
    """As `suggestion`, of a key that other tools have no name for."""
    close_matches = difflib.get_close_matches(key.lower(), [*names], n=1, cutoff=0.6)
    return f"; nearest: {close_matches[0]}" if close_matches else ""


def intended_name(name: str, names: Iterable[str]) -> str:
    """The name that this one was probably meant to be; empty: none.

    >>> intended_name("factr", ["factor", "send"]), intended_name("half", ["factor", "send"])
    ('factor', '')
    """
    candidates = [candidate for candidate in names if candidate != name]
    return "".join(difflib.get_close_matches(name, candidates, n=1, cutoff=0.85))
