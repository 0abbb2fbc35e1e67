"""Greedy continuations of real files, where MARTLET_TEST_MODELS names a folder that holds them."""

import os
from pathlib import Path

import numpy as np
import pytest
from martlet.runtime.executors.native_library import NativeUnavailable
from martlet.runtime.model import Model, load_model

from .tiny import Chunk, make_step

PROMPT = "The capital of France is"
FOLDER = os.environ.get("MARTLET_TEST_MODELS")


def greedy(model: Model, n_tokens: int) -> str:
    ids = model.tokenizer.encode(PROMPT, add_special=True, parse_special=False)
    n_prompt, n_past, blocks = len(ids), 0, [3, 1]
    while len(ids) < n_prompt + n_tokens:
        step = make_step([Chunk(ids[n_past:], n_past, blocks)], [len(ids) - n_past - 1])
        n_past = len(ids)
        ids.append(int(np.argmax(model.executor.run(step)[0])))
    return model.tokenizer.decode(ids[n_prompt:])


@pytest.mark.parametrize(
    ("name", "dequantize", "n_tokens", "text"),
    [
        ("smollm2", False, 2, " Paris."),
        ("gemma3", False, 8, " the capital of the country of France."),
        # Two continuations are nearly equal here; plain floats decide for the published one.
        ("gemma3", True, 13, " the capital of the country of France. It is the largest city"),
    ],
)
def test_reference_continues(name: str, dequantize: bool, n_tokens: int, text: str) -> None:
    path = Path(FOLDER or "") / f"{name}.gguf"
    if FOLDER is None or not path.exists():
        pytest.skip(f"set MARTLET_TEST_MODELS to a folder with {name}.gguf")
    model = load_model(path, executor="reference", context=64, dequantize=dequantize)
    try:
        assert greedy(model, n_tokens) == text
    finally:
        model.close()


@pytest.mark.parametrize(
    ("name", "n_tokens", "text"),
    [
        ("smollm2", 2, " Paris."),
        ("gemma3", 13, " the capital of the country of France. It is the largest city"),
    ],
)
def test_native_continues(name: str, n_tokens: int, text: str) -> None:
    path = Path(FOLDER or "") / f"{name}.gguf"
    if FOLDER is None or not path.exists():
        pytest.skip(f"set MARTLET_TEST_MODELS to a folder with {name}.gguf")
    try:
        model = load_model(path, executor="native", context=64)
    except NativeUnavailable as error:
        pytest.skip(f"native library: {error}")
    try:
        assert greedy(model, n_tokens) == text
    finally:
        model.close()
