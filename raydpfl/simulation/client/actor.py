"""Trains and evaluates clients for a coordinator.

A `ClientActor` is a plain class: it runs in an actor of Ray (`client.actors` above 0) or in the
coordinator's process (`client.actors: 0`). The bits are the same, because all randomness is keyed
and every chunk has the same shape wherever it runs:

- a pooled actor trains chunks, or parts of them where a client's bits depend on it alone
  (`raydpfl.training.backends.base.Backend.threads`);
- with an actor per client, an actor trains its client at that client's slot of the chunk, and the
  other slots are empty.

Either returns one vector, the exact sum of what its clients send.
"""

import math
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial

import numpy as np
import torch

from raydpfl import models
from raydpfl.core import device, native
from raydpfl.core.hardware import threads
from raydpfl.core.messages import Broadcast, Chunk, ChunkResult, Work
from raydpfl.core.prng import Purpose, keyed_globals, stream
from raydpfl.data import Shards
from raydpfl.errors import (
    USER_EXCEPTIONS,
    ConfigError,
    DeviceError,
    located_message,
    wrap_user_errors,
)
from raydpfl.experiment import Experiment
from raydpfl.simulation.client.actor_round import ActorRound, ChunkRound
from raydpfl.simulation.client.chunk_training import ChunkTraining, UserCodeWatch
from raydpfl.simulation.client.contribution import (
    Contribution,
    KernelContribution,
    ScaledContribution,
    choose,
)
from raydpfl.simulation.client.data_cache import GpuRows, Rows
from raydpfl.simulation.client.personalization import Ditto, LocalParameters
from raydpfl.simulation.evaluation import BatchScores, Evaluator
from raydpfl.simulation.user_code import runs_user_code, trains_user_code
from raydpfl.training.process_settings import single_thread, tune_allocator
from raydpfl.training.trainer import Trainer

# numbers of rows that joined chunks may take, and of padding that joining another may cost
JOINED_SIZE = 1 << 22
PADDING = 1 << 17


