"""A request: what was asked (`SamplingParams`), where it stands (`Request`), what came out.

One idea drives the scheduler, and it lives here: a request has `num_tokens` and
`num_computed_tokens`, and steps are handed out until the second catches up with the first.

```
 |<------------ prompt ------------>|<--- output --->|
 |################|.................|................|
 0       num_computed_tokens                     num_tokens
```

Mirrors vllm/sampling_params.py, vllm/v1/request.py and vllm/outputs.py; left out: multimodal
inputs, LoRA, structured output. Chapters 2 and 11 read this file.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any, NamedTuple

from minivllm.base import UserError, did_you_mean

MAX_N = 16_384  # continuations of one prompt; each is a request of its own


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return _is_int(value) or (isinstance(value, float) and math.isfinite(value))


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to choose tokens and when to stop. Names and defaults are vLLM's, except `max_tokens`.

    Order of the steps on a row of logits: allowed tokens, bias, bad words and `min_tokens` masks;
    penalties; temperature; `min_p`, `top_k`, `top_p`; draw. Log-probabilities are those of the
    raw model distribution, before any of these.

    Raises:
        UserError: a value is of the wrong type or out of range; the sentence names the field.
    """

    n: int = 1  # continuations of one prompt
    temperature: float = 1.0  # 0 (or below 1e-5) = greedy, whatever top_p says
    top_p: float = 1.0
    top_k: int = 0  # 0 or -1 = off
    min_p: float = 0.0
    presence_penalty: float = 0.0  # subtracted once from tokens already generated
    frequency_penalty: float = 0.0  # subtracted per occurrence in the output
    repetition_penalty: float = 1.0  # divides (multiplies if negative) tokens of prompt and output
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    seed: int | None = None  # draws depend on (seed, position) only, never on the batch
    max_tokens: int | None = None  # None = as far as the context reaches
    min_tokens: int = 0  # no end of sequence and no stop before this many
    ignore_eos: bool = False
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    logprobs: int | None = None  # that many alternatives a token; the sampled one always comes
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True

    def __new__(cls, **values: Any) -> "SamplingParams":
        """Refuse an unknown name before the constructor does, and name the nearest."""
        known = [f.name for f in fields(cls)]
        for name in values:
            if name not in known:
                raise UserError(f"unknown sampling parameter {name!r}{did_you_mean(name, known)}")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for name, low, high in (
            ("temperature", 0.0, math.inf),
            ("top_p", 0.0, 1.0),
            ("min_p", 0.0, 1.0),
            ("presence_penalty", -2.0, 2.0),
            ("frequency_penalty", -2.0, 2.0),
            ("repetition_penalty", 0.0, math.inf),
        ):
            value = getattr(self, name)
            if not _is_number(value) or not low <= value <= high:
                raise UserError(f"{name} must be a number in [{low:g}, {high:g}], not {value!r}")
        if self.top_p == 0:
            raise UserError("top_p must be above 0: a value near 0 keeps the best token only")
        if self.repetition_penalty == 0:
            raise UserError("repetition_penalty must be above 0; 1 switches it off")
        for name, low in (("n", 1), ("min_tokens", 0), ("top_k", -1)):
            value = getattr(self, name)
            if not _is_int(value) or value < low:
                raise UserError(f"{name} must be an integer of at least {low}, not {value!r}")
        if self.n > MAX_N:
            raise UserError(f"n must be at most {MAX_N:,}, not {self.n:,}")
        for name, low in (
            ("max_tokens", 1),
            ("logprobs", 0),
            ("prompt_logprobs", 0),
            ("seed", -(2**63)),
        ):
            value = getattr(self, name)
            if value is not None and (not _is_int(value) or value < low):
                raise UserError(f"{name} must be an integer of at least {low}, not {value!r}")
        if self.seed is not None and self.seed >= 2**64:
            raise UserError(f"seed must fit 64 bits, not {self.seed!r}")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise UserError(
                f"min_tokens {self.min_tokens} exceeds max_tokens {self.max_tokens}: lower it"
            )
        if self.temperature < 1e-5 and self.n > 1:
            raise UserError(
                "n above 1 with temperature 0 would give the same text n times: use n=1"
            )
        self._check_tokens_and_strings()

    def _check_tokens_and_strings(self) -> None:
        stop = [self.stop] if isinstance(self.stop, str) else self.stop
        for name, values in (("stop", stop), ("bad_words", self.bad_words)):
            if values is None:
                continue
            if not isinstance(values, (list, tuple)) or not all(isinstance(v, str) for v in values):
                raise UserError(f"{name} must be a list of strings, not {values!r}")
            if "" in values:
                raise UserError(f"{name} holds an empty string: leave it out")
        for name in ("stop_token_ids", "allowed_token_ids"):
            ids = getattr(self, name)
            if ids is None:
                continue
            if not isinstance(ids, (list, tuple)) or not all(_is_int(i) and i >= 0 for i in ids):
                raise UserError(f"{name} must be a list of token ids (integers >= 0), not {ids!r}")
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise UserError("allowed_token_ids is empty: then no token could ever be chosen")
        if self.logit_bias is not None:
            if not isinstance(self.logit_bias, dict):
                raise UserError(
                    f"logit_bias must map token ids to numbers, not {self.logit_bias!r}"
                )
            for token_id, bias in self.logit_bias.items():
                if not _is_int(token_id) or token_id < 0:
                    raise UserError(f"logit_bias key {token_id!r} is not a token id (integer >= 0)")
                if not _is_number(bias) or not -100 <= bias <= 100:
                    raise UserError(
                        f"logit_bias of token {token_id} must be in [-100, 100], not {bias!r}"
                    )

    @property
    def greedy(self) -> bool:
        """Temperatures this low only pick the best token; dividing by them could overflow."""
        return self.temperature < 1e-5

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class FinishReason(StrEnum):
    """Why a request ended; the values are those of the OpenAI API, plus vLLM's two."""

    STOP = "stop"  # end of sequence, a stop token or a stop string
    LENGTH = "length"  # max_tokens, the context, or the whole KV cache is full
    ABORT = "abort"
    ERROR = "error"


