"""How long a model is to stay after a request, as Ollama's clients write it.

Owns: KeepAlive and the reading of it. Must not know: what is done with it.
"""

from __future__ import annotations

import math
import re
from typing import Annotated, Any

from pydantic import BeforeValidator

UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "": 1.0}
TERM = r"(\d{1,15}(?:\.\d{1,9})?|\.\d{1,9})(ns|us|µs|ms|s|m|h)"
DURATION = re.compile(rf"(?:{TERM})+|\d{{1,15}}(?:\.\d{{1,9}})?", re.ASCII)
STAYS = math.inf


def seconds_of(value: Any) -> float:
    """Seconds, from a number of them or text such as "5m" or "1h30m"; STAYS for what is negative.

    Raises ValueError.
    """
    if isinstance(value, str):
        text = value.strip().removeprefix("+")
        is_negative = text.startswith("-")
        if not DURATION.fullmatch(text.removeprefix("-")):
            raise ValueError('must be seconds, or a duration such as "5m" or "1h30m"')
        terms = re.findall(TERM, text, re.ASCII) or [(text.removeprefix("-"), "")]
        seconds = sum(float(number) * UNITS[unit] for number, unit in terms)
        return STAYS if is_negative else seconds
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    # math.isnan() fails for whole numbers that no float holds, and those are none.
    if not is_number or (isinstance(value, float) and math.isnan(value)):
        raise ValueError('must be seconds, or a duration such as "5m" or "1h30m"')
    return STAYS if value < 0 else float(min(value, 1e15))


KeepAlive = Annotated[float, BeforeValidator(seconds_of, json_schema_input_type=float | str)]
