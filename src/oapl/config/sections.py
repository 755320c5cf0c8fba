"""Every setting of a run: its name, type, default, and what it means. Names follow TRL, Transformers and vLLM."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from string import Formatter
from typing import Annotated, Any, Literal, get_args
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from oapl.config.benchmarks import find_benchmark

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]
Device = Annotated[str, Field(pattern=r"^(cpu|cuda(:\d+)?)$")]
VLLM_TEMPERATURE = 0.01
"""What vLLM raises lower ones to."""
SaysNone = BeforeValidator(lambda value: "none" if value is None else value)
"""For a setting with a choice called "none", which the command line would read as None."""


def server_url(url: str) -> str:
    """Without a slash at its end. Raises ValueError where it is no server's, or holds a user's name or a query."""
    try:
        parts = urlsplit(url)
        is_plain = parts.scheme in ("http", "https") and parts.hostname and (parts.port is None or parts.port > 0)
    except ValueError:  # a port or a bracket that is none
        is_plain = False
    if not is_plain or set(url) & set("@?#") or url.split() != [url]:
        raise ValueError(f"{url!r} is no server's URL. Write it like http://node1:8000")
    return url.rstrip("/")


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    def changed(self, *keys: str) -> dict[str, Any]:
        """Those of the settings that have another value than their default."""
        values = {key: getattr(self, key) for key in keys}
        return {key: value for key, value in values.items() if value != type(self).model_fields[key].default}


class ModelConfig(Section):
    name_or_path: str = Field(description="A model folder, a hub name, or `builtin:countdown`, the model shipped here.")
    attn_implementation: str | None = Field(
        None, description="Attention of Transformers, such as `eager`, `sdpa`, `flash_attention_2`; its choice if none."
    )
    use_peft: bool = Field(False, description="Train LoRA matrices in place of the weights; needs `oapl[peft]`.")
    lora_r: Count = Field(16, description="Rank of the LoRA matrices.")
    lora_alpha: Positive = Field(32.0, description="LoRA's product is scaled by lora_alpha / lora_r.")
    lora_target_modules: tuple[str, ...] = Field(
        ("all-linear",),
        min_length=1,
        description="Names of the layers with LoRA; `all-linear` is all but the head.",
    )


BUILTIN_REWARDS = ("math", "code")
"""Rewards that ship with this package."""
DATASET_SUFFIXES = (".jsonl", ".json", ".parquet", ".csv")
"""How the name of a dataset ends that is a file; any other is one on the hub."""


@dataclass(frozen=True)
class Rows:
    """Which rows a dataset's name stands for."""

    path: str
    split: str = ""
    configs: frozenset[str] = frozenset()
    """Of a hub dataset; none stands for all, as far as one can tell."""

    def overlaps(self, other: Rows | None) -> bool:
        """Whether some rows may be the other's too. The same problems under another name are not noticed."""
        if other is None or (self.path, self.split) != (other.path, other.split):
            return False
        return not (self.configs and other.configs) or bool(self.configs & other.configs)


def rows_of(dataset: str | None, split: str) -> Rows | None:
    if dataset is None:
        return None
    if dataset.endswith(DATASET_SUFFIXES):
        return Rows(str(Path(dataset).resolve()))
    if (benchmark := find_benchmark(dataset)) is not None:
        return Rows(benchmark.path, benchmark.split)
    path, configs = hub_name(dataset)
    return Rows(path, split, frozenset(configs))


def hub_name(dataset: str) -> tuple[str, tuple[str, ...]]:
    """A hub dataset's name, and its configurations: `name:config,config`."""
    path, _, configs = dataset.partition(":")
    return path, tuple(filter(None, configs.split(",")))


def as_tuple(value: Any) -> Any:
    """A single name where a list of them may stand."""
    return (value,) if isinstance(value, str) and not value.lstrip().startswith("[") else value


