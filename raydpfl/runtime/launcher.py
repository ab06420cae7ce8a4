"""Where a run's coordinator and clients are: in this process, or in actors of Ray.

`client.actors` says it. `auto` is decided once, before the first round:

- with an address, a placement group or GPUs: as many client actors as fit;
- else this process, where compiled code trains in threads, where one actor at most has work or
  room, or where actors would save less time in all rounds than Ray's start takes, by the steps of
  a few clients that were timed;
- else one actor for each core.

What was decided for this machine is logged and written into the config of the run. A cluster may
have other nodes when a run is resumed, so there `auto` stays.
"""

from __future__ import annotations

import logging
import math
import os
import pickle
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from raydpfl.core import device, signals
from raydpfl.core.hardware import cores, threads
from raydpfl.errors import ConfigError, RunError, message, traceback_text, wrap_user_errors
from raydpfl.runtime.capacity import actor_count
from raydpfl.runtime.session import (
    LOOK,
    Session,
    count_client_actors,
    free_resources,
    pin_to_node,
    unwrap_error,
)
from raydpfl.sections import Client
from raydpfl.simulation.coordinator import Coordinator
from raydpfl.simulation.plan import Plan
from raydpfl.simulation.pool import Pool
from raydpfl.simulation.user_code import search
from raydpfl.training.backends import BACKENDS
from raydpfl.training.process_settings import tune_allocator

if TYPE_CHECKING:
    from raydpfl.runtime.actor_pool import ActorPool

log = logging.getLogger("raydpfl")
Call = Callable[..., Any]  # calls a method of the coordinator, wherever it is
Stage = Callable[[str], object]
GPU_WAIT = 120.0  # seconds to wait for a free GPU of the cluster
TICK = 0.05  # seconds between two looks at what is waited for
START = 8.0  # seconds that Ray and its actors, which import torch, take to start on two cores
ACTORS_START = 3.0  # seconds that the actors take where Ray runs
# what is done before the first round, and once it is interrupted, in words
STARTING = "starting Ray"
STOPPING = "stopping"
# why `auto` runs in this process
NO_GAIN = "client actors would be no faster than the threads of this process"


