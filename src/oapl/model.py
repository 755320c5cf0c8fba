"""Hugging Face causal language models: loading, log-probs of given tokens, and saving as a policy.

Shapes: B sequences, S tokens of a sequence (prompt, completion, padding), V vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import transformers
from jinja2 import TemplateError
from safetensors import SafetensorError
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.modeling_layers import GradientCheckpointingLayer

from oapl.config import TaskConfig
from oapl.errors import EngineError, ModelError
from oapl.fused import RECOMPILE_LIMIT
from oapl.lora import merged_weights
from oapl.types import Messages

BUILTIN = Path(__file__).parent / "assets"
PROBE = "probe.json"
MAX_PROBE_TOKENS = 256
COMPILED = ("Norm", "MLP")


def resolve(name_or_path: str) -> str:
    """The folder or hub name behind a model setting. Raises ModelError for an unknown `builtin:` name."""
    if not name_or_path.startswith("builtin:"):
        return name_or_path
    folder = BUILTIN / name_or_path.removeprefix("builtin:")
    if not (folder / "config.json").exists():
        known = ", ".join(f"builtin:{path.parent.name}" for path in sorted(BUILTIN.glob("*/config.json")))
        raise ModelError(f"model.name_or_path = {name_or_path!r} does not ship with oapl; it has {known}.")
    return str(folder)


def load_tokenizer(name_or_path: str) -> PreTrainedTokenizerBase:
    """Raises ModelError where there is no such model or it has no usable tokenizer."""
    try:
        return AutoTokenizer.from_pretrained(resolve(name_or_path))
    except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
        raise _cannot_load("tokenizer", name_or_path, error) from error


def load_model(name_or_path: str, dtype: str, device: str, attn_implementation: str | None = None) -> PreTrainedModel:
    """The model in evaluation mode (no dropout). Raises ModelError where it cannot be loaded."""
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ModelError(
            f"device = {device!r}: torch {torch.__version__} sees no CUDA device here. Use device = 'cpu'."
        )
    transformers.utils.logging.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(
            resolve(name_or_path), dtype=getattr(torch, dtype), attn_implementation=attn_implementation
        )
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError) as error:
        if attn_implementation is not None and (isinstance(error, ImportError) or "attn_impl" in str(error)):
            raise ModelError(
                f"model.attn_implementation = {attn_implementation!r} cannot be used here: {first_line(error)}"
            ) from error
        raise _cannot_load("model", name_or_path, error) from error
    if caps_scores(model):
        if attn_implementation == "sdpa":
            raise ModelError(
                f"model.attn_implementation = 'sdpa' leaves out the cap on attention's scores that "
                f"{type(model).__name__} has. Leave it unset, or use 'eager'."
            )
        if attn_implementation is None:
            model.set_attn_implementation("eager")
    return model.to(device).eval()


def caps_scores(model: PreTrainedModel) -> bool:
    """Whether attention's scores have a cap, which only `eager` heeds."""
    return getattr(model.config, "attn_logit_softcapping", None) is not None


def checkpoint_layers(model: PreTrainedModel) -> None:
    """Has each layer computed again in the backward pass. Raises ModelError where the model cannot."""
    if not model.supports_gradient_checkpointing:
        raise ModelError(f"trainer.gradient_checkpointing: {type(model).__name__} cannot. Set it to false.")
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.training = True  # the layer alone, as that is what it asks; its dropouts stay off


def compile_parts(model: PreTrainedModel) -> None:
    """Has torch.compile fuse what a layer does besides attention: norms and feed-forward parts, in place.

    They are told by the names of their classes, which end in `Norm` and `MLP`. Attention layers are left alone: with a
    cache they would be compiled anew for each way they are called. Raises ModelError where this machine cannot compile,
    or the model has no such parts.
    """
    try:
        torch.compile(torch.sin)(torch.zeros(2, device=model.device))
    except Exception as error:  # the types differ by version, device and what is missing
        raise ModelError(
            f"trainer.torch_compile: torch cannot compile for {model.device} here ({first_line(error)}). "
            "Install a C++ compiler, such as g++, or set it to false."
        ) from error
    parts = [module for module in model.modules() if type(module).__name__.endswith(COMPILED)]
    if not parts:
        raise ModelError(f"trainer.torch_compile: {type(model).__name__} has nothing to compile. Set it to false.")
    for part in parts:
        part.compile(dynamic=True, recompile_limit=RECOMPILE_LIMIT)


def _cannot_load(what: str, name_or_path: str, error: Exception) -> ModelError:
    if Path(name_or_path).is_dir():
        remedy = "The folder must hold a Hugging Face model: config.json, tokenizer.json and *.safetensors"
    else:
        remedy = "Give a folder, a name on the hub (with a network or a filled cache), or builtin:countdown"
    return ModelError(
        f"model.name_or_path = {name_or_path!r}: its {what} cannot be loaded. {remedy}. ({first_line(error)})"
    )


def first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def eos_token_ids(policy: Path) -> list[int]:
    """The tokens that end a completion, of a policy's folder or a hub name. Raises ModelError where it names none."""
    configs: list[Any] = [AutoConfig.from_pretrained(policy).get_text_config(decoder=True)]
    with suppress(OSError):  # not every model has one
        configs.insert(0, GenerationConfig.from_pretrained(policy))
    for config in configs:
        ids = getattr(config, "eos_token_id", None)
        if ids is not None:
            return list(ids) if isinstance(ids, list | tuple) else [ids]
    raise ModelError(f"{policy}: neither generation_config.json nor config.json has an eos_token_id.")


