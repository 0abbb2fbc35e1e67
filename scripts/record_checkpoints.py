"""Records tiny checkpoints, what `transformers` computes for them and what llama.cpp says.

Owns: the checkpoints of tests/data/checkpoints, as `transformers` saves them, each with a tokenizer
trained here, and the recorded logits. Must not import martlet: an oracle shares no code with what
it judges. Needs torch, transformers, tokenizers and sentencepiece.

    python scripts/record_checkpoints.py --text TEXT [NAME …] [--stored FOLDER …]
    python scripts/record_checkpoints.py --llama-bin DIR --files DIR [NAME …]

The first makes the checkpoints that tests/data/recipes describes and records their logits, or those
of the checkpoints in --stored; the second what llama-completion says of the GGUF files in --files,
named as the checkpoints. Those that are not named stay as they are.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

_LAYOUT = "the folder of recipes, checkpoints and logits"
_SEED = 20
_N_TOKENS = 24
N_FIRST = 9  # of them, where they are of two texts
_POOLINGS = ("cls_token", "mean_tokens", "max_tokens", "lasttoken")
_STORED_COLUMNS = 8  # of the large vocabularies every eighth logit is kept
N_GREEDY = 24
_FACTORS = ("norm.weight", "layer_scalar")  # around 1
CHOICE_BIAS = ("correction_bias", "expert_bias")  # buffers of routers
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


def save_wordpiece(text: Path, folder: Path) -> int:
    tk: Any = import_module("tokenizers")
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer = tk.Tokenizer(tk.models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = tk.normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = tk.pre_tokenizers.BertPreTokenizer()
    trainer = tk.trainers.WordPieceTrainer(
        vocab_size=_N_BPE, special_tokens=special, show_progress=False
    )
    tokenizer.train([str(text)], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    roles = {"pad": 0, "unk": 1, "cls": 2, "sep": 3, "mask": 4}
    _save_json(
        folder / "tokenizer_config.json",
        {
            **{f"{role}_token": special[at] for role, at in roles.items()},
            "tokenizer_class": "BertTokenizer",
            "do_lower_case": True,
        },
    )
    return int(tokenizer.get_vocab_size())


def save_sentence(recipe: Mapping[str, Any], folder: Path, rng: np.random.Generator) -> None:
    """modules.json and its folders, as sentence-transformers saves them."""
    torch: Any = import_module("torch")
    safetensors: Any = import_module("safetensors.torch")
    prefix, modules = (
        "sentence_transformers.models.",
        [("", "Transformer"), ("1_Pooling", "Pooling")],
    )
    modules += [(f"{at}_Dense", "Dense") for at in range(2, 2 + len(recipe["dense"]))]
    for at, (rows, cols) in enumerate(recipe["dense"], 2):
        (folder / f"{at}_Dense").mkdir()
        weight = torch.from_numpy(cols**-0.5 * rng.standard_normal((rows, cols))).float()
        tensors = {"linear.weight": weight.to(getattr(torch, recipe["stored"]))}
        safetensors.save_file(tensors, folder / f"{at}_Dense" / "model.safetensors")
        config = {
            "in_features": cols,
            "out_features": rows,
            "bias": False,
            "activation_function": "torch.nn.modules.linear.Identity",
        }
        _save_json(folder / f"{at}_Dense" / "config.json", config)
    (folder / "1_Pooling").mkdir()
    flags = {f"pooling_mode_{kind}": kind == recipe["pooling"] for kind in _POOLINGS}
    _save_json(folder / "1_Pooling" / "config.json", flags)
    listed = [
        {"idx": at, "name": str(at), "path": path, "type": prefix + kind}
        for at, (path, kind) in enumerate(modules)
    ]
    _save_json(folder / "modules.json", listed)


def _save_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n")


# -- models ---------------------------------------------------------------------------------------


def record_model(recipe: Mapping[str, Any], text: Path, folder: Path) -> Recorded:
    """Saves the checkpoint and returns random ids and the logits there of what was saved."""
    torch: Any = import_module("torch")
    transformers: Any = import_module("transformers")

    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    torch.manual_seed(_SEED)
    rng = np.random.default_rng(_SEED)
    tokenizer = recipe["tokenizer"]
    n_tokens = recipe.get("padding_rows", 0) + (
        save_sentencepiece(text, folder, prefix=tokenizer == "spm")
        if tokenizer.startswith("spm")
        else save_wordpiece(text, folder)
        if tokenizer == "wordpiece"
        else save_byte_level(tokenizer, text, folder)
    )
    sizes = {**_SIZES, **recipe["config"], "vocab_size": n_tokens}
    sizes |= dict.fromkeys(recipe.get("vocab_keys", ()), n_tokens)  # rows of further tables
    for key in recipe.get("without", ()):  # those that this class lacks
        del sizes[key]
    model_class = getattr(transformers, recipe["model"])
    eager, around = {"attn_implementation": "eager"}, recipe.get("around")
    if around is None:
        config = model_class.config_class(**sizes, **eager)
    else:  # a language model in a class that reads images, too
        config = model_class.config_class(text_config=sizes, **around, **eager)
    model = model_class(config).float()
    norm_centre = recipe.get("norm_centre", 1.0)  # 0 where the model adds 1
    with torch.no_grad():
        learned = (*CHOICE_BIAS, "layer_scalar")
        buffers = ((k, v) for k, v in model.named_buffers() if k.endswith(learned))
        for key, values in (*model.named_parameters(), *buffers):
            # Constant initial values would hide a missing bias or a misplaced "+1".
            std = 0.3 if values.ndim == 1 else values.shape[-1] ** -0.5
            centre = norm_centre if key.lower().endswith(_FACTORS) else 0.0
            values.copy_(torch.from_numpy(centre + std * rng.standard_normal(values.shape)))
    model.tie_weights()
    model = model.to(getattr(torch, recipe["stored"]))
    with_generation = folder / "generation_config.json"
    kept = with_generation.read_text() if with_generation.exists() else None
    model.save_pretrained(folder, max_shard_size=recipe.get("shard_bytes", "1GB"))
    if kept is not None:
        with_generation.write_text(kept)
    if "pooling" in recipe:
        save_sentence(recipe, folder, rng)
    if recipe.get("reads"):
        return record_encoder(folder, recipe)
    return record_stored(folder)


def record_encoder(checkpoint: Path, recipe: Mapping[str, Any]) -> Recorded:
    """Random ids, and what an encoder makes of them: hidden states (n, dim), through the dense
    layers behind them, or the classifier's labels (1, n_labels) of two texts."""
    torch: Any = import_module("torch")
    transformers: Any = import_module("transformers")
    safetensors: Any = import_module("safetensors.torch")
    how = {"attn_implementation": "eager", "dtype": torch.float32}
    model = getattr(transformers, recipe["model"]).from_pretrained(checkpoint, **how).eval()
    ids = np.random.default_rng(_SEED).integers(0, model.config.vocab_size, _N_TOKENS)
    batch = torch.from_numpy(ids[None])
    with torch.no_grad():
        if recipe["reads"] == "labels":
            segments = torch.arange(_N_TOKENS)[None] >= N_FIRST
            return ids, model(batch, token_type_ids=segments.long()).logits.numpy()
        rows = model(batch).last_hidden_state[0]
        for at in range(2, 2 + len(recipe["dense"])):
            stored = safetensors.load_file(checkpoint / f"{at}_Dense" / "model.safetensors")
            rows = rows @ stored["linear.weight"].float().T
    return ids, rows.numpy()


