"""Records tiny checkpoints, what `transformers` computes for them and what llama.cpp says.

Owns: the checkpoints of tests/data/checkpoints, as `transformers` saves them, each with a tokenizer
trained here, and the recorded logits. Must not import martlet: an oracle shares no code with what
it judges. Needs torch, transformers, tokenizers and sentencepiece.

    python scripts/record_checkpoints.py tests/data/checkpoints --text TEXT [--stored FOLDER …]
    python scripts/record_checkpoints.py tests/data/checkpoints --llama-bin DIR --files DIR

The first records models and logits, also of the checkpoints in --stored; the second what
llama-completion says of the GGUF files in --files, named as the checkpoints.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

_SEED = 20
_N_TOKENS = 24
_STORED_COLUMNS = 8  # of the large vocabularies every eighth logit is kept
N_GREEDY = 24
_N_SEEN = 3
PROMPT = "Once upon a time the old man said"

_SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
_YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 4.0,  # low, so that this short context has all three kinds of dims
    "attention_factor": 1.25,
}
_GEMMA_SIZES = {
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "query_pre_attn_scalar": 16,
    "tie_word_embeddings": True,
    "sliding_window": 9,
    "layer_types": [f"{kind}_attention" for kind in ("sliding", "sliding", "full", "sliding")],
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
}
# name -> (class stem, weights stored as, tokenizer, config beyond _SIZES)
MODELS: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "llama": (
        "Llama",
        "float32",
        "llama-bpe",
        {"rope_parameters": _LLAMA3_ROPE, "attention_bias": True, "mlp_bias": True},
    ),
    "llama-linear": (
        "Llama",
        "float16",
        "smollm",
        {"rope_parameters": _LINEAR_ROPE, "tie_word_embeddings": True},
    ),
    "mistral": ("Mistral", "bfloat16", "spm", {"sliding_window": 9}),
    "qwen2": ("Qwen2", "bfloat16", "qwen2", {"head_dim": None, "num_attention_heads": 4}),
    "qwen3": (
        "Qwen3",
        "bfloat16",
        "qwen2",
        {"rope_parameters": _YARN_ROPE, "tie_word_embeddings": True},
    ),
    "gemma3": ("Gemma3", "bfloat16", "spm-plain", _GEMMA_SIZES),
}
_SHARD_BYTES = {"llama": "64KB"}
_PADDING_ROWS = {"qwen2": 13}  # rows of the embedding without a token

# The patterns of the models' own published tokenizer files.
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_HEAD = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_PATTERNS = {
    "llama-bpe": _HEAD + r"\p{N}{1,3}|" + _TAIL,
    "qwen2": _HEAD + r"\p{N}|" + _TAIL,
}
_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|eot_id|>"]
_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_N_BPE, _N_SPM = 300, 340

Recorded = tuple[np.ndarray, np.ndarray]  # int64 ids, float32 logits (n, vocab_size)


# -- tokenizers -----------------------------------------------------------------------------------


def save_byte_level(kind: str, text: Path, folder: Path) -> int:
    """tokenizer.json and its config; returns the number of tokens."""
    tk: Any = import_module("tokenizers")
    pre, byte_level = tk.pre_tokenizers, tk.pre_tokenizers.ByteLevel
    tokenizer = tk.Tokenizer(tk.models.BPE(ignore_merges=kind == "llama-bpe"))
    if kind == "smollm":
        steps = [pre.Digits(individual_digits=True), byte_level(add_prefix_space=False)]
    else:
        split = pre.Split(tk.Regex(_PATTERNS[kind]), behavior="isolated")
        steps = [split, byte_level(add_prefix_space=False, use_regex=False)]
    tokenizer.pre_tokenizer = pre.Sequence(steps)
    tokenizer.decoder = tk.decoders.ByteLevel()
    if kind == "qwen2":
        tokenizer.normalizer = tk.normalizers.NFC()
    trainer = tk.trainers.BpeTrainer(
        vocab_size=_N_BPE,
        special_tokens=[] if kind == "qwen2" else _SPECIAL,
        initial_alphabet=byte_level.alphabet(),
        show_progress=False,
    )
    tokenizer.train([str(text)], trainer)
    if kind == "qwen2":  # added behind the vocabulary, and a token of plain text
        tokenizer.add_special_tokens(_SPECIAL)
        tokenizer.add_tokens([tk.AddedToken("<tool_call>", normalized=False)])
    if kind == "llama-bpe":
        bos = ("<|endoftext|>", tokenizer.token_to_id("<|endoftext|>"))
        tokenizer.post_processor = tk.processors.TemplateProcessing(
            single="<|endoftext|> $A", special_tokens=[bos]
        )
    tokenizer.save(str(folder / "tokenizer.json"))
    _save_json(
        folder / "tokenizer_config.json",
        {
            "bos_token": "<|endoftext|>",
            "eos_token": "<|im_end|>",
            "tokenizer_class": "PreTrainedTokenizerFast",
            "chat_template": _TEMPLATE,
        },
    )
    ends = [tokenizer.token_to_id(text) for text in ("<|im_end|>", "<|eot_id|>")]
    _save_json(folder / "generation_config.json", {"eos_token_id": ends})
    return int(tokenizer.get_vocab_size(with_added_tokens=True))


def save_sentencepiece(text: Path, folder: Path, *, prefix: bool) -> int:
    spm: Any = import_module("sentencepiece")
    gemma = [] if prefix else ["<start_of_turn>", "<end_of_turn>", "\n\n", "▁▁"]
    spm.SentencePieceTrainer.train(
        input=str(text),
        model_prefix=str(folder / "tokenizer"),
        model_type="bpe",
        vocab_size=_N_SPM,
        byte_fallback=True,
        character_coverage=0.98,
        add_dummy_prefix=prefix,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        user_defined_symbols=gemma,
        minloglevel=2,
        num_threads=1,
    )
    (folder / "tokenizer.vocab").unlink()
    processor = spm.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    config: dict[str, Any] = {
        "tokenizer_class": "LlamaTokenizer" if prefix else "GemmaTokenizer",
        "bos_token": "<s>",
        "eos_token": {"content": "</s>"},
        "unk_token": "<unk>",
        "add_bos_token": True,
    }
    ends: Any = 2
    if not prefix:
        ends = [2, processor.piece_to_id("<end_of_turn>")]
        config["added_tokens_decoder"] = {
            str(processor.piece_to_id(text)): {"content": text, "special": True}
            for text in gemma[:2]
        }
        sampling = {"do_sample": True, "top_k": 64, "top_p": 0.95}
        _save_json(folder / "generation_config.json", {"eos_token_id": ends, **sampling})
    _save_json(folder / "tokenizer_config.json", config)
    return int(processor.get_piece_size())


def _save_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n")


# -- models ---------------------------------------------------------------------------------------


def record_model(name: str, text: Path, folder: Path) -> Recorded:
    """Saves the checkpoint and returns random ids and the logits there of what was saved."""
    torch: Any = import_module("torch")
    transformers: Any = import_module("transformers")

    stem, stored, tokenizer, extra = MODELS[name]
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    torch.manual_seed(_SEED)
    rng = np.random.default_rng(_SEED)
    n_tokens = _PADDING_ROWS.get(name, 0) + (
        save_sentencepiece(text, folder, prefix=tokenizer == "spm")
        if tokenizer.startswith("spm")
        else save_byte_level(tokenizer, text, folder)
    )
    sizes = {**_SIZES, **extra, "vocab_size": n_tokens}
    sizes = {key: value for key, value in sizes.items() if value is not None}
    config_class = getattr(transformers, f"{stem}{'Text' if stem == 'Gemma3' else ''}Config")
    config = config_class(**sizes, attn_implementation="eager")
    model = getattr(transformers, f"{stem}ForCausalLM")(config).float()
    with torch.no_grad():
        for key, values in model.named_parameters():
            # Constant initial values would hide a missing bias or a misplaced "+1".
            std = 0.3 if values.ndim == 1 else values.shape[1] ** -0.5
            is_plain_norm = key.endswith("norm.weight") and stem != "Gemma3"
            centre = 1.0 if is_plain_norm else 0.0
            values.copy_(torch.from_numpy(centre + std * rng.standard_normal(values.shape)))
    model.tie_weights()
    model = model.to(getattr(torch, stored))
    with_generation = folder / "generation_config.json"
    kept = with_generation.read_text() if with_generation.exists() else None
    model.save_pretrained(folder, max_shard_size=_SHARD_BYTES.get(name, "1GB"))
    if kept is not None:
        with_generation.write_text(kept)
    return record_stored(folder)


def record_stored(checkpoint: Path, stride: int = 1) -> Recorded:
    """Random ids and every `stride`-th logit there, computed in float32."""
    torch: Any = import_module("torch")
    transformers: Any = import_module("transformers")

    model = transformers.AutoModelForCausalLM.from_pretrained(
        checkpoint, attn_implementation="eager", dtype=torch.float32
    )
    ids = np.random.default_rng(_SEED).integers(0, model.config.vocab_size, _N_TOKENS)
    with torch.no_grad():
        logits = model.eval()(torch.from_numpy(ids[None])).logits[0].numpy()
    return ids, logits[:, ::stride]


# -- llama.cpp ------------------------------------------------------------------------------------


def llama_cpp_says(llama_bin: Path, model: Path) -> str:
    """The greedy continuation of PROMPT, prompt left out.

    Now and then the program loses the end of its output: the longest is kept, once seen twice.
    Without flash attention, which rounds to float16."""
    command = [
        *(str(llama_bin / "llama-completion"), "-m", str(model), "-p", PROMPT, "-fa", "off"),
        *("-n", str(N_GREEDY), "--temp", "0", "-c", "128", "-t", "1", "--no-display-prompt"),
        *("-no-cnv", "-ctk", "f32", "-ctv", "f32", "--no-warmup", "--no-escape"),
    ]
    seen: list[bytes] = []
    while seen.count(longest := max(seen, key=len, default=b"")) < _N_SEEN:
        done = subprocess.run(command, capture_output=True, check=True, stdin=subprocess.DEVNULL)
        seen.append(done.stdout)
    return longest.decode("utf-8", "replace").removesuffix("\n\n")  # its own two line breaks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--text", type=Path, help="what tokenizers are trained on")
    parser.add_argument("--stored", type=Path, nargs="*", default=[], help="other checkpoints")
    parser.add_argument("--llama-bin", type=Path)
    parser.add_argument("--files", type=Path, help="the checkpoints as GGUF files")
    args = parser.parse_args()
    if args.llama_bin:
        said = {
            p.stem: llama_cpp_says(args.llama_bin, p) for p in sorted(args.files.glob("*.gguf"))
        }
        _save_json(
            args.folder / "llama_cpp.json", {"prompt": PROMPT, "n_tokens": N_GREEDY, "said": said}
        )
        return
    recorded = {name: record_model(name, args.text, args.folder / name) for name in MODELS}
    recorded |= {path.name: record_stored(path, _STORED_COLUMNS) for path in args.stored}
    columns: dict[str, Any] = {f"{name}.ids": ids for name, (ids, _) in recorded.items()}
    columns |= {f"{name}.logits": logits for name, (_, logits) in recorded.items()}
    np.savez_compressed(args.folder / "logits.npz", **columns)


if __name__ == "__main__":
    main()
