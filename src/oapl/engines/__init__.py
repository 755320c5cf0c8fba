"""What generates completions: `base.Engine` says what each must do."""

from __future__ import annotations

from collections.abc import Callable

from oapl.config import EngineConfig
from oapl.engines.base import Engine


def make_engine(
    config: EngineConfig, attn_implementation: str | None = None, should_stop: Callable[[], bool] = lambda: False
) -> Engine:
    """The engine that a recipe asks for; it holds no policy yet. Told to stop, it waits for no server any longer."""
    if config.kind == "vllm":
        from oapl.engines.vllm import VLLMEngine

        return VLLMEngine(config)
    if config.kind == "vllm_server":
        from oapl.engines.vllm_server import VLLMServerEngine

        return VLLMServerEngine(config, should_stop)
    from oapl.engines.embedded import EmbeddedEngine

    return EmbeddedEngine(config, attn_implementation)
