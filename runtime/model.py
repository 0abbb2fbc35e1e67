"""Opens a model file and puts together what serving it needs: config, tokenizer, plan, executor.

Owns: defaults that depend on the machine (context, KV pool, executor). Must not know: requests,
sampling or how an op is computed.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike

from ..quant.gguf_file import GGUFFile, GGUFTensor
from .adapters import Adapter, AdapterFile, all_tensors, open_adapters
from .config import ModelConfig
from .draft_words import ChoiceOfWords, Words
from .errors import FileFormatError, RequestError, UnsupportedError
from .estimate import weight_bytes
from .executors import Executor
from .executors.choice import create_executor, likely_executor
from .fingerprint import packed_key
from .machine import choose_threads, memory
from .memory_fit import Need, choose_repack, need_of
from .models import record_nextn, record_plan, unused_tensors
from .ops import BufferKind, KvType
from .plan import Plan
from .shared_weights import SharedWeights
from .state_slots import SPARE_STATES
from .step import MOST_GUESSES
from .timeline import Timeline
from .tokenizer import Tokenizer
from .trace_file import TraceFile
from .weights import ChosenRows, DequantizedWeights, StoredWeights, WeightSource
from .window_parts import parts_of_pool

_LOG = logging.getLogger(__name__)
_DEFAULT_CONTEXT = 8192  # tokens; longer ones are asked for, since they are paid for in memory
_WHOLE_CONTEXT = 2048  # the same where all tokens of a context are computed in one step
_DEFAULT_SEQUENCES = 8  # whole contexts that the default KV pool holds
_KV_SHARE = 4  # the default pool takes at most 1/4 of the available memory
_STATE_SHARE = 2  # of the pool's bytes, states of recurrent layers take at most 1/2
_MOST_STATES = 32 + SPARE_STATES


@dataclass
class Model:
    """An open model. Close it to free the executor's memory and the file."""

    config: ModelConfig
    tokenizer: Tokenizer
    plan: Plan
    executor: Executor
    executor_reason: str
    context: int
    file: GGUFFile = field(repr=False)
    kv_type: KvType = KvType.F16
    adapters: Sequence[Adapter] = ()
    """In the order of their numbers."""
    words: Words | None = None
    """Tokens that its logits are of; None: all."""
    share_weights: bool = False
    """Whether other processes use the same copy of them."""
    timeline: Timeline | None = None
    """Where it is written down what time goes into; steps already are."""
    _others: list[Executor] = field(default_factory=list, repr=False)

    @property
    def kv_bytes(self) -> int:
        """Size of the KV pool, states of recurrent layers included."""
        of = self.executor
        sizes = (of.n_blocks * of.block_tokens, of.n_window_blocks * of.block_tokens, of.n_states)
        return pool_bytes(self.plan, self.kv_type, *sizes, of.n_guesses)

    def close(self) -> None:
        for executor in (*self._others, self.executor):
            executor.close()
        for adapter in self.adapters:
            adapter.file.close()
        self.file.close()

    def open_nextn(self, words: Words | None = None) -> tuple[Plan, Executor]:
        """The block that predicts further tokens, which config.nextn says is there, on an executor
        like the model's, with as many blocks of keys and values. words: of which it gives logits;
        None: of all. Closed with the model."""
        main = self.executor
        weights, n_words = _of_words(StoredWeights(self.file.tensors), words)
        plan = record_nextn(self.config, weights, main.max_rows, n_words=n_words)
        executor, _ = create_executor(
            main.name,
            plan,
            weights,
            block_tokens=main.block_tokens,
            n_blocks=main.n_blocks,
            n_threads=getattr(main, "n_threads", None),
            isa=getattr(main, "isa", None),
            kv_type=self.kv_type,
            repack=getattr(main, "repack", None),
            shared=_shared(plan, weights) if self.share_weights else None,
        )
        self._others.append(executor)
        self.file.drop_pages()
        return plan, executor

    def tensors(self) -> dict[str, GGUFTensor]:
        """Those of the model's file and of its adapters'."""
        return all_tensors(self.file, self.adapters)


