"""Worlds of a replay in which clients send what an adversary would."""

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property

import numpy as np
import torch

from raydpfl.audit import checks
from raydpfl.audit.checks import Check
from raydpfl.audit.client_canaries import FAR, ClientCanaryRun, sum_mechanism
from raydpfl.audit.replay.sum_difference import ROUNDING
from raydpfl.audit.replay.world import LARGEST, World, replace_victim_rows
from raydpfl.core.messages import Columns
from raydpfl.core.prng import Purpose, normals
from raydpfl.methods.noise import NoiseSource, SideQuery
from raydpfl.methods.selection import Cohort
from raydpfl.simulation.client.actor import ClientActor
from raydpfl.simulation.client.actor_round import ChunkRound
from raydpfl.simulation.client.contribution import Contribution
from raydpfl.simulation.noise_monitor import MonitoredNoise
from raydpfl.training.backends.base import Block

FALSE_ALARM = 1e-9  # of one check of the noise
ROUNDED = 1e-3  # of the coordinates of a vector, that it may round otherwise to integers
SAME = 1e-6  # of two draws of one noise, over its std and the bound: float64, and the sums' grid
# contributions x (parameters + OVERHEAD) of a world
LESS = 3e7
OVERHEAD = 20_000
# what a client with state may send at most: its state is float32, and so is its square
WITH_STATE = 1e15
SENT = ("far", "opposite", "tiny", "largest", "spike", "denormal", "NaN", "nothing", "infinite")
LENGTHS = (0.5, 0.999, 1.001, 1.1, 1.5, 2.0, 3.0, 5.0, 10.0, 30.0)  # in bounds, of other updates


