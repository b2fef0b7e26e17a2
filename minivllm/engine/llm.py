"""`LLM`: the engine in three lines, for scripts and notebooks.

    with LLM("smollm2") as llm:
        for output in llm.generate(["The sea is", "2 + 3 ="], SamplingParams(temperature=0)):
            print(output.outputs[0].text)

Names and result shapes are those of vllm/entrypoints/llm.py. Chapter 0 reads this file.
"""

import math
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any, cast

from tqdm.auto import tqdm

from minivllm.base import EngineDeadError, UserError
from minivllm.cache.manager import KVCacheManager
from minivllm.cache.pool import BlockPool
from minivllm.config import EngineConfig
from minivllm.engine.engine import Engine, EngineLimits, EngineStepError, StepReport, snapshot
from minivllm.layers.attention import AttentionOp
from minivllm.request import RequestOutput, SamplingParams
from minivllm.runner.loader import load
from minivllm.runner.sampler import Sampler
from minivllm.sched.scheduler import Scheduler
from minivllm.trace import EventSink

DEFAULT_MODEL = "smollm2"
Prompt = str | Sequence[int] | Mapping[str, Any]  # text, token ids, or {"prompt_token_ids": …}
Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Score:
    """How likely the model finds a text. Natural logarithms."""

    token_ids: list[int]  # the tokens that were scored
    logprobs: list[float]  # one each, given all tokens before it

    @property
    def log_likelihood(self) -> float:
        """Log-probability of the whole."""
        return math.fsum(self.logprobs)

    @property
    def perplexity(self) -> float:
        """exp of the mean negative log-probability of a token."""
        return math.exp(-self.log_likelihood / len(self.logprobs))


