"""Constrained output: which tokens may follow, so that an answer has the form that its request asked for.

    text --compile--> CompiledConstraint --one each sequence--> ConstraintState --each step--> mask of tokens

A state is a function of the constraint and of the tokens since the answer's start, nothing else: rebuilt from them on
another machine it allows the same tokens. Masks say exactly which tokens keep the text the beginning of a right
one; control tokens never are, except EOS where the text is complete and DSML inside tool calls.

Letters in shapes: B = sequences of a batch, V = the model's vocabulary, W = 4,040 words of 32 tokens.
Source: facts-system R57 (what is constrained, 20 s, a bounded cache, a failure ends one request), facts-spikes 2
(llguidance and its traps); the state machine and the other limits are ours.
"""

from __future__ import annotations

import asyncio
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from time import monotonic

import numpy as np
import numpy.typing as npt
import torch
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from llguidance.numpy import fill_next_token_bitmask
from torch import Tensor

from codec.errors import CodecError
from codec.grammar import Constraint, Kind, constraint_of, grammar_of
from codec.vocab import BOS_ID, DSML_ID, EOS_ID, THINK_END_ID, VOCAB_SIZE, OutputVocab
from pipeline.events import FinishReason
from stages.constraints import ConstraintError, Follow
from stages.engine.interface import OutputConstraint

MASK_WORDS = (VOCAB_SIZE + 31) // 32  # W
COMPILE_LIMIT_S = 20.0  # Source: facts-system R57
MAX_CACHED = 256  # compiled constraints and failures; most have 40 KB, and what their lexers learn is limited below
MAX_CACHED_CHARS = 2_097_152  # of their texts; measured: up to 300 bytes a character, so 600 MB at worst
RENEW_TOKENS = 256  # between two renewals of one sequence: they cost as much as compiling, in the engine's thread
NUM_THREADS = 2  # compiling releases the GIL; a second thread lets small grammars pass a large one

Words = npt.NDArray[np.int32]

_DEAD_END = "no token of the vocabulary can follow"
_SHARED_LIMIT = "lexer error"  # how the library's messages begin that what its copies share may cause

# [256, 8]: what eight logits may be at most, by their byte of a mask. A minimum has no branches: 35 us a row for any
# mask, where filling by a mask of booleans takes 110, and 480 for one without long runs.
_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
_CEILINGS = np.where(_BITS, np.float32(np.inf), np.float32(-np.inf))


def _limits() -> LLParserLimits:
    """What one grammar may cost. Speeds are the library's own figures."""
    return LLParserLimits(
        initial_lexer_fuel=1_000_000,  # 20 ms of reading regexes
        step_lexer_fuel=200_000,  # 14 ms a mask
        step_max_items=50_000,  # 2.5 ms a mask
        max_items_in_row=2_000,
        max_lexer_states=20_000,  # 7 MB of the kind that costs most; an ordinary schema needs some hundreds
        max_grammar_size=500_000,
        verbose_errors=False,  # the long form repeats the request's schema and output into logs
    )


class Allowed(StrEnum):
    """What a mask says about the next token."""

    ANY = "any"  # not constrained yet
    SOME = "some"
    END = "end"  # EOS alone: the text is complete and nothing can follow
    FAULT = "fault"  # no token at all: the sequence must end, see `ConstraintState.fault`


@dataclass(slots=True, eq=False)
class CompiledConstraint:
    """A constraint, ready to be followed by any number of sequences in any thread.

    `start`: never advanced, only copied. Its copies share what the library learns about the grammar, which is quick,
    and the limit to that, so that a long or hostile answer may use up another's. permitted: [W] bits of the tokens
    that may be allowed at all.
    """

    make: Callable[[], LLMatcher]
    start: LLMatcher
    permitted: Words
    after_think: bool

    def renewed(self) -> LLMatcher:
        """A matcher that shares nothing, and another for the sequences to come. Blocks twice as long as compiling."""
        self.start = self.make()
        return self.make()


class _ByteTokens:
    """Our vocabulary as the library wants to see it. Grammars force no tokens, so it never needs real BPE."""

    eos_token_id = EOS_ID
    bos_token_id = BOS_ID

    def __init__(self, vocab: OutputVocab) -> None:
        self.tokens = [vocab.token_bytes(token) for token in range(VOCAB_SIZE)]
        self.special_token_ids = sorted(vocab.added_ids)
        self._by_byte = {piece[0]: token for token, piece in enumerate(self.tokens) if len(piece) == 1}

    def __call__(self, text: bytes) -> list[int]:
        return [self._by_byte[byte] for byte in text]