def load_model(
    path: str | PathLike[str],
    *,
    executor: str = "auto",
    threads: int | None = None,
    context: int | None = None,
    kv_bytes: int | None = None,
    block_tokens: int = 32,
    max_rows: int = 256,
    isa: str | None = None,
    kv_type: KvType = KvType.F16,
    activations: BufferKind = BufferKind.Q8,
    dequantize: bool = False,
    gives_back: bool = True,
    guesses: int = MOST_GUESSES,
    adapters: Sequence[AdapterFile] = (),
    words: ChoiceOfWords | None = None,
    trace: TraceFile | None = None,
    mmap_experts: bool = False,
    repack: bool | None = None,
    share_weights: bool = False,
) -> Model:
    """Opens a GGUF file (or the set of a shard).

    context: tokens of one request at most; kv_bytes: size of the KV pool; max_rows: rows of one
    step; kv_type: what the cache holds; activations: what rows are rounded to before products;
    dequantize: decode all weights to F32 first, for comparisons; gives_back: layers with a
    window keep little more than it, as engines run them. False for those who lay out steps
    themselves; guesses: rows of a sequence and step that recurrent layers can take back;
    adapters: which requests can ask for; words: chooses the tokens that logits are of, for models
    that guess what others say; trace: where steps are written down; mmap_experts: experts take
    memory when they are first chosen; repack: hold a packed copy of the weights, which is
    faster, or read them from the mapped file (both: native executor). None: hold one if it fits;
    share_weights: hold it together with other processes of this machine (native executor, Linux).
    Raises NotEnoughMemory before anything is taken that is not there.
    """
    file = GGUFFile.open(path)
    opened: list[Adapter] = []
    try:
        opened = open_adapters(adapters, str(file.metadata.get("general.architecture")))
        weights: WeightSource = StoredWeights(all_tensors(file, opened))
        weights = DequantizedWeights(weights) if dequantize else weights
        shapes = {name: tensor.shape for name, tensor in file.tensors.items()}
        config = ModelConfig.from_metadata(file.metadata, shapes)
        if not config.is_causal:
            context = context or min(config.context_train, _WHOLE_CONTEXT)
            max_rows = max(max_rows, context)
        config = config.at_context(context or min(config.context_train, _DEFAULT_CONTEXT))
        tokenizer = Tokenizer.from_metadata(file.metadata)
        _check_vocabulary(config, tokenizer)
        chosen = words(tokenizer) if words else None
        weights, n_words = _of_words(weights, chosen)
        plan = record_plan(
            config,
            weights,
            max_rows,
            activations=activations,
            adapters=opened,
            n_words=n_words,
        )
        _warn_of_unused(plan, StoredWeights(file.tensors), config)
        for adapter in opened:
            adapter.check_used(plan)
        _check_positions(plan, context)
        pool = size_pool(
            plan,
            config,
            block_tokens,
            context=context,
            kv_bytes=kv_bytes,
            kv_type=kv_type,
            gives_back=gives_back,
            guesses=guesses,
        )
        is_raw_asked = repack is False
        shared = None
        if share_weights:
            _check_shared(executor, isa, {"mmap_experts": mmap_experts, "no-repack": is_raw_asked})
            shared, repack = _shared(plan, weights), True
        if likely_executor(executor, isa)[1] == "native":
            guessing = None
            if guesses and config.nextn:  # with logits of all tokens: at most that
                guessing = record_nextn(config, StoredWeights(file.tensors), max_rows)
            need = pool.need(
                plan,
                guessing,
                block_tokens,
                kv_type,
                guesses,
                n_threads=choose_threads(threads).count,
                mmap_experts=mmap_experts,
            )
            if shared and shared.is_there:
                need = need.beside(weight_bytes(plan))
            repack, why = choose_repack(need, memory(), repack, file_bytes=file.n_bytes)
            if why:
                _LOG.warning("%s", why)
        runner, reason = create_executor(
            executor,
            plan,
            weights,
            block_tokens=block_tokens,
            repack=repack,
            n_blocks=pool.n_blocks,
            n_window_blocks=pool.n_window_blocks,
            n_states=pool.n_states,
            n_guesses=guesses,
            mmap_experts=mmap_experts or None,
            shared=shared,
            n_threads=threads,
            isa=isa,
            kv_type=kv_type,
        )
        asked = {"mmap_experts": mmap_experts, "no-repack": is_raw_asked}
        if any(asked.values()) and not hasattr(runner, "late_bytes"):
            options = " and ".join(name for name, is_asked in asked.items() if is_asked)
            raise UnsupportedError(
                f"executor {runner.name} holds all weights: leave {options} out, or get the "
                "native executor (`martlet doctor` says what it lacks)"
            )
        for source in (file, *(adapter.file for adapter in opened)):
            source.drop_pages()  # packed by now; those of a table that is still read come back
        if shared:
            reason += "; weights shared with other processes"
        if not getattr(runner, "repack", True):
            reason += "; weights as they stand in the file, with no packed copy"
    except BaseException:
        for source in (file, *(adapter.file for adapter in opened)):
            source.close()
        raise
    _LOG.info("%s: executor %s", path, reason)
    model = Model(
        config,
        tokenizer,
        plan,
        runner,
        reason,
        pool.context,
        file,
        kv_type,
        opened,
        chosen,
        share_weights,
    )
    if trace:
        model.timeline = Timeline(trace, config.name)
        model.executor = model.timeline.traced(runner, plan)
    return model


