"""Which actors run which chunks, and what the machine is asked for before anything starts."""

import os
import subprocess
import time
from dataclasses import replace
from functools import partial

import numpy as np
import psutil
import pytest

from raydpfl.core.messages import Chunk
from raydpfl.errors import ConfigError
from raydpfl.methods.selection import Cohort
from raydpfl.runtime import orphan_cleanup, session
from raydpfl.runtime.capacity import actor_count, capacity
from raydpfl.sections import Client
from raydpfl.simulation import scheduler
from raydpfl.simulation.scheduler import Costs, assign_chunks, assign_singly, chunks, rows


def cut(sizes, width, costs=None) -> list[Chunk]:
    sizes = np.asarray(sizes)
    clients = np.arange(len(sizes)) * 3
    costs = None if costs is None else np.array(costs)
    return chunks(Cohort.of(clients), np.ones(len(sizes)), sizes, width, sizes / 10, costs)


def test_chunks_hold_every_client_once_are_cut_by_size_and_are_padded_to_one_width():
    made = cut([4, 9, 2, 7, 5], 2)
    assert [chunk.clients.tolist() for chunk in made] == [[0, 6], [9, 12], [3, -1]]
    assert [chunk.rows for chunk in made] == [4, 7, 9]
    assert all(len(chunk.weights) == len(chunk.draws) == 2 for chunk in made)
    assert [chunk.stds.tolist() for chunk in made] == [[0.4, 0.2], [0.7, 0.5], [0.9, 0.0]]


SIZES = [2, 9, 4, 5, 7]


@pytest.mark.parametrize(
    ("sizes", "width", "costs", "clients"),
    [
        # of one size: as they stand in the cohort
        ([6] * 7, 3, None, [[0, 3, 6], [9, 12, 15], [18, -1, -1]]),
        # of one cost: by size
        (SIZES, 2, [[3.0] * 5, [5.0] * 5, [2.0] * 5], [[0, 6], [9, 12], [3, -1]]),
        # a chunk takes as long as its largest client, as on a GPU: most steps first in each
        (SIZES, 2, [SIZES, SIZES, [0] * 5], [[6, 0], [12, 9], [3, -1]]),
    ],
)
def test_chunks_of_clients_that_differ_in_nothing_that_costs_have_one_width(
    sizes, width, costs, clients
):
    assert [chunk.clients.tolist() for chunk in cut(sizes, width, costs)] == clients


def test_chunks_of_unequal_clients_hardly_pad():
    drawn = np.random.default_rng(0).lognormal(np.log(50), 1.0, 320).astype(int) + 1
    sizes = np.minimum(drawn, 200)  # of 20 steps of 10, no more rows are used
    made = cut(sizes, 16)
    assert sizes.sum() / rows(made) > 0.85
    assert sizes.sum() / sum(16 * each.max() for each in sizes.reshape(-1, 16)) < 0.4


def every_cut(count: int, width: int):
    """The widths of all chunks, in all ways to cut so many clients."""
    if not count:
        yield []
    for last in range(1, min(width, count) + 1):
        for before in every_cut(count - last, width):
            yield [*before, last]


@pytest.mark.parametrize("seed", range(5))
def test_chunks_of_clients_that_cost_unequally_cost_least_of_all_cuts(seed):
    generator = np.random.default_rng(seed)
    sizes = generator.permutation(9) + 1
    steps = generator.integers(1, 5, 9) if seed % 2 else np.ones(9)
    costs = np.stack([steps, sizes * 3.0 * seed, generator.lognormal(2, 1, 9).round(2)])
    order = np.argsort(sizes)

    def cost(widths: list[int]) -> float:
        ends = np.cumsum(widths)
        _, chunk, step = costs[:, order[ends - 1]]
        made = np.add.reduceat(steps[order], ends - widths)
        return float((chunk + made * step).sum())

    made = chunks(Cohort.of(np.arange(9)), np.ones(9), sizes, 4, costs=costs)
    widths = [len(chunk.clients) for chunk in made]
    assert cost(widths) == pytest.approx(min(map(cost, every_cut(9, 4))))
    ends = np.cumsum(widths)
    for chunk, end in zip(made, ends, strict=True):
        own = order[end - len(chunk.clients) : end]
        most_first = sorted(own, key=lambda client: (-steps[client], client))
        assert chunk.clients.tolist() == most_first and chunk.rows == sizes[own[-1]]


