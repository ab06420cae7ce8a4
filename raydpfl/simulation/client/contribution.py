"""What clients send: their updates bounded, weighted, with noise, added up on a grid.

Three implementations of one algorithm give the same bits; `choose` takes the fastest for a chunk:

- `KernelContribution`: compiled code adds every update while it is in the cache;
- `ScaledContribution` bounds and noises float32 updates while it adds them;
- `Contribution`, the reference, makes the float64 vectors that clients send.
"""

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from itertools import chain
from traceback import clear_frames

import numpy as np
import torch

from raydpfl.core import device, exact_sum, native
from raydpfl.core.prng import keyed_globals
from raydpfl.errors import USER_EXCEPTIONS, RunError
from raydpfl.methods.hook_values import array_of, check_names
from raydpfl.methods.probes import Sent
from raydpfl.simulation.client.actor_round import ChunkRound, check_shape
from raydpfl.simulation.client.chunk_training import ChunkTraining
from raydpfl.simulation.user_code import runs_user_code
from raydpfl.training.backends.base import Block, Sum

LEAST_NORM = 2.0**-450  # squares of such numbers are far from the least of float64
PREFETCH_BYTES = 1 << 31  # bytes of noise that are drawn before they are needed


class Contribution:
    """Trains the clients of a chunk and adds up what they send."""

    def __init__(self, training: ChunkTraining):
        self.training = training
        self.experiment = training.experiment
        self.bounding = self.experiment.bounding
        self.device = training.device
        self._user_defined = runs_user_code(self.experiment)

    def add_chunk(self, state: ChunkRound) -> None:
        """Trains the clients of a chunk and adds what they send to the actor's total. On a GPU a
        thread draws the clients' noise meanwhile.
        """
        small = 8 * state.actor.d * len(state.slots) <= PREFETCH_BYTES
        if self.device.type == "cpu" or state.work.client_std == 0 or not small:
            self._add_blocks(state)
            return
        with ThreadPoolExecutor(1) as thread:
            state.drawn = thread.submit(self.noise, state, state.slots)
            self._add_blocks(state)

    def _add_blocks(self, state: ChunkRound) -> None:
        for block in self.blocks(state):
            if block.local is not None:
                state.local_parameters[state.index(block.slots)] = block.local
            # what user-defined code computes or draws for a client must not depend on others
            for part in block.singles() if self.bounding.is_user_defined else (block,):
                self.add(state, part, state.actor.total)

    def blocks(self, state: ChunkRound) -> Iterator[Block]:
        """The updates of the chunk's clients; an audit has others."""
        return self.training.blocks(state, state.chunk.members)

    def add(self, state: ChunkRound, block: Block, total: torch.Tensor) -> None:
        """Adds what the clients of a block send to `total`, float64 [d]. Where the device's memory
        does not hold the vectors of all clients, it takes one half of the block after the other.
        """
        vectors = None
        try:
            vectors = self.vectors(state, block)
        except RuntimeError as error:
            is_single = len(block.slots) == 1
            if is_single or self.device.type == "cpu" or not device.is_out_of_memory(error):
                raise
            clear_frames(error.__traceback__)
        if vectors is None:
            device.empty_cache(self.device)
            half = len(block.slots) // 2
            self.add(state, block.part(slice(half)), total)
            self.add(state, block.part(slice(half, None)), total)
        elif self.device.type == "cpu":
            exact_sum.add(total.numpy(), vectors.contiguous().numpy(), state.work.grid)
        else:
            vectors, largest = exact_sum.snap_to_grid(vectors, state.work.grid)
            total += vectors.sum(0)
            state.actor.largest.append(largest)

    def vectors(self, state: ChunkRound, block: Block) -> torch.Tensor:
        """What a block's clients send: weighted, bounded vectors, with noise, float64 [k, d]."""
        slots = block.slots
        bounding = self.bounding
        local = self.experiment.local
        view = state.view("bounding", slots)
        vectors = self.unbounded_vectors(state, slots, block.updates)
        check_shape(f"bounding.kind {bounding.kind} sends", vectors, (len(slots), state.actor.d))
        lengths = self.lengths(vectors)
        norms = self.finite_norms(state, slots, vectors, lengths)
        factors = self.bounding_factors(state, slots, lengths)
        scale = torch.from_numpy(factors * state.chunk.weights[slots])
        unbounded_vectors = vectors.clone() if bounding.stateful else vectors
        vectors *= device.move_tensor(scale, self.device)[:, None]
        noise = self._noise_of(state, slots)
        sums = state.work.modular
        probe_noise = noise if sums is None or noise is None else sums.decode(noise)
        columns = self._probe_columns(state, block, vectors, probe_noise)
        residual = bounding.next_state(unbounded_vectors, vectors, view)
        if self._user_defined:
            self._check_lengths(state, slots, vectors)
        if sums is not None:
            client_draws = state.chunk.clients[slots], state.chunk.draws[slots]
            integers = sums.encode(vectors.cpu().numpy(), *client_draws)
            vectors = device.move_tensor(torch.from_numpy(integers), self.device)
        exact_vectors = vectors.clone() if self.experiment.noise.is_user_defined else vectors
        if noise is not None:
            vectors += device.move_tensor(torch.from_numpy(noise), self.device)
        local_state = None
        if local.stateful:
            sent_vectors = vectors.clone() if self._user_defined else vectors
            if sums is not None:
                decoded_vectors = sums.decode(vectors.cpu().numpy())
                sent_vectors = device.move_tensor(torch.from_numpy(decoded_vectors), self.device)
            inverted_updates = bounding.invert(sent_vectors, view)
            local_state = local.next_state(inverted_updates, state.view("local", slots))
        # at last, as what comes before is repeated where memory is short
        state.record(slots, norms, factors, block.losses)
        self.monitor_noise(state, slots, noise, exact_vectors)
        state.actor.add_columns(columns)
        shape = (len(slots), state.actor.d)
        state.actor.add_client_states("bounding", residual, shape)
        state.actor.add_client_states("local", local_state, shape)
        return vectors

    def unbounded_vectors(
        self, state: ChunkRound, slots: np.ndarray, updates: torch.Tensor
    ) -> torch.Tensor:
        """What clients would send without a bound, float64 [k, d], of their updates, [k, d]."""
        return self.bounding.send(updates.double(), state.view("bounding", slots)).double()

    def lengths(self, vectors: torch.Tensor) -> np.ndarray:
        """The norms that are bounded of vectors, [k, d]: float64 [k]."""
        if self.bounding.order == 1:
            return vectors.double().abs().sum(1).cpu().numpy()
        return vector_norms(vectors)

    def finite_norms(
        self, state: ChunkRound, slots: np.ndarray, vectors: torch.Tensor, lengths: np.ndarray
    ) -> np.ndarray:
        """The norms [k] of unbounded vectors, NaN where one is not finite. Its client counts as one
        that has not moved: its vector, and its length, are then those of what it sends.
        """
        norms = lengths.copy()
        for place in np.flatnonzero(~np.isfinite(norms)).tolist():
            slot = slots[place : place + 1]
            state.drop_nonfinite_client(int(slot[0]), float(norms[place]))
            idle = self.training.idle(state, slot)[None]
            vectors[place] = self.unbounded_vectors(state, slot, idle)[0]
            lengths[place] = self.lengths(vectors[place : place + 1])[0]
            norms[place] = math.nan
        return norms

    def bounding_factors(
        self, state: ChunkRound, slots: np.ndarray, norms: np.ndarray
    ) -> np.ndarray:
        """The factors of vectors of these norms, float64 [k] both. Raises `RunError` where a vector
        times its factor is longer than the bound. A client beyond its limit has the factor 0.
        """
        work = state.work
        first_slot = int(slots[0])
        client, draw = int(state.chunk.clients[first_slot]), int(state.chunk.draws[first_slot])
        key = {"t": work.t, "client": client, "draw": draw}
        user_defined = self.training.trainer.user_defined
        with keyed_globals(work.seed, **key, step=2) if user_defined else nullcontext():
            # a copy, as user-defined code may write to it
            factors = self.bounding.factors(torch.from_numpy(norms.copy()), bound_of(state))
        check_shape(f"bounding.kind {self.bounding.kind} gives factors", factors, norms.shape)
        self.check_factors(state, slots, norms, factors.numpy())
        if state.chunk.limits is None:
            return factors.numpy()
        lengths = norms * factors.numpy() * np.abs(state.chunk.weights[slots])
        state.lengths[slots] = lengths
        return np.where(lengths <= state.chunk.limits[slots], factors.numpy(), 0.0)

    def check_factors(
        self, state: ChunkRound, slots: np.ndarray, norms: np.ndarray, factors: np.ndarray
    ) -> None:
        """Raises `RunError` where vectors of these norms, times the factors, pass the bound."""
        bound = state.work.bound
        if bound is None:
            return
        lengths = factors * norms
        limit = bound * (1 + 1e-12)
        if not (lengths.min() >= 0 and lengths.max() <= limit):
            place = int(np.argmin((lengths >= 0) & (lengths <= limit)))
            raise RunError(
                f"bounding.kind {self.bounding.kind} lets client "
                f"{state.chunk.clients[slots[place]]} send norm {norms[place]:g} times factor "
                f"{factors[place]:g} in round {state.work.t}, above its bound of {bound:g}"
            )

    def noise(self, state: ChunkRound, slots: np.ndarray) -> np.ndarray | None:
        """The noise of clients on what they send, float64 [k, d]; None: they draw none. Raises
        `RunError` where noise was accounted for and none is drawn.
        """
        work = state.work
        if work.client_std == 0:
            return None
        member = self.experiment.noise
        clients = state.chunk.clients[slots]
        keys = clients, state.chunk.draws[slots]
        noise = member.on_clients(work.noise_seed, work.t, *keys, work.client_std, state.actor.d)
        if noise is None:
            raise RunError(
                f"noise.kind {member.kind} draws no noise of client {clients[0]} in round "
                f"{work.t}, where N(0, {work.client_std:.6g}^2) was accounted for"
            )
        check_shape(f"noise.kind {member.kind} draws", noise, (len(slots), state.actor.d))
        return np.ascontiguousarray(noise, np.float64)

    def monitor_noise(
        self, state: ChunkRound, slots: np.ndarray, noise: np.ndarray | None, vectors: torch.Tensor
    ) -> None:
        """Records statistics of user-defined noise, and of what it hides, for the coordinator."""
        if noise is None or not self.experiment.noise.is_user_defined:
            return
        from raydpfl.simulation.noise_monitor import numbers  # loads scipy

        hidden_values = vectors.cpu().numpy().astype(np.float64)
        z = self.experiment.noise.scores(noise, state.work.client_std)
        clients = state.chunk.clients[slots]
        values = {**numbers(z, [hidden_values]), "sum": noise.sum(0), "client": clients}
        for name, array in values.items():
            state.actor.noise.setdefault(name, []).append(array)

    def _noise_of(self, state: ChunkRound, slots: np.ndarray) -> np.ndarray | None:
        """`noise`, where a thread has not drawn it."""
        if state.drawn is None:
            return self.noise(state, slots)
        noise = state.drawn.result()
        return None if noise is None else noise[np.searchsorted(state.slots, slots)]

    def _probe_columns(
        self, state: ChunkRound, block: Block, vectors: torch.Tensor, noise: np.ndarray | None
    ) -> dict[str, np.ndarray]:
        """The probes' columns of a block's clients, all float64 [k]."""

        def repeat(times: int) -> tuple[torch.Tensor, np.ndarray]:
            if times not in state.repeat_sums:  # once for all blocks of the chunk
                state.repeat_sums[times] = self.training.repeat(state, times)
            sums, squares = state.repeat_sums[times]
            return sums[state.index(block.slots)], squares[block.slots]

        columns: dict[str, np.ndarray] = {}
        for probe in self.experiment.measure:
            broadcast = state.actor.broadcast.get(f"measure.{probe.kind}", {})
            values = probe.chunk(Sent(block.updates, vectors, noise, broadcast, repeat))
            names, subject = probe.columns(noise is not None), f"measure {probe.kind}: chunk"
            check_names(subject, values, names)
            shape = (len(block.slots),)
            columns |= {
                name: array_of(f"{subject}, of {name},", values.get(name), shape) for name in names
            }
        return columns

    def _check_lengths(self, state: ChunkRound, slots: np.ndarray, vectors: torch.Tensor) -> None:
        """Raises `RunError` where what clients send, weighted and without noise, float64 [k, d], is
        longer than the bound: user-defined code with access to it may have changed it.
        """
        bound = state.work.bound
        if bound is None:
            return
        lengths = self.lengths(vectors)
        weights = np.abs(state.chunk.weights[slots])
        within_bound = lengths <= bound * weights * (1 + 1e-9)
        if not within_bound.all():
            place = int(np.argmin(within_bound))
            raise RunError(
                f"client {state.chunk.clients[slots[place]]} sends norm "
                f"{lengths[place] / weights[place]:g} in round {state.work.t}, above "
                f"the bound of {bound:g} of bounding.kind {self.bounding.kind}"
            )


