"""Ids equal those of other implementations: llama.cpp's vocabulary files, and two real models.

The files are not part of the repository; without them these tests skip and say what they need.
"""

import os
from pathlib import Path

import pytest
from martlet.quant.gguf_file import GGUFFile
from martlet.runtime.tokenizer import Tokenizer

VOCAB_DIR = Path(__file__).parents[2].parent / "shared" / "data" / "vocab"
VOCABS = [
    "bert-bge",
    "deepseek-llm",
    "falcon",
    "gpt-2",
    "llama-bpe",
    "llama-spm",
    "qwen2",
    "starcoder",
]
CASE_MARK = "\n__ggml_vocab_test__\n"

# Ids as the models' source tokenizers give them; BOS first where the model asks for it.
MODEL_CASES = {
    "smollm2.gguf": {
        "The capital of France is": [504, 3575, 282, 4649, 314],
        "<|im_start|>user\nHi there<|im_end|>\n<|im_start|>assistant\n": (
            [1, 4093, 198, 26843, 665, 2, 198, 1, 520, 9531, 198]
        ),
        "👩‍🚀 ok": [10813, 235, 119, 321, 231, 10813, 244, 218, 10907],
    },
    "gemma3.gguf": {
        "The capital of France is": [2, 818, 5279, 529, 7001, 563],
        "<start_of_turn>user\nHi there<end_of_turn>\n<start_of_turn>model\n": (
            [2, 105, 2364, 107, 10979, 993, 106, 107, 105, 4368, 107]
        ),
        "👩‍🚀 ok": [2, 243767, 237243, 242015, 7546],
        "a\n\n\nb": [2, 236746, 109, 236763],
        "x  y   z": [2, 236781, 138, 236762, 139, 236802],
    },
}


def load(path: Path) -> Tokenizer:
    with GGUFFile.open(path) as file:
        return Tokenizer.from_metadata(file.metadata)


def cases_of(path: Path) -> list[tuple[str, list[int]]]:
    # Every case ends with the mark; line breaks inside are part of the case.
    texts = path.with_suffix(".gguf.inp").read_bytes().decode().split(CASE_MARK)[:-1]
    lines = path.with_suffix(".gguf.out").read_text().split("\n")[: len(texts)]
    return list(zip(texts, ([int(i) for i in line.split()] for line in lines), strict=True))


@pytest.mark.parametrize("name", VOCABS)
def test_llama_cpp_vocabulary_files(name):
    path = VOCAB_DIR / f"ggml-vocab-{name}.gguf"
    if not path.exists():
        pytest.skip(f"{path.name} is not in {VOCAB_DIR}")
    tokenizer, cases = load(path), cases_of(path)
    assert len(cases) >= 46
    for text, ids in cases:
        assert tokenizer.encode(text, add_special=False, parse_special=False) == ids, repr(text)
        if name != "bert-bge":  # which lower-cases and re-spaces
            assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("name", MODEL_CASES)
def test_real_models(name):
    folder = os.environ.get("MARTLET_TEST_MODELS")
    if not folder or not (Path(folder) / name).exists():
        pytest.skip(f"set MARTLET_TEST_MODELS to a folder with {name}")
    tokenizer = load(Path(folder) / name)
    for text, ids in MODEL_CASES[name].items():
        assert tokenizer.encode(text, add_special=True, parse_special=True) == ids
        shown = tokenizer.decode(ids[tokenizer.add_bos :], special=True)
        assert shown == text