@pytest.mark.parametrize("actors", [1, 2, 3, 7, 50])
def test_chunks_are_assigned_once_to_no_more_actors_than_there_are(actors):
    made = cut(np.random.default_rng(0).integers(1, 100, 90), 4)
    assigned = assign_chunks(made, actors, Costs().of(made))
    assert len(assigned) <= actors
    firsts = [chunk.clients.tolist() for chunk in made]
    given = [[firsts.index(chunk.clients.tolist()) for chunk in share] for share in assigned]
    assert sorted(index for share in given for index in share) == list(range(len(made)))
    assert all(share == sorted(share) for share in given)


def test_assignments_have_about_the_same_number_of_rows():
    made = cut([10] * 64, 4)
    assert [len(share) for share in assign_chunks(made, 4, Costs().of(made))] == [4, 4, 4, 4]
    unequal = cut(np.random.default_rng(1).lognormal(4, 1, 150).astype(int) + 1, 8)
    loads = [rows(share) for share in assign_chunks(unequal, 2, Costs().of(unequal))]
    assert max(loads) / sum(loads) < 0.55


@pytest.mark.parametrize("actors", [1, 2, 3, 7, 95])
def test_chunks_are_cut_between_clients_where_their_bits_are_the_same_in_any(actors):
    made = cut(np.random.default_rng(0).integers(1, 100, 90), 4)
    costs = Costs().of(made)
    assigned = scheduler.assign_clients(made, actors, costs)
    assert len(assigned) <= actors and all(assigned)
    clients = [chunk.clients.tolist() for share in assigned for chunk in share]
    everyone = np.concatenate([chunk.clients[chunk.clients >= 0] for chunk in made])
    assert np.concatenate(clients).tolist() == everyone.tolist()
    loads = [rows(share) for share in assigned]
    one = max(chunk.rows for chunk in made)
    assert max(loads) <= sum(loads) / actors + one
    assert actors == 95 or min(loads) >= sum(loads) / actors - one


def test_a_part_of_a_chunk_has_the_states_of_its_clients():
    memory = {"bounding": {slot: np.full(2, slot) for slot in (0, 2, 3)}}
    chunk = Chunk(np.arange(4), np.zeros(4, int), np.ones(4), rows=1, memory=memory)
    parts = [chunk.part(slice(0, 2)), chunk.part(slice(2, 4))]
    held = [{k: v.tolist() for k, v in part.memory["bounding"].items()} for part in parts]
    assert held == [{0: [0, 0]}, {0: [2, 2], 1: [3, 3]}]
    joined = Chunk.concatenate([parts[0], chunk.part(slice(1, 2)), parts[1]])
    assert sorted(joined.memory["bounding"]) == [0, 3, 4]


def test_what_a_row_costs_is_learned_from_the_rounds():
    costs = Costs()
    made = cut([10] * 32 + [20] * 32, 4)
    assert not costs.is_fitted and costs.of(made).tolist() == [rows([chunk]) for chunk in made]
    costs.record(made[:4], 0.4)
    costs.record(made[4:], 2.0)
    costs.record(made, 2.4)
    assert costs.of(made) == pytest.approx([0.1] * 8 + [0.2] * 8)


def test_an_empty_cohort_has_no_assignments():
    assert assign_chunks([], 2, np.zeros(0)) == assign_singly([]) == []
    assert scheduler.assign_clients([], 2, np.zeros(0)) == []


def test_singles_are_one_client_each_in_the_slot_it_has_in_its_chunk():
    made = cut([4, 9, 2], 2)
    singles = [(share[0].clients.tolist(), share[0].slot) for share in assign_singly(made)]
    assert singles == [([0, 6], 0), ([0, 6], 1), ([3, -1], 0)]


