"""A model without weights: its next token is any function of the tokens it was fed.

ScriptedExecutor keeps token ids where a real executor keeps keys and values, and reads a sequence
back through the step's block table. A wrong slot, a stale block or a missed row therefore changes
what the script sees, and the output. ScriptedTokenizer maps bytes to ids one to one.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence

import numpy as np
from martlet.runtime.step import MOST_GUESSES, Step

Script = Callable[[np.ndarray], "int | np.ndarray"]
"""(n,) token ids of a sequence so far -> its next token id, or (vocab_size,) float32 logits."""

BOS, EOS, EOT = 256, 257, 258
VOCAB_SIZE = 260
UNWRITTEN = -1


class ScriptedTokenizer:
    """Ids 0 … 255 are bytes; BOS, EOS and EOT are control tokens; 259 shows as one full word."""

    def __init__(self, *, eog_ids: Sequence[int] = (EOS, EOT), chat_template: str | None = None):
        self.vocab_size = VOCAB_SIZE
        self.bos_id: int | None = BOS
        self.eos_id: int | None = EOS if EOS in eog_ids else None
        self.eog_ids = frozenset(eog_ids)
        self.special_ids = frozenset((BOS, EOS, EOT))
        self.add_bos, self.add_eos = True, False
        self.chat_template = chat_template
        self._special = {BOS: b"<bos>", EOS: b"<eos>", EOT: b"<eot>"}

    def encode(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        return [BOS] * add_special + list(text.encode())

    def token_bytes(self, token_id: int, *, special: bool = False) -> bytes:
        if token_id in self._special:
            return self._special[token_id] if special else b""
        return b" word" if token_id == VOCAB_SIZE - 1 else bytes([token_id])

    def token_text(self, token_id: int) -> str:
        return self.token_bytes(token_id, special=True).decode(errors="replace")

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        pieces = (self.token_bytes(i, special=special) for i in ids)
        return b"".join(pieces).decode(errors="replace")


class ScriptedExecutor:
    """Runs a script. May be slow, and may fail: put an exception into `fail_next`."""

    name = "scripted"

    def __init__(
        self,
        script: Script,
        *,
        max_rows: int = 64,
        block_tokens: int = 16,
        n_blocks: int = 256,
        window: int = 0,
        n_window_blocks: int | None = None,
        n_states: int = 0,
        n_guesses: int = MOST_GUESSES,
        logits_width: int = VOCAB_SIZE + 4,
        seconds_per_step: float = 0.0,
        on_step: Callable[[Step], None] | None = None,
    ) -> None:
        self.script = script
        self.max_rows, self.block_tokens, self.n_blocks = max_rows, block_tokens, n_blocks
        self.logits_width = logits_width  # wider than the vocabulary, as padded models are
        self.seconds_per_step = seconds_per_step
        self.on_step = on_step
        self.fail_next: Exception | None = None
        self.steps: list[Step] = []
        self.is_closed = False
        self.window, self.n_window_blocks = window, (window and n_window_blocks) or n_blocks
        self.n_states, self.n_guesses = n_states, n_guesses
        self._guesses = [np.empty(0, np.int32)] * n_states  # of the last step, by slot
        self.sees_ahead = False
        self._states = [np.full(1, UNWRITTEN, np.int32)] * n_states
        self._slots = np.full(n_blocks * block_tokens, UNWRITTEN, np.int32)
        self._window_slots = np.full(self.n_window_blocks * block_tokens, UNWRITTEN, np.int32)

    def run(self, step: Step) -> np.ndarray:
        self.check(step)
        self.steps.append(step)
        if self.on_step:
            self.on_step(step)
        time.sleep(self.seconds_per_step)
        if self.fail_next:
            error, self.fail_next = self.fail_next, None
            raise error
        out: dict[int, np.ndarray] = {}
        for seq in range(step.n_seqs):
            rows = slice(step.seq_start[seq], step.seq_start[seq + 1])
            at, tokens = step.positions[rows], step.tokens[rows]
            self._slots[self._slots_of(step.block_table[seq], at)] = tokens
            self._window_slots[self._slots_of(step.window_table[seq], at)] = tokens
        for seq in range(step.n_seqs):
            self._check_window(step, seq)
            self._advance_state(step, seq)
            for row in range(step.seq_start[seq], step.seq_start[seq + 1]):
                if row in step.out_rows:
                    out[row] = self._logits(step, seq, int(step.positions[row]))
        return np.stack([out[r] for r in step.out_rows]) if out else self._no_logits()

    def check(self, step: Step) -> None:
        """What every executor may rely on."""
        for array in vars(step).values():
            is_float = array is step.adapters or array is step.given
            assert array.dtype == (np.float32 if is_float else np.int32)
            assert array.flags.c_contiguous
        assert 0 < step.n_rows <= self.max_rows
        assert step.n_rows == len(step.positions) == step.seq_start[-1]
        assert (np.diff(step.seq_start) > 0).all()
        assert (np.diff(step.out_rows) > 0).all()
        for start, end in zip(step.seq_start, step.seq_start[1:], strict=False):
            assert (np.diff(step.positions[start:end]) == 1).all()

    def copy_block(self, src: int, dst: int, window: tuple[int, int] | None = None) -> None:
        src_part, dst_part = window or (src, dst)
        self.write_block(dst, self.read_block(src, src_part), dst_part)

    def read_block(self, block: int, window_block: int | None = None) -> bytes:
        part = self._place(block if window_block is None else window_block)
        return self._slots[self._place(block)].tobytes() + self._window_slots[part].tobytes()

    def write_block(self, block: int, data: bytes, window_block: int | None = None) -> None:
        full, windowed = np.frombuffer(data, np.int32).reshape(2, -1)
        self._slots[self._place(block)] = full
        self._window_slots[self._place(block if window_block is None else window_block)] = windowed

    def _place(self, block: int) -> slice:
        return slice(block * self.block_tokens, (block + 1) * self.block_tokens)

    def close(self) -> None:
        self.is_closed = True

    def _slots_of(self, table: np.ndarray, positions: np.ndarray) -> np.ndarray:
        blocks = table[positions // self.block_tokens]
        assert (blocks >= 0).all(), "a row's block has no place"
        return blocks * self.block_tokens + positions % self.block_tokens

    def _check_window(self, step: Step, seq: int) -> None:
        """What rows of the sequence see in windowed layers are the tokens the others see."""
        start, last = (
            step.positions[step.seq_start[seq]],
            step.positions[step.seq_start[seq + 1] - 1],
        )
        seen = np.arange(max(0, start - self.window + 1) if self.window else 0, last + 1)
        tokens = self._window_slots[self._slots_of(step.window_table[seq], seen)]
        assert (tokens == self._slots[self._slots_of(step.block_table[seq], seen)]).all()

    def _advance_state(self, step: Step, seq: int) -> None:
        """A state is all tokens before the position it is of, as keys and values show them."""
        n_guesses, n_replays = int(step.guesses[seq]), int(step.replays[seq])
        if not self.n_states:
            return
        slot, rows = step.states[seq], slice(step.seq_start[seq], step.seq_start[seq + 1])
        assert 0 <= slot < self.n_states
        start = int(step.positions[rows][0])
        before = self._states[slot] if start else np.empty(0, np.int32)
        assert n_replays <= len(self._guesses[slot]), "guesses that were never computed"
        before = np.concatenate((before, self._guesses[slot][:n_replays]))
        seen = self._slots[self._slots_of(step.block_table[seq], np.arange(start))]
        assert before.tolist() == seen.tolist(), "the state is that of another place"
        assert n_guesses <= self.n_guesses
        tokens = step.tokens[rows]
        kept, self._guesses[slot] = np.split(tokens, [len(tokens) - n_guesses])
        assert len(kept), "a sequence of guesses alone"
        self._states[slot] = np.concatenate((before, kept))

    def copy_state(self, src: int, dst: int) -> None:
        self._states[dst] = self._states[src]

    def _logits(self, step: Step, seq: int, position: int) -> np.ndarray:
        history = self._slots[self._slots_of(step.block_table[seq], np.arange(position + 1))]
        assert (history != UNWRITTEN).all(), "read a slot that was never written"
        return self._logits_of(self.script(history))

    def _logits_of(self, answer: int | np.ndarray) -> np.ndarray:
        logits = np.zeros(self.logits_width, np.float32)
        logits[VOCAB_SIZE:] = 1e9  # padding: drawn by whoever forgets the real vocabulary size
        if isinstance(answer, np.ndarray):
            logits[: len(answer)] = answer
        else:
            logits[answer] = 50.0
        return logits

    def _no_logits(self) -> np.ndarray:
        return np.empty((0, self.logits_width), np.float32)


def reply_with(ids: Sequence[int], then: int = EOS) -> Script:
    """Answers any prompt with ids, then `then` for ever. It finds how far it is from the longest
    end of the history that begins ids; so a prompt should not end like the reply begins."""
    wanted = list(ids)

    def script(history: np.ndarray) -> int:
        for n in range(min(len(wanted), len(history)), 0, -1):
            if history[-n:].tolist() == wanted[:n]:
                return wanted[n] if n < len(wanted) else then
        return then if history[-1] == then or not wanted else wanted[0]

    return script


def reply_text(text: str) -> Script:
    return reply_with(list(text.encode()))


def hashed(n_choices: int = 256) -> Script:
    """A token that depends on every earlier token and on their number."""

    def script(history: np.ndarray) -> int:
        digest = hashlib.blake2b(history.tobytes(), digest_size=8).digest()
        return int.from_bytes(digest, "little") % n_choices

    return script


def hashed_logits(scale: float = 2.0) -> Script:
    """Logits that depend on every earlier token: for sampling with a temperature."""

    def script(history: np.ndarray) -> np.ndarray:
        seed = hashlib.blake2b(history.tobytes(), digest_size=8).digest()
        noise = np.random.default_rng(int.from_bytes(seed, "little"))
        return (noise.standard_normal(VOCAB_SIZE) * scale).astype(np.float32)

    return script
