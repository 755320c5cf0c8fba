"""The tensors of a trainer's exact state in safetensors files, written by any number of ranks and read by any other.

One rank alone writes each tensor whole. Several write one file each, with what they hold of every tensor, and where in
it that is, by PyTorch's distributed checkpoint in its Hugging Face format. The reader takes both for the same.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter

from oapl.sharding import JoinedRanks, Ranks
from oapl.store.files import storing


def write_tensors(folder: Path, files: Mapping[str, Mapping[str, Tensor]], ranks: Ranks) -> None:
    """Writes the tensors of each file's name. All ranks call it together; a name stands for one tensor in all files.

    Raises StoreError, on all ranks, where one of them cannot write.
    """
    if isinstance(ranks, JoinedRanks):
        with storing(folder), causes():
            state_dict_saver.save(
                {name: tensor for tensors in files.values() for name, tensor in tensors.items()},
                storage_writer=HuggingFaceStorageWriter(str(folder), save_distributed=True),
                planner=DefaultSavePlanner(dedup_save_to_lowest_rank=True),
                process_group=ranks.words,
            )
    else:
        for name, tensors in files.items():
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / f"{name}.safetensors")


@contextmanager
def causes() -> Iterator[None]:
    """Raises what went wrong on a rank, where PyTorch gives every rank a list of it."""
    try:
        yield
    except CheckpointException as error:
        raise next(failure for failure, _ in error.failures.values()) from error


def stored_shapes(folder: Path) -> dict[str, torch.Size]:
    """Of the tensors in a folder, by name."""
    stored = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    return {name: torch.Size(tensor.size) for name, tensor in stored.items()}  # type: ignore[union-attr]


def read_tensors(folder: Path, tensors: Mapping[str, Tensor], ranks: Ranks) -> None:
    """Fills the tensors, or what this rank holds of them. All ranks call it together."""
    with torch.no_grad(), causes(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        state_dict_loader.load(
            dict(tensors),
            storage_reader=HuggingFaceStorageReader(str(folder)),
            process_group=ranks.words if isinstance(ranks, JoinedRanks) else None,
            no_dist=not isinstance(ranks, JoinedRanks),
        )
