"""Where a run's coordinator and clients are: in this process, or in actors of Ray, which a thread
brings up while this process does something else.

- `client.actors: 0`: here, and Ray is not even imported.
- A number of actors, `per-client`, an address, GPUs: as asked. Ray and the processes start while
  the data are prepared and the noise is calibrated, and the first round waits for them.
- `auto`: the run begins here at once. Ray starts only where the rounds that are left take longer
  than that gains (`Worth`); then actors take the chunks over as soon as they have come up, in the
  midst of a round, and after that round the coordinator moves to an actor too, by the checkpoint
  that a resumed run would go on from. No bit depends on who runs what. A Ray that does not start is
  warned of, and the run goes on here.
"""

from __future__ import annotations

import logging
import os
import pickle
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from raydpfl.core import device, signals
from raydpfl.core.hardware import cores, threads
from raydpfl.errors import ConfigError, FileError, RunError, contained, told
from raydpfl.experiment import Experiment
from raydpfl.runtime.capacity import wanted
from raydpfl.runtime.session import LOOK, Session, at_work, free
from raydpfl.simulation.coordinator import Coordinator
from raydpfl.simulation.plan import Plan
from raydpfl.simulation.pool import Moving, Pool
from raydpfl.simulation.provenance import of_capability, of_code, of_device

if TYPE_CHECKING:
    from raydpfl.runtime.actor_pool import Actors

log = logging.getLogger("raydpfl")
Call = Callable[..., Any]  # calls a method of the coordinator, wherever it is
FREE = 120.0  # seconds that a GPU of the cluster is waited for
TICK = 0.05  # seconds between two looks of who waits
HERE = "client.actors is 0"
SHORT = "the run was over before it would have been up"
NO_GAIN = "client actors would be no faster than the threads of this process"


class _Closed(Exception):
    """The run ends while its actors come up."""


class Worth:
    """Whether to start Ray for the rounds that are left.

    n actors take about m/n of the time that this process takes with m threads, once they are up; or
    with more, that are as fast as m would be if they did not wait for one another. While they come
    up, `STARTS` seconds (`SOON` where Ray is up), the rounds go on here. The clock is that of the
    processor, over the threads: on a machine that others use, rounds and start are slower alike.
    """

    STARTS = 8.0  # Ray, and a process that imports torch for each actor, on two cores
    SOON = 3.0  # these processes alone
    SURE = 1.0  # seconds of rounds that are enough to judge by
    FIRST = 2.0  # seconds of a round that is not over, likewise

    def __init__(self, rounds: int, actors: int, starts: float, threads: float = 1):
        self._rounds = rounds
        self._actors = actors
        self._starts = starts
        self.threads = threads
        self._ended: list[float] = []  # when the first round and the last one have

    def begin(self, done: int, now: float) -> None:
        """So many rounds are done when the run begins, at `now` seconds of some clock."""
        self._left = self._rounds - done
        self._began = now
        self._count = 0
        self._ended = []

    def round(self, now: float) -> None:
        """Another round is done."""
        self._count += 1
        self._left -= 1
        self._ended[1:] = [now] if self._ended else []
        if not self._ended:
            self._ended = [now]

    def gains(self, now: float) -> bool:
        """Whether the run would end sooner."""
        last = self._ended[-1] if self._ended else self._began
        each = now - last if now - last >= self.FIRST else 0.0  # the round under way, so far
        if len(self._ended) == 2:
            first, last = self._ended
            if last - first >= self.SURE:  # the first is left out: what it warms up it does once
                each = max(each, (last - first) / (self._count - 1))
        share = 1 - self.threads / max(self._actors, self.threads)
        return each * self._left * share > self._starts