class LLM:
    """A model, its engine and nothing else; single-threaded, in this process.

    Args:
        model: "smollm2" (fetched when missing), a folder, a .gguf file or a hub name.
        scheduler: a scheduler class of your own, called like `Scheduler`.
        block_pool: a block pool class of your own, called like `BlockPool`.
        attention: an attention op of your own, called like `kernels.ops.attention`.
        sampler: a sampler class of your own, called like `Sampler`.
        recorder: takes the engine's events, e.g. `minivllm.trace.Recorder()`.
        engine_args: vLLM's names, as in `EngineConfig`: `max_model_len`, `block_size`, `dtype`, …

    Raises:
        UserError: an argument is unknown or wrong, or the model cannot be used; one sentence.
    """

    def __init__(
        self,
        model: str = DEFAULT_MODEL,
        *,
        scheduler: Callable[..., Scheduler] = Scheduler,
        block_pool: Callable[..., BlockPool] = BlockPool,
        attention: AttentionOp | None = None,
        sampler: Callable[..., Sampler] | None = None,
        recorder: EventSink | None = None,
        **engine_args: Any,
    ) -> None:
        self._engine: Engine | None = None
        plug_ins = {"scheduler": scheduler, "block_pool": block_pool, "attention": attention,
                    "sampler": sampler}  # fmt: skip
        for name, plug_in in plug_ins.items():
            if plug_in is not None and not callable(plug_in):
                raise UserError(f"{name} must be a class or function of your own, not {plug_in!r}")
        config = EngineConfig.from_args(model, **engine_args)
        loaded = load(config, attention=attention, sampler=sampler)
        self.config, self.model_config = loaded.config, loaded.model
        self.memory, self.tokenizer = loaded.memory, loaded.tokenizer
        cache = self.config.cache
        pool = block_pool(self.memory.num_blocks, recorder)
        kv = KVCacheManager(pool, cache.block_size, cache.enable_prefix_caching)
        assert self.config.max_model_len is not None
        self._engine = Engine(
            scheduler(self.config.scheduler, kv, recorder),
            loaded.runner,
            self.tokenizer,
            EngineLimits(
                vocab_size=min(self.model_config.vocab_size, self.tokenizer.vocab_size),
                max_model_len=self.config.max_model_len,
                max_logprobs=self.config.max_logprobs,
                eos_token_ids=tuple(
                    sorted({*self.model_config.eos_token_ids, *self.tokenizer.eos_token_ids})
                ),
            ),
            recorder=recorder,
            seed=self.config.seed,
            paranoid=self.config.paranoid,
        )

    @property
    def engine(self) -> Engine:
        """The engine underneath.

        Raises:
            EngineDeadError: after `close()`.
        """
        if self._engine is None:
            raise EngineDeadError("this LLM is closed: make a new one")
        return self._engine

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts, all at once; results in the order of the prompts.

        Without `max_tokens` a text goes on until the model ends it or its context is full.

        Args:
            prompts: one or many; each a text, a list of token ids, `{"prompt": …}` or
                `{"prompt_token_ids": …, "cache_salt": …}`.
            sampling_params: one for all, or one each.
            use_tqdm: show a progress bar.
            priority: one number a prompt, smaller goes first; needs scheduling_policy="priority".

        Raises:
            UserError: a prompt or parameter is wrong; nothing was run.
            EngineStepError: a step failed; the engine is clean and usable.
        """
        many = _as_prompts(prompts)
        default = SamplingParams() if sampling_params is None else sampling_params
        params = _one_each("sampling_params", default, len(many))
        priorities = _one_each("priority", priority if priority is not None else 0, len(many))
        outputs: list[RequestOutput] = []
        with self._own_requests(outputs):
            for prompt, param, prio in zip(many, params, priorities, strict=True):
                outputs.append(self._add(prompt, param, prio, stream=False))
            with tqdm(total=len(many), disable=not use_tqdm, desc="Processed prompts") as bar:
                while any(not output.finished for output in outputs):
                    self._step_or_raise()
                    bar.update(sum(output.finished for output in outputs) - bar.n)
        return outputs

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        **template_args: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation or many: the chat template, then `generate`.

        Args:
            messages: `[{"role": "user", "content": "Hi"}]`, or a list of such lists.
            sampling_params: one for all, or one each.
            use_tqdm: show a progress bar.
            add_generation_prompt: end the prompt where the assistant begins.
            template_args: passed to the template, e.g. `tools=…`.

        Raises:
            UserError: as `generate`, or the model has no chat template.
        """
        if isinstance(messages, (str, Mapping)) or not isinstance(messages, Sequence):
            raise UserError(
                f"messages must be a list like [{{'role': 'user', 'content': 'Hi'}}], "
                f"not {messages!r}"
            )
        single = bool(messages) and isinstance(messages[0], Mapping)
        conversations: Sequence[Any] = [messages] if single else messages
        prompts = [
            self._chat_ids(conversation, add_generation_prompt, template_args)
            for conversation in conversations
        ]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def _chat_ids(
        self, messages: Messages, add_generation_prompt: bool, template_args: dict[str, Any]
    ) -> list[int]:
        text = self.tokenizer.apply_chat_template(
            [dict(m) for m in messages],
            add_generation_prompt=add_generation_prompt,
            **template_args,
        )
        # The template wrote the special tokens already: none is added a second time.
        return self.tokenizer.encode(text, add_special_tokens=False)

    def stream(
        self,
        prompt: Prompt | Messages,
        sampling_params: SamplingParams | None = None,
    ) -> Iterator[RequestOutput]:
        """Complete one prompt (or answer one conversation), token by token.

        Yields the output so far whenever it has grown; `outputs[0].delta` is the text that is new.
        Leaving the loop early aborts the request.
        """
        if isinstance(prompt, Sequence) and prompt and not isinstance(prompt, str):
            if isinstance(prompt[0], str):
                raise UserError("stream takes one prompt: call it once for each")
        if isinstance(prompt, Sequence) and prompt and isinstance(prompt[0], Mapping):
            prompt = self._chat_ids(cast(Messages, prompt), True, {})
        outputs: list[RequestOutput] = []
        with self._own_requests(outputs):
            output = self._add(cast(Prompt, prompt), sampling_params or SamplingParams(), 0)
            outputs.append(output)
            num_tokens, texts, ended = 0, [""] * len(output.outputs), False
            while not ended:
                # Steps of another stream, interleaved with this one, serve it as well.
                while not output.finished and _num_tokens(output) == num_tokens:
                    self._step_or_raise()
                num_tokens, ended = _num_tokens(output), output.finished
                now = snapshot(output)
                for i, completion in enumerate(now.outputs):
                    completion.delta = completion.text[len(texts[i]) :]
                    texts[i] = completion.text
                yield now

    def score(self, texts: Prompt | Sequence[Prompt], *, context: str | None = None) -> list[Score]:
        """Log-probability and perplexity of texts under the model; nothing is generated.

        Args:
            texts: what to score; its first token is not scored without a context.
            context: a text before each of them that is read but not scored.

        Raises:
            UserError: a text is shorter than two tokens and has no context.
        """
        before = self.tokenizer.encode(context) if context else []
        prompts = []
        for text in _as_prompts(texts):
            ids, _ = _unpack(text)
            if isinstance(ids, str):
                ids = self.tokenizer.encode(ids, add_special_tokens=not before)
            if len(before) + len(ids) < 2 or not ids:
                raise UserError("a text to score needs two tokens, or one and a context")
            prompts.append([*before, *ids])
        params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
        scores = []
        for output in self.generate(prompts, params, use_tqdm=False):
            entries, ids = output.prompt_logprobs, output.prompt_token_ids
            assert entries is not None, "prompt_logprobs were asked for"
            first = max(1, len(before))
            chosen = [(entries[i] or {})[ids[i]].logprob for i in range(first, len(ids))]
            scores.append(Score(ids[first:], chosen))
        return scores

    def add_request(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
    ) -> RequestOutput:
        """Queue a prompt and return its output object, which `step()` fills."""
        return self._add(prompt, sampling_params or SamplingParams(), priority, request_id)

    def step(self) -> StepReport:
        """One step of the engine, for those who want to watch: who ran, who waited and why."""
        with _deferred_interrupt():
            return self.engine.step()

    def abort(self, request_ids: str | Iterable[str]) -> None:
        """Give requests up; their outputs keep what they have. Unknown ids are ignored."""
        self.engine.abort(request_ids)

    def has_unfinished_requests(self) -> bool:
        """Whether `step()` has anything to do."""
        return self.engine.has_unfinished_requests()

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix: the next prompt is computed whole."""
        self.engine.scheduler.kv.pool.reset_index()

    def close(self) -> None:
        """Give the memory back. The object cannot be used any more; closing twice is fine."""
        engine, self._engine = self._engine, None
        if engine is None:
            return
        on_gpu = self.config.device == "cuda"
        del engine
        if on_gpu:
            import torch  # deferred: this file does not need it otherwise

            torch.cuda.empty_cache()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # -- helpers -----------------------------------------------------------------------------

    def _add(
        self,
        prompt: Prompt,
        params: SamplingParams,
        priority: int,
        request_id: str | None = None,
        stream: bool = True,
    ) -> RequestOutput:
        if not isinstance(params, SamplingParams):
            raise UserError(f"sampling_params must be SamplingParams, not {params!r}")
        text, salt = _unpack(prompt)
        return self.engine.add_request(
            text, params, request_id=request_id, priority=priority, salt=salt, stream=stream
        )

    def _step_or_raise(self) -> StepReport:
        overlap = self.config.scheduler.async_scheduling
        with _deferred_interrupt():
            report = self.engine.step_overlapped() if overlap else self.engine.step()
        if report.error is not None:
            names = ", ".join(name for name, _ in report.ran)
            raise EngineStepError(
                f"step {report.step} failed ({type(report.error).__name__}: {report.error}); its "
                f"requests ({names}) were ended, the engine is clean"
            ) from report.error
        return report

    @contextmanager
    def _own_requests(self, outputs: list[RequestOutput]) -> Iterator[None]:
        """However the block is left, none of its requests stays behind."""
        try:
            yield
        finally:
            unfinished = [output.request_id for output in outputs if not output.finished]
            if unfinished and self._engine is not None:
                self._engine.abort(unfinished)


@contextmanager
def _deferred_interrupt() -> Iterator[None]:
    """Hold Ctrl-C (a notebook's stop button) back until the step is over.

    A step cut in the middle would leave queues and tables half changed.
    """
    previous = signal.getsignal(signal.SIGINT)
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or not callable(previous):  # only there, and only if somebody listens
        yield
        return
    pressed: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda *signal_and_frame: pressed.append(signal_and_frame))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
    if pressed:
        previous(*pressed[0])


def _num_tokens(output: RequestOutput) -> int:
    return sum(len(completion.token_ids) for completion in output.outputs)


def _unpack(prompt: Prompt) -> tuple[str | Sequence[int], str | None]:
    """A prompt in any form -> (text or token ids, cache salt)."""
    if not isinstance(prompt, Mapping):
        return prompt, None
    unknown = set(prompt) - {"prompt", "prompt_token_ids", "cache_salt"}
    if unknown or not {"prompt", "prompt_token_ids"} & set(prompt):
        raise UserError(
            f"a prompt given as a dict holds 'prompt' or 'prompt_token_ids' and perhaps "
            f"'cache_salt', not {sorted(prompt)}"
        )
    name = "prompt_token_ids" if "prompt_token_ids" in prompt else "prompt"
    return prompt[name], prompt.get("cache_salt")


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or many -> many. A list of integers is one prompt."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise UserError(f"prompts must be text, token ids or a list of them, not {prompts!r}")
    if prompts and isinstance(prompts[0], int):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _one_each(name: str, values: Any, count: int) -> list[Any]:
    """One value for all prompts, or a list with one each."""
    if not isinstance(values, Sequence):
        return [values] * count
    if len(values) != count:
        raise UserError(f"{name} has {len(values)} entries for {count} prompts: give one each")
    return list(values)
