"""What the hand-written backward passes, of attention and of the head, share."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch


def sum_type(dtype: torch.dtype) -> torch.dtype:
    """In which type numbers of this type are added up and exponentiated: float32 or better."""
    return torch.promote_types(dtype, torch.float32)


def fuse(function: Callable[..., Any], is_compiled: bool) -> Callable[..., Any]:
    """The function, or what torch.compile makes of it: one pass over its inputs."""
    return _compiled(function) if is_compiled else function


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=True)