class Launcher:
    """Starts the coordinator and the clients of a run, and ends them.

    Ray is started here, joined by `address`, or found running in this process. A run inside a
    placement group (the trial of a sweep) keeps to the group: its coordinator is this process, and
    its clients take the group's bundles.

    `on_stage` is given what is done meanwhile, in words, and that the run stops by an interrupt:
    a Ray that comes up is then waited for.
    """

    def __init__(self, client: Client, address: str | None, on_stage: Stage = lambda text: None):
        if address and client.actors == 0:
            expected = "client.actors auto or above 0; 0 runs in this process, without Ray"
            raise ConfigError("--address", address, expected)
        self._address = address
        self._on_stage = on_stage
        self._session: Session | None = None
        self._group: Any = None
        self._elastic = False  # whether Ray is to be started here
        self._pool: ActorPool | None = None
        self._host: Any = None  # the coordinator's actor
        self._count = 0  # of client actors
        self._reason: str | None = None  # why auto runs in this process
        if client.actors == 0:
            device.choose_device(client.num_gpus)
        elif address:
            self._session = Session(address)
        elif "ray" in sys.modules and sys.modules["ray"].is_initialized():
            self._group = sys.modules["ray"].util.get_current_placement_group()
        else:
            self._elastic = True
            actor_count(client, 1, 1, self._nodes(), True)  # refused before the data are touched

    def __enter__(self) -> Launcher:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is not None and issubclass(kind, KeyboardInterrupt):
                self._on_stage(STOPPING)
        finally:
            self._close()

    def _close(self) -> None:
        if self._session:
            self._session.close()
        elif self._pool or self._host is not None:  # in a Ray that is left running
            import ray

            with suppress(Exception):
                if self._pool:
                    self._pool.close()
                if self._host is not None:
                    ray.kill(self._host)

    def check(self) -> None:
        """Raises `RunError` where the control store of Ray is lost."""
        if self._session:
            self._session.check()

    def decide(self, plan: Plan) -> Plan:
        """The plan with the number of client actors, and with what its clients' GPUs compute like
        where this process has none: a node of the cluster is asked. Raises `ConfigError` where the
        actors do not fit or torch has no GPU there, `RunError` where no GPU is free.
        """
        client = plan.experiment.client
        if client.actors == 0:
            return plan
        if client.num_gpus > 0 and not self._elastic and "device" not in plan.platform:
            facts = self._gpu_facts(client.num_gpus)
            if not facts:
                expected = "0; torch can use no GPU on a node that Ray counts one of"
                raise ConfigError("client.num_gpus", client.num_gpus, expected)
            plan = replace(plan, platform={**plan.platform, **facts})
        auto = client.actors == "auto"
        inline = auto and not (self._address or self._group or client.num_gpus)
        nodes = self._nodes()
        resources = None
        if auto and self._elastic:
            resources = {**nodes[0], "CPU": max(1.0, nodes[0]["CPU"] - count_client_actors())}
        elif auto and not self._group:
            resources = free_resources()
        assert isinstance(client.chunk, int)  # `auto` is resolved
        chunks = max(1, round(plan.cohort / client.chunk))
        run = (len(plan.population), chunks, nodes, self._elastic, plan.d)
        self._count = actor_count(client, *run, resources, inline)
        if not inline:
            return plan
        self._reason = self._inline_reason(plan)
        if self._reason:
            self._count = 0
        reason_text = f": {self._reason}" if self._reason else ""
        log.info("client.actors: auto is %d%s", self._count, reason_text)
        client = client.model_copy(update={"actors": self._count})
        return replace(plan, experiment=plan.experiment.model_copy(update={"client": client}))

    def _inline_reason(self, plan: Plan) -> str | None:
        """Why `auto` runs in this process; None: it takes client actors."""
        speed = threads() if BACKENDS[plan.experiment.client.backend].threads else 1
        if self._count <= speed:
            return NO_GAIN
        start = START if self._elastic else ACTORS_START
        seconds = plan.train_seconds
        if seconds * (1 - speed / self._count) < start:
            return f"all rounds take about {seconds:.2g} s, and starting Ray {start:g} s"
        return None

    def _nodes(self) -> list[dict[str, float]]:
        if self._elastic:
            return [{"CPU": cores(), "GPU": torch.cuda.device_count()}]
        if self._group:
            return self._group.bundle_specs
        import ray

        return [node["Resources"] for node in ray.nodes() if node["Alive"]]

    def _gpu_facts(self, gpus: float) -> dict[str, str]:
        """`raydpfl.core.device.facts` of a node of the cluster, or of the placement group."""
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        strategy = PlacementGroupSchedulingStrategy(self._group) if self._group else "DEFAULT"
        options = {"num_cpus": 0, "num_gpus": gpus, "scheduling_strategy": strategy}
        call = ray.remote(device.facts).options(**options).remote(gpus)
        deadline = time.monotonic() + GPU_WAIT
        while not ray.wait([call], timeout=TICK)[0]:
            signals.check()
            self.check()
            if time.monotonic() > deadline:
                ray.cancel(call, force=True)
                raise RunError(f"for {GPU_WAIT:.0f} s no node has had {gpus:g} of a GPU free")
        return ray.get(call)

    def coordinator(self, plan: Plan, out: str, resume: bool, fresh_noise: bool) -> Call:
        """`call(method, *arguments)` on the coordinator, which is started: an actor on this node,
        or a plain object in this process.
        """
        with wrap_user_errors():
            pool = self._start_pool(plan) if self._count else None
            if pool is None or self._group:
                coordinator = Coordinator(plan, out, pool, resume, fresh_noise)
                call = partial(_inline, coordinator)
                call("start")
                return call
            # an actor on a joined cluster has another working directory, and another sys.path
            path = tuple(os.path.abspath(entry) for entry in sys.path)
            run = (pickle.dumps(plan), path, os.path.abspath(out), pool, resume, fresh_noise)
            process, warnings = self._remote("begin", *run)
            if self._session:
                self._session.coordinator = process
            for warning in warnings:
                log.warning(warning)
            return self._remote

    def _start_pool(self, plan: Plan) -> ActorPool:
        """The client actors, once all of them can work."""
        count = self._count
        if self._elastic:
            self._on_stage(STARTING)
            # one more than the clients take: Ray starts as many processes at once as it has CPUs,
            # and the coordinator's is among them
            logical_cpus = max(cores(), math.ceil(count * plan.experiment.client.num_cpus)) + 1
            self._session = Session("local", num_cpus=logical_cpus)
        import ray

        from raydpfl.runtime.actor_pool import ActorPool

        if not self._group:
            node = ray.get_runtime_context().get_node_id()
            self._host = pin_to_node(CoordinatorActor, node, max_restarts=0).remote()
        pool = self._pool = ActorPool(plan.experiment, str(plan.shards), count, plan.platform)
        healthy_actors = -1

        def check() -> None:
            nonlocal healthy_actors
            signals.check()
            self.check()
            if pool.healthy != healthy_actors:
                healthy_actors = pool.healthy
                self._on_stage(f"{healthy_actors} of {count} client actors started")

        pool.wait_until_up(check)
        return pool

    def _remote(self, method: str, *arguments: Any) -> Any:
        """Calls a method of the coordinator in its actor."""
        import ray

        try:
            future = getattr(self._host, method).remote(*arguments)
            while not ray.wait([future], timeout=LOOK)[0]:
                self.check()
            return ray.get(future)
        except ray.exceptions.RayTaskError as error:
            raise unwrap_error(error, "the coordinator failed") from None
        except (ray.exceptions.RayActorError, ray.exceptions.OutOfMemoryError) as error:
            self.check()
            raise RunError(f"the coordinator died: {message(error)}; go on with --resume") from None

    def summary(self) -> dict[str, Any]:
        """For `summary.json`: whether Ray was used, its client actors, and why not."""
        return {"used": self._count > 0, "actors": self._count, "why_not": self._reason}


def _inline(coordinator: Coordinator, method: str, *arguments: Any) -> Any:
    """Calls a method of a coordinator in this process."""
    try:
        with wrap_user_errors(f"round {coordinator.state.t}" if method == "round" else ""):
            return getattr(coordinator, method)(*arguments)
    except (RunError, ConfigError, MemoryError, OSError):
        raise
    except Exception as error:  # a user-defined member may raise anything
        raise RunError(f"the run failed: {traceback_text(error)}") from error


class CoordinatorActor(Coordinator):
    """The coordinator in an actor of Ray, whose process starts before there is a run."""

    def __init__(self) -> None:
        pass

    def begin(
        self,
        plan: bytes,
        path: tuple[str, ...],
        out: str,
        pool: Pool,
        resume: bool,
        fresh_noise: bool,
    ) -> tuple[int, list[str]]:
        """As `start`, of a pickled plan. `path`: where the user's modules are found."""
        search(path)
        tune_allocator()
        super().__init__(pickle.loads(plan), out, pool, resume, fresh_noise)
        with wrap_user_errors():
            return self.start()

    def round(self) -> dict[str, Any]:
        with wrap_user_errors(f"round {self.state.t}"):
            return super().round()


CoordinatorActor.__name__ = "Coordinator"  # in Ray's dashboard
