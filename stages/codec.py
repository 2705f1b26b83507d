"""codec: a request body into token ids, block keys and everything needed to parse the answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache

import codec.codec
from codec.errors import CodecError, error_body
from codec.models import EncodedPrompt, StreamMeta
from codec.vocab import OutputVocab
from kv.block import chain_keys, root_of, salt
from pipeline.errors import HTTP_STATUS, ErrorCode, RequestError, TransientError
from pipeline.events import Beacon, RequestBody, Sampling
from pipeline.membership import Membership
from stages.parse import Parse

INLINE_BODY_BYTES = 8_192  # larger ones are encoded in a thread. Source: facts-codec 12 (no stall above 5 ms)
# Larger ones are encoded one after the other, on a thread of their own: 16 MiB take seconds of a core, and who sends
# many must not take every thread from the others. Source: ours; 1 MiB takes 0.15 s, without a place to cut 0.6 s
HUGE_BODY_BYTES = 1 << 20
UNKNOWN_CONTEXT_TOKENS = 1 << 20  # until an engine has said its own limit. Source: facts-model 1

EOS_IDS = (1,)  # Source: facts-model 1


@dataclass(frozen=True, slots=True)
class ChatEncoding:
    """A Chat Completions request, ready to dispatch. Implements pipeline.stage.Encoding."""

    model: str
    fingerprint: str
    sampling: Sampling
    seed: int | None
    num_prompt_tokens: int
    too_long: bool
    ids: bytes
    block_keys: bytes
    salt: bytes
    prompt: EncodedPrompt
    vocab: OutputVocab

    def open(self, rid: str, created: int, choice: int) -> Parse:
        """A fresh parser for one choice."""
        meta = StreamMeta(rid=rid, created=created, model=self.prompt.model, choice=choice)
        return Parse(self.prompt.parse, meta, self.vocab)


class Codec:
    """Request stage: RequestBody in, one ChatEncoding out."""

    def __init__(self, chat: codec.codec.Codec, membership: Membership, kv_secret: bytes) -> None:
        self._chat = chat
        self._membership = membership
        self._kv_secret = kv_secret
        self._huge = ThreadPoolExecutor(max_workers=1, thread_name_prefix="huge-body")

    async def handle(self, event: RequestBody) -> AsyncGenerator[ChatEncoding]:
        """Encode one body.

        Raises: RequestError for a fault of the body, TransientError while no engine has said what it serves.
        """
        if event.protocol != "chat_completions":
            raise RequestError(ErrorCode.INVALID_REQUEST, f"the protocol {event.protocol} is not served yet")
        engine = self._engine()
        context = engine.max_prompt_tokens if engine else UNKNOWN_CONTEXT_TOKENS
        if len(event.body) <= INLINE_BODY_BYTES:
            encoding = self._encode(event, engine, context)
        else:
            thread = self._huge if len(event.body) > HUGE_BODY_BYTES else None
            loop = asyncio.get_running_loop()
            encoding = await loop.run_in_executor(thread, self._encode, event, engine, context)
        if encoding is None:
            raise TransientError("no prefill engine has announced what it serves")
        yield encoding

    def _engine(self) -> Beacon | None:
        fresh = self._membership.fresh("prefill")
        return min(fresh, key=lambda beacon: beacon.worker) if fresh else None

    def _encode(self, event: RequestBody, engine: Beacon | None, context: int) -> ChatEncoding | None:
        try:
            prompt = self._chat.encode_chat(event.body, context)
        except CodecError as error:
            raise RequestError(ErrorCode(error.code), error.message, param=error.param) from error
        if engine is None:
            return None
        salted, root = _roots(event.tenant, prompt.salt_user, self._kv_secret, engine.fingerprint, engine.layout)
        keys = b"" if prompt.too_long else chain_keys(root, prompt.ids)
        wishes = prompt.sampling
        return ChatEncoding(
            model=prompt.model,
            fingerprint=engine.fingerprint,
            sampling=Sampling(
                max_tokens=wishes.max_tokens,
                temperature=wishes.temperature,
                top_p=wishes.top_p,
                top_k=wishes.top_k,
                num_choices=wishes.num_choices,
                eos_ids=EOS_IDS,
                ignore_eos=wishes.ignore_eos,
                top_logprobs=wishes.top_logprobs,
                grammar=wishes.grammar,
            ),
            seed=wishes.seed,
            num_prompt_tokens=prompt.num_prompt_tokens,
            too_long=prompt.too_long,
            ids=prompt.ids.astype("<u4", copy=False).tobytes(),
            block_keys=keys,
            salt=salted,
            prompt=prompt,
            vocab=self._chat.vocab,
        )

    def failure(self, protocol: str, code: ErrorCode, message: str, param: str | None = None) -> bytes:  # noqa: ARG002
        """The error body of the protocol. Every protocol that is served so far has OpenAI's envelope."""
        return error_body(code=code, message=message, status=HTTP_STATUS[code], param=param)


@lru_cache(maxsize=10_000)
def _roots(tenant: str, user: str, secret: bytes, fingerprint: str, layout: str) -> tuple[bytes, bytes]:
    """Salt of a tenant's user, and the root of its keys for one model and layout."""
    salted = salt(tenant, user, secret)
    return salted, root_of(fingerprint, bytes.fromhex(layout), salted)