def load_tokenizer(vocab: OutputVocab) -> LLTokenizer:
    """The vocabulary's bytes as the library's prefix tree, with every added token as a control token.

    Blocks 0.6 s and keeps 40-55 MB, once a process. May run in a thread, but the library holds the GIL for all of the
    0.5 s that it takes: load before serving.
    """
    return LLTokenizer(TokenizerWrapper(_ByteTokens(vocab)), n_vocab=VOCAB_SIZE, eos_token=EOS_ID)


def permitted_words(vocab: OutputVocab, vocab_size: int, *, calls_tools: bool) -> Words:
    """Bits [W] of the tokens below `vocab_size` that are text, of EOS, and of DSML where tools are called."""
    bits = np.zeros(MASK_WORDS * 32, np.uint8)
    bits[:vocab_size] = 1
    bits[sorted(vocab.added_ids - {EOS_ID, DSML_ID})] = 0
    bits[DSML_ID] &= calls_tools
    return np.packbits(bits, bitorder="little").view(np.int32)


def check_grammar(text: str) -> None:
    """Raise ConstraintError for a constraint that no engine can compile: needs no vocabulary, blocks milliseconds.

    What is found here is the sender's fault and can be told before any engine works.
    """
    if problem := LLMatcher.validate_grammar(_grammar(text)[1], limits=_limits()):
        raise ConstraintError(FinishReason.GRAMMAR_ERROR, _first_line(problem))


def _grammar(text: str) -> tuple[Constraint, str]:
    try:
        constraint = constraint_of(text)
        return constraint, grammar_of(constraint)
    except CodecError as error:
        raise ConstraintError(FinishReason.GRAMMAR_ERROR, error.message) from error


def _first_line(problem: str) -> str:
    """The library's message without its drawing of the grammar."""
    return (problem.splitlines() or ["unknown"])[0].strip()[:300]


class GrammarBuilder:
    """Compiles constraints for one vocabulary. Safe for several threads."""

    def __init__(self, vocab: OutputVocab, vocab_size: int = VOCAB_SIZE, limits: LLParserLimits | None = None) -> None:
        """See `load_tokenizer` for what it blocks. Raises ValueError for a model with fewer tokens than EOS needs."""
        if vocab_size <= EOS_ID:
            raise ValueError(f"a vocabulary of {vocab_size} tokens has no EOS")
        self._tokenizer = load_tokenizer(vocab)
        self._limits = limits or _limits()
        size = min(vocab_size, VOCAB_SIZE)
        self._permitted = {calls: permitted_words(vocab, size, calls_tools=calls) for calls in (False, True)}

    def __call__(self, text: str) -> CompiledConstraint:
        """Compile, first mask included. Raises ConstraintError.

        Blocks 1-3 ms for what is usual and up to 2 s for the largest texts, most of it without the GIL.
        """
        constraint, grammar = _grammar(text)

        def make() -> LLMatcher:
            return LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits)

        permitted = self._permitted[constraint.kind is Kind.TOOL_CALLS]
        start = make()
        if problem := _problem_at_once(start, permitted):
            raise ConstraintError(FinishReason.GRAMMAR_ERROR, _first_line(problem))
        return CompiledConstraint(make, start, permitted, constraint.after_think)


def _problem_at_once(start: LLMatcher, permitted: Words) -> str:
    """Why no sequence can even begin; empty when one can."""
    trial, row = start.deep_copy(), np.zeros(MASK_WORDS, np.int32)
    if not trial.is_error():
        fill_next_token_bitmask(trial, row.reshape(1, -1))
    return trial.get_error() or ("" if (row & permitted).any() else _DEAD_END)


