"""What a run will take, told by its recipe and its model's config: tokens, memory, disk. No weights are read.

Shapes: B rows of a micro-batch, T of their tokens, N = B * T, H hidden size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from huggingface_hub import get_hf_file_metadata, hf_hub_url
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from oapl.causal_lm import has_plain_cache
from oapl.config import Recipe
from oapl.engines.slots import bytes_per_token
from oapl.head import chunk_logits
from oapl.lora import add_lora, trained_parameters
from oapl.model import caps_scores, first_line, resolve
from oapl.trainer import attention_by_size, chooses_attention

FLOAT32 = 4
HUB_TIMEOUT_S = 5.0
BYTES_PER_CHUNK_LOGIT = 12
"""The head's product, logit and exponential, or gradient, each in float32 at most."""
PIECE_CACHES = 3
"""Of a row in pieces, beside what its last piece keeps: keys and values, their gradients, those that it gives."""


@dataclass(frozen=True)
class Facts:
    """Of a model, and of the largest micro-batch that it is trained with."""

    kind: str
    num_parameters: int
    """Of a policy, into which LoRA is merged."""
    num_added: int
    """LoRA's."""
    num_trained: int
    num_whole: int
    """Of two layers, one that computes and the next, and of what belongs to none: what a rank gathers."""
    rows: int
    """B, as many completions of full length as the budget of tokens holds, prompts left out."""
    tokens: int
    """T, or the tokens of a piece of a longer row."""
    activations: int
    """Bytes that such a micro-batch keeps for its backward pass, and that its head takes."""
    cache_numbers: int
    """Numbers that keys and values of one token are made of, in all layers together."""


def estimate(recipe: Recipe) -> list[str]:
    """Lines to read. Where the model's shape cannot be had, they say so, and only count what is sampled."""
    lines = ["What the run will take. Tokens are at most so many; prompts come on top.", "", *count_lines(recipe), ""]
    try:
        facts = facts_of(recipe)
    except Exception as error:  # a config comes from anywhere, its code raises anything, and a dry run is to go on
        name, reason = recipe.model.name_or_path, first_line(error)
        return [*lines, f"Memory and disk are not known, as the shape of {name} is not: {reason}"]
    total, sampled = facts.num_parameters + facts.num_added, sampler_bytes(recipe, facts)
    return [
        *lines,
        f"model: {facts.kind}, {total:,} parameters, {facts.num_trained:,} trained",
        *table(memory_title(recipe), trainer_bytes(recipe, facts), has_sum=True),
        *(table(f"sampler's memory{of_each(recipe)}", sampled, has_sum=True) if sampled else []),
        *table("disk", disk_bytes(recipe, facts), has_sum=False),
    ]


def of_each(recipe: Recipe) -> str:
    count = recipe.evaluation.num_workers
    return f", for each of the {count} that evaluate at once" if count > 1 else ""


def table(title: str, parts: dict[str, int], *, has_sum: bool) -> list[str]:
    if has_sum:
        parts = {**parts, "together": sum(parts.values())}
    return ["", f"{title}:", *(f"  {readable(size):>9}  {name}" for name, size in parts.items())]


