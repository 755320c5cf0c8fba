"""The roles of a run on a Ray cluster: samplers are actors that Ray starts again, the trainer's ranks are Ray Train's.

All of them share the run folder and nothing else, so that is all that has to outlive a node. What they tell goes to an
actor on the driver's node, for one progress display; a role whose word is lost works on.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import threading
import uuid
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import ray
import ray.exceptions
import ray.train
import ray.train.torch
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from oapl import roles
from oapl.config import Recipe, load_recipe
from oapl.errors import ConfigError, LostRankError, OaplError, WorkerError
from oapl.processes import pause
from oapl.progress import Progress
from oapl.results import is_finished, unsampled
from oapl.sharding import Place, backend_of, joined
from oapl.store import RunFolder
from oapl.types import Events

LOOK_S = 0.5
LISTEN_S = 1.0
LAST_BREATH_S = 120.0
"""Seconds within which the workers of a node that died end too."""
MAX_STARTS = 5
"""Times that roles may start without a step or a shard between."""
STOP_PATIENCE_S = 120.0
"""Seconds that roles may take to end well, once told to stop."""


class Mailbox:
    """What roles tell the driver, kept until it asks."""

    def __init__(self) -> None:
        self._letters: list[tuple[str, Any]] = []
        self._is_stopping = False

    def stop(self) -> None:
        self._is_stopping = True

    def is_stopping(self) -> bool:
        return self._is_stopping

    def put(self, kind: str, value: Any) -> None:
        self._letters.append((kind, value))

    def take(self) -> list[tuple[str, Any]]:
        letters, self._letters = self._letters, []
        return letters


class Post:
    """A role's way to the mailbox, and word from it to stop. It may be gone."""

    def __init__(self, mailbox: str) -> None:
        self._mailbox, self._stop = ray.get_actor(mailbox), threading.Event()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        while not self._stop.is_set():
            with suppress(ray.exceptions.RayError):
                if ray.get(self._mailbox.is_stopping.remote()):
                    self._stop.set()
            self._stop.wait(LISTEN_S)

    def send(self, kind: str, value: Any) -> None:
        with suppress(ray.exceptions.RayError):
            self._mailbox.put.remote(kind, value)

    def events(self) -> Events:
        return Events(
            should_stop=self._stop.is_set,
            on_step=lambda record: self.send("step", dict(record)),
            on_shard=lambda record: self.send("shard", dict(record)),
        )


class SamplerActor:
    """A sampler. Ray starts it again, on another node if need be, and calls `sample` again, until that returns."""

    def __init__(self, run_dir: str, folder: str, mailbox: str) -> None:
        work_in(folder)
        self._run, self._post = RunFolder(run_dir), Post(mailbox)

    def sample(self) -> None:
        self._post.send("start", "a sampler")
        run, recipe = self._run, load_recipe(self._run.config_path)
        find_work, is_over = partial(unsampled, recipe, run), partial(is_finished, recipe, run)
        roles.sample(recipe, run, self._post.events(), find_work, is_over)


def train_rank(settings: Mapping[str, Any]) -> None:
    """One rank of the trainer, in a worker of Ray Train. An error that another try would meet again ends all tries."""
    post = Post(settings["mailbox"])
    try:
        work_in(settings["folder"])
        run, context = RunFolder(settings["run_dir"]), ray.train.get_context()
        recipe = load_recipe(run.config_path)
        post.send("start", f"rank {context.get_world_rank()}")
        place = Place(
            context.get_world_rank(),
            context.get_world_size(),
            context.get_local_rank(),
            context.get_local_world_size(),
            "env://",
        )
        with joined(place, recipe.trainer.device) as ranks:
            roles.train_as(ranks, recipe, run, post.events(), patience_s=LAST_BREATH_S)
    except LostRankError:
        raise  # Ray Train starts all of them again
    except Exception as error:
        post.send("error", error if isinstance(error, OaplError) else WorkerError(f"the trainer failed: {error!r}"))
        raise


def work_in(folder: str) -> None:
    """Works in the user's folder, where a recipe's files and reward functions are, if this machine has it."""
    if Path(folder).is_dir():
        os.chdir(folder)
        sys.path.insert(0, folder)


def run_ray(recipe: Recipe, run: RunFolder, progress: Progress, events: Events) -> None:
    """Samplers and trainer on the cluster at hand, or on one that is started here, until the run is finished.

    Raises what ended a role and would end it again, and KeyboardInterrupt when told to stop. Nodes and processes that
    die are Ray's business: their roles are started again, and go on from what the run folder holds.
    """
    connect(recipe, progress)
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
    name = f"oapl-{uuid.uuid4().hex}"
    mailbox = ray.remote(Mailbox).options(name=name, num_cpus=0, scheduling_strategy=here, max_restarts=-1).remote()
    place = {"run_dir": str(run.path.resolve()), "folder": os.getcwd(), "mailbox": name}
    inbox = Inbox(mailbox, progress, events, recipe.launch.num_samplers + recipe.trainer.num_ranks)
    samplers = start_samplers(recipe, place)
    fit = Fit(recipe, place)
    working = [sampler.sample.remote() for sampler in samplers]
    progress.phase("training")
    try:
        while not is_finished(recipe, run):
            inbox.read()
            working = without_done(working)
            fit.check()
            if events.should_stop():
                raise KeyboardInterrupt
            pause(LOOK_S, events.should_stop)
        inbox.read()
    finally:
        mailbox.stop.remote()
        fit.wait()  # else its thread would meet a Ray that was shut down, which ends the process
        if working:
            ray.wait(working, num_returns=len(working), timeout=STOP_PATIENCE_S)
        for actor in (*samplers, mailbox):
            ray.kill(actor)
        ray.shutdown()