class ConstraintState:
    """Where one sequence is in its constraint. Belongs to one thread at a time; made in 5 us to 2 ms.

    `fault`: empty, or why the sequence must end with `grammar_error`; it never becomes empty again.
    """

    __slots__ = ("_compiled", "_matcher", "_renewed_at", "_thinking", "_tokens", "fault")

    def __init__(self, compiled: CompiledConstraint) -> None:
        self._compiled = compiled
        self._matcher = compiled.start.deep_copy()
        self._thinking = compiled.after_think
        self._tokens = array("I")  # taken since the constraint holds
        self._renewed_at = -RENEW_TOKENS
        self.fault = ""

    @classmethod
    def replay(cls, compiled: CompiledConstraint, tokens: Sequence[int]) -> ConstraintState:
        """The state after these tokens of the answer, equal to one that lived through them. 2 us a token."""
        state = cls(compiled)
        for token in tokens:
            state.advance(token)
        return state

    @property
    def is_active(self) -> bool:
        """Whether the next token is constrained: not before `</think>` where the answer starts in reasoning."""
        return not self._thinking

    def allowed_mask(self, row: Words) -> Allowed:
        """Fill `row` [W], C-contiguous: bit t % 32 of word t // 32 says whether token t may be next.

        Every bit is set while nothing is constrained. On a fault only EOS is, and the token that is sampled from it
        must be dropped: the text before it is not complete.
        """
        if self._thinking:
            row.fill(-1)
            return Allowed.ANY
        if not self.fault:
            self._fill(row)
            np.bitwise_and(row, self._compiled.permitted, out=row)
            if not row.any():
                self._fail(_DEAD_END)
        if self.fault:
            row.fill(0)
            row[0] = 1 << EOS_ID
            return Allowed.FAULT
        return Allowed.END if row[0] == 1 << EOS_ID and not row[1:].any() else Allowed.SOME

    def advance(self, token: int) -> None:
        """Take the sampled token. Never raises: a token that was not allowed sets `fault`."""
        if self._thinking:
            self._thinking = token != THINK_END_ID
        elif self.fault:
            return
        elif not self._permits(token):
            self._fail(f"token {token} is not allowed here")
        elif self._matcher.consume_token(token) or (self._renew() and self._matcher.consume_token(token)):
            self._tokens.append(token)
        else:
            self._fail(self._matcher.get_error())

    def _fill(self, row: Words) -> None:
        fill_next_token_bitmask(self._matcher, row.reshape(1, -1))
        if self._matcher.is_error() and self._renew():
            fill_next_token_bitmask(self._matcher, row.reshape(1, -1))
        if self._matcher.is_error():  # the library then allows EOS, as if the text were complete
            self._fail(self._matcher.get_error())

    def _renew(self) -> bool:
        """Take the same tokens with a matcher that shares nothing, if a shared limit may be why it failed.

        So no other sequence has a say in whether this one can go on.
        """
        if not self._matcher.get_error().startswith(_SHARED_LIMIT):
            return False
        if len(self._tokens) - self._renewed_at < RENEW_TOKENS:
            return False
        self._renewed_at = len(self._tokens)
        self._matcher = self._compiled.renewed()
        return self._matcher.consume_tokens(self._tokens.tolist())

    def _permits(self, token: int) -> bool:
        return 0 <= token < VOCAB_SIZE and bool(self._compiled.permitted[token >> 5] >> (token & 31) & 1)

    def _fail(self, problem: str) -> None:
        self.fault = _first_line(problem)


@torch.inference_mode()
def mask_logits(logits: Tensor, states: Sequence[OutputConstraint | None]) -> list[str]:
    """Set the logits [B, V], fp32, of tokens that may not be next to -inf, in place; row b follows `states[b]`.

    Rows without a constraint, or before theirs begins, are not touched; each other costs about 0.1 ms of one core.
    A row depends on nothing but itself and its state. Returns what each row's mask says, [B]; a FAULT row leaves EOS.

    Raises:
        ValueError: not one state a row.
    """
    if len(logits) != len(states):
        raise ValueError(f"{len(logits)} rows of logits, {len(states)} states")
    found, row = [str(Allowed.ANY)] * len(states), np.empty(MASK_WORDS, np.int32)
    for index, state in enumerate(states):
        if state is None or not state.is_active:
            continue
        found[index] = state.allowed_mask(row)
        _forbid(logits[index], row)
    return found


def _forbid(logits: Tensor, row: Words) -> None:
    ceilings = torch.from_numpy(_CEILINGS.take(row.view(np.uint8), axis=0).reshape(-1)[: len(logits)])
    within = logits[: len(ceilings)]
    torch.minimum(within, ceilings.to(logits.device), out=within)
    logits[len(ceilings) :] = -torch.inf  # a padded vocabulary's tail


Build = Callable[[str], CompiledConstraint]


@dataclass(slots=True, eq=False)
class _Job:
    """One text being compiled, or what came of it. `started_s`: on the monotonic clock, 0 while it waits its turn."""

    future: Future[CompiledConstraint | ConstraintError]
    started_s: float = 0.0
    too_slow: bool = False


