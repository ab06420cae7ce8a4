"""The client actors of a run: what an error, a kill and another process do to the pool."""

import os

import numpy as np
import psutil
import pytest
from conftest import experiment

from raydpfl.errors import RunError
from raydpfl.simulation.resolution import resolve


@pytest.mark.slow
def test_a_pool_goes_on_after_an_error_a_kill_and_in_other_processes(shared_ray):
    from raydpfl.runtime.actor_pool import ActorPool

    plan = resolve(experiment())
    pool = ActorPool(plan.experiment, str(plan.shards), 2, plan.platform)
    pool.wait_until_up(lambda: None)
    model = np.zeros(plan.d, np.float32)
    many = np.arange(40)

    def losses(pool: ActorPool, clients: np.ndarray) -> list[float]:
        return pool.losses(model, 0, clients, plan.noise_seed).tolist()

    expected = losses(pool, many)
    for _ in range(2):  # the answer of the actor without an error is not taken for a later one
        with pytest.raises(RunError, match="IndexError"):
            losses(pool, np.append(many, 10**6))
    assert losses(pool, many[:5]) == expected[:5] and pool.replaced == 0

    psutil.Process(pool._facts[1].pid).kill()
    assert losses(pool, many) == expected and pool.replaced == 1

    there = shared_ray.remote(lambda pool: losses(pool, many))
    assert shared_ray.get(there.remote(pool)) == expected == losses(pool, many)
    ends = shared_ray.remote(lambda pool: (losses(pool, many), os.kill(os.getpid(), 9)))
    with pytest.raises(shared_ray.exceptions.WorkerCrashedError):
        shared_ray.get(ends.options(max_retries=0).remote(pool))
    assert losses(pool, many) == expected and pool.replaced == 1
    pool.close()