OwnRows = Literal["dataset", "math", "code"]
"""Tasks whose problems are rows that the user names."""


class TaskConfig(Section):
    name: str = Field(
        description="`math`, `code`, `dataset` for your own rows and reward, `countdown`, or `reasoning_gym:<dataset>`."
    )
    args: dict[str, Any] = Field({}, description="Arguments of a generated task, such as `max_numbers`.")
    chat: bool = Field(
        False, description="Give prompts of plain text to the model as a user's message, by its chat template."
    )
    system_prompt: str | None = Field(None, description="A system message before each prompt; needs a chat template.")
    chat_template_kwargs: dict[str, Any] = Field(
        {}, description="What the chat template is given besides the messages, such as `enable_thinking`."
    )
    prompt_template: str | None = Field(
        None,
        description="For `math` and `code`: the prompt, where `{problem}` stands for the problem; by default it asks "
        "for a boxed answer, or for a program.",
    )
    answer_after: str | None = Field(
        None,
        description="For `math` and `code`: only what follows this is graded, as `</think>` where the model's template "
        "opens the thinking part.",
    )
    dataset: str | None = Field(
        None,
        description="Training rows: a .jsonl, .csv or .parquet file, a benchmark, or a name on the hub, with "
        "`:config,config` where it has several.",
    )
    split: str = Field("train", description="For a hub dataset: the split to train on.")
    eval_dataset: str | None = Field(
        None, description="The held-out rows: a file, the hub name, or a benchmark such as `aime_2025`."
    )
    eval_split: str = Field("test", description="For a hub dataset: the held-out split.")
    eval_data_file: str | None = Field(
        None, description="A file with the rows of the benchmark that `eval_dataset` names, in place of the hub."
    )
    validation_dataset: str | None = Field(
        None, description="With a selection: the file, hub name or benchmark of the validation problems."
    )
    validation_split: str = Field("validation", description="For a hub dataset: the split to choose the weights by.")
    reward_funcs: Annotated[tuple[str, ...], BeforeValidator(as_tuple)] = Field(
        (),
        description="What gives the reward: `math`, `code`, `module:function`, called as `reward(prompts, completions, "
        "**columns)`, or `verl:module:compute_score`. By default the task's own grader.",
    )
    reward_weights: tuple[Finite, ...] = Field(
        (), description="One weight a reward function; the reward is their weighted sum. By default 1 each."
    )
    reward_timeout_s: Positive = Field(
        30.0, description="Seconds that a call of a reward function may take, or one answer to `math`."
    )
    num_workers: Count = Field(1, description="Answers or programs graded side by side by `math` and `code`.")
    test_timeout_s: Positive = Field(6.0, description="For `code`: seconds that a program may take for one test.")
    max_tests: Count | None = Field(
        None, description="For `code`: only so many tests, those with the longest inputs; DeepCoder uses 15."
    )
    success_threshold: float = Field(
        1.0,
        description="A completion counts as correct from this reward on; of several with `math` or `code`, from this "
        "score of theirs on.",
    )

    @property
    def judged_by(self) -> str | None:
        """The reward function by whose own score a completion counts as right: the grader of mathematics or programs,
        where other rewards are added to it. None: the whole reward says it."""
        own = [name for name in self.rewards if name in BUILTIN_REWARDS]
        return own[0] if own and len(self.rewards) > 1 else None

    @property
    def rewards(self) -> tuple[str, ...]:
        """The reward functions: those asked for, or the task's own."""
        return self.reward_funcs or ((self.name,) if self.name in BUILTIN_REWARDS else ())

    @model_validator(mode="after")
    def _check_source(self) -> TaskConfig:
        if self.name not in ("countdown", *get_args(OwnRows)) and not re.fullmatch(r"reasoning_gym:\w+", self.name):
            raise ValueError(
                f"name = {self.name!r} is unknown: use math, code, dataset, countdown or reasoning_gym:<dataset>"
            )
        if self.name in get_args(OwnRows):
            if self.dataset is None:
                raise ValueError(f"dataset is missing: `name = {self.name!r}` needs the rows to train on")
            if self.args:
                raise ValueError(f"args = {self.args} has no use with {self.name!r}; it is for generated tasks")
        else:
            of_rows = ("dataset", "eval_dataset", "validation_dataset", "eval_data_file", "reward_funcs")
            for key, value in self.changed(*of_rows).items():
                raise ValueError(
                    f'{key} = {value!r} needs rows of your own: `name = "dataset"`, "math" or "code", not {self.name!r}'
                )
        if self.prompt_template is not None and self.name not in BUILTIN_REWARDS:
            raise ValueError(
                f"prompt_template = {self.prompt_template!r} is for math and code, not for {self.name!r}. Leave it out"
            )
        if self.prompt_template is not None and "{problem}" not in self.prompt_template:
            raise ValueError(
                f"prompt_template = {self.prompt_template!r} has no `{{problem}}`, which stands for the problem"
            )
        if self.eval_data_file is not None and (self.eval_dataset is None or find_benchmark(self.eval_dataset) is None):
            raise ValueError(
                f"eval_data_file = {self.eval_data_file!r} holds the rows of a benchmark: name it as eval_dataset. "
                f"Rows that are no benchmark's are named as eval_dataset themselves"
            )
        return self

    @model_validator(mode="after")
    def _check_rewards(self) -> TaskConfig:
        if self.name == "dataset" and not self.reward_funcs:
            raise ValueError(
                'reward_funcs is missing: `name = "dataset"` needs one, such as `module:function` or `math`'
            )
        for function in self.reward_funcs:
            if function not in BUILTIN_REWARDS and not re.fullmatch(r"(verl:)?[\w.]+:\w+", function):
                raise ValueError(
                    f"reward_funcs: {function!r} must be math, code, `module:function` or `verl:module:compute_score`"
                )
            if self.reward_funcs.count(function) > 1:
                raise ValueError(f"reward_funcs names {function!r} twice. Give it once, with its weight")
        if self.reward_weights and len(self.reward_weights) != len(self.rewards):
            raise ValueError(
                f"reward_weights = {list(self.reward_weights)} must have one weight for each of the reward functions "
                f"{list(self.rewards)}. Give as many, or [] for 1 each"
            )
        if self.answer_after is not None and not set(BUILTIN_REWARDS) & set(self.rewards):
            raise ValueError(f"answer_after = {self.answer_after!r} needs math or code among the rewards. Leave it out")
        for key, value in self.changed("test_timeout_s", "max_tests").items():
            if "code" not in self.rewards:
                raise ValueError(f"{key} = {value} is for programs, and `code` is not among the rewards. Leave it out")
        return self

    @model_validator(mode="after")
    def _check_validation_rows(self) -> TaskConfig:
        validation = rows_of(self.validation_dataset, self.validation_split)
        for key, rows in (
            ("dataset", rows_of(self.dataset, self.split)),
            ("eval_dataset", rows_of(self.eval_dataset, self.eval_split)),
            ("eval_data_file", rows_of(self.eval_data_file, "")),
        ):
            if validation is not None and validation.overlaps(rows):
                raise ValueError(
                    f"validation_dataset = {self.validation_dataset!r} holds the rows of {key} too: weights chosen by "
                    f"problems that they were trained on, or that are reported, look better than they are. "
                    f"Give other rows"
                )
        return self


