"""The trained model of a run, from its directory: `load(run)`, and `raydpfl export`.

A run that ends leaves `model.safetensors`: the parameters and buffers of its module, with what is
needed to make the module without the data, and the guarantees that hold for it. A directory may
come from anyone, so no code that it names is imported unless `trust_code` asks for it.
"""

import hashlib
import json
import os
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from raydpfl import models, storage
from raydpfl.config.registry import allow_imports, refuse_code, unimported_paths
from raydpfl.errors import ConfigError, RunError
from raydpfl.experiment import Experiment
from raydpfl.models import tasks, weights
from raydpfl.models.tasks import Form, Target
from raydpfl.simulation import user_code
from raydpfl.simulation.checkpoint import load as checkpoint
from raydpfl.storage.files import read_json
from raydpfl.storage.run_files import replace_file

CHECKPOINTS = "checkpoints"
MODEL_FILES = ("config.yaml", "summary.json", weights.MODEL_FILE)


@dataclass(frozen=True)
class Saved:
    """What a run has trained. `module` has its weights and is in evaluation mode; `config` is its
    experiment, complete (without `trust_code` its user-defined members are not imported);
    `summary` is what `summary.json` holds.
    """

    module: nn.Module
    config: Experiment
    summary: dict[str, Any]


def write_model(folder: Path, module: nn.Module, form: Form, summary: dict[str, Any]) -> None:
    """Writes a trained module, with its summary, to the run directory (`FileError`)."""
    form_facts = {"shape": form.shape, "target": asdict(form.target), "tokens": form.tokens}
    form_facts["task"] = form.task.model_dump(mode="json")
    metadata = {
        "form": json.dumps(form_facts),
        "model_sha256": str(summary["model_sha256"]),
        "rounds": str(summary["rounds"]),
        "holds": json.dumps(summary["holds"]),
    }
    path = folder / weights.MODEL_FILE
    file_bytes = weights.serialize(module.state_dict(), path, metadata)
    replace_file(path, lambda file: file.write(file_bytes))


def load(run: str | Path, client: int | None = None, trust_code: bool = False) -> Saved:
    """What a run has trained, from its directory alone, a path or an address. Raises `ConfigError`
    where that is none of a run that has ended, the client has no such model, or the model or task
    is user-defined and `trust_code` is not set; `RunError` for weights that its summary has not.

    Args:
        run: the directory.
        client: one that has a model of its own (`model.local`, `personal`): `module` is that, from
            the last checkpoint. None: the model that was sent to all.
        trust_code: import the user-defined classes that the run names, from here or as the run has
            stored their source. That runs their code.
    """

    def is_needed(name: str) -> bool:
        return _is_model_file(name) or (client is not None and CHECKPOINTS in name)

    with storage.readable_folder(run, file_filter=is_needed) as folder:
        saved = _load(run, folder, trust_code)
        if client is None:
            return saved
        numbers = _client_parameters(folder, client, run)
    if not saved.config.personal:  # else it is the whole model
        model = models.flatten(saved.module)
        numbers = models.ParameterSplit.of(saved.module).whole(model, numbers[None])[0]
    models.set_trained(saved.module, numbers)
    return saved


def _client_parameters(folder: Path, client: int, run: str | Path) -> torch.Tensor:
    """What a client has of its own, float32 [own]. Raises `ConfigError`."""
    last_checkpoint = checkpoint(folder / CHECKPOINTS)
    states = last_checkpoint.state.memory.own if last_checkpoint else {}
    if client not in states:
        ids = ", ".join(map(str, sorted(states)[:5])) + ", ..." * (len(states) > 5)
        expected = f"one of the {len(states):,} clients of {run} with a model of its own ({ids})"
        raise ConfigError("client", client, expected)
    return torch.from_numpy(states[client])


def _is_model_file(name: str) -> bool:
    """Whether a file of a run directory is needed for its model."""
    return name in MODEL_FILES or name.startswith(f"{user_code.CODE_FOLDER}/")


def _load(run: str | Path, folder: Path, trust_code: bool) -> Saved:
    with user_code.stored_code(folder, prefer_stored=True) if trust_code else nullcontext():
        return _read_model(run, folder, None if trust_code else ())


def _read_model(run: str | Path, folder: Path, imports: tuple[str, ...] | None) -> Saved:
    path = _file(folder)
    experiment = Experiment.from_yaml(folder / "config.yaml", imports=imports)
    try:
        summary = read_json(folder / "summary.json")
        metadata = weights.facts(path)
        with allow_imports(imports):
            form = _form(json.loads(metadata["form"]))
    except (OSError, ValueError, LookupError, TypeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError("run", str(run), f"the directory of a run ({reason})") from None
    members = (experiment.model, form.task)
    refuse_code(run, [path for member in members for path in unimported_paths(member)])
    model = experiment.model.model_copy(update={"init": None})
    module = models.build(model, form, experiment.seed)
    weights.fill(module, str(path))
    numbers = models.flatten(module).numpy().astype("<f4")
    digest = hashlib.sha256(numbers.tobytes()).hexdigest()
    if digest != summary.get("model_sha256"):
        raise RunError(f"{path} is not the model of {folder / 'summary.json'}")
    return Saved(module.eval(), experiment, summary)


def export(
    run: str | Path,
    out: str | Path | None = None,
    merged: bool = False,
    trust_code: bool = False,
) -> Path | str:
    """Writes the model of a run to a file, safetensors or a `state_dict` by its suffix: of one with
    adapters these and what else was trained. Returns the file. Raises `ConfigError` as `load`; or
    the run has no adapters to merge, or there is no file to write them to.

    Args:
        run: the run directory, or its address.
        out: the file; None: the run's own is named, which holds all.
        merged: adapters are added to the weights of their layers, and all is written, as it would
            be of the module without them.
        trust_code: as for `load`.
    """
    with storage.readable_folder(run, file_filter=_is_model_file) as folder:
        path = _file(folder)
        if out is None and not merged:
            return storage.location(storage.join_address(run, path.name))
        if out is None:
            raise ConfigError("--out", None, "a file for the merged weights")
        file = Path(out)
        module = _load(run, folder, trust_code).module
        tensors = _exported_tensors(module, merged)
        file_bytes = weights.serialize(tensors, file, weights.facts(path))
    replace_file(file, lambda part: part.write(file_bytes))
    return file


def _exported_tensors(module: nn.Module, merged: bool) -> dict[str, torch.Tensor]:
    """What is written of a module: all, or of one with adapters these and what else was trained, or
    these merged. Raises `ConfigError`.
    """
    adapters = models.adapters(module)
    if merged and not adapters:
        raise ConfigError("--merged", True, "a run with adapters (model.lora)")
    if merged or not adapters:
        return models.merged(module) if merged else module.state_dict()
    names = models.exported_names(module)
    parameters = module.named_parameters()
    return {name: values.detach() for name, values in parameters if name in names}


def _file(folder: Path) -> Path:
    path = folder / weights.MODEL_FILE
    if not os.path.isfile(path):
        expected = f"the directory of a run that has ended; it has no {weights.MODEL_FILE} "
        expected += f"(raydpfl run {folder} --resume ends it)"
        raise ConfigError("run", str(folder), expected)
    return path


def _form(facts: dict[str, Any]) -> Form:
    target = facts["target"]
    targets = Target(tuple(target["shape"]), target["classes"], tuple(target["names"]))
    return Form(tuple(facts["shape"]), targets, tasks.parse(facts["task"]), facts["tokens"])
