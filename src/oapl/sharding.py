"""One trainer in several processes, its ranks: each holds a share of every weight, and computes a share of each step.

The first rank leads. It alone waits, decides and keeps the run folder; what all have to do together (an optimizer step,
a checkpoint, a policy) it tells the others, which follow. So no rank can wait in a collective for one that has left by
a decision of its own.

Weights are sharded by PyTorch's FSDP2: a layer is whole only while it computes, forward and backward.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import groupby
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers.modeling_layers import GradientCheckpointingLayer

from oapl.batching import Batch
from oapl.causal_lm import CausalLM
from oapl.errors import LostRankError, ModelError
from oapl.lora import merge

T = TypeVar("T")

LONG = timedelta(days=365)
"""How long a follower waits for the next thing to do: as long as samplers may take."""


@dataclass(frozen=True)
class Place:
    """Which of a trainer's processes this one is, and where they meet."""

    rank: int
    size: int
    local_rank: int
    """Among those of its machine, which take their turns with the machine's memory."""
    local_size: int
    meeting: str
    """What PyTorch calls an `init_method`."""

    @classmethod
    def of_environment(cls, environment: Mapping[str, str] = os.environ) -> Place | None:
        """What torchrun says of this process, or None where it was not started by it."""
        if "WORLD_SIZE" not in environment:
            return None
        rank, size, local_rank, local_size = (
            int(environment[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        )
        return cls(rank, size, local_rank, local_size, "env://")


class Ranks:
    """The processes of one trainer, seen from one of them. This is one that works alone."""

    rank = 0
    size = 1
    others_stop = False
    """Whether another rank was told to stop, as far as this one has heard."""

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def device(self, setting: str) -> str:
        """Where this rank computes, by `trainer.device`."""
        return setting

    @contextmanager
    def turn(self) -> Iterator[None]:
        """One rank of a machine at a time."""
        yield

    def agree(self, value: T) -> T:
        """The first rank's value."""
        return value

    def gather(self, value: T) -> list[T]:
        """Every rank's value, in order."""
        return [value]

    def lead(self, act: Callable[..., T], trainer: Any, run: Any, *arguments: Any) -> T:
        """What `act(trainer, run, *arguments)` returns here, while every follower does the same."""
        return act(trainer, run, *arguments)

    def follow(self, trainer: Any, run: Any, should_stop: Callable[[], bool]) -> None:
        """Does what the first rank leads in, until it ends."""
        raise AssertionError("one that works alone leads")

    def stops(self, should_stop: Callable[[], bool]) -> Callable[[], bool]:
        """Whether this rank, by `should_stop`, or any other was told to stop."""
        return lambda: should_stop() or self.others_stop

    @contextmanager
    def leading(self) -> Iterator[None]:
        """Lets the followers go at its end, unless that is in the middle of an act: they then miss this rank."""
        yield


ALONE = Ranks()


class JoinedRanks(Ranks):
    """Of several processes, made by `joined`. Words go over gloo, whatever the weights go over."""

    def __init__(self, place: Place, mesh: DeviceMesh, words: dist.ProcessGroup) -> None:
        self.rank, self.size = place.rank, place.size
        self.mesh = mesh
        self.words = words
        self._place = place
        self._at_act = False

    def device(self, setting: str) -> str:
        return f"cuda:{self._place.local_rank}" if setting == "cuda" else setting

    @contextmanager
    def turn(self) -> Iterator[None]:
        for turn in range(max(self.gather(self._place.local_size))):
            if turn == self._place.local_rank:
                yield
            dist.barrier(group=self.words)

    def agree(self, value: T) -> T:
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.words)
        return box[0]

    def gather(self, value: T) -> list[T]:
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.words)
        return values

    def lead(self, act: Callable[..., T], trainer: Any, run: Any, *arguments: Any) -> T:
        self._at_act = True
        self.agree((act, arguments))
        result = act(trainer, run, *arguments)
        self.others_stop |= any(self.gather(False))  # which also says that all have done it
        self._at_act = False
        return result

    def follow(self, trainer: Any, run: Any, should_stop: Callable[[], bool]) -> None:
        told: tuple[Callable[..., Any], tuple[Any, ...]] | None = None
        while (told := self.agree(told)) is not None:
            act, arguments = told
            act(trainer, run, *arguments)
            self.gather(should_stop())

    @contextmanager
    def leading(self) -> Iterator[None]:
        try:
            yield
        finally:
            if not self._at_act:
                self.agree(None)


@contextmanager
def joined(place: Place | None, device: str) -> Iterator[Ranks]:
    """The ranks, once all have come. Raises LostRankError where another rank is gone."""
    if place is None or place.size == 1:
        yield ALONE
        return
    kind = device.partition(":")[0]
    if kind == "cuda":
        if (count := torch.cuda.device_count()) <= place.local_rank:
            raise ModelError(
                f"trainer.device = 'cuda': rank {place.rank} needs a device of its own, and torch {torch.__version__} "
                f"sees {count} here. Give as many ranks as there are, or trainer.device = 'cpu'."
            )
        torch.cuda.set_device(place.local_rank)
    is_met = dist.is_initialized()  # by who started them
    with missing_the_others(place):
        if not is_met:
            dist.init_process_group(
                backend_of(device), init_method=place.meeting, rank=place.rank, world_size=place.size
            )
        yield JoinedRanks(place, init_device_mesh(kind, (place.size,)), dist.new_group(backend="gloo", timeout=LONG))
        if not is_met:
            dist.destroy_process_group()