def readable(num_bytes: int) -> str:
    size, units = float(num_bytes), ["B", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1000 and len(units) > 1:
        size, units = size / 1024, units[1:]
    return f"{size:.3g} {units[0]}"


# What is sampled


def count_lines(recipe: Recipe) -> list[str]:
    trainer, sampling, evaluation = recipe.trainer, recipe.sampling, recipe.evaluation
    of_step = trainer.prompts_per_step * sampling.num_generations
    of_round = trainer.prompts_per_round * sampling.num_generations
    lines = [
        f"training: {trainer.num_steps:,} steps in {trainer.num_rounds:,} rounds of {trainer.weight_sync_steps:,}",
        *(
            f"  {'a ' + name if name != 'run' else 'the run':<8} samples {count:,} completions, "
            f"{count * sampling.max_completion_length:,} tokens"
            for name, count in (("round", of_round), ("run", of_round * trainer.num_rounds))
        ),
        f"  a step   trains on {of_step:,} completions, {of_step * sampling.max_completion_length:,} tokens",
    ]
    length = evaluation.max_completion_length or sampling.max_completion_length
    scored = {"evaluations": (1 + evaluation.eval_on_start, evaluation.num_prompts, evaluation.num_generations)}
    if (selection := recipe.selection) is not None:
        scored["validations"] = (1 + len(recipe.snapshot_steps), selection.num_prompts, selection.num_generations)
    for name, (times, num_prompts, num_generations) in scored.items():
        count = times * num_prompts * num_generations
        lines.append(
            f"{name}: {times} of {num_prompts:,} problems x {num_generations:,}, {count:,} completions, "
            f"{count * length:,} tokens"
        )
    return lines


# What it is sampled and trained with


def memory_title(recipe: Recipe) -> str:
    count = recipe.trainer.num_ranks
    return "trainer's memory" if count == 1 else f"memory of each of the trainer's {count} ranks"


def trainer_bytes(recipe: Recipe, facts: Facts) -> dict[str, int]:
    """`load_model`, `compute_in_bfloat16`, AdamW: what is trained is in float32, as are its gradient and two moments;
    with bf16 there is a bfloat16 copy of everything besides, and what is not trained has that alone. `shard`: each rank
    has a share of all, and whole only what computes."""
    total = facts.num_parameters + facts.num_added
    bf16, size, count = recipe.trainer.bf16, policy_itemsize(recipe), recipe.trainer.num_ranks
    kind = "bfloat16" if bf16 else "float32"
    if count == 1:
        parts = {f"weights, {kind}": total * size}
        if bf16:
            parts["weights that are trained, float32"] = facts.num_trained * FLOAT32
    else:
        parts = {
            f"whole for a while: weights and gradients of two layers, embeddings and head, {kind}": (
                2 * facts.num_whole * size
            ),
            "weights that are trained, float32": facts.num_trained * FLOAT32 // count,
        }
        if total > facts.num_trained:
            parts[f"weights that are not, {kind}"] = (total - facts.num_trained) * size // count
    parts |= {
        "gradients, float32": facts.num_trained * FLOAT32 // count,
        "AdamW's two moments, float32": 2 * facts.num_trained * FLOAT32 // count,
    }
    if recipe.recomputes_anchor:
        parts["frozen copy of the sampler's policy"] = facts.num_parameters * size // count
    parts[f"activations and head, {facts.rows:,} x {facts.tokens:,} tokens"] = facts.activations
    return parts


def sampler_bytes(recipe: Recipe, facts: Facts) -> dict[str, int]:
    engine, sampling = recipe.engine, recipe.sampling
    if engine.kind == "vllm_server":
        return {}  # all is in the servers
    size = torch.bfloat16.itemsize if engine.dtype == "bfloat16" else FLOAT32
    longest = max(sampling.max_completion_length, recipe.evaluation.max_completion_length or 0)
    of_token = facts.cache_numbers * size
    cache = engine.max_num_seqs * longest * of_token
    told = (
        f"{engine.max_num_seqs:,} x {longest:,} tokens; {readable(engine.max_num_seqs * of_token)} for each of a prompt"
    )
    if engine.kv_cache_memory_bytes is not None:
        cache, told = min(cache, engine.kv_cache_memory_bytes), "at most engine.kv_cache_memory_bytes"
    return {f"weights, {engine.dtype}": facts.num_parameters * size, f"keys and values, {told}": cache}


def disk_bytes(recipe: Recipe, facts: Facts) -> dict[str, int]:
    policy = facts.num_parameters * policy_itemsize(recipe)
    count = recipe.trainer.num_rounds + 1 + len(recipe.snapshot_steps)
    return {
        "a policy": policy,
        f"{count:,} policies and snapshots, all kept": count * policy,
        "a checkpoint": 3 * facts.num_trained * FLOAT32,
    }


def policy_itemsize(recipe: Recipe) -> int:
    return torch.bfloat16.itemsize if recipe.trainer.bf16 else FLOAT32


# The model, without its weights


def facts_of(recipe: Recipe) -> Facts:
    """Raises whatever Transformers does where there is no such config."""
    config = config_of(recipe.model.name_or_path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    if recipe.model.use_peft:
        add_lora(model, recipe.model)
    num_trained = sum(parameter.numel() for parameter in trained_parameters(model).values())
    rows, tokens = micro_batch(recipe, model)
    with FakeTensorMode():
        pretend(model, torch.bfloat16 if recipe.trainer.bf16 else torch.float32)
        cache_numbers = numbers_per_token(model)
        past = recipe.sampling.max_completion_length - tokens
        activations = kept_by_layers(recipe, model, rows, tokens, past) + taken_by_head(model, rows * tokens)
        if past:
            activations += PIECE_CACHES * (past + tokens) * cache_numbers * model.dtype.itemsize
    return Facts(
        kind=type(model).__name__,
        num_parameters=num_parameters,
        num_added=num_trained if recipe.model.use_peft else 0,
        num_trained=num_trained,
        num_whole=num_whole(model),
        rows=rows,
        tokens=tokens,
        activations=activations,
        cache_numbers=cache_numbers,
    )


def num_whole(model: PreTrainedModel) -> int:
    """See `Facts.num_whole`."""
    of_layers: list[int] = [
        sum(parameter.numel() for parameter in layer.parameters())
        for layer in model.modules()
        if isinstance(layer, GradientCheckpointingLayer)
    ]
    outside: int = sum(parameter.numel() for parameter in model.parameters()) - sum(of_layers)
    return outside + 2 * max(of_layers, default=0)


def config_of(name_or_path: str) -> PreTrainedConfig:
    """From a folder, of which no other file is read, from the cache, or from the hub, if that answers at once."""
    source = resolve(name_or_path)
    try:
        return AutoConfig.from_pretrained(source, local_files_only=True)
    except OSError:
        get_hf_file_metadata(hf_hub_url(source, "config.json"), timeout=HUB_TIMEOUT_S)  # loading would try for long
        return AutoConfig.from_pretrained(source)


def micro_batch(recipe: Recipe, model: PreTrainedModel) -> tuple[int, int]:
    """B and T of the largest micro-batch (`oapl.batching`), or 1 and the tokens of a piece (`oapl.pieces`)."""
    length, budget = recipe.sampling.max_completion_length, recipe.trainer.max_tokens_per_microbatch
    count = recipe.trainer.num_ranks
    if length > budget and has_plain_cache(model) and not recipe.trainer.gradient_checkpointing and count == 1:
        return 1, budget
    of_step = -(-recipe.trainer.prompts_per_step * recipe.sampling.num_generations // count)
    return max(1, min(of_step, budget // length)), length


def pretend(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Puts tensors without numbers, that say they are on a CPU, in the place of a model's on the meta device: so it
    computes as on a CPU, kernels and all. Called, as all that follows, within a `FakeTensorMode`."""
    pretended: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is None:
                    continue
                if id(tensor) not in pretended:  # else it is tied to one before
                    is_parameter = isinstance(tensor, torch.nn.Parameter)
                    made = torch.empty(tensor.shape, dtype=dtype if is_parameter else tensor.dtype)
                    pretended[id(tensor)] = torch.nn.Parameter(made, tensor.requires_grad) if is_parameter else made
                tensors[name] = pretended[id(tensor)]


def numbers_per_token(model: PreTrainedModel) -> int:
    cache = DynamicCache()
    with torch.no_grad():
        model.get_decoder()(input_ids=torch.zeros(1, 1, dtype=torch.long), past_key_values=cache, use_cache=True)
    return bytes_per_token(cache) // int(model.dtype.itemsize)


def kept_by_layers(recipe: Recipe, model: PreTrainedModel, rows: int, tokens: int, past: int) -> int:
    """Bytes that a forward pass of B rows of T tokens, after `past` others, keeps for the backward pass; no weights.

    With gradient checkpointing each layer's input, and what one layer keeps while it is computed again.
    """
    if caps_scores(model) or recipe.model.attn_implementation == "eager":  # others keep what sdpa does
        model.set_attn_implementation("eager")
    if chooses_attention(recipe, model):
        num_scores = rows * tokens * (past + tokens)
        model.set_attn_implementation(attention_by_size(model, num_scores, is_compiled=False))
    weights = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in weights:
            kept[storage._cdata] = storage  # held, so that no other takes its place
        return tensor

    body, cache = model.get_decoder(), DynamicCache(config=model.config) if past else None
    if past:
        with torch.no_grad():
            body(input_ids=torch.zeros(rows, past, dtype=torch.long), past_key_values=cache, use_cache=True)
    ids = torch.zeros(rows, tokens, dtype=torch.long)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        body(input_ids=ids, past_key_values=cache, use_cache=cache is not None)
    num_bytes = sum(storage.nbytes() for storage in kept.values())
    if recipe.trainer.gradient_checkpointing:
        config = model.config.get_text_config(decoder=True)
        inputs: int = config.num_hidden_layers * rows * tokens * config.hidden_size * model.dtype.itemsize
        return inputs + num_bytes // int(config.num_hidden_layers)
    return num_bytes


def taken_by_head(model: PreTrainedModel, num_tokens: int) -> int:
    """Bytes of hidden states, [N, H], their gradient, a chunk of logits, and the gradient of the weights, [V, H]."""
    weight: torch.Tensor = model.get_output_embeddings().weight
    vocabulary, hidden = weight.shape
    states = num_tokens * hidden * (weight.dtype.itemsize + FLOAT32)
    of_weight = weight.numel() * weight.dtype.itemsize if weight.requires_grad else 0
    return states + BYTES_PER_CHUNK_LOGIT * chunk_logits(num_tokens, vocabulary) + of_weight