class ClientActor:
    """Trains chunks of clients. Raises `ClientError` naming a client whose training failed or gave
    a non-finite update.

    In the coordinator's process it is made with the experiment and its shards. An actor's process
    starts before there is an experiment, and calls `make` and `check` later
    (`raydpfl.runtime.worker.start_worker`).
    """

    def __init__(self, experiment: Experiment | None = None, shards: str = ""):
        self.in_process = experiment is not None
        if experiment is not None:
            self.make(experiment, shards)
            self.check()

    def make(self, experiment: Experiment, shards: str) -> None:
        """Opens the data and builds the model and the trainer."""
        single_thread()
        tune_allocator()
        client = experiment.client
        native.use(threads() if self.in_process else int(client.num_cpus))
        self.experiment = experiment
        self.shards = Shards.open(shards)
        self.form = self.shards.form(experiment.data.task)
        self.device = device.choose_device(client.num_gpus)
        device.settle(self.device, client.num_gpus, tf32=client.precision == "tf32")
        rows = self.shards, self.form, self.device
        on_gpu = self.device.type != "cpu"
        self.rows = GpuRows(*rows, client.num_gpus) if on_gpu else Rows(*rows)
        module = models.build(experiment.model, self.form, experiment.seed)
        self.trainer = Trainer(
            module,
            experiment.local,
            backend=client.backend,
            seed=experiment.seed,
            device=self.device,
            clip=experiment.bounding.sample_bound,
            user_defined=trains_user_code(experiment),
            task=self.form.task,
            precision=client.precision,
        )
        self.module = module.to(self.device).eval()  # the trainer has a copy
        rule = experiment.personal
        self.personal = (
            Ditto(experiment, rule, self.shards, self.module)
            if rule
            else LocalParameters(self.module)
        )
        self.evaluator = Evaluator(experiment, self.shards, self.module, self.personal)
        self.training = ChunkTraining(experiment, self.rows, self.trainer, self.personal)
        kinds = (KernelContribution, ScaledContribution, Contribution)
        self._contributions = {kind: kind(self.training) for kind in kinds}
        self._totals = torch.empty(0, 0)  # of the last round, see `ActorRound.totals`
        self._watch = UserCodeWatch(self.training) if self.trainer.user_defined else None

    def contribution(self, state: ChunkRound) -> Contribution:
        """What adds up a chunk; an audit observes it."""
        return self._contributions[choose(state, self.training)]

    def check(self) -> None:
        """On a GPU, trains two made-up clients: a module that trains on the CPU may fail there, as
        it makes tensors on the CPU or has no deterministic form. Raises `ConfigError`.
        """
        if self.device.type == "cpu":
            return
        local = self.experiment.local
        flat = models.trained(self.module)[: self.personal.split.parameters]
        form = self.form
        x = form.inputs(4).view(2, 2, *form.shape)
        y = form.task.random_targets(stream(0, Purpose.DATA), 4, form.outputs)
        data = (flat, x, y.view(2, 2, *y.shape[1:]), [2, 2])
        corrections = torch.zeros(2, len(flat)) if local.corrects else None
        train = partial(self.trainer.chunk, *data, clients=[0, 1], draws=[0, 0])
        try:
            with device.device_errors(self.device):
                for _ in train(t=0, corrections=corrections):
                    device.synchronise(self.device)
        except DeviceError:
            raise
        except USER_EXCEPTIONS as error:
            kind = self.experiment.model.kind
            expected = "a module that trains on a GPU, with all its tensors where its input is"
            expected += f" ({located_message(error)})"
            raise ConfigError("model.kind", kind, expected) from None

    def train(self, broadcast: Broadcast, work: Work, chunks: Sequence[Chunk]) -> ChunkResult:
        """The exact sum of what clients of these chunks send, and the columns recorded of them."""
        with wrap_user_errors(f"round {work.t}"):
            start_time = time.perf_counter()
            self.trainer.seed = work.seed
            self.trainer.noise_seed = work.noise_seed
            actor = self.begin(broadcast, work)
            joined_chunks = list(self.join_chunks(chunks))
            for chunk in joined_chunks[1:]:  # the first is read at once
                self.shards.prefetch(chunk.members, chunk.rows)
            with device.device_errors(self.device):
                for chunk in joined_chunks:
                    self.add(actor, chunk)
                if self._watch:
                    self._watch.check(actor)
                result = actor.result()
            self.shards.release()
            result.seconds = time.perf_counter() - start_time
            return result

    def begin(self, broadcast: Broadcast, work: Work) -> ActorRound:
        """The accumulator of a round, on the device."""

        def copy_to_device(array: np.ndarray) -> torch.Tensor:
            # a copy: Ray's arrays are read-only
            return device.move_tensor(torch.tensor(array), self.device)

        states = {
            member: {name: copy_to_device(array) for name, array in state.items()}
            for member, state in broadcast.states.items()
        }
        if self.in_process or runs_user_code(self.experiment):
            model = copy_to_device(broadcast.model)
        else:  # in Ray's object store, as nothing writes to it
            with warnings.catch_warnings(action="ignore"):
                model = device.move_tensor(torch.from_numpy(broadcast.model), self.device)
        # rows of whole vectors, one per thread that adds
        width = -(-model.numel() // native.VECTOR) * native.VECTOR
        count = native.threads() if self.trainer.backend.threads else 1
        # an actor's result is a copy in Ray's object store, so its memory serves all rounds
        if self.in_process or self._totals.shape != (count, width):
            self._totals = torch.zeros(count, width, dtype=torch.float64, device=self.device)
        else:
            self._totals.zero_()
        return ActorRound(
            work,
            self.experiment.local.learning_rate(work.t),
            model,
            states,
            self._totals,
            self.experiment.client.on_error,
        )

    def add(self, actor: ActorRound, chunk: Chunk) -> None:
        """Trains a chunk, and adds what its clients send and what is recorded of them."""
        previous_parameters = self.personal.before(chunk, np.arange(len(chunk.clients)))
        state = ChunkRound(actor, chunk, previous_parameters)
        self.contribution(state).add_chunk(state)
        self.personal.train(state)
        state.finish(self.experiment.bounding)

    def join_chunks(self, chunks: Sequence[Chunk]) -> Iterator[Chunk]:
        """The chunks by rows; joined, where compiled code trains and padding hardly grows."""
        features = math.prod(self.shards.shape)
        group: list[Chunk] = []
        for chunk in sorted(chunks, key=lambda chunk: chunk.rows):
            if chunk.slot is not None or not self.trainer.backend.threads:
                yield chunk
                continue
            if group:
                row = chunk.width * features
                padding = len(group) * (chunk.rows - group[-1].rows) * row
                if padding > PADDING or (len(group) + 1) * chunk.rows * row > JOINED_SIZE:
                    yield Chunk.concatenate(group)
                    group = []
            group.append(chunk)
        if group:
            yield Chunk.concatenate(group)

    @wrap_user_errors()
    def losses(
        self, model: np.ndarray, t: int, clients: Sequence[int], noise_seed: int
    ) -> list[float]:
        """What the selection has each of `clients` answer of the losses of `model` (float32 [d]) on
        all of its rows, with noise of `noise_seed`.
        """
        selection = self.experiment.selection
        models.load(self.module, device.move_tensor(torch.tensor(model), self.device))
        parts = []
        with device.device_errors(self.device), torch.inference_mode():
            for client in clients:
                self.training.client = client
                x, y, _ = self.rows.chunk([client], int(self.shards.sizes[client]))
                # what user-defined code draws from the process's generators is keyed
                key = {"t": t, "client": client, "step": 3}
                user_defined = self.trainer.user_defined
                with keyed_globals(self.experiment.seed, **key) if user_defined else nullcontext():
                    parts.append(self.form.task.loss(self.module(x[0]), y[0]).double())
            row_losses = torch.cat(parts).cpu().numpy() if parts else np.empty(0)
        by_client = np.split(row_losses, np.cumsum([len(part) for part in parts])[:-1])
        pairs = zip(clients, by_client, strict=False)
        return [selection.answer(losses, noise_seed, t, client) for client, losses in pairs]

    @wrap_user_errors("an evaluation of the model")
    def evaluate(
        self, model: np.ndarray, t: int, indices: Sequence[int], states: Mapping[int, np.ndarray]
    ) -> list[BatchScores]:
        """See `Evaluator.evaluate`."""
        self.training.client = -1
        with device.device_errors(self.device):
            return self.evaluator.evaluate(model, t, indices, states)