class SamplingConfig(Section):
    num_generations: int = Field(8, description="G, the completions of one prompt.")
    max_completion_length: Count = Field(256, description="Tokens after which a completion is cut.")
    temperature: Positive = Field(1.0, description="Divides the logits, when sampling and when training.")
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        (), description="Texts that end a completion, besides the model's own tokens; they stay part of it."
    )

    @model_validator(mode="after")
    def _check_group(self) -> SamplingConfig:
        if self.num_generations < 2:
            raise ValueError(
                f"num_generations = {self.num_generations} must be at least 2: with one completion a prompt its value "
                f"equals its reward and there is nothing to learn. The paper uses 8"
            )
        return self


class OAPLConfig(Section):
    kind: Literal["oapl"] = Field(
        "oapl", description="The regression of the log-ratio onto the advantage; or `grpo`, `grpo_plus`, `reinforce`."
    )
    beta1: Annotated[float, Field(gt=0)] = Field(
        5.0, description="Temperature of the value's soft maximum; `inf` is the mean, the paper uses 1."
    )
    beta2: Positive = Field(
        0.1,
        description="Scales the log-ratio, in reward per nat; the paper uses 1e-3, for answers of thousands of tokens.",
    )
    anchor: Literal["engine", "trainer"] = Field(
        "engine",
        description="The sampler's log-probs: as the engine drew, or computed again by a frozen copy in the trainer.",
    )
    leave_one_out: bool = Field(False, description="Each completion's value from the others of its group.")
    drop_uniform_groups: bool = Field(False, description="Leave out groups whose completions all have one reward.")
    rescale: bool = Field(False, description="Divide the loss by 2 * beta2: gradients in policy-gradient units.")
    per_token_mean: bool = Field(False, description="Divide the log-ratio by the length. A variant that is not OAPL.")