class Places:
    """Ray for one run: started here, joined by address, or found running in this process; or not
    used at all.

    A run that finds itself in a placement group (the trial of a sweep) keeps to the group: its
    coordinator is this process, and its clients take the group's bundles.
    """

    def __init__(self, experiment: Experiment, address: str | None):
        client = experiment.client
        self.inline = client.actors == 0
        if self.inline and address:
            raise ConfigError(
                "--address", address, "client.actors above 0; 0 runs in this process, without Ray"
            )
        self.address = address
        self.client = client
        self.session: Session | None = None
        self.group: Any = None
        self.elastic = False
        self.clients: Actors | None = None
        self._host: Any = None  # the coordinator's actor
        self._plan: Plan | None = None
        self._count = 0
        self._here: Moving | None = None  # the clients, where the run begins here
        self._worth: Worth | None = None
        self._worked = self._looked = 0.0  # see `_clock`
        self._failure: BaseException | None = None
        self._planned = threading.Event()
        self._connected = threading.Event()
        self._up = threading.Event()
        self._begun = threading.Event()
        self._closing = threading.Event()
        self._looking = threading.Lock()
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._done = 0  # rounds
        self._from: int | None = None  # the first round, counted from 0, in which Ray is used
        self._warned = False

    def __enter__(self) -> Places:
        if self.inline:
            device.chosen(self.client.num_gpus)
            return self
        running = "ray" in sys.modules and sys.modules["ray"].is_initialized()
        self.elastic = not self.address and not running
        if running and not self.address:
            self.group = sys.modules["ray"].util.get_current_placement_group()
        if self.elastic:  # what this machine alone can refuse, before the data are touched
            wanted(self.client, 1, 1, self._nodes(), True)
        if not self.late:
            self._begin(self._bring_up)
        return self

    @property
    def late(self) -> bool:
        """Whether the run begins in this process, and Ray comes when it pays."""
        asked = self.inline or self.address or self.group or self.client.num_gpus > 0
        return self.client.actors == "auto" and not asked

    @property
    def waits(self) -> bool:
        """Whether the first round waits for Ray."""
        return not (self.inline or self.late)

    def _begin(self, what: Callable[[], None]) -> None:
        self._thread = threading.Thread(target=what, name="raydpfl-launch", daemon=True)
        self._thread.start()

    def __exit__(self, *_: Any) -> None:
        self._closing.set()
        self._planned.set()
        try:
            if self._thread and self._begun.is_set():
                self._up.wait()
            self._close()
        finally:
            self._over.set()

    def _close(self) -> None:
        if self.session:
            self.session.close()
        elif self.clients or self._host is not None:
            # of a Ray that is left running nothing of ours goes on
            import ray

            with suppress(Exception):
                if self.clients:
                    self.clients.close()
                if self._host is not None:
                    ray.kill(self._host)

    def check(self) -> None:
        """Raises `RunError` where the control store of Ray is lost."""
        if self.session:
            self.session.check()

    def _nodes(self) -> list[dict[str, float]]:
        if self.elastic:
            return [{"CPU": cores(), "GPU": torch.cuda.device_count()}]
        if self.group:
            return self.group.bundle_specs
        import ray

        return [node["Resources"] for node in ray.nodes() if node["Alive"]]

    def _free(self, nodes: list[dict[str, float]]) -> list[dict[str, float]]:
        """What of the nodes no other run has taken."""
        if self.group:
            return nodes
        if not self.elastic:
            return free()
        (here,) = nodes
        return [{**here, "CPU": max(1.0, here["CPU"] - at_work())}]

    # --- in the thread ---

    def _bring_up(self) -> None:
        """Connects, starts processes, and tells them what they work for once there is a plan."""
        self._begun.set()
        try:
            self._check_open()
            self._connect()
            self._connected.set()
            self._processes()
            self._planned.wait()
            self._check_open()
            self._tell()
            self._up.set()
        except BaseException as error:
            self._failure = error
            self._connected.set()
            self._up.set()
        # what it has started dies with the thread, not with the process (PR_SET_PDEATHSIG)
        self._over.wait()

    def _check_open(self) -> None:
        if self._closing.is_set():
            raise _Closed

    def _connect(self) -> None:
        """Starts Ray, or joins it."""
        if self.address:
            self.session = Session(self.address)
        elif self.elastic:
            if self.client.actors == "per-client":  # how many nobody knows before there are data
                self._planned.wait()
                self._check_open()
            asked = self.client.actors
            count = asked if isinstance(asked, int) else self._count
            # one more than the clients take: Ray starts as many processes at once as it has CPUs,
            # and the coordinator's is among them
            logical = max(cores(), int(count * self.client.num_cpus + 0.999)) + 1
            self.session = Session("local", relied=not self.late, num_cpus=logical)

    def _processes(self) -> None:
        """Starts the coordinator's process and, where their number is known, those of clients."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        from raydpfl.runtime.actor_pool import Actors
        from raydpfl.runtime.coordinator_actor import Coordinator as Hosted

        if not self.group:
            node = ray.get_runtime_context().get_node_id()
            here = NodeAffinitySchedulingStrategy(node, soft=False)
            options = {"num_cpus": 0, "max_restarts": 0, "scheduling_strategy": here}
            self._host = ray.remote(Hosted).options(**options).remote()
        # elsewhere only as many as were found to fit
        if not self._planned.is_set() and not (
            self.elastic and isinstance(self.client.actors, int)
        ):
            self._planned.wait()
            self._check_open()
        count = self._count or int(self.client.actors)
        self.clients = Actors(self.client, count)

    def _tell(self) -> None:
        plan = self._plan
        assert plan is not None and self.clients is not None
        platform = of_capability(plan.platform) | of_device(plan.platform) | of_code(plan.platform)
        self.clients.told(plan.experiment, str(plan.shards), platform)
        warm = None
        if self._host is not None:
            warm = self._host.warm.remote(_packed(plan), _path())
        self.clients.up(min(2, self._count) if self.late else self._count, self._check_open)
        if self.late and warm is not None:  # elsewhere its next call waits, and meets what it meets
            import ray

            while not ray.wait([warm], timeout=TICK)[0]:
                self._check_open()
            ray.get(warm)

    def _clock(self) -> float:
        """Seconds of the processor for each thread that trains here."""
        worth = self._worth
        now = time.process_time()
        with self._looking:
            if worth is not None and self._here is not None:
                worth.threads = self._here.speed or threads()  # who are taken to gain until known
                self._worked += (now - self._looked) / worth.threads
            self._looked = now
            return self._worked

    def _vain(self) -> bool:
        """Whether actors are known to be no faster than the threads here."""
        known = self._here.speed if self._here else None
        return self._count <= (known or 1)

    def _when_it_pays(self) -> None:
        worth = self._worth
        assert worth is not None
        while not self._closing.wait(4 * TICK):
            if worth.gains(self._clock()):
                self._bring_up()
                return

    # --- in the process of the run ---

    def _wait(
        self, event: threading.Event, on_stage: Callable[[str], object] = lambda what: None
    ) -> None:
        """Waits for the thread; raises what it has failed with. `on_stage`: see `coordinator`."""
        shown = ""
        while not event.wait(TICK):
            signals.check()
            if event is not self._up:
                continue
            self.check()
            if self.clients:
                stage = f"{self.clients.healthy} of {self._count} client actors started"
                if stage != shown:
                    on_stage(stage)
                shown = stage
        signals.check()
        if self._failure is not None:
            raise self._failure

    def located(self, plan: Plan) -> Plan:
        """The plan, with what its clients' GPUs compute like where this process sees none: a node
        of the cluster is asked, before anything is drawn or written.

        Raises:
            ConfigError: torch has no GPU there.
            RunError: no GPU is free.
        """
        if self.inline or self.client.num_gpus <= 0 or of_device(plan.platform):
            return plan
        self._wait(self._connected)
        found = _gpu_facts(self.client.num_gpus, self.group)
        if not found:
            expected = "0; torch can use no GPU on a node that Ray counts one of"
            raise ConfigError("client.num_gpus", self.client.num_gpus, expected)
        return replace(plan, platform={**plan.platform, **found})

    def actors(self, plan: Plan) -> int:
        """How many client actors the run takes; 0 in this process."""
        if self.inline:
            return 0
        if not self.elastic and not self.late:
            self._wait(self._connected)
        experiment = plan.experiment
        chunk = experiment.client.chunk
        assert isinstance(chunk, int)  # the plan has settled what auto is
        most = max(1, round(plan.cohort / chunk))
        population = len(plan.population)
        client = experiment.client
        nodes = self._nodes()
        left = self._free(nodes) if client.actors == "auto" else None
        count = wanted(client, population, most, nodes, self.elastic, plan.d, left, self.late)
        self._plan = plan
        self._count = count
        self._planned.set()
        return count

    def coordinator(
        self,
        plan: Plan,
        out: str,
        resume: bool,
        fresh_noise: bool,
        on_stage: Callable[[str], object] = lambda what: None,
    ) -> Call:
        """`call(method, *arguments)` on the coordinator, which is started: an actor beside this
        process, or a plain object in it. `on_stage` is called with how many client actors have
        started, in words, while they do.
        """
        with contained():
            if self.inline:
                return _inline(Coordinator(plan, out, resume=resume, anew=fresh_noise))
            if self.late:
                starts = Worth.STARTS if self.elastic else Worth.SOON
                self._worth = Worth(plan.experiment.rounds, self._count, starts)
                pool = Moving(plan.experiment, str(plan.shards), self._taking_over)
                self._here = pool
                return _inline(Coordinator(plan, out, pool, resume=resume, anew=fresh_noise))
            self._wait(self._up, on_stage)
            self._from = 0
            if self.group:
                pool_up = self.clients
                return _inline(Coordinator(plan, out, pool_up, resume=resume, anew=fresh_noise))
            return self._remote(plan, out, resume, fresh_noise)

    def begun(self, done: int) -> None:
        """The first round begins; so many are done from before."""
        self._done = done
        if self._worth:
            self._worth.begin(done, self._clock())
            if not self._vain():
                self._begin(self._when_it_pays)

    def after_round(self, call: Call, out: str, done: int) -> Call:
        """The coordinator for the next round, if there is one: another, where it has moved to an
        actor.
        """
        self._done = done
        plan = self._plan
        if plan is None or self._worth is None:
            return call
        self._worth.round(self._clock())
        if done == plan.experiment.rounds or self._taking_over() is None:
            return call
        call("save")
        self._worth = None
        return self._remote(plan, out, True, False)

    def _taking_over(self) -> Pool | None:
        """As `_others`, who are given chunks from now on."""
        others = self._others()
        if others is not None and self._from is None:
            self._from = self._done
        return others

    def _others(self) -> Pool | None:
        """The client actors of a run that has begun in this process, once they are up."""
        if not self._up.is_set():
            return None
        session = self.session
        if self._failure is None and session and session.lost:
            self._failure = RunError(session.lost)
        if self._failure is None:
            if session:
                session.relied = True
            return self.clients
        if not self._warned and not signals.asked():
            self._warned = True
            reason = str(self._failure).split(";")[0]
            log.warning("the run goes on in this process, without Ray: %s", reason)
        return None

    def told(self) -> dict[str, Any]:
        """For the summary: whether Ray was used, in which round first, by how many actors, and why
        not.
        """
        used = self._from is not None
        why = None
        if self.inline:
            why = HERE
        elif not used and self._failure is not None:
            why = str(self._failure)
        elif not used:
            why = NO_GAIN if self._vain() else SHORT
        count = self._count if used else 0
        found = {"asked": not self.inline, "used": used, "from_round": self._from}
        return found | {"actors": count, "why_not": why}

    def _remote(self, plan: Plan, out: str, resume: bool, fresh_noise: bool) -> Call:
        """Calls on the coordinator in its actor, which takes the run up."""
        import ray

        host = self._host

        def call(method: str, *given: Any) -> Any:
            try:
                waiting = getattr(host, method).remote(*given)
                while not ray.wait([waiting], timeout=LOOK)[0]:
                    self.check()
                return ray.get(waiting)
            except ray.exceptions.RayTaskError as error:
                raise _raised(error) from None
            except ray.exceptions.RayActorError as error:
                self.check()
                reason = " ".join(str(error).split())[:300]
                raise RunError(f"the coordinator died: {reason}; go on with --resume") from None

        # an actor on a joined cluster stands in another directory
        where = os.path.abspath(out)
        process, warnings = call(
            "begin", _packed(plan), _path(), where, self.clients, resume, fresh_noise
        )
        if self.session:
            self.session.coordinator = process
        for warning in warnings:
            log.warning(warning)
        return call


def _gpu_facts(num_gpus: float, group: Any) -> dict[str, str]:
    """`raydpfl.core.device.facts` of a node of the cluster, or of the placement group."""
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    where = PlacementGroupSchedulingStrategy(group) if group else "DEFAULT"
    options = {"num_cpus": 0, "num_gpus": num_gpus, "scheduling_strategy": where}
    asked = ray.remote(device.facts).options(**options).remote(num_gpus)
    until = time.monotonic() + FREE
    while not ray.wait([asked], timeout=TICK)[0]:
        signals.check()
        if time.monotonic() > until:
            ray.cancel(asked, force=True)
            raise RunError(f"for {FREE:.0f} s no node has had {num_gpus:g} of a GPU free")
    return ray.get(asked)


def _packed(plan: Plan) -> bytes:
    """A plan for another process, where modules of the user's own may not be found yet."""
    return pickle.dumps(plan)


def _path() -> tuple[str, ...]:
    """Where this process finds modules."""
    return tuple(os.path.abspath(entry) for entry in sys.path)


def _raised(error: Any) -> Exception:
    """What a method of a coordinator in an actor raised (a RayTaskError), as if it had run here."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, OSError):
        return FileError(str(cause))
    if isinstance(cause, (RunError, ConfigError)):
        return cause
    return RunError(f"the coordinator failed\n{error}")


def _inline(plain: Coordinator) -> Call:
    """Calls on a coordinator in this process, which is started."""

    def call(method: str, *given: Any) -> Any:
        try:
            with contained(f"round {plain.at.t}" if method == "round" else ""):
                return getattr(plain, method)(*given)
        except (RunError, ConfigError, MemoryError, OSError):
            raise
        except Exception as error:  # an own member may raise anything
            raise RunError(f"the run failed: {told(error)}") from error

    call("start")
    return call