def _check_shared(executor: str, isa: str | None, others: Mapping[str, bool]) -> None:
    """Raises UnsupportedError where weights cannot be shared between processes."""
    found = likely_executor(executor, isa)[1]
    if found != "native":
        raise UnsupportedError(
            f"executor {found} does not share weights: leave share_weights out, or get the native "
            "executor (`martlet doctor` says what it lacks)"
        )
    for name, is_asked in others.items():
        if is_asked:
            raise UnsupportedError(
                f"{name} leaves weights in the file, share_weights packs all of them: choose one"
            )


def _shared(plan: Plan, weights: WeightSource) -> SharedWeights:
    return SharedWeights(packed_key(plan, weights), weight_bytes(plan))


def _of_words(weights: WeightSource, words: Words | None) -> tuple[WeightSource, int]:
    """With rows of an output matrix for these tokens, and how many; 0: for all."""
    return (weights, 0) if words is None else (ChosenRows(weights, words), len(words))


@dataclass(frozen=True)
class PoolSize:
    context: int
    n_blocks: int
    n_window_blocks: int | None = None
    """Of layers with a window; None: as many as the others."""
    n_states: int | None = None
    """Sequences whose recurrent states have room; None: no layer is recurrent."""

    def need(
        self,
        plan: Plan,
        nextn: Plan | None,
        block_tokens: int,
        kv_type: KvType,
        guesses: int,
        *,
        n_threads: int,
        mmap_experts: bool = False,
    ) -> Need:
        """What a model with this pool takes; nextn: its own block that guesses, if that is used."""
        n_windowed = self.n_blocks if self.n_window_blocks is None else self.n_window_blocks
        n_tokens = self.n_blocks * block_tokens
        sizes = (n_tokens, n_windowed * block_tokens, self.n_states or 0, guesses)
        held = pool_bytes(plan, kv_type, *sizes)
        need = need_of(plan, held, n_tokens, n_threads, mmap_experts)
        if nextn is None:
            return need
        own = pool_bytes(nextn, kv_type, n_tokens, n_tokens, 0, 0)  # it has no window of its own
        return need + need_of(nextn, own, n_tokens, n_threads)