class GRPOConfig(Section):
    kind: Literal["grpo"] = Field(description="GRPO against the sampler, at any lag.")
    epsilon: Annotated[float, Field(gt=0, lt=1)] = Field(0.2, description="Lower clip of the token ratio.")
    epsilon_high: Positive | None = Field(None, description="Upper clip; by default that of epsilon.")
    importance_sampling: Annotated[
        Literal["none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"], SaysNone
    ] = Field(
        "none", description="Weights in place of the clip: of a token or the whole, capped or dropped beyond the cap."
    )
    importance_sampling_clip_max: Annotated[float, Field(ge=1, allow_inf_nan=False)] = Field(
        2.0, description="The cap of the weights."
    )
    loss_type: Literal["grpo", "dr_grpo", "dapo"] = Field(
        "dapo", description="Mean over a completion's tokens then completions, over a fixed length, or over all tokens."
    )
    scale_rewards: Annotated[Literal["group", "none"], SaysNone] = Field(
        "group", description="Divide advantages by the group's standard deviation."
    )

    @model_validator(mode="after")
    def _check_all_act(self) -> GRPOConfig:
        if self.importance_sampling == "none":
            idle = ["importance_sampling_clip_max"]
            reason = "there are no weights to cap. Leave it out, or ask for weights"
        else:
            idle, reason = ["epsilon", "epsilon_high"], "weights take the place of the clip. Leave one of them out"
        for key, value in self.changed(*idle).items():
            raise ValueError(
                f"{key} = {value} has no use with importance_sampling = {self.importance_sampling!r}: {reason}"
            )
        return self


class GRPOPlusConfig(Section):
    kind: Literal["grpo_plus"] = Field(description="DeepCoder's GRPO+: clips 0.2 and 0.28, truncated ones left out.")


class ReinforceConfig(Section):
    kind: Literal["reinforce"] = Field(description="The plain policy gradient with a leave-one-out baseline.")


def loss_kind(value: Any) -> Any:
    return value.get("kind", "oapl") if isinstance(value, Mapping) else getattr(value, "kind", "oapl")


LossSection = OAPLConfig | GRPOConfig | GRPOPlusConfig | ReinforceConfig
_TaggedLoss = Annotated[
    Annotated[OAPLConfig, Tag("oapl")]
    | Annotated[GRPOConfig, Tag("grpo")]
    | Annotated[GRPOPlusConfig, Tag("grpo_plus")]
    | Annotated[ReinforceConfig, Tag("reinforce")],
    Discriminator(loss_kind),
]