class ConstraintCompiler:
    """Compiles constraints in threads of its own and remembers the last ones, failures too. Safe for any thread.

    Each text is compiled once, however many requests bring it at a time. A compilation that runs longer than `limit_s`
    fails its text for as long as it is remembered; its thread is free again when the library's own limits stop it. A
    request waits at most `limit_s` for a thread and as long again for the compilation.
    """

    def __init__(
        self,
        load: Callable[[], Build],
        *,
        limit_s: float = COMPILE_LIMIT_S,
        max_cached: int = MAX_CACHED,
        max_cached_chars: int = MAX_CACHED_CHARS,
        num_threads: int = NUM_THREADS,
    ) -> None:
        """Take `load`, which makes a `GrammarBuilder` (or a test's own). It runs once, in a thread, when needed."""
        self._load = load
        self._limit_s = limit_s
        self._max_cached = max_cached
        self._max_cached_chars = max_cached_chars
        self._threads = ThreadPoolExecutor(num_threads, "constraint")
        self._loading = threading.Lock()
        self._build: Build | None = None
        self._lock = threading.Lock()
        self._jobs: OrderedDict[str, _Job] = OrderedDict()  # by text, last used last
        self._num_chars = 0

    def __len__(self) -> int:
        """Texts remembered or being compiled."""
        return len(self._jobs)

    def preload(self) -> Future[Build]:
        """Load the vocabulary now, in a thread: then no constrained request waits for it."""
        return self._threads.submit(self._loaded)

    async def compiled(self, text: str) -> CompiledConstraint:
        """The constraint that `text` says, compiled off the event loop. Raises ConstraintError."""
        job, arrived_s = self._job(text), monotonic()
        while not job.future.done() and (left_s := self._left_s(job, arrived_s)) > 0:
            await asyncio.wait({asyncio.wrap_future(job.future)}, timeout=left_s)  # cancels nothing
        return self._outcome(text, job)

    def compile(self, text: str) -> CompiledConstraint:
        """The same, blocking its caller. Raises ConstraintError."""
        job, arrived_s = self._job(text), monotonic()
        while not job.future.done() and (left_s := self._left_s(job, arrived_s)) > 0:
            wait((job.future,), timeout=left_s)
        return self._outcome(text, job)

    def close(self) -> None:
        """Let the threads go; a compilation that runs is not waited for."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _loaded(self) -> Build:
        with self._loading:
            if self._build is None:
                self._build = self._load()
            return self._build

    def _job(self, text: str) -> _Job:
        with self._lock:
            if (known := self._jobs.get(text)) is not None:
                self._jobs.move_to_end(text)
                return known
            job = _Job(Future())
            job.future = self._threads.submit(self._run, text, job)
            self._jobs[text] = job
            self._num_chars += len(text)
            while len(self._jobs) > self._max_cached or self._num_chars > self._max_cached_chars:
                oldest, _ = self._jobs.popitem(last=False)  # whoever waits for it holds it
                self._num_chars -= len(oldest)
            return job

    def _run(self, text: str, job: _Job) -> CompiledConstraint | ConstraintError:
        build = self._loaded()
        job.started_s = monotonic()
        try:
            return build(text)
        except ConstraintError as error:  # remembered: raised anew for everyone who asks
            return error

    def _left_s(self, job: _Job, arrived_s: float) -> float:
        return (job.started_s or arrived_s) + self._limit_s - monotonic()

    def _outcome(self, text: str, job: _Job) -> CompiledConstraint:
        if not job.future.done() and not job.started_s:
            raise ConstraintError(FinishReason.GRAMMAR_TIMEOUT, f"no thread was free for {self._limit_s:g} s")
        if job.too_slow or not job.future.done():
            job.too_slow = True
            raise ConstraintError(FinishReason.GRAMMAR_TIMEOUT, f"compiling took longer than {self._limit_s:g} s")
        try:
            outcome = job.future.result()
        except BaseException:  # a bug: remembered by nobody
            self._forget(text, job)
            raise
        if isinstance(outcome, ConstraintError):
            raise ConstraintError(outcome.finish, outcome.reason)
        return outcome

    def _forget(self, text: str, job: _Job) -> None:
        with self._lock:
            if self._jobs.get(text) is job:
                del self._jobs[text]
                self._num_chars -= len(text)


class EngineConstraints:
    """Implements stages.constraints.Constraints over one compiler."""

    def __init__(self, compiler: ConstraintCompiler) -> None:
        self._compiler = compiler

    async def begin(self, text: str) -> OutputConstraint:
        """See Constraints."""
        return ConstraintState(await self._compiler.compiled(text))

    async def follow(self, text: str) -> Follow:
        """See Constraints."""
        return partial(ConstraintState.replay, await self._compiler.compiled(text))