def backend_of(device: str) -> str:
    """What weights and words go over."""
    return "cpu:gloo,cuda:nccl" if device.startswith("cuda") else "gloo"


@contextmanager
def missing_the_others(place: Place) -> Iterator[None]:
    """Turns what PyTorch says of a lost connection into a LostRankError."""
    try:
        yield
    except RuntimeError as error:
        words = str(error).partition(". This is")[0]
        if isinstance(error, dist.DistError) or "gloo" in words or "Connection" in words or "peer" in words:
            raise LostRankError(
                f"rank {place.rank} of {place.size} lost the others: one of them ended, and its own output says why. "
                f"Run the same command again to continue. ({words})"
            ) from error
        raise


# The model


class Whole(torch.nn.Module):
    """Gives what computes with a model the weights that belong to no layer: embeddings, last norm, head."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, function: Callable[..., T], *arguments: Any) -> T:
        return function(*arguments)


@dataclass(frozen=True)
class ShardedLM(CausalLM):
    """A model of which every rank holds a share. All ranks call it together, as often as each other."""

    root: Whole
    ranks: Ranks
    names: tuple[str, ...]
    """Of the model's tensors, in order."""

    def logprobs(self, batch: Batch, temperature: float) -> tuple[Tensor, Tensor]:
        of_targets: tuple[Tensor, Tensor] = self.root(self._logprobs, batch, temperature)
        if not torch.is_grad_enabled():
            self._fsdp.reshard()  # else a backward pass does it
        return of_targets

    def _logprobs(self, batch: Batch, temperature: float) -> tuple[Tensor, Tensor]:
        output = self.model.get_output_embeddings()
        head = replace(self.head, weight=output.weight, bias=getattr(output, "bias", None))  # as they are gathered now
        return CausalLM(self.model, self.body, head, self.has_plain_cache).logprobs(batch, temperature)

    @torch.no_grad()
    def run(self, function: Callable[..., T], *arguments: Any) -> T:
        result: T = self.root(function, *arguments)
        self._fsdp.reshard()
        return result

    def weights(self) -> dict[str, Tensor]:
        """On the first rank, in its host's memory; on others nothing. One layer at a time is gathered."""
        return self.run(self._gather_weights)

    @property
    def _fsdp(self) -> FSDPModule:
        assert isinstance(self.root, FSDPModule)
        return self.root

    def _gather_weights(self) -> dict[str, Tensor]:
        kept: dict[str, Tensor] = {}
        of_parameter: dict[int, Tensor] = {}
        for name, weight in merge(self.model, self._whole_weights()):
            if self.ranks.is_first:
                copied = (
                    of_parameter[id(weight)] if id(weight) in of_parameter else weight.detach().to("cpu", copy=True)
                )
                if isinstance(weight, torch.nn.Parameter):
                    of_parameter[id(weight)] = copied  # two names of tied weights share it
                kept[name] = copied
        return kept

    def _whole_weights(self) -> Iterator[tuple[str, Tensor]]:
        layers = {name: module for name, module in self.model.named_modules() if isinstance(module, FSDPModule)}

        def layer_of(name: str) -> str | None:
            return next((layer for layer in layers if name.startswith(f"{layer}.")), None)

        for layer, names in groupby(self.names, key=layer_of):
            if layer is not None:
                layers[layer].unshard()
            for name in names:
                owner, _, leaf = name.rpartition(".")
                yield name, getattr(self.model.get_submodule(owner), leaf)
            if layer is not None:
                layers[layer].reshard()


def shard(lm: CausalLM, ranks: Ranks, *, bf16: bool) -> CausalLM:
    """Leaves this rank its share of the model, on its device, and none of the rest; all of it to one that is alone.

    Gradients are summed over the ranks, in float32: what a loss is to be divided by is the loss's own business. With
    `bf16`, layers compute in bfloat16; the shares stay as they are. Raises ModelError where the layers are not known.
    """
    if not isinstance(ranks, JoinedRanks):
        return lm
    model = lm.model
    names = tuple(model.state_dict())
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ModelError(f"trainer.num_ranks: the layers of {type(model).__name__} are not known. Set it to 1.")
    kinds = (
        MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if bf16 else MixedPrecisionPolicy()
    )
    root = Whole(model)
    for module in (*layers, root):
        sharded = fully_shard(module, mesh=ranks.mesh, mp_policy=kinds)
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)  # not every backend can scale as it sums
        sharded.set_reduce_scatter_unused_params(True)  # as of experts that only other ranks' tokens reach
    return ShardedLM(model, lm.body, lm.head, lm.has_plain_cache, root, ranks, names)