class TrainerConfig(Section):
    num_steps: Count = Field(description="Optimizer steps of the run; a multiple of weight_sync_steps.")
    weight_sync_steps: Count = Field(50, description="L, the steps between new weights for the sampler: one round.")
    prompts_per_step: Count = Field(32, description="Groups an optimizer step trains on.")
    num_epochs: Count = Field(
        1, description="Passes over each round's groups, each after the first in a new order; L counts all their steps."
    )
    learning_rate: Positive = Field(1e-6, description="Peak learning rate of AdamW.")
    lr_scheduler_type: Literal["constant", "cosine"] = Field(
        "constant", description="After the warm-up; cosine ends at min_lr_rate."
    )
    min_lr_rate: float = Field(0.0, ge=0, lt=1, description="Share of the peak at which the cosine ends.")
    warmup_steps: int = Field(0, ge=0, description="Steps over which the learning rate rises from 0.")
    weight_decay: NonNegative = Field(0.0, description="Decoupled weight decay of AdamW.")
    adam_beta1: float = Field(0.9, ge=0, lt=1, description="Decay of AdamW's first moment.")
    adam_beta2: float = Field(0.95, ge=0, lt=1, description="Decay of AdamW's second moment.")
    adam_epsilon: Positive = Field(1e-10, description="AdamW's epsilon; small, since the loss carries 2 * beta2.")
    on_collapse: Literal["stop", "warn", "off"] = Field(
        "stop", description="What to do once right answers are being unlearnt: end the run, say so, or nothing."
    )
    max_grad_norm: Positive = Field(1.0, description="Gradients beyond this norm are scaled down to it.")
    max_tokens_per_microbatch: Count = Field(
        16384, description="Prompt, completion and padding tokens of one backward."
    )
    gradient_checkpointing: bool = Field(
        False, description="Compute each layer again in the backward pass: less memory, a third more work."
    )
    bf16: bool = Field(
        False, description="Compute in bfloat16; what is trained has float32 copies, which the optimizer moves."
    )
    torch_compile: bool = Field(
        False,
        description="Fuse norms, feed-forward parts, attention's scores, the head's logits: faster, once compiled.",
    )
    device: Device = Field("cpu", description="`cpu`, `cuda` or `cuda:<index>`.")
    num_ranks: Count = Field(
        1, description="Processes that weights, optimizer and work are shared out to, each with a device of its own."
    )
    num_threads: Count = Field(1, description="CPU threads of each of the trainer's processes.")
    save_steps: Count | None = Field(
        None, description="Also save a checkpoint every so many steps, besides the one at each weight sync."
    )
    save_total_limit: int = Field(2, ge=2, description="Checkpoints kept; older ones are removed.")

    @model_validator(mode="after")
    def _check_rounds(self) -> TrainerConfig:
        if self.num_steps % self.weight_sync_steps:
            lower = self.num_steps // self.weight_sync_steps * self.weight_sync_steps
            nearest = " or ".join(str(n) for n in (lower, lower + self.weight_sync_steps) if n)
            raise ValueError(
                f"num_steps = {self.num_steps} must be a multiple of weight_sync_steps = {self.weight_sync_steps}, "
                f"so that every round is whole: try {nearest}"
            )
        if self.weight_sync_steps % self.num_epochs:
            raise ValueError(
                f"num_epochs = {self.num_epochs} must divide weight_sync_steps = {self.weight_sync_steps}, "
                f"the steps of a round"
            )
        return self

    @model_validator(mode="after")
    def _check_schedule(self) -> TrainerConfig:
        if self.min_lr_rate and self.lr_scheduler_type != "cosine":
            raise ValueError(
                f"min_lr_rate = {self.min_lr_rate} is where a cosine ends, and lr_scheduler_type = "
                f"{self.lr_scheduler_type!r} has no end. Leave it out, or set lr_scheduler_type = 'cosine'"
            )
        return self

    @property
    def num_rounds(self) -> int:
        return self.num_steps // self.weight_sync_steps

    @property
    def shards_per_round(self) -> int:
        """What a round samples: one shard a step of its first epoch."""
        return self.weight_sync_steps // self.num_epochs

    @property
    def prompts_per_round(self) -> int:
        return self.shards_per_round * self.prompts_per_step


