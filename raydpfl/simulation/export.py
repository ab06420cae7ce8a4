"""The trained model of a run, from its directory: `load(run)`, and `raydpfl export`.

A run that ends leaves `model.safetensors`: the parameters and buffers of its module, with what is
needed to make the module without the data, and the guarantees that hold for it. A directory may
come from anyone, so no code that it names is imported unless `trust_code` asks for it.
"""

import hashlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from raydpfl import models, storage
from raydpfl.config.registry import importing, refuse_code, unread
from raydpfl.errors import ConfigError, RunError
from raydpfl.experiment import Experiment
from raydpfl.models import tasks, weights
from raydpfl.models.tasks import Form, Target
from raydpfl.simulation import user_code
from raydpfl.simulation.checkpoint import load as checkpoint
from raydpfl.storage.files import read_json
from raydpfl.storage.run_files import replace_file

CHECKPOINTS = "checkpoints"
READ = ("config.yaml", "summary.json", weights.SAVED)


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
    path = folder / weights.SAVED
    held = weights.packed(module.state_dict(), path.suffix, metadata)
    replace_file(path, lambda file: file.write(held))


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
    if client is None:
        with storage.reading(run, wanted=_read) as folder:
            return _load(run, folder, trust_code)
    with storage.reading(run, wanted=lambda name: _read(name) or CHECKPOINTS in name) as folder:
        loaded = _load(run, folder, trust_code)
        own = _own(folder, client, run)
    if not loaded.config.personal:  # else it is the whole model
        shared = models.flatten(loaded.module)
        own = models.ParameterSplit.of(loaded.module).whole(shared, own[None])[0]
    models.set_trained(loaded.module, own)
    return loaded


def _own(folder: Path, client: int, run: str | Path) -> torch.Tensor:
    """What a client has of its own, float32 [own]. Raises `ConfigError`."""
    last = checkpoint(folder / CHECKPOINTS)
    own = last.state.memory.own if last else {}
    if client not in own:
        some = ", ".join(map(str, sorted(own)[:5])) + ", ..." * (len(own) > 5)
        expected = f"one of the {len(own):,} clients of {run} with a model of its own ({some})"
        raise ConfigError("client", client, expected)
    return torch.from_numpy(own[client])


def _read(name: str) -> bool:
    """Whether a file of a run directory is needed for its model."""
    return name in READ or name.startswith(f"{user_code.KEPT}/")


def _load(run: str | Path, folder: Path, trust_code: bool) -> Saved:
    if not trust_code:
        return _made(run, folder, ())
    with user_code.stored_code(folder, first=True):
        return _made(run, folder, None)


def _made(run: str | Path, folder: Path, imports: tuple[str, ...] | None) -> Saved:
    path = _file(folder)
    experiment = Experiment.from_yaml(folder / "config.yaml", imports=imports)
    try:
        summary = read_json(folder / "summary.json")
        metadata = weights.facts(path)
        with importing(imports):
            form = _form(json.loads(metadata["form"]))
    except (OSError, ValueError, LookupError, TypeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError("run", str(run), f"the directory of a run ({reason})") from None
    refuse_code(run, [path for part in (experiment.model, form.task) for path in unread(part)])
    fresh = experiment.model.model_copy(update={"init": None})
    module = models.build(fresh, form, experiment.seed)
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
    adapters what was trained. Returns the file. Raises `ConfigError` as `load`; or the run has no
    adapters to merge, or there is no file to write them to.

    Args:
        run: the run directory, or its address.
        out: the file; None: the run's own is named, which holds all.
        merged: adapters are added to the weights of their layers, and all is written, as it would
            be of the module without them.
        trust_code: as for `load`.
    """
    with storage.reading(run, wanted=_read) as folder:
        path = _file(folder)
        if out is None and not merged:
            return storage.named(storage.within(run, path.name))
        if out is None:
            raise ConfigError("--out", None, "a file for the merged weights")
        file = Path(out)
        module = _load(run, folder, trust_code).module
        held = weights.packed(_exported(module, merged), file.suffix, weights.facts(path))
    replace_file(file, lambda part: part.write(held))
    return file


def _exported(module: nn.Module, merged: bool) -> dict[str, torch.Tensor]:
    """What is written of a module: all, or of one with adapters what was trained, or these merged.
    Raises `ConfigError`.
    """
    added = models.adapters(module)
    if merged and not added:
        raise ConfigError("--merged", True, "a run with adapters (model.lora)")
    if merged or not added:
        return models.merged(module) if merged else module.state_dict()
    sent = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    sent -= models.shared_and_local.local(module)
    return {name: tensor for name, tensor in module.state_dict().items() if name in sent}


def _file(folder: Path) -> Path:
    path = folder / weights.SAVED
    if not os.path.isfile(path):
        expected = f"the directory of a run that has ended; it has no {weights.SAVED} "
        expected += f"(raydpfl run {folder} --resume ends it)"
        raise ConfigError("run", str(folder), expected)
    return path


def _form(facts: dict[str, Any]) -> Form:
    target = facts["target"]
    targets = Target(tuple(target["shape"]), target["classes"], tuple(target["names"]))
    return Form(tuple(facts["shape"]), targets, tasks.parse(facts["task"]), facts["tokens"])
