"""A tiny random model as a real GGUF file with a vocabulary of bytes, for whole-command tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
from martlet.quant.formats import FORMATS
from martlet.runtime.weights import StoredWeights

from ..runtime.tiny import TinyDims, tiny_metadata, tiny_model

UNKNOWN, CONTROL, BYTE = 2, 3, 6  # token types
NAMED = (("<unk>", UNKNOWN), ("<s>", CONTROL), ("</s>", CONTROL))
BOS, EOS, FIRST_BYTE = 1, 2, 3
DIMS = TinyDims(dim=32, ffn_dim=64, heads=2, kv_heads=1, head_dim=16, vocab_size=3 + 256)
TEMPLATE = (
    "{% for m in messages %}<s>{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant: {% endif %}"
)


def write_tiny_model(
    path: Path,
    *,
    template: str | None = TEMPLATE,
    weights: StoredWeights | None = None,
    first_token: str = "<unk>",
) -> Path:
    """weights: of DIMS; random ones in Q8_0 if None."""
    weights = weights or tiny_model("llama", dims=DIMS, formats=("Q8_0",)).weights
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in tiny_metadata("llama", DIMS).items():
        if key != "general.architecture":
            add_value(writer, key, value)
    writer.add_tokenizer_model("llama")
    named = ((first_token, UNKNOWN), *NAMED[1:])
    tokens = [*named, *((f"<0x{byte:02X}>", BYTE) for byte in range(256))]
    writer.add_token_list([text for text, _ in tokens])
    writer.add_token_types([kind for _, kind in tokens])
    writer.add_token_scores([0.0] * len(tokens))
    writer.add_bos_token_id(BOS)
    writer.add_eos_token_id(EOS)
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(True)
    writer.add_add_space_prefix(False)
    if template is not None:
        writer.add_chat_template(template)
    for name in weights.names():
        shape, stored = weights.shape(name), weights.format_name(name)
        assert shape is not None
        row_bytes = FORMATS[stored].data_bytes((1, shape[-1]))
        data = weights.data(name).reshape(*shape[:-1], row_bytes)
        dtype = gguf.GGMLQuantizationType[stored]
        writer.add_tensor(name, data, raw_shape=data.shape, raw_dtype=dtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    add = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}
    add[type(value)](key, value)