class EngineConfig(Section):
    kind: Literal["embedded", "vllm", "vllm_server"] = Field(
        "embedded",
        description="What generates: `embedded`, PyTorch in the sampler's own process, `vllm`, there too, or "
        "`vllm_server`, servers of vLLM over HTTP.",
    )
    server_urls: tuple[Annotated[str, AfterValidator(server_url)], ...] = Field(
        (), description="vllm_server: the servers, such as `http://node1:8000`. Each gets the weights and its share."
    )
    server_command: str | None = Field(
        None,
        description="vllm_server: starts a server where none answers, once for each URL, with `{model}`, `{host}` and "
        "`{port}` filled in; it ends with the sampler.",
    )
    max_num_seqs: Count = Field(256, description="Completions decoded at once; of several servers, by all together.")
    kv_cache_memory_bytes: Count | None = Field(
        None, description="Most bytes of keys and values; fewer completions are decoded at once where they need more."
    )
    max_model_len: Count | None = Field(
        None, description="vLLM: tokens of prompt and completion together; by default the model's context."
    )
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] | None = Field(
        None, description="vLLM: share of the device's memory that it may take."
    )
    tensor_parallel_size: Count = Field(1, description="vLLM: GPUs that hold one model together.")
    enforce_eager: bool = Field(False, description="vLLM: start sooner, without compiling; slower on long runs.")
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="Type of the weights and the KV cache.")
    device: Device = Field("cpu", description="`cpu`, `cuda` or `cuda:<index>`.")
    num_threads: Count = Field(1, description="CPU threads of the sampler.")
    probe_tolerance: Positive | None = Field(
        None,
        description="Refuse to sample where engine and trainer differ by more, in nats a token on average; "
        "by default 1e-3, or 0.25 where either computes in bfloat16.",
    )

    def tolerance(self, *, coarse: bool = False) -> float:
        """Nats a token by which this engine may differ from another, or from a trainer, that computes in bfloat16
        (`coarse`) or not."""
        return self.probe_tolerance or (0.25 if coarse or self.dtype == "bfloat16" else 1e-3)

    @model_validator(mode="after")
    def _check_kind(self) -> EngineConfig:
        of_vllm = ("max_model_len", "gpu_memory_utilization", "tensor_parallel_size", "enforce_eager")
        of_server = ("server_urls", "server_command")
        if self.kind == "embedded":
            self._refuse(of_vllm, 'is vLLM\'s: it needs `kind = "vllm"`')
        elif self.kind == "vllm_server":
            self._refuse(
                (*of_vllm, "kv_cache_memory_bytes", "device"), "is the servers' own: give it to `vllm serve` as a flag"
            )
            self._check_servers()
        if self.kind != "vllm_server":
            self._refuse(of_server, 'needs `kind = "vllm_server"`')
        if self.kind == "vllm" and ":" in self.device:
            raise ValueError(
                f"device = {self.device!r}: vLLM takes the first devices it sees. Give `cuda`, and set "
                f"CUDA_VISIBLE_DEVICES for `oapl sample`"
            )
        return self

    def _refuse(self, keys: tuple[str, ...], reason: str) -> None:
        for key, value in self.changed(*keys).items():
            default = type(self).model_fields[key].default
            raise ValueError(
                f"{key} = {value} {reason}. Leave it out"
                + ("" if default in (None, ()) else f", or set it to {default}")
            )

    def _check_servers(self) -> None:
        if not self.server_urls:
            raise ValueError(
                'kind = "vllm_server" needs `server_urls`, such as ["http://node1:8000"]: where `vllm serve` answers'
            )
        if len(set(self.server_urls)) < len(self.server_urls):
            raise ValueError(f"server_urls = {list(self.server_urls)} name a server twice. Name each once")
        if (command := self.server_command) is None:
            return
        try:
            names = {name for _, name, _, _ in Formatter().parse(command) if name is not None}
            shlex.split(command)
        except ValueError as error:
            raise ValueError(f"server_command = {command!r} cannot be read: {error}") from error
        if "model" not in names or not names <= {"model", "host", "port"}:
            raise ValueError(
                f"server_command = {command!r} must have {{model}} where the policy's folder goes, and may have "
                f"{{host}} and {{port}} of the URL; write other braces twice"
            )
        if len(self.server_urls) > 1 and not names & {"host", "port"}:
            raise ValueError(
                f"server_command = {command!r} is run for each of the {len(self.server_urls)} server_urls, and must "
                f"have {{port}} or {{host}}, or all would start the same server"
            )
        if "--api-key" in command:
            raise ValueError(
                "server_command holds an API key, and is kept in the run folder. Set VLLM_API_KEY in the environment: "
                "`vllm serve` and the sampler both read it"
            )