class Logprob(NamedTuple):
    """Log-probability of one token under the raw model distribution."""

    logprob: float
    rank: int  # 1 = the most likely token
    decoded_token: str | None = None


TokenLogprobs = dict[int, Logprob]


class Request:
    """A request inside the engine: token ids and counters, no text and no tensors.

    The scheduler alone changes it. `sort_key` is (priority, arrival number): smaller goes first.
    """

    __slots__ = (
        "request_id", "prompt_token_ids", "params", "priority", "arrival", "sort_key", "salt",
        "seed",
        "token_ids", "num_prompt_tokens", "num_computed_tokens", "num_pending",
        "num_cached_tokens", "num_preemptions", "max_total_tokens", "stop_token_ids",
        "bad_words_ids", "watched", "row", "finish_reason", "stop_reason",
    )  # fmt: skip

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        arrival: int = 0,
        priority: int = 0,
        seed: int = 0,
        eos_token_ids: Sequence[int] = (),
        max_total_tokens: int = 1 << 30,
        bad_words_ids: tuple[tuple[int, ...], ...] = (),
        salt: str | None = None,
    ) -> None:
        self.request_id = request_id
        self.prompt_token_ids = tuple(prompt_token_ids)
        self.params = params
        self.priority, self.arrival, self.sort_key = priority, arrival, (priority, arrival)
        self.salt = salt  # requests share cached blocks only with the same salt
        self.seed = seed
        self.num_prompt_tokens = len(self.prompt_token_ids)
        self.token_ids = list(self.prompt_token_ids)  # prompt, then output
        self.num_computed_tokens = 0  # tokens whose K and V are (or are being) written
        self.num_pending = 0  # tokens being sampled whose ids have not come back yet
        self.num_cached_tokens = -1  # prompt tokens served from cached blocks; -1 = never admitted
        self.num_preemptions = 0
        # The request ends at this many tokens, prompt included.
        if params.max_tokens is not None:
            max_total_tokens = min(max_total_tokens, self.num_prompt_tokens + params.max_tokens)
        self.max_total_tokens = max_total_tokens
        # Ids that end it. They count as output tokens but never show in the text.
        self.stop_token_ids = frozenset(params.stop_token_ids or ()) | (
            frozenset() if params.ignore_eos else frozenset(eos_token_ids)
        )
        self.bad_words_ids = bad_words_ids  # params.bad_words as token ids
        self.watched = True  # somebody looks at its tokens one by one
        self.row = -1  # its row in the runner; -1 = none
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None  # the stop token or string that ended it

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens, those being sampled included."""
        return len(self.token_ids) + self.num_pending

    @property
    def output_token_ids(self) -> list[int]:
        """The tokens generated so far."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def num_output_tokens(self) -> int:
        """How many tokens were generated so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    def __repr__(self) -> str:
        tokens = f"{self.num_prompt_tokens}+{self.num_output_tokens}"
        return f"Request({self.request_id!r}, tokens={tokens}, computed={self.num_computed_tokens})"


@dataclass
class CompletionOutput:
    """One continuation of a prompt. vLLM's shape."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    delta: str = ""  # the text that the last step added

    @property
    def finished(self) -> bool:
        """Whether this continuation has ended."""
        return self.finish_reason is not None


@dataclass
class RequestOutput:
    """What a prompt has led to so far. vLLM's shape, with the times a user asks for."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    num_cached_tokens: int = 0
    finished: bool = False
    time_to_first_token: float | None = None  # seconds since the request was added
    elapsed: float | None = None  # seconds from adding to the end
