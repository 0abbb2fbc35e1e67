"""An engine that says what a test tells it to.

ScriptedEngine keeps the promises of runtime.engine.Engine (events in order from other threads, one
FinishEvent, context rule, bounded queue) without a model: a script turns a prompt into token ids.
Tokens are bytes: token id b < 256 is the byte b.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from martlet.runtime.constraint import Constraint, is_allowed
from martlet.runtime.errors import ContextTooLong, QueueFull
from martlet.runtime.events import (
    FINISH_REASONS,
    Event,
    FinishEvent,
    FinishReason,
    TokenEvent,
    TokenLogprob,
)
from martlet.runtime.latency import Timings
from martlet.runtime.sampling_params import SamplingParams
from martlet.runtime.stats import EngineStats
from martlet.runtime.textstream import TextStream
from martlet.runtime.tokenizer import Tokenizer
from martlet.runtime.tokenizer_bpe import BYTE_OF_LETTER

BOS, START, END, UNK = 256, 257, 258, 259
SPECIALS = ("<s>", "<|im_start|>", "<|im_end|>", "<unk>")
VOCAB_SIZE = 260
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# One that thinks unless it is told not to, as Qwen3's does.
THINKING = CHATML + (
    "{% if add_generation_prompt and enable_thinking is defined and not enable_thinking %}"
    "{{ '<think>\n\n</think>\n\n' }}{% endif %}"
)
# One that has the reasoning opened before the answer begins, as DeepSeek R1's does.
OPENED = CHATML + "{% if add_generation_prompt %}{{ '<think>\n' }}{% endif %}{# </think> #}"


def byte_tokenizer(template: str | None = CHATML, *, add_bos: bool = False) -> Tokenizer:
    """The real tokenizer class over a vocabulary of 256 bytes and four control tokens."""
    letters = {byte: letter for letter, byte in BYTE_OF_LETTER.items()}
    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [letters[byte] for byte in range(256)] + list(SPECIALS),
        "tokenizer.ggml.token_type": [1] * 256 + [3, 3, 3, 2],
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.bos_token_id": BOS,
        "tokenizer.ggml.eos_token_id": END,
        "tokenizer.ggml.add_bos_token": add_bos,
    }
    if template is not None:
        metadata["tokenizer.chat_template"] = template
    return Tokenizer.from_metadata(metadata)


def says(text: str | bytes, *, end: bool = True) -> Callable[[Sequence[int]], list[int]]:
    """A script that answers any prompt with this text; without `end` it never stops by itself."""
    raw = text.encode() if isinstance(text, str) else text
    return lambda prompt: list(raw) + ([END] if end else [ord("~")] * 100_000)


@dataclass
class Running:
    """What a test may look at afterwards."""

    id: str
    prompt_ids: list[int]
    params: SamplingParams
    on_event: Callable[[Event], None]
    arrived_ns: int
    constraint: Constraint | None = None
    show_ids: frozenset[int] = frozenset()
    started: bool = False
    n_emitted: int = 0
    cancelled: threading.Event = field(default_factory=threading.Event)
    reason: FinishReason | None = None

    def takes(self, token_id: int) -> bool:
        """A script may say only what the request's constraint allows."""
        if self.constraint is None:
            return True
        if not is_allowed(self.constraint.allowed(), token_id):
            return False
        self.constraint.accept(token_id)
        return True