class LaunchConfig(Section):
    kind: Literal["processes", "inline", "ray"] = Field(
        "processes",
        description="`processes`: samplers and trainer side by side. `inline`: in turn, bitwise repeatable. `ray`: on "
        "a Ray cluster.",
    )
    ray_address: str | None = Field(
        None,
        description="Of the cluster; by default the one at hand (`RAY_ADDRESS`, `ray start`), else one started here.",
    )
    rounds_ahead: int = Field(
        0,
        ge=0,
        le=1,
        description="1 lets the sampler start a round before the one before it is trained: no waiting, lag up to 2 L.",
    )
    num_samplers: int = Field(
        1,
        ge=0,
        description="Samplers that `processes` starts; more may join by `oapl sample --run_dir`. 0 leaves it to those.",
    )
    lease_s: Positive = Field(
        60.0, description="Seconds of silence after which other samplers take a piece of a round over from one."
    )
    rounds_from: str | None = Field(
        None, description="A run folder whose sealed rounds are trained on, copied, in place of sampling those rounds."
    )


class EvaluationConfig(Section):
    num_prompts: Count = Field(256, description="Held-out problems (fewer where the split has fewer).")
    num_generations: Count = Field(64, description="Samples a problem; pass@k is given for powers of two up to it.")
    temperature: Positive = Field(1.0, description="Of the evaluation's samples.")
    top_p: Annotated[float, Field(gt=0, le=1)] = Field(
        1.0,
        description="Evaluations draw from the fewest likeliest tokens whose chances sum to this. Training does not: "
        "a truncated sampler is another policy than the trainer computes.",
    )
    top_k: int = Field(0, ge=0, description="Evaluations draw from so many likeliest tokens, before top_p; 0 is all.")
    max_completion_length: Count | None = Field(None, description="By default that of `sampling`.")
    eval_on_start: bool = Field(True, description="Evaluate the model as it came; else there is no difference to give.")
    num_workers: Count = Field(1, description="Processes of a run that sample an evaluation side by side.")


class SelectionConfig(Section):
    eval_steps: Count = Field(50, description="Steps between snapshots of the weights; divides num_steps.")
    num_prompts: Count = Field(64, description="Validation problems (fewer where the split has fewer).")
    num_generations: Count = Field(16, description="Samples a validation problem.")


class TrackingConfig(Section):
    report_to: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = Field(
        (), description="Where metrics go besides metrics.jsonl; each is an extra of this package."
    )
    project: str = Field("oapl", description="Project name for wandb and trackio.")


