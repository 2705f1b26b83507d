"""The codec's front door: a request body in, token ids and everything that the stages after it need out."""

from __future__ import annotations

from collections.abc import Mapping

from codec.errors import CodecError, not_served
from codec.models import EncodedPrompt, ParseSpec, SamplingSpec
from codec.recipe import ChatRecipe, resolve_max_tokens
from codec.request import answer_constraint, check_stops, read_chat, refuse_unserved
from codec.segments import SegmentCache
from codec.tokenizer import PromptTokenizer
from codec.vocab import OutputVocab, load_vocabulary

# The names under which the official service and its weights know the model. Source: facts-codec (object flow).
OFFICIAL_NAMES: dict[str, str] = dict.fromkeys(
    ("DeepSeek-V4.1-Flash", "deepseek-v4.1-flash", "deepseek-v4-flash", "deepseek-flash"), "DeepSeek-V4.1-Flash"
)

# ~16 M ids: a few hundred long agent histories, and small beside one engine
CACHE_BYTES = 64 * 1024 * 1024


class Codec:
    """Chat Completions bodies -> token ids. Safe to share between threads."""

    def __init__(
        self, chat: ChatRecipe, tokenizer: PromptTokenizer, vocab: OutputVocab, models: frozenset[str]
    ) -> None:
        self._chat = chat
        self.tokenizer = tokenizer
        self.vocab = vocab  # for output streams
        self.models = models  # names that a request may use

    @classmethod
    def load(cls, models: Mapping[str, str], cache_bytes: int = CACHE_BYTES) -> Codec:
        """A codec for `models` (request's name -> model version) and the official names.

        Blocks ~0.3 s (use a thread), and for 0.2 s of it the tokenizer library keeps the GIL: load before serving.
        Raises VocabularyError when the tokenizer's data is not installed, ValueError for an unknown model version.
        """
        names = OFFICIAL_NAMES | dict(models)
        chat = ChatRecipe(names)
        vocabulary = load_vocabulary()
        tokenizer = PromptTokenizer(vocabulary, SegmentCache(cache_bytes))
        vocab = OutputVocab(vocabulary)
        vocab.learn_all()
        return cls(chat, tokenizer, vocab, frozenset(names))

    def encode_chat(self, body: bytes, max_context_tokens: int) -> EncodedPrompt:
        """The prompt of a Chat Completions body.

        CPU time: 16 us for a short chat, 0.8 ms for an agent turn with tools and 4k cached tokens, 2 ms for a plain
        history of 100k cached tokens; ~1.1 us for each token that is not in the cache, most of it without the GIL.

        A prompt longer than `max_context_tokens` comes back with `too_long` set and without `max_tokens`.
        Raises CodecError: 404 for a model that is not served, 400 for every other fault of the body.
        """
        fields = read_chat(body)
        if fields.model not in self.models:
            raise CodecError(
                status=404,
                code="model_not_found",
                message=f"model {fields.model!r} is not served here; served: {', '.join(sorted(self.models))}",
                param="model",
            )
        chat = self._chat.render(fields)
        refuse_unserved(fields)
        if chat.has_images:
            raise not_served("messages", "image input")
        stop = check_stops(chat.stop)
        ids = self.tokenizer.encode(chat.prompt, chat.control_ranges)
        too_long = len(ids) > max_context_tokens
        return EncodedPrompt(
            ids=ids,
            model=fields.model,
            sampling=SamplingSpec(
                max_tokens=0 if too_long else resolve_max_tokens(chat, len(ids), max_context_tokens),
                temperature=chat.temperature,
                top_p=chat.top_p,
                seed=chat.seed,
                num_choices=fields.num_choices,
                grammar=answer_constraint(fields, in_reasoning=chat.start.in_reasoning),
                ignore_eos=fields.ignore_eos,
            ),
            parse=ParseSpec(
                stream=chat.stream,
                start=chat.start,
                include_usage=fields.include_usage,
                stop=stop,
                has_tools=fields.has_tools,
            ),
            salt_user=fields.salt_user,
            max_context_tokens=max_context_tokens,
            too_long=too_long,
        )