class ScriptedEngine:
    def __init__(
        self,
        script: Callable[[Sequence[int]], list[int]] | None = None,
        *,
        tokenizer: Tokenizer | None = None,
        context: int = 4096,
        slots: int = 4,
        max_queue: int = 16,
        prefill_s: float = 0.0,
        token_s: float = 0.0,
        fail_at: int | None = None,
        answers: bool = True,
    ) -> None:
        """script: by default "hello". fail_at: tokens before an error.
        answers False: requests are taken and never served.
        """
        self.script, self.context = script or says("hello"), context
        self.tokenizer = tokenizer or byte_tokenizer()
        self.prefill_s, self.token_s, self.fail_at = prefill_s, token_s, fail_at
        self.answers = answers
        self.is_alive = True
        self.unpaused = threading.Event()
        self.unpaused.set()
        self.requests: list[Running] = []
        self.max_unfinished = slots + max_queue
        self._slots = threading.Semaphore(slots)
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._finished: Counter[FinishReason] = Counter(dict.fromkeys(FINISH_REASONS, 0))

    def submit(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        on_event: Callable[[Event], None],
        *,
        request_id: str | None = None,
        service: str = "interactive",
        deadline_ms: float | None = None,
        cache_salt: bytes = b"",
        constraint: Constraint | None = None,
        show_ids: frozenset[int] = frozenset(),
        arrived_ns: int | None = None,
        adapters: Mapping[int, float] | None = None,
        second_at: int | None = None,
    ) -> Running:
        n_prompt = len(prompt_ids)
        if n_prompt >= self.context:
            raise ContextTooLong(
                f"prompt has {n_prompt} tokens, context is {self.context}",
                needed=n_prompt + 1,
                limit=self.context,
            )
        with self._lock:
            n = self.n_unfinished
            if n >= self.max_unfinished:
                raise QueueFull(f"{n} unfinished", unfinished=n, limit=self.max_unfinished)
            name = request_id or f"r{len(self.requests)}"
            arrived_ns = arrived_ns or time.monotonic_ns()
            request = Running(name, list(prompt_ids), params, on_event, arrived_ns)
            request.constraint, request.show_ids = constraint, show_ids
            self.requests.append(request)
        threading.Thread(target=self._serve, args=(request,), daemon=True).start()
        return request

    def cancel(self, request_id: str) -> None:
        for request in self.requests:
            if request.id == request_id:
                request.cancelled.set()

    @property
    def n_unfinished(self) -> int:
        return sum(request.reason is None for request in self.requests)

    def stats(self) -> EngineStats:
        running = sum(r.started and r.reason is None for r in self.requests)
        return EngineStats(
            running=running,
            waiting=self.n_unfinished - running,
            blocks_total=8,
            blocks_used=running,
            blocks_cached=0,
            tokens_prefilled=self._counts["prefilled"],
            tokens_decoded=self._counts["decoded"],
            tokens_cached=0,
            tokens_recomputed=0,
            steps=self._counts["decoded"],
            preemptions=0,
            finished=dict(self._finished),
        )

    def _serve(self, request: Running) -> None:
        if not self.answers:
            return
        while not self._slots.acquire(timeout=0.01):
            if request.cancelled.is_set():
                self._finish(request, "cancelled", TextStream(self.tokenizer), [])
                return
        try:
            self._generate(request)
        finally:
            self._slots.release()

    def _generate(self, request: Running) -> None:
        params, text = request.params, self._stream_of(request)
        stamps = [time.monotonic_ns()]
        while not self.unpaused.wait(0.01):
            if request.cancelled.is_set():
                self._finish(request, "cancelled", text, stamps)
                return
        request.started = True
        n_room = self.context - len(request.prompt_ids)
        n_most = min(n_room, params.max_tokens or n_room)
        self._counts["prefilled"] += len(request.prompt_ids)
        reason: FinishReason = "length"
        request.cancelled.wait(self.prefill_s)
        for index, token_id in enumerate(self.script(request.prompt_ids)[:n_most]):
            if request.cancelled.wait(self.token_s) or request.cancelled.is_set():
                reason = "cancelled"
                break
            if index == self.fail_at or not request.takes(token_id):
                reason = "error"
                break
            stamps.append(time.monotonic_ns())
            is_end = token_id == END and not params.ignore_eos
            shown = "" if is_end else text.push(token_id)
            request.n_emitted += 1
            self._counts["decoded"] += 1
            request.on_event(
                TokenEvent(index, token_id, shown, self._logprob(token_id, params), stamps[-1])
            )
            is_done = request.constraint is not None and request.constraint.is_done
            if is_end or text.stopped or is_done:
                reason = "stop"
                break
        self._finish(request, reason, text, stamps)

    def _stream_of(self, request: Running) -> TextStream:
        return TextStream(self.tokenizer, request.params.stop, show_ids=request.show_ids)

    def _logprob(self, token_id: int, params: SamplingParams) -> TokenLogprob | None:
        """The token itself comes second of the alternatives, with the probability 1/4."""
        if params.logprobs is None:
            return None
        others = [(65 + i, -0.5 - i) for i in range(params.logprobs)]
        if len(others) > 1:
            others[1] = (token_id, -1.386)
        return TokenLogprob(-1.386, tuple(others))

    def _finish(
        self, request: Running, reason: FinishReason, text: TextStream, stamps: list[int]
    ) -> None:
        n_output = request.n_emitted
        end = stamps[-1] if stamps and reason in ("stop", "length") else time.monotonic_ns()
        timings = Timings.from_stamps(
            arrived=request.arrived_ns,
            scheduled=stamps[0] if stamps else None,
            first_token=stamps[1] if n_output else None,
            end=end,
            n_output=n_output,
        )
        request.reason = reason
        self._finished[reason] += 1
        seed = 77 if request.params.seed is None else request.params.seed
        request.on_event(
            FinishEvent(
                reason=reason,
                text="" if text.stopped else text.finish(),
                timings=timings,
                error="scripted fault" if reason == "error" else None,
                n_prompt=len(request.prompt_ids),
                n_output=n_output,
                n_cached=0,
                seed=seed,
            )
        )
