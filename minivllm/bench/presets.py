"""Models that are a shape only: a config.json and a plain tokenizer, for `load_format="dummy"`.

How fast a step is depends on shapes, not on what the weights say, so nothing is downloaded. The
tokenizer has as many entries as the model: 256 bytes, and names for the rest ("<4711>"). Any engine
that reads transformers' files can load these folders.

Chapter 1 reads this file.
"""

import json
import os
import tempfile
import zlib
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from minivllm.base import UserError
from minivllm.models.hub import DEFAULT_CACHE

QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_act": "silu",
    "attention_bias": False, "attention_dropout": 0.0, "initializer_range": 0.02,
    "head_dim": 128, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0, "vocab_size": 151936, "tie_word_embeddings": True,
    "torch_dtype": "bfloat16", "use_cache": True, "use_sliding_window": False,
}  # fmt: skip


def _shape(
    hidden: int, intermediate: int, layers: int, heads: int, **others: Any
) -> dict[str, Any]:
    return QWEN3 | {
        "hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": layers,
        "max_window_layers": layers, "num_attention_heads": heads, "num_key_value_heads": 8,
    } | others  # fmt: skip


SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": _shape(1024, 3072, 28, 16),
    "qwen3-8b": _shape(4096, 12288, 36, 32, tie_word_embeddings=False),
    "tiny": _shape(64, 128, 2, 4, num_key_value_heads=2, head_dim=16, vocab_size=512,
                   torch_dtype="float32"),
}  # fmt: skip


def shape_folder(name: str, cache_dir: str | None = None) -> Path:
    """The folder of one of `SHAPES`, written when it is not there yet.

    Args:
        name: a key of `SHAPES`.
        cache_dir: where to put it; default ~/.cache/minivllm.

    Raises:
        UserError: it cannot be written.
    """
    text = json.dumps(SHAPES[name], indent=1)
    home = Path(cache_dir or DEFAULT_CACHE).expanduser() / "shapes"
    folder = home / f"{name}-{zlib.crc32(text.encode()):08x}"  # a changed shape is another folder
    if folder.is_dir():
        return folder
    try:
        home.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=home, prefix=".new-") as temporary:
            new = Path(temporary) / name
            new.mkdir()
            (new / "config.json").write_text(text + "\n", "utf-8")
            kind = {"tokenizer_class": "PreTrainedTokenizerFast"}
            (new / "tokenizer_config.json").write_text(json.dumps(kind) + "\n", "utf-8")
            byte_tokenizer(SHAPES[name]["vocab_size"]).save(str(new / "tokenizer.json"))
            try:
                os.rename(new, folder)
            except OSError:
                if not folder.is_dir():  # else another process was faster
                    raise
    except OSError as error:
        raise UserError(
            f"cannot write the shape of {name} to {home}: {error.strerror}: choose another folder "
            f"with download_dir"
        ) from None
    return folder


def byte_tokenizer(vocab_size: int) -> Tokenizer:
    """One token a byte, then "<256>", "<257>", … up to `vocab_size` entries."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = alphabet + [f"<{i}>" for i in range(len(alphabet), vocab_size)]
    vocab = {name: i for i, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