def has_tied_head(policy: Path) -> bool:
    """Whether a model's head and its table of embeddings are one tensor."""
    return bool(getattr(AutoConfig.from_pretrained(policy).get_text_config(decoder=True), "tie_word_embeddings", False))


def context_length(model: PreTrainedModel) -> int:
    return int(getattr(model.config, "max_position_embeddings", 0) or 2**31 - 1)


def encode_prompt(tokenizer: PreTrainedTokenizerBase, text: str | Messages, config: TaskConfig) -> list[int]:
    """Token ids of a prompt: plain text as it is, or chat messages through the model's own template, ready for an
    answer. Raises ModelError where there is no template, or it refuses the messages."""
    messages = as_posed(text, config)
    if isinstance(messages, str):
        return list(tokenizer(messages)["input_ids"])
    if tokenizer.chat_template is None:
        raise ModelError(
            "the prompts are chat messages, but the model's tokenizer has no chat template. Use plain text."
        )
    try:
        encoded = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=True, **config.chat_template_kwargs
        )
    except (TemplateError, TypeError, ValueError) as error:
        raise ModelError(f"the model's chat template refuses a prompt's messages: {error}. See [task].") from error
    return list(encoded["input_ids"])


def as_posed(text: str | Messages, config: TaskConfig) -> str | list[Mapping[str, Any]]:
    """A prompt as the task puts it: plain text, or all of the messages. Raises ModelError for two system messages."""
    if isinstance(text, str):
        if not config.chat and config.system_prompt is None:
            return text
        text = [{"role": "user", "content": text}]
    messages = list(text)
    if config.system_prompt is not None:
        if messages[0]["role"] == "system":
            raise ModelError(
                "task.system_prompt is set, but the prompts bring a system message of their own. Drop one."
            )
        messages.insert(0, {"role": "system", "content": config.system_prompt})
    return messages


def next_token_logprobs(model: PreTrainedModel, ids_BS: Tensor, temperature: float, first: int = 0) -> Tensor:
    """Log-probs of tokens `first + 1 … S - 1`, each given those before it: f32[B, S - 1 - first] in nats.

    Sequences are padded on the right: no token attends to what follows it, so padding needs no mask and its results
    are simply to be ignored. All logits are held at once.
    """
    positions = torch.arange(first, ids_BS.shape[1] - 1, device=ids_BS.device)
    logits_BSV = model(input_ids=ids_BS, use_cache=False, logits_to_keep=positions).logits.float()
    logprobs_BSV: Tensor = (logits_BSV / temperature).log_softmax(-1)
    return logprobs_BSV.gather(-1, ids_BS[:, first + 1 :, None]).squeeze(-1)


def save_policy(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    *,
    probe: Sequence[Sequence[int]],
) -> None:
    """Writes a plain Hugging Face model folder, with the model's own log-probs of the probe sequences."""
    write_policy(model, tokenizer, folder, merged_weights(model), probe_record(model, probe))


def write_policy(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    weights: Mapping[str, Tensor],
    record: Mapping[str, Any],
) -> None:
    """`save_policy` with weights and the record of the probe given. Of the model, only what describes it is read."""
    model.save_pretrained(folder, state_dict=dict(weights))
    tokenizer.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    dtype = str(next(iter(weights.values())).dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps({**config, "dtype": dtype}, indent=2) + "\n")
    (folder / PROBE).write_text(json.dumps(record) + "\n")


def probe_record(model: PreTrainedModel, probe: Sequence[Sequence[int]]) -> dict[str, Any]:
    """The probe's sequences, none too long, and the model's own log-probs of them."""
    sequences = [list(sequence[:MAX_PROBE_TOKENS]) for sequence in probe]
    return {"sequences": sequences, "logprobs": score(model, sequences)}


@torch.no_grad()
def score(model: PreTrainedModel, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
    """For each sequence, the log-probs of its tokens after the first, at temperature 1."""
    device = next(model.parameters()).device
    return [
        next_token_logprobs(model, torch.tensor([sequence], device=device), temperature=1.0)[0].tolist()
        for sequence in sequences
    ]


def probe_gap(policy: Path, scores: Sequence[Sequence[float]]) -> float:
    """Mean absolute gap in nats a token between an engine's scores of the policy's probe and the trainer's."""
    expected = json.loads((policy / PROBE).read_text())["logprobs"]
    gaps = [abs(a - b) for have, want in zip(scores, expected, strict=True) for a, b in zip(have, want, strict=True)]
    return float(sum(gaps) / max(1, len(gaps)))


def check_probe(policy: Path, scores: Sequence[Sequence[float]], tolerance: float) -> float:
    """The probe's gap. Raises EngineError where it passes the tolerance: the engine holds other weights."""
    gap = probe_gap(policy, scores)
    if not gap <= tolerance:
        raise EngineError(
            f"{policy}: the engine's log-probs differ from the trainer's by {gap:.4f} nats a token on the policy's "
            f"probe, more than engine.probe_tolerance = {tolerance}. The engine holds other weights, or computes too "
            f"coarsely: try engine.dtype = 'float32', or raise the tolerance if you accept the mismatch."
        )
    return gap


def probe_sequences(policy: Path) -> list[list[int]]:
    sequences: Any = json.loads((policy / PROBE).read_text())["sequences"]
    return list(sequences)