class ScaledContribution(Contribution):
    """Bounds and noises float32 updates while it adds them, without a float64 copy."""

    def add(self, state: ChunkRound, block: Block, total: torch.Tensor) -> None:
        """See `Contribution.add`. It may change the updates of the block."""
        slots = block.slots
        lengths = vector_norms(block.updates) if block.norms is None else block.norms
        norms = self.finite_norms(state, slots, block.updates, lengths)
        factors = self.bounding_factors(state, slots, lengths)
        state.record(slots, norms, factors, block.losses)
        noise = self.noise(state, slots)
        self.monitor_noise(state, slots, noise, block.updates)
        scale = factors * state.chunk.weights[slots]
        exact_sum.add(total.numpy(), block.updates.numpy(), state.work.grid, scale, noise)


class KernelContribution(ScaledContribution):
    """Compiled code bounds, noises and adds every update while it is in the cache."""

    def add_chunk(self, state: ChunkRound) -> None:
        chunk = state.chunk
        work = state.work
        closed_form = self.bounding.closed(bound_of(state))
        assert closed_form is not None  # as `choose` says
        accumulator = Sum(
            closed_form,
            np.ascontiguousarray(chunk.weights, np.float64),
            *(work.client_std, work.noise_seed, work.t, chunk.clients, chunk.draws),
            *(work.grid, state.actor.totals.numpy()),
            factors=np.empty(len(chunk.clients)),
            fits=np.ones(1, bool),
        )
        blocks = self.training.train(state, chunk.members, accumulator=accumulator)
        try:
            first_block = next(blocks)
        except USER_EXCEPTIONS:  # before anything is trained; the base class names the client
            super().add_chunk(state)
            return
        for block in chain([first_block], blocks):
            assert block.norms is not None
            finite = np.isfinite(block.norms)
            for place in np.flatnonzero(~finite).tolist():
                state.drop_nonfinite_client(int(block.slots[place]), float(block.norms[place]))
            norms = np.where(finite, block.norms, np.nan)
            state.record(block.slots, norms, accumulator.factors[block.slots], block.losses)
        if not accumulator.fits[0]:
            exact_sum.check_range(math.inf, work.grid)
        norms = np.nan_to_num(state.norms[state.slots])
        self.check_factors(state, state.slots, norms, state.factors[state.slots])