def pool_bytes(
    plan: Plan, kv_type: KvType, n_tokens: int, n_windowed: int, n_states: int, n_guesses: int
) -> int:
    """Keys and values of so many tokens, in layers with a window of n_windowed, and states."""
    full, windowed = plan.kv_group_bytes(kv_type)
    state_bytes = plan.state_bytes + n_guesses * plan.guess_bytes
    return n_tokens * full + n_windowed * windowed + n_states * state_bytes


def size_pool(
    plan: Plan,
    config: ModelConfig,
    block_tokens: int,
    *,
    context: int | None = None,
    kv_bytes: int | None = None,
    kv_type: KvType = KvType.F16,
    free_bytes: int | None = None,
    gives_back: bool = True,
    guesses: int = MOST_GUESSES,
) -> PoolSize:
    """Blocks of the KV pool. A context that was asked for must fit; the default one gives way."""
    for name, value in (("context", context), ("kv_bytes", kv_bytes)):
        if value is not None and value < 1:
            raise RequestError(f"{name} is {value}, expected at least 1", field=name)
    wanted = context or min(config.context_train, _DEFAULT_CONTEXT)
    window = plan.window if gives_back else 0
    state_bytes = plan.state_bytes + guesses * plan.guess_bytes
    full_bytes, window_bytes = (n * block_tokens for n in plan.kv_group_bytes(kv_type))
    blocks_per_context = -(-wanted // block_tokens)

    def n_parts(n_blocks: int) -> int:
        return parts_of_pool(n_blocks, blocks_per_context, window, block_tokens, plan.max_rows)

    def held_bytes(n_blocks: int) -> int:
        return n_blocks * full_bytes + n_parts(n_blocks) * window_bytes

    if kv_bytes is None:
        free_bytes = memory().available_bytes if free_bytes is None else free_bytes
        # Encoders keep nothing: what one step computes, and a block more for each of its texts.
        n_sequences = 2 if plan.sees_ahead else _DEFAULT_SEQUENCES
        wanted_bytes = held_bytes(n_sequences * blocks_per_context)
        wanted_bytes += _MOST_STATES * state_bytes
        kv_bytes = min(free_bytes // _KV_SHARE, wanted_bytes)
    n_states = None
    if plan.states:
        n_states = min(_MOST_STATES, kv_bytes // _STATE_SHARE // state_bytes)
        if not n_states:
            raise RequestError(
                f"the state of one sequence takes {state_bytes} bytes, and at most half of "
                f"the {kv_bytes} allowed for the KV pool is for states; set kv_bytes higher",
                field="kv_bytes",
            )
        kv_bytes -= n_states * state_bytes
    most = kv_bytes // max(full_bytes, 1)
    n_blocks = bisect_right(range(most + 1), kv_bytes, key=held_bytes) - 1
    if n_blocks < (blocks_per_context if context else 1):
        raise RequestError(
            f"a context of {wanted} tokens needs {held_bytes(blocks_per_context)} bytes of "
            f"KV pool, {kv_bytes} are allowed; ask for a shorter context or set kv_bytes",
            field="context",
        )
    n_window_blocks = n_parts(n_blocks) if window else None
    return PoolSize(min(wanted, n_blocks * block_tokens), n_blocks, n_window_blocks, n_states)


def _check_vocabulary(config: ModelConfig, tokenizer: Tokenizer) -> None:
    """Every token must have an embedding; rows beyond the vocabulary are padding."""
    if tokenizer.vocab_size > config.vocab_size:
        raise FileFormatError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, 'token_embd.weight' only "
            f"{config.vocab_size} rows; fetch the file again"
        )


def _check_positions(plan: Plan, context: int | None) -> None:
    most = plan.most_positions
    if most and context and context > most:
        raise RequestError(
            f"a context of {context} tokens is asked for, the model has learned {most} positions",
            field="context",
        )


def _warn_of_unused(plan: Plan, weights: WeightSource, config: ModelConfig) -> None:
    names = unused_tensors(plan, weights, config)
    if names:
        _LOG.warning("%d tensors of the file are not used: %s", len(names), ", ".join(names[:5]))
