"""Turns a GGUF file into a checkpoint folder: bf16 safetensors, configuration, tokenizer and chat template.

Runs as a process of its own (``python -m workers.model.convert GGUF FOLDER``): the conversion needs about 1.5 GiB for
half a minute and prints bars that belong on nobody's terminal. It writes into the folder it is given and nowhere else.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

ROUND_TRIP_TEXT = "Hello, world's 12 x.\n\n  emoji 👩\u200d👧 e\u0301 你好\t<end>"


def convert(gguf: Path, folder: Path) -> None:
    """Writes the checkpoint of ``gguf`` into ``folder``. Raises RuntimeError when the tokenizer does not round-trip."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for name in ("config.json", "generation_config.json"):
        _strip_circumstances(folder / name)
    saved = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer.encode(ROUND_TRIP_TEXT, add_special_tokens=False)
    if saved.encode(ROUND_TRIP_TEXT, add_special_tokens=False) != ids or saved.decode(ids) != ROUND_TRIP_TEXT:
        raise RuntimeError("the converted tokenizer does not give back its text")
    if not saved.chat_template or saved.eos_token_id != model.config.eos_token_id:
        raise RuntimeError("the converted tokenizer lost its chat template or its end-of-sequence token")


def _strip_circumstances(path: Path) -> None:
    # Where and with which library a model was converted would make two equal models differ.
    config = json.loads(path.read_text(encoding="utf-8"))
    for field in ("_name_or_path", "_model_name_or_path", "_from_model_config", "transformers_version"):
        config.pop(field, None)
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
