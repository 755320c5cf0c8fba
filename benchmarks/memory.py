"""Peak memory of a training step where the vocabulary or the completions double, at the same tokens a micro-batch.

    make runs/smollm2
    .venv/bin/python benchmarks/memory.py --output memory.json

A model of SmolLM2-135M's shape with random weights. Each form has a process of its own. What the weights, their float32
copies, gradients and moments take is counted and left out, since it grows with the vocabulary of necessity, and so is
what the libraries take before there is a model. `full logits`
computes the same with all logits of a micro-batch at once, in float32, as a plain loss does.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from machine import write_results

TOKENS = 4096
FORMS = {
    "as it is": {},
    "vocabulary x 2": {"vocabulary": 2},
    "length x 2": {"length": 2},
    "both x 2": {"vocabulary": 2, "length": 2},
    "full logits": {"full": 1},
    "full logits, vocabulary x 2": {"full": 1, "vocabulary": 2},
}


def child(args: argparse.Namespace, form: dict[str, int]) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    from oapl.config import Recipe
    from oapl.trainer import Trainer
    from oapl.types import Completion, Group, Shard

    torch.set_num_threads(args.threads)
    libraries = memory("VmRSS")
    length = args.length * form.get("length", 1)
    config = AutoConfig.from_pretrained(args.model)
    config.vocab_size *= form.get("vocabulary", 1)
    with tempfile.TemporaryDirectory() as folder:
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
        AutoTokenizer.from_pretrained(args.model).save_pretrained(folder)
        recipe = Recipe(
            model={"name_or_path": folder, "attn_implementation": "sdpa"},
            task={"name": "countdown"},
            sampling={"num_generations": 8, "max_completion_length": length},
            loss={"beta2": 0.1},
            trainer={
                "num_steps": 50,
                "bf16": True,
                "num_threads": args.threads,
                "max_tokens_per_microbatch": TOKENS + 64,
            },
        )
        trainer = Trainer(recipe, folder)
    if form.get("full"):
        trainer.lm.head.__class__.logprobs = full_logprobs
    rng = np.random.default_rng(0)
    num_rows = 2 * TOKENS // length  # two micro-batches
    made = tuple(
        Completion(
            rng.integers(100, config.vocab_size, length).astype(np.int32), np.full(length, -11.0, "f4"), "length"
        )
        for _ in range(num_rows)
    )
    rewards = (np.arange(num_rows) % 2).astype(np.float32)
    group = Group(0, "0", "", np.arange(100, 108, dtype=np.int32), made, ("",) * num_rows, rewards)
    trainer.train_step(Shard((group,), (), 0.0, 0.0, 0.0), "digest")  # which makes gradients and moments
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    trainer.train_step(Shard((group,), (), 0.0, 0.0, 0.0), "digest")
    computed = sum(p.numel() * p.element_size() for p in trainer.model.parameters())
    states = computed + sum(4 * p.numel() * p.element_size() for p in trainer.parameters.values())
    print(json.dumps({"peak": memory("VmHWM"), "states": states, "libraries": libraries}))


def memory(what: str) -> int:
    """Bytes: `VmRSS` now, or the peak, `VmHWM`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(what)).split()[1])


def full_logprobs(head: Any, hidden_NH: Any, targets_N: Any, temperature: float) -> tuple[Any, Any]:
    logprobs_NV = ((hidden_NH @ head.weight.T).float() / temperature).log_softmax(-1)
    entropy_N = -(logprobs_NV.exp() * logprobs_NV).sum(-1).detach()
    return logprobs_NV.gather(-1, targets_N[:, None])[:, 0], entropy_N


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="runs/smollm2", help="whose shape and tokenizer are taken")
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--forms", nargs="*", default=list(FORMS))
    parser.add_argument("--output", type=Path)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args, FORMS[args.child])
        return
    rows = {}
    print(
        "| | peak GiB | weights and their states | libraries | all else | times the first |\n|---|---|---|---|---|---|"
    )
    for form in args.forms:
        done = subprocess.run(
            [sys.executable, __file__, "--child", form, *sys.argv[1:]], stdout=subprocess.PIPE, text=True, check=True
        )
        found = json.loads(done.stdout.strip().splitlines()[-1])
        rest = found["peak"] - found["states"] - found["libraries"]
        rows[form] = found | {"rest": rest}
        ratio = rest / next(iter(rows.values()))["rest"]
        gib = " | ".join(f"{x / 2**30:.2f}" for x in (*(found[key] for key in ("peak", "states", "libraries")), rest))
        print(f"| {form} | {gib} | {ratio:.2f} |", flush=True)
    write_results(args, ("oapl", "torch", "transformers"), tokens=TOKENS, rows=rows)


if __name__ == "__main__":
    main()