class AdversaryWorld(World, ClientCanaryRun):
    """A world in which no client trains: what each would send unbounded is an adversary's."""

    def plant(self, actor: ClientActor) -> None:
        """Losses and scores are of other rows too."""
        if self.neighbour is not None and not self.neighbour.is_rotating:
            reader = actor.shards.reader
            actor.shards.reader = replace_victim_rows(reader, self.neighbour.victim, -1e4)

    def select(self, t: int) -> Cohort:
        """One client of the cohort, if any, has its turn."""
        cohort = super().select(t)
        clients = cohort.clients.tolist()
        if self.neighbour is None and clients:
            turns = [client for client in clients if self._action(client, t) == "far"] or clients
            self.records[t].turn = turns[t % len(turns)]
        return cohort

    def blocks(self, contribution: Contribution, state: ChunkRound) -> Iterator[Block]:
        for slots in np.flatnonzero(state.chunk.members >= 0)[:, None]:
            client = int(state.chunk.members[slots[0]])
            action = self._action(client, state.work.t)
            updates = self._updates(action, client, state, slots, contribution.device)
            loss = 10.0 ** (SENT.index(action) - 2) if isinstance(action, str) else action
            yield Block(slots, updates, np.full(1, math.nan if action == "NaN" else loss))

    def _action(self, client: int, t: int) -> str | float:
        """What a client sends in a round, or how long, in bounds; victims of the first world go as
        far as they can, and do anything else in a neighbouring one.
        """
        neighbour = self.neighbour
        if neighbour is not None and client == neighbour.victim:
            place = 1 + (neighbour.first - 1 + t) % (len(SENT) - 1)
            return "nothing" if neighbour.absent else SENT[place]
        turn = client + t
        if client in self.canaries.places or turn % 2:
            return "far"
        return (*SENT, *LENGTHS)[turn // 2 % (len(SENT) + len(LENGTHS))]

    def _updates(
        self,
        action: str | float,
        client: int,
        state: ChunkRound,
        slots: np.ndarray,
        device: torch.device,
    ) -> torch.Tensor:
        """A client's update, float32 [1, d]."""
        d = self.plan.d
        bounding = self.experiment.bounding
        peak = LARGEST if self.experiment.stateful is None else WITH_STATE
        far_norm = FAR * (self._bound + self._client_std / self.plan.weight) + bounding.far
        direction = normals(self.experiment.seed, Purpose.CANARY, d, client=client)
        direction /= torch.linalg.vector_norm(direction, dtype=torch.float64).float()
        sizes = {"far": far_norm, "opposite": -far_norm, "tiny": 1e-3 * self._bound, "nothing": 0.0}
        if action in sizes or isinstance(action, float):
            unit = float(torch.linalg.vector_norm(direction, bounding.order))
            size = action * self._bound / unit if isinstance(action, float) else sizes[action]
            vectors = (direction * size).to(device)[None]
            return bounding.invert(vectors, state.view("bounding", slots)).float()
        updates = torch.zeros(1, d)
        spike = (client + state.work.t) % d
        if action == "largest":
            updates[:] = torch.sign(direction) * peak
        elif action == "denormal":
            updates[:] = 1e-45
        else:
            updates[0, spike] = {"spike": peak / 1e8, "NaN": math.nan, "infinite": math.inf}[action]
        return updates.to(device)

    def sent(self, state: ChunkRound, block: Block, vector: torch.Tensor) -> None:
        work, chunk = state.work, state.chunk
        slots = block.slots
        client = int(chunk.clients[slots[0]])
        addend = vector.cpu().numpy()
        if work.modular is None:
            super().sent(state, block, vector)
        else:
            self._sum += addend
        turn = (self.first or self).records[work.t].turn
        if client in self.canaries.places or client == turn:
            victim_vectors = self.records[work.t].sent
            victim_vectors[client] = victim_vectors.get(client, 0.0) + addend
        if self.neighbour is not None:
            return
        key = chunk.clients[slots], chunk.draws[slots]
        if self._client_std:
            noise = self.experiment.noise
            std = self._client_std
            if self.plan.lattice is not None:
                std = noise.client_std(self.plan.lattice.std, self.plan.clients_left)
            drawn_noise = noise.on_clients(work.noise_seed, work.t, *key, std, self.plan.d)
            assert drawn_noise is not None  # of this std
            addend = addend - drawn_noise[0]
            if work.modular is None:
                subject = f"client {client}'s update"
                self._check_noise(work.t, subject, self._sent_noise, drawn_noise[0], std)
            else:
                scores = noise.scores(drawn_noise[0], std)  # of integers, as normals
                self.update_squares.append((work.t, client, float(scores @ scores)))
        order = self.experiment.bounding.order
        length, limit = float(np.linalg.norm(addend, order)), self._bound * self.plan.weight
        slack = self.plan.d ** (1 / order) * work.grid.step
        if work.modular is not None:
            target = work.modular.encode(self._expected_vector(state, block)[None], *key)[0]
            errors = np.flatnonzero(addend != target)
            if len(errors) > ROUNDED * self.plan.d or np.abs(addend - target).max(initial=0.0) > 1:
                self.faults.append(
                    f"client {client} sends other integers in round {work.t} than its vector and "
                    f"the noise that was accounted for make, in {len(errors)} coordinates"
                )
            length, limit, slack = float(addend @ addend), float(work.modular.square), 0.0
        if not length <= limit * (1 + ROUNDING) + slack:
            norm = "norm" if work.modular is None else "squared norm"
            self.moves.append(
                f"client {client} sends {norm} {length:.12g} in round {work.t}, where {limit:.12g} "
                "is declared"
            )

    # --- the noise: what the member draws for the std that accountants have ---

    def _check_noise(
        self, t: int, subject: str, added_noise: np.ndarray, drawn_noise: np.ndarray, std: float
    ) -> None:
        gap = float(np.abs(added_noise - drawn_noise).max(initial=0.0))
        exact = self.plan.lattice is not None  # integers
        if not gap <= (0.0 if exact else SAME * (std + self._bound * self.plan.weight)):
            self.faults.append(
                f"the noise on {subject} of round {t} is off by {gap:.6g} from what noise.kind "
                f"{self.experiment.noise.kind} draws at std {std:.6g}, which was accounted for"
            )

    def release(self, t: int, total: np.ndarray) -> np.ndarray:
        noised_sum = super().release(t, total)
        if self.neighbour is None:
            std = self.stds[-1] if self.plan.lattice is None else self.plan.lattice.std
            drawn_noise = self._noise_source.on_sum(t, std)
            drawn_noise = np.zeros(self.plan.d) if drawn_noise is None else drawn_noise
            added_noise = self.records[t].noise["updates"]
            self._check_noise(t, "the sum", added_noise, drawn_noise, std)
            if self.plan.lattice is not None and not self._client_std:
                scores = self.experiment.noise.scores(added_noise, std)  # of integers, as normals
                self.squares.append(float(scores @ scores))
        return noised_sum

    @cached_property
    def _noise_source(self) -> NoiseSource:
        return self.experiment.noise.on_server(self.plan.noise_seed, self.plan.d)

    def noisy_answers(
        self, t: int, cohort: Cohort, columns: Columns, noise: MonitoredNoise | None = None
    ) -> dict[str, float]:
        sums = super().noisy_answers(t, cohort, columns, noise)
        if noise is not None or self.neighbour is not None:
            return sums
        plan = self.plan
        for query in sum_mechanism(plan).sums[1:]:
            std = self._ratios[query.name] * query.bound * plan.factor(t)
            query_cohort = cohort.clients, cohort.draws, plan.clients_left
            side_query = SideQuery(query.name, plan.noise_seed, t, std, *query_cohort)
            drawn_noise = np.array(self.experiment.noise.on_query(side_query))
            added_noise = self.records[t].noise[query.name]
            self._check_noise(t, f"the sum of {query.name}", added_noise, drawn_noise, std)
        return sums


class EveryoneWorld(AdversaryWorld):
    """A world of two rounds in which every client takes part, whatever the cohort. In the first it
    goes as far as it can, in the second their updates have all lengths around the bound.
    """

    def select(self, t: int) -> Cohort:
        max_clients = int(LESS / (self.plan.d + OVERHEAD))
        return Cohort.of(np.arange(min(len(self.plan.population), max(1, max_clients))))

    def _action(self, client: int, t: int) -> str | float:
        low, high = LENGTHS[0], LENGTHS[-1]
        return low * (high / low) ** (client / len(self.plan.population)) if t else "far"

    def finished(self) -> None:
        self.pool.close()

    def checks(self) -> list[Check]:
        """Of what every client sends."""
        if self.plan.lattice is not None:
            return [replace(checks.sums([self]), name="sums of everyone")]
        noise = checks.noise_of_updates([self], FALSE_ALARM)
        results = (checks.bounds([self], FALSE_ALARM), checks.sums([self]), noise)
        return [replace(check, name=f"{check.name} of everyone") for check in results if check]