def test_a_single_client_gets_its_own_state_alone():
    chunk = replace(cut([4, 9], 2)[0], memory={"local": {0: np.ones(3), 1: np.zeros(3)}})
    assert [list(share[0].memory["local"]) for share in assign_singly([chunk])] == [[0], [1]]


@pytest.mark.parametrize(
    "cpus,gpus,nodes,held",
    [
        (1, 0, [{"CPU": 2}], 2),
        (1, 0.6, [{"CPU": 16, "GPU": 4}], 4),
        (1, 0.5, [{"CPU": 16, "GPU": 2}, {"CPU": 1, "GPU": 8}], 5),
        (1, 2, [{"CPU": 8, "GPU": 3}], 1),
        (1, 0.25, [{"CPU": 8}], 0),
        (1.5, 0, [{"CPU": 2}, {"CPU": 4}], 3),
    ],
)
def test_capacity_packs_gpu_fractions_per_device_and_cpus_per_node(cpus, gpus, nodes, held):
    assert capacity(cpus, gpus, nodes) == held


def test_auto_takes_one_actor_per_slot_and_no_more_than_there_are_chunks():
    assert actor_count(Client(), 100, 50, [{"CPU": 2}], elastic=True) == 2
    assert actor_count(Client(), 100, 1, [{"CPU": 2}], elastic=True) == 1
    assert actor_count(Client(num_cpus=2), 100, 50, [{"CPU": 3}, {"CPU": 3}], elastic=False) == 2
    beside_others = partial(actor_count, Client(), 100, 50, [{"CPU": 4}] * 2, elastic=False)
    assert beside_others(available_resources={"CPU": 3.0}) == 3
    assert beside_others(available_resources={}, inline=True) == 1
    with pytest.raises(ConfigError, match=r"client.actors = 'auto'.*other runs have all"):
        beside_others(available_resources={})


def test_what_ray_says_is_free_is_what_other_runs_have_left(shared_ray):
    class Held:
        def look(self) -> bool:
            return True

    whole = shared_ray.cluster_resources()["CPU"]
    assert session.free_resources()["CPU"] == whole
    other = shared_ray.remote(Held).options(num_cpus=whole - 1).remote()
    shared_ray.get(other.look.remote())

    def wait_for(cores: float) -> None:  # Ray tells of it a little later
        deadline = time.monotonic() + 20
        while session.free_resources()["CPU"] != cores:
            assert time.monotonic() < deadline

    wait_for(1.0)
    shared_ray.kill(other)
    wait_for(whole)


@pytest.mark.slow
def test_client_actors_of_other_runs_of_this_machine_are_counted():
    before = session.count_client_actors()
    for marked in (False, True):
        environment = {**os.environ, orphan_cleanup.MARK: "theirs"} if marked else None
        command = ["bash", "-c", "exec -a ray::ClientActor.train sleep 60"]
        process = subprocess.Popen(command, env=environment)
        try:
            deadline = time.monotonic() + 20
            while not any("ray::" in word for word in psutil.Process(process.pid).cmdline()[:1]):
                assert time.monotonic() < deadline
            assert session.count_client_actors() == before + marked
        finally:
            process.kill()
            process.wait()


def test_a_cluster_that_others_share_is_never_asked_for_more_than_it_holds():
    with pytest.raises(ConfigError, match=r"client.actors = 3: expected at most 2 actors of 1 CPU"):
        actor_count(Client(actors=3), 100, 50, [{"CPU": 2}], elastic=False)


def test_this_machine_is_asked_for_what_its_memory_holds():
    assert actor_count(Client(actors=4), 100, 50, [{"CPU": 2}], elastic=True) == 4
    said = r"client.actors = 'per-client': expected at most \d+ actors fit here"
    with pytest.raises(ConfigError, match=said):
        actor_count(Client(actors="per-client"), 10_000_000, 50, [{"CPU": 2}], elastic=True)
