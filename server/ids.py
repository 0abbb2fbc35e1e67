"""Names for requests and answers that nobody else has. Owns: new_id."""

from __future__ import annotations

import random

# Seeded once by the system. Asking it each time, as uuid4 does, lets another thread have the
# interpreter meanwhile, and the loop may wait for it while a request is waiting to begin.
_numbers = random.Random()


def new_id() -> str:
    """32 hexadecimal digits. Not a secret."""
    return f"{_numbers.getrandbits(128):032x}"
