"""What the converter wants to know of readers: pre-tokenizers by name, texts of end tokens.

Owns: telling quant what runtime's tokenizer knows, in the JSON of the `tokenizers` library.
"""

from __future__ import annotations

import json

from martlet.quant.convert_pretokenizer import PreTokenizerForm
from martlet.quant.convert_tokenizer import ReaderFacts
from martlet.runtime.pretokenizers import PRE_TOKENIZERS
from martlet.runtime.tokenizer_special import EOG_TEXTS


def reader_facts() -> ReaderFacts:
    forms = {
        name: PreTokenizerForm(json.loads(row.build().__getstate__()), row.ignore_merges, row.nfc)
        for name, row in PRE_TOKENIZERS.items()
    }
    return ReaderFacts(forms, EOG_TEXTS)
