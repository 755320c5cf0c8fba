"""Make the countdown model that ships with the package: `python scripts/make_countdown_model.py`.

A Llama of about 1 M parameters learns, by supervised next-token prediction, to answer countdown problems
with legal chains of steps. About half of its training answers reach the target and the others reach some
other number, so the model often finds the target in many tries and seldom in one: a base to reinforce.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from oapl.tasks.countdown import Countdown, chain_text, prompt_text, random_chain

FOLDER = Path(__file__).parents[1] / "src/oapl/assets/countdown"
VOCABULARY = ["<pad>", "<eos>", "<unk>", "use ", " make ", " ", "\n", *"0123456789", *"+-*/="]


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Words and single characters; no special token is ever added to a prompt."""
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(VOCABULARY)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"use | make |.|\n"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        model_max_length=128,
        clean_up_tokenization_spaces=False,
    )


def make_model(tokenizer: PreTrainedTokenizerFast, args: argparse.Namespace) -> LlamaForCausalLM:
    if args.start_from is not None:
        return LlamaForCausalLM.from_pretrained(args.start_from, dtype=torch.float32, attn_implementation="eager")
    torch.manual_seed(args.seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=args.hidden_size,
        intermediate_size=args.intermediate_size,
        num_hidden_layers=args.num_layers,
        num_attention_heads=4,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    config._attn_implementation = "eager"  # faster than sdpa in bf16 on a CPU at this length
    model = LlamaForCausalLM(config)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    return model


def make_traces(task: Countdown, tokenizer, rng: random.Random, count: int, solved_share: float):
    """Token ids and loss mask of `count` training examples, padded to the longest."""
    prompts, answers = [], []
    for _ in range(count):
        numbers, chain = task.problem(rng, "train")
        prompts.append(prompt_text(numbers, target=chain[-1][3]))
        if rng.random() >= solved_share:
            chain = random_chain(rng, numbers)
        answers.append(chain_text(chain))
    prompt_ids, answer_ids = tokenizer(prompts)["input_ids"], tokenizer(answers)["input_ids"]
    width = max(len(p) + len(a) + 1 for p, a in zip(prompt_ids, answer_ids, strict=True))
    ids = np.full((count, width), tokenizer.pad_token_id)
    mask = np.zeros((count, width), dtype=bool)
    for row, (p, a) in enumerate(zip(prompt_ids, answer_ids, strict=True)):
        ids[row, : len(p) + len(a) + 1] = [*p, *a, tokenizer.eos_token_id]
        mask[row, len(p) : len(p) + len(a) + 1] = True
    return ids, mask


def train(
    model: LlamaForCausalLM, ids: np.ndarray, mask: np.ndarray, args: argparse.Namespace, save: Callable[[Path], None]
) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    num_steps = len(ids) * args.epochs // args.batch_size
    rng = np.random.default_rng(args.seed)
    start = time.monotonic()
    for step in range(num_steps):
        progress = step / num_steps
        scale = min(1.0, (step + 1) / 100) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress)))
        for group in optimizer.param_groups:
            group["lr"] = args.learning_rate * scale
        rows = rng.choice(len(ids), size=args.batch_size, replace=False)
        ids_BT, mask_BT = torch.from_numpy(ids[rows]), torch.from_numpy(mask[rows])
        with torch.autocast("cpu", torch.bfloat16):
            logits_BTV = model(ids_BT).logits[:, :-1].float()
        labels_BT = ids_BT[:, 1:].masked_fill(~mask_BT[:, 1:], -100)
        loss = torch.nn.functional.cross_entropy(logits_BTV.flatten(0, 1), labels_BT.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step + 1 in args.save_steps:
            save(args.output / f"{step + 1:06d}")
        if step % 100 == 0 or step == num_steps - 1:
            print(f"step {step}/{num_steps} loss {loss.item():.4f} {time.monotonic() - start:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--output", type=Path, default=FOLDER)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start_from", type=Path, help="a model made here, to train on, in place of a new one")
    parser.add_argument("--hidden_size", type=int, default=128)
    parser.add_argument("--intermediate_size", type=int, default=384)
    parser.add_argument("--num_layers", type=int, default=5)
    parser.add_argument("--num_traces", type=int, default=300_000)
    parser.add_argument("--solved_share", type=float, default=0.5)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch_size", type=int, default=256)
    parser.add_argument("--learning_rate", type=float, default=2e-3)
    parser.add_argument("--min_numbers", type=int, default=3)
    parser.add_argument("--max_numbers", type=int, default=4)
    parser.add_argument("--largest_number", type=int, default=12)
    parser.add_argument(
        "--save_steps", type=int, nargs="*", default=[], help="save after these steps, in folders of their own"
    )
    parser.add_argument("--num_threads", type=int, default=2, help="leave these cores free, or it crawls")
    args = parser.parse_args()
    torch.set_num_threads(args.num_threads)

    task = Countdown(min_numbers=args.min_numbers, max_numbers=args.max_numbers, largest_number=args.largest_number)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer, args)
    print(f"{model.num_parameters():,} parameters", flush=True)
    ids, mask = make_traces(task, tokenizer, random.Random(args.seed), args.num_traces, args.solved_share)
    print(f"{len(ids):,} traces, width {ids.shape[1]}", flush=True)

    def save(folder: Path) -> None:
        weights = {name: weight.to(torch.bfloat16) for name, weight in model.state_dict().items()}
        model.save_pretrained(folder, state_dict=weights)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}, indent=2) + "\n")
        tokenizer.save_pretrained(folder)

    train(model, ids, mask, args, save)
    if not args.save_steps:
        save(args.output)


if __name__ == "__main__":
    main()
