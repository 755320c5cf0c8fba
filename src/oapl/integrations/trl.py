"""OAPL inside TRL: `OAPLTrainer`, a `GRPOTrainer` whose completions are of weights up to L steps old.

TRL samples and trains in turn. So a round is what one of its generations makes: at a sync, all prompts of the next L
optimizer steps are answered by the weights of that moment, and trained on one step after the other. Needs TRL 1.16.
"""

from __future__ import annotations

from dataclasses import MISSING, dataclass, field, fields
from typing import Any

import torch
from torch import Tensor
from trl import GRPOConfig, GRPOTrainer
from trl.trainer.utils import split_pixel_values_by_grid, split_tensor_dict, unsplit_pixel_values_by_grid

from oapl.losses import oapl_loss, optimal_value, sequence_log_ratio

WITHOUT_EFFECT = (
    "beta", "delta", "epsilon", "epsilon_high", "importance_sampling_level", "loss_type", "scale_rewards",
    "multi_objective_aggregation", "off_policy_mask_threshold", "top_entropy_quantile", "entropy_coef",
    "use_adaptive_entropy", "use_bias_correction_kl", "sync_ref_model", "vllm_importance_sampling_correction",
)  # fmt: skip
"""Settings of GRPO's loss."""
OTHER_DISTRIBUTION = (
    *("top_p", "top_k", "min_p", "repetition_penalty"),
    *("generation_kwargs", "vllm_structured_outputs_regex"),
)
"""Settings by which tokens are drawn from another distribution than the trainer computes."""
MULTIMODAL = (
    "pixel_values", "image_grid_thw", "num_images", "pixel_attention_mask", "spatial_shapes", "num_tiles",
    "image_sizes", "token_type_ids", "mm_token_type_ids", "image_position_ids",
)  # fmt: skip


@dataclass
class OAPLConfig(GRPOConfig):  # type: ignore[misc]
    """`trl.GRPOConfig` with the settings of OAPL, and without those that only GRPO's loss has.

    Raises ValueError where one of these is changed, where tokens would be drawn by more than the temperature, and where
    `steps_per_generation` or `generation_batch_size` is given: they follow from `weight_sync_steps`.
    """

    beta1: float = field(
        default=5.0,
        metadata={"help": "Temperature of the value's soft maximum; inf is the mean, the paper uses 1."},
    )
    beta2: float = field(
        default=0.1,
        metadata={"help": "Scales the log-ratio, in reward per nat; the paper uses 1e-3, for long answers."},
    )
    weight_sync_steps: int = field(
        default=50,
        metadata={"help": "L: optimizer steps between two syncs; num_iterations passes over a round are within them."},
    )
    adam_epsilon: float = field(
        default=1e-10, metadata={"help": "AdamW's epsilon; small, since the loss carries 2 * beta2."}
    )
    disable_dropout: bool = field(
        default=True, metadata={"help": "Log-ratios are of one model, and so without chance in it."}
    )
    vllm_importance_sampling_correction: bool = field(
        default=False, metadata={"help": "GRPO's; here vLLM's log-probs are the anchor, and nothing is corrected."}
    )

    def __post_init__(self) -> None:
        for name in ("steps_per_generation", "generation_batch_size"):
            if getattr(self, name) is not None:
                raise ValueError(
                    f"{name} = {getattr(self, name)}: a round is generated at once. Leave it out and set "
                    f"weight_sync_steps."
                )
        if self.weight_sync_steps < 1:
            raise ValueError(f"weight_sync_steps = {self.weight_sync_steps} must be at least 1")
        if not self.beta1 > 0:
            raise ValueError(f"beta1 = {self.beta1} must be positive; inf is the mean")
        if not 0 < self.beta2 < float("inf"):
            raise ValueError(f"beta2 = {self.beta2} must be positive and finite")
        for name in _changed(self, WITHOUT_EFFECT):
            raise ValueError(
                f"{name} = {getattr(self, name)!r} is of GRPO's loss, and OAPL has no use for it. Leave it out"
            )
        for name in _changed(self, OTHER_DISTRIBUTION):
            raise ValueError(
                f"{name} = {getattr(self, name)!r}: tokens would be drawn from another distribution than the one whose "
                f"log-probs are trained. Leave it out and use the temperature"
            )
        if self.num_iterations < 1 or self.weight_sync_steps % self.num_iterations:
            raise ValueError(
                f"weight_sync_steps = {self.weight_sync_steps} must be a multiple of num_iterations = "
                f"{self.num_iterations}: all passes over a round lie between two syncs"
            )
        if not self.disable_dropout:
            raise ValueError(
                "disable_dropout = False: the log-ratio would be of two random draws of the model. Leave it out"
            )
        self.steps_per_generation = self.weight_sync_steps * self.gradient_accumulation_steps // self.num_iterations
        super().__post_init__()
        rows = self.per_device_train_batch_size * self.gradient_accumulation_steps
        if rows % self.num_generations:
            raise ValueError(
                f"per_device_train_batch_size * gradient_accumulation_steps = {rows} must be divisible by "
                f"num_generations = {self.num_generations}, so that an optimizer step trains on whole groups"
            )