def connect(recipe: Recipe, progress: Progress) -> None:
    """To the cluster that the recipe names or that is at hand; without one, starts one on this machine. Says so where
    that is too small for now."""
    quiet: Mapping[str, Any] = {"log_to_driver": False, "logging_level": logging.WARNING}
    num_cpus, num_gpus = needs(recipe)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        ray.init(address=recipe.launch.ray_address or "auto", **quiet)
    except ConnectionError as error:
        if recipe.launch.ray_address is not None:
            raise ConfigError(
                f"launch.ray_address = {recipe.launch.ray_address!r}: no cluster there ({error})."
            ) from error
        ray.init(address="local", num_cpus=max(num_cpus, os.cpu_count() or 1), **quiet)  # shares, not cores
    for number, handler in handlers.items():  # Ray sets its own
        signal.signal(number, handler)
    there = ray.cluster_resources()
    if there.get("CPU", 0) < num_cpus or there.get("GPU", 0) < num_gpus:
        has = f"{there.get('CPU', 0):g} CPUs and {there.get('GPU', 0):g} GPUs"
        progress.note(f"the cluster has {has}, the run takes {num_cpus} and {num_gpus}: the rest waits for more nodes")


def needs(recipe: Recipe) -> tuple[int, int]:
    """CPUs and GPUs of all samplers and ranks."""
    launch, engine, trainer = recipe.launch, recipe.engine, recipe.trainer
    num_gpus = launch.num_samplers * gpus_of_sampler(recipe) + trainer.num_ranks * trainer.device.startswith("cuda")
    return launch.num_samplers * engine.num_threads + trainer.num_ranks * trainer.num_threads, num_gpus


def gpus_of_sampler(recipe: Recipe) -> int:
    return recipe.engine.tensor_parallel_size if recipe.engine.device.startswith("cuda") else 0


def start_samplers(recipe: Recipe, place: Mapping[str, str]) -> list[Any]:
    sampler = ray.remote(SamplerActor).options(
        num_cpus=recipe.engine.num_threads, num_gpus=gpus_of_sampler(recipe), max_restarts=-1, max_task_retries=-1
    )
    return [sampler.remote(**place) for _ in range(recipe.launch.num_samplers)]


class Inbox:
    """The mailbox as the driver reads it, which ends a run whose roles start again and again and get nowhere."""

    def __init__(self, mailbox: Any, progress: Progress, events: Events, num_roles: int) -> None:
        self._mailbox, self._progress, self._events = mailbox, progress, events
        self._num_roles, self._starts = num_roles, 0

    def read(self) -> None:
        """Shows what was told since. Raises an error that a role told of."""
        try:
            letters = ray.get(self._mailbox.take.remote())
        except ray.exceptions.RayError:
            letters = []  # its node is gone, and it comes again
        for kind, value in letters:
            if kind == "error":
                raise value
            if kind == "start":
                self._count(value)
            else:
                self._starts = 0
                (self._events.on_step if kind == "step" else self._events.on_shard)(value)
        self._progress.refresh()

    def _count(self, who: str) -> None:
        self._starts += 1
        if self._starts > self._num_roles:
            self._progress.note(f"{who} was started again")
        if self._starts > MAX_STARTS * self._num_roles:
            raise WorkerError(
                f"the run's {self._num_roles} roles were started {self._starts} times without a step or shard between. "
                f"Ray's dashboard, or the logs of its workers, say why they end."
            )


def without_done(working: list[Any]) -> list[Any]:
    """The samplers' calls that go on. Raises what ended one by its own doing."""
    done, rest = ray.wait(working, num_returns=len(working), timeout=0) if working else ([], [])
    for call in done:
        try:
            ray.get(call)
        except ray.exceptions.RayTaskError as error:
            cause = error.cause
            raise cause if isinstance(cause, OaplError) else WorkerError(f"a sampler failed: {error}") from error
    return list(rest)


class Fit:
    """The trainer's ranks under Ray Train, started again all together where one is lost."""

    def __init__(self, recipe: Recipe, settings: Mapping[str, Any]) -> None:
        on_gpus = recipe.trainer.device.startswith("cuda")
        self._error: Exception | None = None
        self._trainer = ray.train.torch.TorchTrainer(
            train_rank,
            train_loop_config=dict(settings),
            torch_config=ray.train.torch.TorchConfig(backend=backend_of(recipe.trainer.device)),
            scaling_config=ray.train.ScalingConfig(
                num_workers=recipe.trainer.num_ranks,
                use_gpu=on_gpus,
                resources_per_worker={"CPU": recipe.trainer.num_threads, **({"GPU": 1} if on_gpus else {})},
            ),
            run_config=ray.train.RunConfig(
                storage_path=tempfile.mkdtemp(prefix="oapl-ray-train-"),  # nothing is reported to Ray Train
                failure_config=ray.train.FailureConfig(max_failures=-1),
            ),
        )
        self._thread = threading.Thread(target=self._fit, daemon=True)
        self._thread.start()

    def _fit(self) -> None:
        try:
            self._trainer.fit()
        except Exception as error:
            self._error = error

    def check(self) -> None:
        if self._error is not None:
            raise WorkerError(f"the trainer failed: {self._error}") from self._error

    def wait(self) -> None:
        self._thread.join(STOP_PATIENCE_S)
