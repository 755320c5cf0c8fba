"""What attention and head with hand-written backward passes share: types of sums, and torch.compile."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

RECOMPILE_LIMIT = 32
"""Ways to be called that a function is compiled for: with and without gradients, one row or more, each type."""


def sum_type(dtype: torch.dtype) -> torch.dtype:
    """In which type numbers of this type are added up and exponentiated: float32 or better."""
    return torch.promote_types(dtype, torch.float32)


def fuse(function: Callable[..., Any], is_compiled: bool) -> Callable[..., Any]:
    """The function, or what torch.compile makes of it: one pass over its inputs."""
    return _compiled(function) if is_compiled else function


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    fused: Callable[..., Any] = torch.compile(  # type: ignore[call-overload]  # its types lack the limit
        function, dynamic=True, recompile_limit=RECOMPILE_LIMIT
    )
    return fused