def choose(state: ChunkRound, training: ChunkTraining) -> type[Contribution]:
    """The fastest implementation that takes this chunk."""
    experiment = training.experiment
    bounding = experiment.bounding
    needs_vectors = any(probe.looks for probe in experiment.measure)
    needs_vectors = needs_vectors or bounding.stateful or experiment.local.stateful
    needs_vectors = needs_vectors or state.work.modular is not None
    if training.device.type != "cpu" or needs_vectors or not bounding.scales:
        return Contribution
    clients = state.chunk.clients[state.slots]
    fits_kernel = (
        training.trainer.backend.threads
        and not (training.trainer.user_defined or training.personal.count)
        and (state.work.client_std == 0 or not experiment.noise.is_user_defined)
        and len(clients)
        and state.chunk.limits is None
        and training.rows.sizes(clients).all()
        and bounding.closed(bound_of(state)) is not None
    )
    return KernelContribution if fits_kernel else ScaledContribution


def bound_of(state: ChunkRound) -> float:
    """The bound on what a client sends, before its weight."""
    return math.inf if state.work.bound is None else state.work.bound


def vector_norms(vectors: torch.Tensor) -> np.ndarray:
    """The L2 norms of vectors, float64 [k, d]: float64 [k]. Where squares underflow it is
    `LEAST_NORM` unless it is 0, so that none is too small.
    """
    on_cpu = vectors.device.type == "cpu"
    norms = native.norms(vectors) if on_cpu else device.norms(vectors).numpy()
    return np.where((norms > 0) & (norms < LEAST_NORM), LEAST_NORM, norms)
