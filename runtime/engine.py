"""The loop: take mail, schedule, run one step, draw tokens, tell their owners.

Owns: the one thread that touches executor, scheduler and requests, and why a request ends.
Must not know: HTTP, prompts as text, op kernels.

Context rule: prompt + completion <= context. The last token drawn needs no slot in the KV pool.
An end-of-generation token counts as output and is never shown.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from .adapters import salted, shares_of
from .admission import (
    check_ability,
    check_constraint,
    check_terms,
    check_whole,
    checked_prompt,
    most_tokens,
)
from .assembly import scheduler_for, tier_over
from .block_table import BlockTable
from .constraint import Constraint
from .drawing import draw_token
from .errors import FileChanged, MartletError, ModelError
from .events import Event, FinishReason
from .executors import Executor
from .guessing import Guessing
from .mailbox import Mailbox
from .outbox import Outbox
from .pace import Pace
from .pooling import DEFAULT, NO_HIDDEN, Hidden
from .prefix_store import PrefixStore
from .readout import Read, Readers, Reads, read_prompt
from .rejection import Guess
from .request import Request, Scheduled, State
from .sampling import NUMPY, Drawer, Logits
from .sampling_params import CHOSEN_SEED_BITS, SamplingParams
from .service import Service
from .speculation import Speculation
from .state_slots import STATE_EVERY
from .stats import Counts, EngineStats, snapshot
from .step import Step, build_step
from .textstream import TextStream
from .timeline import Timeline
from .vocabulary import Vocabulary

log = logging.getLogger(__name__)
_UNTIMED = contextlib.nullcontext()


class Engine:
    """Serves requests over one executor. submit, cancel and stats may be called from any thread."""

    def __init__(
        self,
        executor: Executor,
        tokenizer: Vocabulary,
        *,
        context: int,
        max_queue: int = 64,
        max_running: int = 32,
        step_rows: int | None = None,
        step_ms: float | None = None,
        prefix_reuse: bool = True,
        fingerprint: bytes = b"",
        prefix_store: PrefixStore | None = None,
        pooling_type: int = DEFAULT,
        generates: bool = True,
        state_every: int = STATE_EVERY,
        adapters: Sequence[float] = (),
        speculation: Speculation | None = None,
        timeline: Timeline | None = None,
    ) -> None:
        """max_queue: requests accepted beyond the max_running that may run at a time.
        step_rows: most rows per step, at most what the executor takes. step_ms: the time a step is
        kept near; by default twice what its streams take without the prompts of others.
        prefix_store: where known prefixes outlive the pool; closed with the engine.
        pooling_type: how prompts become vectors, as model files number it (pooling.py).
        generates: False for models whose prompts have vectors or scores and no continuation.
        state_every: tokens of a long text between snapshots of recurrent layers.
        adapters: how much of each a request gets that does not say.
        speculation: guesses of several tokens, which steps check at once; the text stays the same.
        timeline: where it is written down what time went into.
        """
        if max_queue < 0 or (step_ms is not None and not step_ms > 0):  # NaN as well
            raise ModelError(f"max_queue {max_queue} must be at least 0, step_ms {step_ms} above 0")
        self._tier = tier_over(executor, prefix_store)
        self.context = context
        self._adapters = tuple(adapters)
        self._pooling_type, self._generates = pooling_type, generates
        self._pace = Pace(step_ms)
        self.scheduler = scheduler_for(
            executor,
            tokenizer.vocab_size,
            max_running=max_running,
            step_rows=step_rows,
            prompt_rows=self._pace.prompt_rows,
            prefix_reuse=prefix_reuse,
            fingerprint=fingerprint,
            tier=self._tier,
            state_every=state_every,
        )
        self._whole_rows = self.scheduler.step_rows if executor.sees_ahead else None
        self._guessing = Guessing(speculation, self.scheduler)
        self._mailbox = Mailbox(self.scheduler.max_running + max_queue)
        self._executor = executor
        self._drawer: Drawer = getattr(executor, "drawer", NUMPY)
        self._tokenizer = tokenizer
        self._counts = Counts()
        self._outbox = Outbox(self._fail)
        self._timeline = timeline
        self.last_step: tuple[Step, float] | None = None
        """As it was laid out, and the seconds it took."""
        self._thread: threading.Thread | None = None

    # ---- from any thread -------------------------------------------------------------------------

    def submit(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        on_event: Callable[[Event], None],
        *,
        request_id: str | None = None,
        constraint: Constraint | None = None,
        show_ids: frozenset[int] = frozenset(),
        cache_salt: bytes = b"",
        second_at: int | None = None,
        reads_cache: bool = True,
        service: Service = "interactive",
        deadline_ms: float | None = None,
        arrived_ns: int | None = None,
        adapters: Mapping[int, float] | None = None,
    ) -> Request:
        """Accepts a request or raises RequestError, ContextTooLong or QueueFull at once.

        constraint: limits this request's output, and ends it once nothing may follow. show_ids:
        control tokens that appear in the text. cache_salt: prefixes are shared among requests of
        one salt. second_at: where the second of two texts begins, of which the prompt consists.
        reads_cache False computes every row of the prompt. deadline_ms: from arrival; a
        request unfinished then ends for that reason. arrived_ns: of time.monotonic_ns, when its
        owner got it; None for now. adapters: how much of which, by number; None: what is usual.
        on_event is called from the engine thread and must return quickly.
        """
        arrived_ns = time.monotonic_ns() if arrived_ns is None else arrived_ns
        check_terms(service, deadline_ms)
        check_constraint(constraint, params)
        shares = shares_of(adapters, self._adapters)
        check_ability(params, self._generates)
        prompt = checked_prompt(prompt_ids, params, vocab_size=self._tokenizer.vocab_size)
        check_whole(len(prompt), self._whole_rows)
        slots = self.scheduler.pool.n_slots
        n_most = most_tokens(len(prompt), params.max_tokens, context=self.context, pool_slots=slots)
        buffer = np.empty(n_most, np.int32)
        buffer[: len(prompt)] = prompt
        seed = secrets.randbits(CHOSEN_SEED_BITS) if params.seed is None else params.seed
        request_id = request_id or secrets.token_hex(8)
        sees_ahead = self._executor.sees_ahead
        readers = Readers.of(params, len(prompt), self._pooling_type, sees_ahead)
        rule, seen_from = self._guessing.terms(len(prompt))

        def make(arrival: int) -> Request:
            return Request(
                id=request_id,
                arrival=arrival,
                buffer=buffer,
                n_prompt=len(prompt),
                params=params,
                seed=seed,
                on_event=on_event,
                text=TextStream(self._tokenizer, params.stop, show_ids=show_ids),
                table=BlockTable(salt=salted(cache_salt, shares)),
                arrived_ns=arrived_ns,
                constraint=constraint,
                reads_cache=reads_cache and readers.read_cache,
                scores=readers.scores,
                pooled=readers.pooled,
                second_at=second_at,
                service=service,
                deadline_ms=deadline_ms,
                adapters=shares,
                rejects=(params.speculate_rule or rule) == "reject",
                seen_from=None if readers.pooled else seen_from,
            )

        return self._mailbox.post(request_id, make)

    def cancel(self, request_id: str) -> None:
        """Ends a request before its next step; does nothing if it is finished or unknown."""
        self._mailbox.cancel(request_id)

    def stats(self) -> EngineStats:
        n_unfinished = self._mailbox.n_unfinished
        return snapshot(self.scheduler, self._counts, n_unfinished, self._guessing.stats())

    @property
    def is_alive(self) -> bool:
        """Whether the thread is there: between start and close, unless a fault has ended it."""
        return self._thread is not None and self._thread.is_alive()

    def start(self) -> None:
        """Starts the engine thread. It sleeps, using no CPU, while no request is unfinished."""
        assert self._thread is None, "the engine is started already"
        self._thread = threading.Thread(target=self._loop, name="martlet-engine", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread after the step it is in, then cancels what is unfinished."""
        self._mailbox.close()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        self._take_mail()
        for request in self.scheduler.unfinished():
            self._finish(request, "cancelled")
        if self._tier:
            self.scheduler.pool.save()
            self._tier.store.close()
            self._tier = None

    # ---- the engine thread -----------------------------------------------------------------------

    def step(self) -> bool:
        """One iteration; False if there were no rows to compute. For the thread, and for tests."""
        with self._span("schedule"):
            self._take_mail()
            self._end_late_ones()
            granted = self.scheduler.schedule()
        if not granted:
            if self.scheduler.waiting:
                raise ModelError("no waiting request fits into the idle pool")
            return False
        self._stamp_scheduled(granted)
        granted, drafts = self._guessing.lengthen(granted)
        reads = Reads(granted, drafts)
        try:
            logits, hidden = self._run(granted)
            reads.check(logits, hidden)
        except FileChanged:
            raise  # there is no model any more
        except Exception as error:
            # The keys and values of these rows are unknown now; those of others are untouched.
            for item in granted:
                self._fail(item.request, error)
            return True
        self._counts.count_step(granted)
        self._guessing.see(granted, hidden)
        self.scheduler.commit(granted)
        with self._span("draw"), self._outbox.held():
            # Entries beyond the vocabulary are padding.
            for read in reads.split(logits[:, : self._tokenizer.vocab_size], hidden):
                self._answer(read)
        return True

    def _span(self, name: str) -> contextlib.AbstractContextManager[None]:
        return self._timeline.span(name) if self._timeline else _UNTIMED

    def _answer(self, read: Read) -> None:
        request = read.request
        try:
            if of_prompt := read_prompt(read):
                self._outbox.tell(request, of_prompt)
            if read.draws and request.is_full:  # nothing is asked beyond the prompt
                self._finish(request, "length")
            elif read.draws:
                self._extend(read)
        except Exception as error:
            self._fail(request, error)

    def _extend(self, read: Read) -> None:
        """Draws the token that follows what the request owns, and goes on for as long as it is the
        guessed one, whose row is there already."""
        request, guessed = read.request, read.draft.tokens
        n_right = 0
        if guessed:
            request.count_draft(read.draft.source, len(guessed), 0)
        for row, best_id in zip(read.logits[-len(read.best_ids) :], read.best_ids, strict=True):
            may_stand = request.rejects and n_right < len(guessed)
            guess = read.draft.guess(n_right) if may_stand else None
            token_id = self._advance(request, row, best_id, guess)
            if request.state is State.FINISHED or n_right == len(guessed):
                break
            if token_id != guessed[n_right]:
                break
            n_right += 1
            request.count_draft(read.draft.source, 0, 1)
            self.scheduler.accept(request)
        if guessed:
            self._guessing.learn(request, read.draft, n_right)

    def _run(self, granted: Sequence[Scheduled]) -> tuple[Logits, Hidden]:
        parts = self.scheduler.pool.parts
        step = build_step(granted, parts.of_block if parts else None)
        start_s = time.perf_counter()
        logits = self._executor.run(step)
        seconds = time.perf_counter() - start_s
        self.last_step = step, seconds
        n_streams = sum(item.request.is_streaming for item in granted)
        n_draft = sum(item.n_draft for item in granted)
        if not n_draft:
            self._pace.observe(n_streams, step.n_rows - n_streams, seconds)
        if n_streams == len(granted):
            self._guessing.observe(step.n_rows, n_streams, seconds)
        return logits, self._executor.hidden if step.n_hidden else NO_HIDDEN

    def _loop(self) -> None:
        try:
            while self._mailbox.wait_for_work():
                try:
                    self.step()
                except FileChanged:
                    raise
                except Exception as error:  # a bug of ours: nobody may be left waiting for ever
                    self._fail_all(error)
        except BaseException as error:
            self._die(error)

    def _die(self, error: BaseException) -> None:
        """Nobody will be answered any more, and whoever waits is told so now."""
        log.critical("the engine thread ends: %s", error or type(error).__name__)
        self._mailbox.close()
        self._take_mail()
        self._fail_all(error)

    def _fail_all(self, error: BaseException) -> None:
        for request in self.scheduler.unfinished():
            self._fail(request, error)

    def _take_mail(self) -> None:
        arrived, cancelled = self._mailbox.take()
        for request in arrived:
            self.scheduler.add(request)
        for request in cancelled:
            self._finish(request, "cancelled")

    def _end_late_ones(self) -> None:
        now_ns = time.monotonic_ns()
        for request in self.scheduler.unfinished():
            if request.is_late(now_ns):
                self._finish(request, "deadline", error=request.late_words())

    def _stamp_scheduled(self, granted: Sequence[Scheduled]) -> None:
        now_ns = time.monotonic_ns()
        for item in granted:
            if item.request.scheduled_ns is None:
                item.request.scheduled_ns = now_ns
                self._counts.count_admitted(item.request)
                log.debug("request %s: prefix miss %s", item.request.id, item.request.miss)

    def _advance(self, request: Request, logits: Logits, best_id: int, guess: Guess | None) -> int:
        """Draws one token, tells the owner and returns it."""
        event, ends_by = draw_token(
            request,
            logits,
            best_id,
            tokenizer=self._tokenizer,
            drawer=self._drawer,
            counts=self._counts,
            guess=guess,
        )
        self._outbox.tell(request, event)
        if ends_by:
            self._finish(request, ends_by, end_ns=event.time_ns)
        return event.token_id

    def _fail(self, request: Request, error: BaseException) -> None:
        log.error("request %s failed", request.id, exc_info=error)
        kind = "" if isinstance(error, MartletError) else f"{type(error).__name__}: "
        self._finish(request, "error", error=(kind + str(error)).splitlines()[0])

    def _finish(
        self,
        request: Request,
        reason: FinishReason,
        *,
        end_ns: int | None = None,
        error: str | None = None,
    ) -> None:
        if request.state is State.FINISHED:
            return
        self.scheduler.remove(request)
        self._mailbox.forget(request)
        self._guessing.forget(request)
        self._counts.finished[reason] += 1
        end = request.ending(reason, time.monotonic_ns() if end_ns is None else end_ns, error)
        if self._timeline:
            self._timeline.request(request.id, request.arrived_ns, end)
        self._outbox.tell(request, end)
