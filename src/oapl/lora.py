"""LoRA by peft: small trained matrices beside frozen weights (Hu et al. 2021, arXiv 2106.09685)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from transformers import PreTrainedModel

from oapl.config import ModelConfig
from oapl.errors import ConfigError

ADAPTER = "default"


def add_lora(model: PreTrainedModel, config: ModelConfig) -> None:
    """Freezes the model and puts trained matrices, in float32, beside the linear layers named. They begin at zero.

    Raises ConfigError where peft is missing or no layer has such a name.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise ConfigError(f"model.use_peft needs peft: pip install 'oapl[peft]'. ({error})") from error
    targets = config.lora_target_modules
    head = model.get_output_embeddings()
    if any(module is head and name.rpartition(".")[2] in targets for name, module in model.named_modules()):
        raise ConfigError(
            f"model.lora_target_modules = {list(targets)} names the output head, which is trained whole or not at all. "
            f"Leave it out."
        )
    adapter = LoraConfig(
        r=config.lora_r,
        lora_alpha=config.lora_alpha,
        lora_dropout=0.0,  # a policy that changes from token to token has no log-probs
        target_modules=targets[0] if targets == ("all-linear",) else list(targets),
        task_type="CAUSAL_LM",
    )
    try:
        inject_adapter_in_model(adapter, model, adapter_name=ADAPTER)
    except ValueError as error:
        raise ConfigError(f"model.lora_target_modules = {list(targets)}: {error}") from error
    for parameter in trained_parameters(model).values():
        parameter.data = parameter.data.float()


def trained_parameters(model: PreTrainedModel) -> dict[str, torch.nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


@torch.no_grad()
def merged_weights(model: PreTrainedModel) -> dict[str, Tensor]:
    """The weights of the plain model that computes the same, with or without LoRA. Nothing is changed in place."""
    return dict(merge(model, model.state_dict().items()))


def merge(model: PreTrainedModel, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """`merged_weights` of the model's own by their names, one by one; its modules have to be whole by then."""
    modules = dict(model.named_modules())
    dither = torch.Generator().manual_seed(0)
    for name, weight in weights:
        if ".lora_" in name:
            continue
        owner, _, kind = name.rpartition(".base_layer.")
        if owner:
            if kind == "weight":
                exact = weight.float() + modules[owner].get_delta_weight(ADAPTER).float()
                weight = round_fairly(exact, dither) if weight.dtype == torch.bfloat16 else exact.to(weight.dtype)
            name = f"{owner}.{kind}"
        yield name, weight


def round_fairly(weight: Tensor, generator: torch.Generator) -> Tensor:
    """float32 to bfloat16, up or down by chance, so that on average nothing is lost (stochastic rounding).

    Nearest rounding would undo most of an adapter: released weights are bfloat16 already, and what LoRA adds to one is
    often less than half the distance to the next.
    """
    noise = torch.randint(2**16, weight.shape, generator=generator, dtype=torch.int32).to(weight.device)
    bits = weight.contiguous().view(torch.int32) + noise
    return (bits & -(2**16)).view(torch.float32).to(torch.bfloat16)


def frozen_digest(model: PreTrainedModel) -> str:
    """Of the weights that are not trained, which no checkpoint holds."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            digest.update(name.replace(".base_layer", "").encode())
            digest.update(parameter.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