def record_stored(checkpoint: Path, stride: int = 1) -> Recorded:
    """Random ids and every `stride`-th logit there, computed in float32."""
    torch: Any = import_module("torch")
    transformers: Any = import_module("transformers")

    (name,) = json.loads((checkpoint / "config.json").read_text())["architectures"]
    model = getattr(transformers, name).from_pretrained(
        checkpoint, attn_implementation="eager", dtype=torch.float32
    )
    n_ids = model.config.get_text_config().vocab_size
    ids = np.random.default_rng(_SEED).integers(0, n_ids, _N_TOKENS)
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
    text = longest.decode("utf-8", "replace").removesuffix("\n\n")  # its own two line breaks
    return text.removesuffix(" [end of text]\n")  # and what it says of an end token


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("names", nargs="*", help="which recipes; else all")
    parser.add_argument("--data", type=Path, default=Path("tests/data"), help=_LAYOUT)
    parser.add_argument("--text", type=Path, help="what tokenizers are trained on")
    parser.add_argument("--stored", type=Path, nargs="*", default=[], help="other checkpoints")
    parser.add_argument("--llama-bin", type=Path)
    parser.add_argument("--files", type=Path, help="the checkpoints as GGUF files")
    args = parser.parse_args()
    data: Path = args.data
    if args.llama_bin:
        path = data / "checkpoints" / "llama_cpp.json"
        said = json.loads(path.read_text())["said"]
        for name in args.names or sorted(file.stem for file in args.files.glob("*.gguf")):
            said[name] = llama_cpp_says(args.llama_bin, args.files / f"{name}.gguf")
        _save_json(path, {"prompt": PROMPT, "n_tokens": N_GREEDY, "said": said})
        return
    for checkpoint in args.stored:
        _save_logits(data, checkpoint.name, record_stored(checkpoint, _STORED_COLUMNS))
    every = [] if args.stored else sorted(p.stem for p in (data / "recipes").glob("*.json"))
    for name in args.names or every:
        recipe = json.loads((data / "recipes" / f"{name}.json").read_text())
        recorded = record_model(recipe, args.text, data / "checkpoints" / name)
        _save_logits(data, name, recorded)


def _save_logits(data: Path, name: str, recorded: Recorded) -> None:
    ids, logits = recorded
    np.savez_compressed(data / "logits" / f"{name}.npz", ids=ids, logits=logits)


if __name__ == "__main__":
    main()
