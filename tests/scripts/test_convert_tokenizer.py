"""Converted tokenizers: the ids of the libraries they come from, roles, end tokens, templates."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tokenizers
from martlet.quant.checkpoint import Checkpoint
from martlet.quant.convert_tokenizer import convert_tokenizer
from martlet.quant.errors import FileFormatError, UnsupportedError
from martlet.quant.gguf_field import Field
from martlet.quant.gguf_file import GGUFFile
from martlet.runtime.pretokenizers import PRE_TOKENIZERS
from martlet.runtime.tokenizer import Tokenizer
from martlet.scripts.convert_check import PROBES, check_token_ids
from martlet.scripts.convert_facts import reader_facts

from ..quant.checkpoints import copied, edit_json
from ..recorded import RECORDED, SHARED, STORED, TINY, checkpoint_of

FACTS = reader_facts()
BYTE_LEVEL = [name for name in TINY if (RECORDED / name / "tokenizer.json").exists()]
SENTENCEPIECE = [name for name in TINY if name not in BYTE_LEVEL]


def convert(folder: Path, n_rows: int | None = None) -> dict[str, Any]:
    checkpoint = Checkpoint.open(folder)
    config = checkpoint.json("config.json")
    n_rows = n_rows or config.get("text_config", config)["vocab_size"]
    return convert_tokenizer(checkpoint, config, n_rows, FACTS).metadata


def texts() -> list[str]:
    """Lines of prose where the shared folder is, and the probes anyway."""
    path = SHARED / "prose-heldout.txt"
    lines = path.read_text().split("\n")[:400] if path.exists() else []
    return [*PROBES, *lines, "\n".join(lines[:40])]


# -- ids ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bert"])
def test_ids_of_wordpiece(name: str, tmp_path: Path) -> None:
    library = tokenizers.Tokenizer.from_file(str(RECORDED / name / "tokenizer.json"))
    words = tmp_path / "words"
    shutil.copytree(RECORDED / name, words)
    (words / "tokenizer.json").unlink()
    ids = library.get_vocab()
    (words / "vocab.txt").write_text("\n".join(sorted(ids, key=lambda word: ids[word])))
    special = {str(i): {"content": library.id_to_token(i), "special": True} for i in range(5)}
    edit_json(words / "tokenizer_config.json", added_tokens_decoder=special)
    for folder in (RECORDED / name, words):
        mine = Tokenizer.from_metadata(convert(folder))
        for text in texts():
            expected = library.encode(text, add_special_tokens=False).ids
            assert mine.encode(text, add_special=False, parse_special=True) == expected
            whole = mine.encode(text, add_special=True, parse_special=True)
            assert whole == [ids["[CLS]"], *expected, ids["[SEP]"]]


@pytest.mark.parametrize("name", BYTE_LEVEL)
def test_ids_equal_those_of_tokenizers(name: str) -> None:
    library = tokenizers.Tokenizer.from_file(str(RECORDED / name / "tokenizer.json"))
    mine = Tokenizer.from_metadata(convert(RECORDED / name))
    for text in texts():
        expected = library.encode(text, add_special_tokens=False).ids
        assert mine.encode(text, add_special=False, parse_special=True) == expected
        expected = library.encode(text).ids
        assert mine.encode(text, add_special=True, parse_special=True) == expected


@pytest.mark.parametrize("name", BYTE_LEVEL)
@pytest.mark.parametrize(
    "text",
    ["{0}text", "{0} text", "{0}{1}", "text{0}", "a 12{0} b 345 {1}\n\n{0}", "{0}'ll {1}\tx"],
)
def test_ids_beside_special_tokens(name: str, text: str) -> None:
    # B40: decoded texts hide how the text beside a special token was cut.
    library = tokenizers.Tokenizer.from_file(str(RECORDED / name / "tokenizer.json"))
    mine = Tokenizer.from_metadata(convert(RECORDED / name))
    text = text.format("<|im_start|>", "<|im_end|>")
    expected = library.encode(text, add_special_tokens=False).ids
    assert mine.encode(text, add_special=False, parse_special=True) == expected


@pytest.mark.parametrize("name", SENTENCEPIECE)
def test_ids_equal_those_of_sentencepiece(name: str) -> None:
    library = sentencepiece.SentencePieceProcessor(
        model_file=str(RECORDED / name / "tokenizer.model")
    )
    mine = Tokenizer.from_metadata(convert(RECORDED / name))
    for text in texts():
        found = mine.encode(text, add_special=False, parse_special=False)
        assert found == library.EncodeAsIds(text)


@pytest.mark.parametrize("name", STORED)
def test_shared_checkpoints(name: str) -> None:
    folder = checkpoint_of(name)
    check_token_ids(Checkpoint.open(folder), convert(folder))


@pytest.mark.parametrize("name", ["starcoder", "deepseek-llm"])
def test_a_real_vocabulary_comes_back_as_it_was(name: str, tmp_path: Path) -> None:
    path = SHARED / "vocab" / f"ggml-vocab-{name}.gguf"
    if not path.exists():
        pytest.skip(f"no ../shared/data/vocab/{path.name} beside the checkout")
    with GGUFFile.open(path) as file:
        source = {k.removeprefix("tokenizer.ggml."): v for k, v in file.metadata.items()}
    tokens, types = source["tokens"], source["token_type"].tolist()
    pre = PRE_TOKENIZERS[source["pre"]]
    merges = [tuple(merge.split(" ")) for merge in source["merges"]]
    ids = {token: id_ for id_, token in enumerate(tokens)}
    library = tokenizers.Tokenizer(tokenizers.models.BPE(ids, merges))
    library.pre_tokenizer = pre.build()
    library.add_special_tokens([t for t, kind in zip(tokens, types, strict=True) if kind == 3])
    ordinary = [t for t, kind in zip(tokens, types, strict=True) if kind == 4]
    library.add_tokens([tokenizers.AddedToken(t, normalized=False) for t in ordinary])
    folder = copied("llama", tmp_path)
    for config in ("tokenizer_config.json", "generation_config.json"):
        (folder / config).write_text("{}")
    edit_json(folder / "config.json", "bos_token_id", "eos_token_id")
    library.save(str(folder / "tokenizer.json"))
    found = convert(folder, n_rows=len(tokens))
    assert found["tokenizer.ggml.tokens"] == tokens
    assert found["tokenizer.ggml.token_type"].tolist() == types
    assert found["tokenizer.ggml.merges"] == source["merges"]
    assert PRE_TOKENIZERS[found["tokenizer.ggml.pre"]] is pre
    check_token_ids(Checkpoint.open(folder), found)


def byte_fallback_json(folder: Path, normalizer: Any, cutter: Any) -> None:
    """tokenizer.model as the tokenizer.json that transformers makes of one, in its place."""
    metadata = convert(folder)
    tokens = metadata["tokenizer.ggml.tokens"]
    scores = metadata["tokenizer.ggml.scores"].tolist()
    ids = {token: id_ for id_, token in enumerate(tokens)}
    ranked = sorted((t for t in tokens if len(t) > 1), key=lambda t: -scores[ids[t]])
    merges = [
        (token[:cut], token[cut:])
        for token in ranked
        for cut in range(1, len(token))
        if token[:cut] in ids and token[cut:] in ids
    ]
    model = tokenizers.models.BPE(ids, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    library = tokenizers.Tokenizer(model)
    if normalizer is not None:
        library.normalizer = normalizer
    if cutter is not None:
        library.pre_tokenizer = cutter
    library.add_special_tokens(["<unk>", "<s>", "</s>"])
    library.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer.model").unlink()


@pytest.mark.parametrize(
    ("prepends", "metaspace"),
    [(True, None), (False, None), (False, "first"), (False, "never"), (False, "split")],
)
def test_byte_fallback_without_its_sentencepiece_model(
    tmp_path: Path, prepends: bool, metaspace: str | None
) -> None:
    folder = copied("mistral", tmp_path)
    norm, pre = tokenizers.normalizers, tokenizers.pre_tokenizers
    steps = [norm.Prepend("▁")] * prepends + [norm.Replace(" ", "▁")]
    if metaspace == "split":  # as Gemma's: at spaces, of which none are left by then
        byte_fallback_json(folder, norm.Replace(" ", "▁"), pre.Split(" ", "merged_with_previous"))
    else:
        byte_fallback_json(
            folder,
            norm.Sequence(steps) if metaspace is None else None,
            metaspace and pre.Metaspace(prepend_scheme=metaspace, split=False),
        )
    metadata = convert(folder)
    assert metadata["tokenizer.ggml.model"] == "llama"
    assert metadata["tokenizer.ggml.add_space_prefix"] == (prepends or metaspace == "first")
    check_token_ids(Checkpoint.open(folder), metadata)


def test_a_tokenizer_that_would_give_other_ids_is_refused(tmp_path: Path) -> None:
    folder = copied("qwen3", tmp_path)
    metadata = convert(folder)
    metadata["tokenizer.ggml.merges"] = metadata["tokenizer.ggml.merges"][1:]
    with pytest.raises(UnsupportedError, match="as a GGUF file it would give"):
        check_token_ids(Checkpoint.open(folder), metadata)


# -- the token list -------------------------------------------------------------------------------


def test_types_of_added_tokens() -> None:
    metadata = convert(RECORDED / "qwen2")
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    of = dict(zip(tokens, types.tolist(), strict=True))
    assert of["<|im_end|>"] == 3
    assert of["<tool_call>"] == 4
    assert of["e"] == 1
    assert len(tokens) == len(types) == 318


def test_rows_without_a_token_are_padding() -> None:
    metadata = convert(RECORDED / "qwen2")
    assert metadata["tokenizer.ggml.tokens"][-1] == "[PAD317]"
    assert metadata["tokenizer.ggml.token_type"][-13:].tolist() == [5] * 13
    assert metadata["tokenizer.ggml.token_type"][-14] != 5


def test_a_tokenizer_with_more_tokens_than_rows_is_refused() -> None:
    with pytest.raises(FileFormatError, match="the embedding 200 rows"):
        convert(RECORDED / "qwen2", n_rows=200)


def test_an_added_token_without_a_row_is_left_out(tmp_path: Path) -> None:
    folder = copied("gemma3", tmp_path)
    edit_json(folder / "added_tokens.json", **{"<image_soft_token>": 340})
    checkpoint = Checkpoint.open(folder)
    found = convert_tokenizer(checkpoint, checkpoint.json("config.json"), 340, FACTS)
    assert len(found.metadata["tokenizer.ggml.tokens"]) == 340
    assert "'<image_soft_token>' has no embedding" in found.notes[0]


def test_user_defined_pieces_of_sentencepiece() -> None:
    metadata = convert(RECORDED / "gemma3")
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    of = dict(zip(tokens, types.tolist(), strict=True))
    assert (of["<unk>"], of["<s>"], of["<0x41>"], of["\n\n"], of["  "]) == (2, 3, 6, 4, 4)
    assert of["<start_of_turn>"] == 3  # as tokenizer_config.json says
    assert metadata["tokenizer.ggml.add_space_prefix"] is False


# -- roles ----------------------------------------------------------------------------------------


def roles(metadata: dict[str, Any]) -> dict[str, str]:
    tokens = metadata["tokenizer.ggml.tokens"]
    return {
        key.removeprefix("tokenizer.ggml.").removesuffix("_token_id"): tokens[value]
        for key, value in metadata.items()
        if key.endswith("_token_id")
    }


def test_roles_and_every_end_token() -> None:
    # B36: generation_config.json names two.
    metadata = convert(RECORDED / "llama")
    assert roles(metadata) == {"bos": "<|endoftext|>", "eos": "<|im_end|>", "eot": "<|eot_id|>"}
    tokenizer = Tokenizer.from_metadata(metadata)
    assert {tokenizer.token_text(i) for i in tokenizer.eog_ids} >= {"<|im_end|>", "<|eot_id|>"}


def test_the_model_ends_as_generation_config_says_else_as_config_does(tmp_path: Path) -> None:
    folder = copied("gemma3", tmp_path)  # whose config.json says 1, the default of its class
    assert {"eos": "</s>", "eot": "<end_of_turn>"}.items() <= roles(convert(folder)).items()
    (folder / "generation_config.json").unlink()
    assert {"eos": "</s>", "eot": "<s>"}.items() <= roles(convert(folder)).items()


def test_end_tokens_of_unknown_texts_go_before_known_ones(tmp_path: Path) -> None:
    folder = copied("qwen2", tmp_path)
    ids = {t: i for i, t in enumerate(convert(folder)["tokenizer.ggml.tokens"])}
    ends = [ids[t] for t in ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "a", "b")]
    edit_json(folder / "generation_config.json", eos_token_id=ends)
    metadata = convert(folder)
    assert set(ends) <= Tokenizer.from_metadata(metadata).eog_ids
    edit_json(folder / "generation_config.json", eos_token_id=[*ends, ids["c"]])
    with pytest.raises(UnsupportedError, match="6 tokens end a generation"):
        convert(folder)


def test_without_any_end_token_nothing_ends(tmp_path: Path) -> None:
    folder = copied("mistral", tmp_path)
    for path in folder.glob("*config.json"):
        edit_json(path, "eos_token", "eos_token_id")
    metadata = convert(folder)
    assert "tokenizer.ggml.eos_token_id" not in metadata
    assert 0 not in Tokenizer.from_metadata(metadata).eog_ids


@pytest.mark.parametrize("value", [10**6, -2, "2", True, 1.5])
def test_a_role_of_no_token_is_refused(tmp_path: Path, value: Any) -> None:
    folder = copied("mistral", tmp_path)
    edit_json(folder / "generation_config.json", eos_token_id=value)
    with pytest.raises(FileFormatError, match="eos_token_id is"):
        convert(folder)


@pytest.mark.parametrize(
    ("name", "adds_bos"),
    [
        ("llama", True),
        ("llama-linear", False),
        ("qwen2", False),
        ("mistral", True),
        ("gemma3", True),
    ],
)
def test_whether_bos_is_added(name: str, adds_bos: bool) -> None:
    assert convert(RECORDED / name)["tokenizer.ggml.add_bos_token"] is adds_bos


def test_the_post_processor_decides_on_eos(tmp_path: Path) -> None:
    folder = copied("llama", tmp_path)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["post_processor"]["single"] = [
        {"Sequence": {"id": "A", "type_id": 0}},
        {"SpecialToken": {"id": "<|im_end|>", "type_id": 0}},
    ]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    metadata = convert(folder)
    assert metadata["tokenizer.ggml.add_bos_token"] is False
    assert metadata["tokenizer.ggml.add_eos_token"] is True


# -- templates and sampling -----------------------------------------------------------------------


def test_the_template_of_tokenizer_config() -> None:
    assert "<|im_start|>" in convert(RECORDED / "llama")["tokenizer.chat_template"]


def test_template_files_go_first(tmp_path: Path) -> None:
    folder = copied("llama", tmp_path)
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tools.jinja").write_text("{{ tools }}")
    metadata = convert(folder)
    assert metadata["tokenizer.chat_template"] == "{{ messages }}"
    assert metadata["tokenizer.chat_template.tools"] == "{{ tools }}"
    assert metadata["tokenizer.chat_templates"] == ["tools"]


def test_a_list_of_templates(tmp_path: Path) -> None:
    folder = copied("llama", tmp_path)
    listed = [{"name": "default", "template": "d"}, {"name": "rag", "template": "r"}]
    edit_json(folder / "tokenizer_config.json", chat_template=listed)
    metadata = convert(folder)
    assert metadata["tokenizer.chat_template"] == "d"
    assert metadata["tokenizer.chat_template.rag"] == "r"


def test_sampling_defaults() -> None:
    metadata = convert(RECORDED / "gemma3")
    assert metadata["general.sampling.top_p"] == 0.95
    assert metadata["general.sampling.top_k"] == Field.number(64, 5)
    assert "general.sampling.temp" not in metadata
