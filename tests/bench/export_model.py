"""The bundled model as the folder that other MLX servers read: the same numbers, in float32.

    python -m tests.bench.export_model FOLDER

float32 is what they run fastest on a CPU; rows of q and k keep the file's order, which the config
says (rope_traditional). Nothing is done where the folder is complete.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from kernel.blas import load_blas

load_blas()

import mlx.core as mx  # noqa: E402

from kernel.bundled import BUNDLED, bundled_model  # noqa: E402
from kernel.gguf import read_gguf  # noqa: E402
from kernel.gguf_vocab import tokenizer_from_gguf  # noqa: E402

CONFIG = "config.json"
"""Written last: the folder is complete once it is there."""


def export(folder: Path) -> None:
    """Write weights, tokenizer, template and config."""
    if (folder / CONFIG).is_file():
        return
    folder.mkdir(parents=True, exist_ok=True)
    held = read_gguf(bundled_model(next(iter(BUNDLED))), mx.float32)
    weights = {name: mx.contiguous(array) for name, array in held.weights.items()}
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    tokenizer = tokenizer_from_gguf(held.metadata)
    tokenizer._core.save(str(folder / "tokenizer.json"))
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": tokenizer.chat_template,
        "clean_up_tokenization_spaces": False,
        **tokenizer.named_tokens,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(about, indent=1))
    config = held.config | {
        "architectures": ["LlamaForCausalLM"],
        "torch_dtype": "float32",
        "eos_token_id": held.metadata["tokenizer.ggml.eos_token_id"],
        "bos_token_id": held.metadata["tokenizer.ggml.bos_token_id"],
    }
    (folder / CONFIG).write_text(json.dumps(config, indent=1))


if __name__ == "__main__":
    export(Path(sys.argv[1]))
