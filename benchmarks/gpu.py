"""A Qwen3-0.6B-shaped model with random weights on one GPU: training, decoding, head, against the device's limits.

    python benchmarks/gpu.py --output gpu.json                                # CUDA, bfloat16
    python benchmarks/gpu.py --device cpu --shape tiny --batch 8 --tokens 8   # that the script runs

Training: useful FLOPs of optimizer steps (6 a weight and token, with attention, each prompt once, no padding) over the
rate of a large bfloat16 product measured in the same run, and over `--peak_tflops` where given. Decoding: bytes of
weights, keys and values that each step must read, over the copy rate measured in the same run. Head: peak memory of the
log-probs and their backward pass, beside that of full logits.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from machine import write_results
from oapl.config import EngineConfig, Recipe
from oapl.engines.embedded import EmbeddedEngine
from oapl.head import Head
from oapl.trainer import Trainer
from oapl.types import Completion, Group, Request, SamplingParams, Shard
from trainer import useful_flops

SHAPES = {
    "qwen3-0.6b": {
        "vocab_size": 151_936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": True,
    },
    "tiny": {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "tie_word_embeddings": True,
    },
}


def write_model(folder: str, shape: str) -> None:
    from tokenizers import Tokenizer, models

    torch.manual_seed(0)
    last = SHAPES[shape]["vocab_size"] - 1
    config = Qwen3Config(**SHAPES[shape], max_position_embeddings=8192, eos_token_id=last, pad_token_id=0)
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"a": 0, "<eos>": last}, unk_token="a")), eos_token="<eos>"
    ).save_pretrained(folder)


def clock(args: argparse.Namespace, work: Callable[[], Any], repeats: int) -> float:
    """Median seconds, after one call that does not count."""
    times = []
    for number in range(repeats + 1):
        synchronize(args)
        start = time.perf_counter()
        work()
        synchronize(args)
        if number:
            times.append(time.perf_counter() - start)
    return float(np.median(times))


def synchronize(args: argparse.Namespace) -> None:
    if args.device != "cpu":
        torch.cuda.synchronize()


def peak_memory(args: argparse.Namespace, work: Callable[[], Any]) -> float | None:
    """GiB beyond what is held already; none on a CPU."""
    if args.device == "cpu":
        work()
        return None
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work()
    return (torch.cuda.max_memory_allocated() - before) / 2**30


def machine_limits(args: argparse.Namespace) -> dict[str, float]:
    size = 8192 if args.device != "cpu" else 512
    a, b = (torch.randn(size, size, device=args.device, dtype=torch.bfloat16) for _ in range(2))
    matmul = 2 * size**3 / clock(args, lambda: a @ b, 10)
    source = torch.ones(2**28 if args.device != "cpu" else 2**22, device=args.device, dtype=torch.float32)
    target = torch.empty_like(source)
    return {"matmul": matmul, "bandwidth": 2 * source.nbytes / clock(args, lambda: target.copy_(source), 10)}


def training(args: argparse.Namespace, model: str) -> dict[str, Any]:
    recipe = Recipe(
        model={"name_or_path": model},
        task={"name": "countdown"},
        sampling={"num_generations": 8, "max_completion_length": args.length},
        loss={"beta2": 0.1},
        trainer={
            "num_steps": 50,
            "bf16": True,
            "device": args.device,
            "max_tokens_per_microbatch": args.microbatch_tokens,
            "gradient_checkpointing": args.gradient_checkpointing,
        },
    )
    trainer = Trainer(recipe, model)
    rng = np.random.default_rng(0)
    vocabulary = SHAPES[args.shape]["vocab_size"]
    lengths = rng.permutation(np.linspace(args.length // 4, args.length, 8 * args.prompts).astype(int))
    groups, ids = [], []
    for position, own in enumerate(np.split(lengths, args.prompts)):
        prompt = rng.integers(0, vocabulary, 128).astype(np.int32)
        made = tuple(
            Completion(rng.integers(0, vocabulary, n).astype(np.int32), -3 * rng.random(n, dtype=np.float32), "stop")
            for n in own
        )
        rewards = rng.integers(0, 2, 8).astype(np.float32)
        groups.append(Group(position, str(position), "", prompt, made, ("",) * 8, rewards))
        ids.append((prompt.tolist(), [one.token_ids.tolist() for one in made]))
    shard = Shard(tuple(groups), (), 0.0, 0.0, 0.0)
    seconds = clock(args, lambda: trainer.train_step(shard, "digest"), args.repeats)
    flops = useful_flops(ids, trainer.model.config)
    tokens = int(lengths.sum())
    return {
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "flops_per_second": flops / seconds,
        "peak_gib": peak_memory(args, lambda: trainer.train_step(shard, "digest")),
    }


def decoding(args: argparse.Namespace, model: str) -> dict[str, Any]:
    engine = EmbeddedEngine(EngineConfig(dtype="bfloat16", device=args.device, max_num_seqs=args.batch))
    engine.load(Path(model))
    rng = np.random.default_rng(0)
    vocabulary = SHAPES[args.shape]["vocab_size"]
    requests = [Request(rng.integers(0, vocabulary, 128).astype(np.int32), seed) for seed in range(args.batch // 8)]
    made = 0

    def work() -> None:
        nonlocal made
        answers = engine.generate(requests, SamplingParams(1.0, args.tokens, 8))
        made = sum(len(one.token_ids) for answer in answers for one in answer)

    seconds = clock(args, work, args.repeats)
    shape = SHAPES[args.shape]
    config = Qwen3Config(**shape)
    weights = sum(p.numel() for p in Qwen3ForCausalLM(config).parameters())
    cached = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    step_bytes = 2 * (weights + args.batch * (128 + args.tokens / 2) * cached)
    return {"tokens_per_second": made / seconds, "bytes_per_second": step_bytes * args.tokens / seconds}


def head_memory(args: argparse.Namespace) -> dict[str, Any]:
    shape = SHAPES[args.shape]
    weight = torch.randn(
        shape["vocab_size"], shape["hidden_size"], device=args.device, dtype=torch.bfloat16, requires_grad=True
    )
    hidden = torch.randn(
        args.microbatch_tokens, shape["hidden_size"], device=args.device, dtype=torch.bfloat16, requires_grad=True
    )
    targets = torch.randint(0, shape["vocab_size"], (args.microbatch_tokens,), device=args.device)

    def ours() -> None:
        Head(weight).logprobs(hidden, targets, 1.0)[0].sum().backward()

    def plain() -> None:
        logits = (hidden @ weight.T).float()
        logits.log_softmax(-1).gather(-1, targets[:, None]).sum().backward()

    result: dict[str, Any] = {}
    for name, work in (("ours", ours), ("full logits", plain)):
        weight.grad = hidden.grad = None
        result[name] = {"seconds": clock(args, work, args.repeats), "peak_gib": peak_memory(args, work)}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--microbatch_tokens", type=int, default=16384)
    parser.add_argument("--gradient_checkpointing", action="store_true")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--peak_tflops", type=float, help="the device's bfloat16 rate by its data sheet")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()

    limits = machine_limits(args)
    packages = ("oapl", "torch", "transformers")
    result: dict[str, Any] = {"limits": limits}
    if args.device != "cpu":
        result["device"] = torch.cuda.get_device_name()
    print(f"matmul {limits['matmul'] / 1e12:.2f} TFLOP/s, copy {limits['bandwidth'] / 1e9:.0f} GB/s")
    with tempfile.TemporaryDirectory() as folder:
        write_model(folder, args.shape)
        for name, measure in (("training", training), ("decoding", decoding)):
            result[name] = measure(args, folder)
            write_results(args, packages, **result)  # what comes later may fail
    result["head"] = head_memory(args)
    found = result["training"]
    share = found["flops_per_second"] / limits["matmul"]
    utilization = f", {found['flops_per_second'] / args.peak_tflops / 1e12:.2f} of the peak" if args.peak_tflops else ""
    print(f"training: {found['tokens_per_second']:.0f} tokens/s, {share:.2f} of the matmul rate{utilization}")
    found = result["decoding"]
    share = found["bytes_per_second"] / limits["bandwidth"]
    print(f"decoding at batch {args.batch}: {found['tokens_per_second']:.0f} tokens/s, {share:.2f} of the copy rate")
    for name, found in result["head"].items():
        print(f"head, {name}: {found['seconds'] * 1e3:.1f} ms, peak GiB {found['peak_gib']}")
    write_results(args, packages, **result)


if __name__ == "__main__":
    main()