def _changed(config: OAPLConfig, names: tuple[str, ...]) -> list[str]:
    defaults = {each.name: each.default for each in fields(config) if each.default is not MISSING}
    return [name for name in names if getattr(config, name) != defaults[name]]


class OAPLTrainer(GRPOTrainer):  # type: ignore[misc]
    """`trl.GRPOTrainer` with the loss and the lag of OAPL; datasets, rewards, peft, logging and vLLM are TRL's.

    `args` is an `OAPLConfig`. The anchor is what vLLM says that it drew each token with; without vLLM it is computed
    by the trainer when the round is generated, since `generate` of Transformers does not tell. Evaluations are sampled
    from the current weights. Raises ValueError where a server of vLLM gives log-probs of another distribution.
    """

    _tag_names = ["trl", "oapl"]  # noqa: RUF012  # TRL's, for a model's card
    _name = "OAPL"
    _paper = {  # noqa: RUF012
        "title": "LLMs Can Learn to Reason Via Off-Policy RL",
        "id": "2602.19362",
        "citation": "@misc{oapl, title = {LLMs Can Learn to Reason Via Off-Policy RL}, eprint = {arXiv:2602.19362}}",
    }
    _buffered_inputs: list[dict[str, Any]] | None
    _rewards: Tensor
    """f32[N, F] of the newest generation, of all processes, by reward function; NaN where one gave none."""

    def __init__(self, model: Any, reward_funcs: Any = None, args: OAPLConfig | None = None, **kwargs: Any) -> None:
        if not isinstance(args, OAPLConfig):
            raise ValueError(f"args must be an OAPLConfig, got {type(args).__name__}")
        super().__init__(model, reward_funcs, args, **kwargs)
        prompts = args.generation_batch_size // args.num_generations
        if hasattr(self.train_dataset, "__len__") and len(self.train_dataset) < prompts:
            raise ValueError(
                f"train_dataset has {len(self.train_dataset)} rows, and a round of weight_sync_steps = "
                f"{args.weight_sync_steps} needs {prompts}: TRL drops what fills no round. Sync more often"
            )
        if self.use_vllm and self.vllm_mode == "server" and self.accelerator.is_main_process:
            mode = self.vllm_generation.vllm_client.get_server_info()["model_config"]["logprobs_mode"]
            if mode != "processed_logprobs":
                raise ValueError(
                    f"the vLLM server runs with --logprobs-mode {mode}, which are not those that tokens are drawn by. "
                    f"Start it with --logprobs-mode processed_logprobs"
                )

    # A round: sampled whole, kept in order

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        """One micro-batch of the round. TRL's method shuffles the rows of a generation, and so parts its groups."""
        if not self.model.training:
            return super()._prepare_inputs(generation_batch)
        step = self._step % (self.args.steps_per_generation * self.num_iterations)
        if step == 0 or self._buffered_inputs is None:
            made = split_pixel_values_by_grid(self._generate_and_score_completions(generation_batch))
            parts = split_tensor_dict(made, self.args.steps_per_generation)
            self._buffered_inputs = [_to(unsplit_pixel_values_by_grid(part), torch.device("cpu")) for part in parts]
        lag = step // self.current_gradient_accumulation_steps
        self._metrics["train"]["lag"].append(float(lag))
        return _to(self._buffered_inputs[step % self.args.steps_per_generation], self.accelerator.device)

    def _generate_single_turn(self, prompt_ids: Any, *args: Any, **kwargs: Any) -> Any:
        """In parts of an optimizer step where Transformers generates, which would take the round as one batch."""
        rows = self.args.per_device_train_batch_size * self.args.gradient_accumulation_steps
        images = args[0] if args else kwargs["images"]
        if self.use_vllm or self.use_transformers_continuous_batching or images is not None:
            return super()._generate_single_turn(prompt_ids, *args, **kwargs)
        made: list[Any] = []
        for first in range(0, len(prompt_ids), rows):
            made += super()._generate_single_turn(prompt_ids[first : first + rows], *args, **kwargs)[0]
        return made, None

    # Rewards, values, anchors

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Tensor:
        self._rewards = super()._calculate_rewards(*args, **kwargs)
        return self._rewards

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        made = super()._generate_and_score_completions(inputs)
        training = self.model.training
        advantages, is_scored = group_advantages(
            self._rewards,
            self.reward_weights.to(self._rewards.device),
            self.num_generations if training else self.num_generations_eval,
            self.args.beta1,
        )
        for _ in range(min(len(advantages), len(self._logs["advantages"]))):  # GRPO's
            self._logs["advantages"].pop()
        self._logs["advantages"].extend(advantages.tolist())
        first = self.accelerator.process_index * len(inputs)
        made["advantages"] = advantages[first : first + len(inputs)]
        made["completion_mask"] = made["completion_mask"] * is_scored[first : first + len(inputs), None]
        anchor, computed = made.pop("sampling_per_token_logps", None), made.get("old_per_token_logps")
        if anchor is None:
            return made
        if computed is not None:
            gap = (anchor - computed).abs()[_mask(made)]
            self._log_mean("train" if training else "eval", "token_gap", gap[~gap.isnan()])
            anchor = torch.where(anchor.isnan(), computed, anchor)
        made["old_per_token_logps"] = anchor
        return made

    def _compute_loss(self, model: Any, inputs: Any) -> Tensor:
        completion_ids, mask = inputs["completion_ids"], _mask(inputs)
        logprobs, entropies, aux_loss = self._get_per_token_logps_and_entropies(
            model,
            torch.cat([inputs["prompt_ids"], completion_ids], dim=1),
            torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1),
            completion_ids.size(1),
            compute_entropy=True,
            compute_aux_loss=self.aux_loss_enabled,
            **{name: inputs.get(name) for name in MULTIMODAL},
        )
        anchor = inputs.get("old_per_token_logps")  # absent, or NaN where vLLM gave none, if these weights just sampled
        anchor = logprobs.detach() if anchor is None else torch.where(anchor.isnan(), logprobs.detach(), anchor)
        loss, metrics = oapl_loss(
            logprobs.float(),
            anchor.float(),
            mask,
            inputs["advantages"].float(),
            beta2=self.args.beta2,
            num_completions=len(completion_ids),
        )
        mode = "train" if self.model.training else "eval"
        with torch.no_grad():
            log_ratios = sequence_log_ratio(logprobs, anchor, mask)
            is_better = inputs["advantages"] > 0
            self._log_mean(mode, "entropy", entropies[mask])
            self._log_mean(mode, "log_ratio", log_ratios)
            self._log_mean(mode, "log_ratio_positive", log_ratios[is_better])
            self._log_mean(mode, "log_ratio_negative", log_ratios[~is_better])
            self._log_mean(mode, "residual", metrics["residual"][None])
        if self.aux_loss_enabled:
            loss = loss + self.router_aux_loss_coef * aux_loss
        return loss / (self.current_gradient_accumulation_steps if mode == "train" else 1)

    def _log_mean(self, mode: str, name: str, values: Tensor) -> None:
        """The mean over all processes' values, none of which may have any."""
        totals = torch.stack([values.float().sum(), torch.tensor(float(values.numel()), device=values.device)])
        total, count = self.accelerator.reduce(totals, reduction="sum").tolist()
        self._metrics[mode][name].append(total / count if count else float("nan"))


def group_advantages(rewards: Tensor, weights: Tensor, num_generations: int, beta1: float) -> tuple[Tensor, Tensor]:
    """f64[N] rewards less the optimal value of their group, and bool[N] whether a completion has a reward.

    `rewards` has shape [N, F], of N completions by F reward functions, NaN where a function gave none; groups of
    `num_generations` follow each other. What no function scored counts in no value, and its advantage is 0.
    """
    is_scored = ~rewards.isnan().all(dim=1)
    total = (rewards.double() * weights.double()).nansum(dim=1)
    advantages = torch.zeros_like(total)
    for first in range(0, len(total), num_generations):
        rows = first + is_scored[first : first + num_generations].nonzero().squeeze(1)
        if len(rows):
            advantages[rows] = total[rows] - optimal_value(total[rows], beta1)
    return advantages, is_scored


def _mask(inputs: dict[str, Any]) -> Tensor:
    """bool[B, T]: the tokens that the policy sampled, and not its padding or a tool's."""
    mask: Tensor = inputs["completion_mask"] * inputs.get("tool_mask", 1)
    return mask.bool()


def _to(inputs: dict[str, Any], device: torch.device) -> dict[str, Any]:
    return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in inputs.items()}