class Recipe(BaseSettings):
    """A whole run. The command line overrides the recipe file, the file overrides the defaults."""

    model_config = SettingsConfigDict(extra="forbid", frozen=True, cli_avoid_json=True, cli_implicit_flags=False)

    seed: int = Field(0, ge=0, lt=2**31, description="Seeds prompts, completions and initial state.")
    model: ModelConfig
    task: TaskConfig
    sampling: SamplingConfig = SamplingConfig()
    loss: _TaggedLoss = OAPLConfig()
    trainer: TrainerConfig
    engine: EngineConfig = EngineConfig()
    launch: LaunchConfig = LaunchConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    selection: SelectionConfig | None = None
    tracking: TrackingConfig = TrackingConfig()

    @model_validator(mode="after")
    def _check_selection(self) -> Recipe:
        if self.selection is None:
            return self
        eval_steps, num_steps = self.selection.eval_steps, self.trainer.num_steps
        if num_steps % eval_steps:
            divisors = [n for n in range(1, num_steps + 1) if num_steps % n == 0]
            nearest = [*[n for n in divisors if n < eval_steps][-1:], *[n for n in divisors if n > eval_steps][:1]]
            raise ValueError(
                f"selection.eval_steps = {eval_steps} must divide trainer.num_steps = {num_steps}, so that the last "
                f"weights are among those to choose from: try {' or '.join(map(str, nearest))}"
            )
        if self.task.name in get_args(OwnRows) and self.task.validation_dataset is None:
            raise ValueError(
                "selection needs problems of its own to choose by: name them as task.validation_dataset, or leave the "
                "section out"
            )
        return self

    @model_validator(mode="after")
    def _check_ranks(self) -> Recipe:
        if self.trainer.num_ranks == 1:
            return self
        of_ranks = f"trainer.num_ranks = {self.trainer.num_ranks}"
        if self.launch.kind == "inline":
            raise ValueError(
                f"{of_ranks}: launch.kind = 'inline' is one process. Set launch.kind = 'processes', or num_ranks = 1"
            )
        if ":" in self.trainer.device:
            raise ValueError(
                f"trainer.device = {self.trainer.device!r} is one device, and {of_ranks} take one each. Give 'cuda', "
                f"and set CUDA_VISIBLE_DEVICES if they are not to be the first ones"
            )
        return self

    @model_validator(mode="after")
    def _check_engine(self) -> Recipe:
        if self.model.use_peft and self.engine.dtype == "bfloat16" and not self.trainer.bf16:
            raise ValueError(
                "engine.dtype = 'bfloat16' would round away most of what LoRA learns, since trainer.bf16 = false saves "
                "policies in float32. Set trainer.bf16 = true, whose policies are rounded fairly, or "
                "engine.dtype = 'float32'"
            )
        for section in ("sampling", "evaluation"):
            if self.engine.kind != "embedded" and (given := getattr(self, section).temperature) < VLLM_TEMPERATURE:
                raise ValueError(
                    f"{section}.temperature = {given}: vLLM samples no colder than {VLLM_TEMPERATURE} and would take "
                    f'that in its place. Raise it, or set engine.kind = "embedded"'
                )
        return self

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (init_settings,)  # the environment does not change a run

    def policy_of_round(self, index: int) -> int:
        """The version of the policy that samples a round."""
        return max(0, index - self.launch.rounds_ahead)

    @property
    def recomputes_anchor(self) -> bool:
        """Whether the loss takes the sampler's log-probs from the trainer's own computation, not from the engine."""
        return isinstance(self.loss, OAPLConfig) and self.loss.anchor == "trainer"

    @property
    def snapshot_steps(self) -> range:
        """The steps after which a snapshot of the weights is kept: none without a selection."""
        if self.selection is None:
            return range(0)
        return range(self.selection.eval_steps, self.trainer.num_steps + 1, self.selection.eval_steps)

    @property
    def probe_tolerance(self) -> float:
        """Nats a token by which engine and trainer may differ on a policy's probe."""
        return self.engine.tolerance(coarse=self.trainer.bf16)
