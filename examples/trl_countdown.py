"""Countdown inside TRL: recipes/countdown.toml with TRL's trainer, data and reward function.

python examples/trl_countdown.py --output_dir runs/trl_countdown
oapl eval runs/trl_countdown recipes/countdown.toml
"""

from __future__ import annotations

import argparse

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from oapl.integrations.trl import OAPLConfig, OAPLTrainer
from oapl.model import resolve
from oapl.tasks.countdown import Countdown, reaches_target

PROMPTS_PER_STEP, NUM_GENERATIONS = 32, 8


def reached(completions, numbers, target, **columns):
    """1 where a completion is a chain of true steps that ends with the target."""
    return [float(reaches_target(*row)) for row in zip(completions, numbers, target, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", default="runs/trl_countdown")
    parser.add_argument("--max_steps", type=int, default=150)
    parser.add_argument("--weight_sync_steps", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()

    task = Countdown()
    problems = [task.prompt("train", index) for index in range(arguments.max_steps * PROMPTS_PER_STEP)]
    dataset = Dataset.from_list([{"prompt": problem.text, **problem.columns} for problem in problems])
    model = resolve("builtin:countdown")

    config = OAPLConfig(
        output_dir=arguments.output_dir,
        beta1=5.0,
        beta2=0.1,
        weight_sync_steps=arguments.weight_sync_steps,
        num_generations=NUM_GENERATIONS,
        per_device_train_batch_size=PROMPTS_PER_STEP * NUM_GENERATIONS // 4,
        gradient_accumulation_steps=4,
        max_completion_length=32,
        max_steps=arguments.max_steps,
        learning_rate=1e-4,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=10,
        adam_beta2=0.95,
        seed=arguments.seed,
        use_cpu=not torch.cuda.is_available(),
        bf16=False,
        gradient_checkpointing=False,
        logging_steps=10,
        save_strategy="no",
        report_to="none",
    )
    trainer = OAPLTrainer(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        reward_funcs=reached,
        args=config,
        train_dataset=dataset,
        processing_class=AutoTokenizer.from_pretrained(model),
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
