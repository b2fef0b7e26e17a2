"""Small stand-ins that several test files use: tokenizers, and engines around doubles."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from tokenizers import Tokenizer, decoders, models

from minivllm.cache.manager import KVCacheManager
from minivllm.cache.pool import BlockPool
from minivllm.config import SchedulerConfig
from minivllm.engine.engine import Engine, EngineLimits, StepReport
from minivllm.request import Request, SamplingParams
from minivllm.runner.scripted import ScriptedModel, hash_script
from minivllm.runner.tiny import TinyRandom, character_tokenizer
from minivllm.sched.plan import Runner, StepPlan, StepResult
from minivllm.sched.scheduler import Scheduler
from minivllm.trace import EventSink


class TextTokenizer:
    """What the engine wants of a tokenizer, around a plain `tokenizers.Tokenizer`."""

    def __init__(self, backend: Tokenizer) -> None:
        self.backend = backend

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        return self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)


def pieces(*texts: str) -> TextTokenizer:
    """Token i shows as the i-th text."""
    vocab = {piece: i for i, piece in enumerate(texts)}
    backend = Tokenizer(models.WordLevel(vocab, unk_token=texts[0]))
    backend.decoder = decoders.Fuse()
    return TextTokenizer(backend)


def make_scheduler(
    *,
    num_blocks: int = 64,
    block_size: int = 4,
    enable_prefix_caching: bool = True,
    recorder: EventSink | None = None,
    scheduler: Callable[..., Scheduler] = Scheduler,
    block_pool: Callable[..., BlockPool] = BlockPool,
    **flags: Any,
) -> Scheduler:
    """A scheduler over a fresh pool; `num_blocks` includes the null block."""
    pool = block_pool(num_blocks, recorder)
    kv = KVCacheManager(pool, block_size, enable_prefix_caching)
    return scheduler(SchedulerConfig(**flags), kv, recorder)


def make_request(name: str, tokens: int | Sequence[int], **kwargs: Any) -> Request:
    """A request of `tokens` made-up tokens of its own, or of the given ones."""
    if isinstance(tokens, int):
        first = sum(name.encode()) * 1000
        tokens = range(first, first + tokens)
    params = kwargs.pop("params", None) or SamplingParams(max_tokens=kwargs.pop("max_tokens", 5))
    return Request(name, tokens, params, **kwargs)


def make_engine(
    script: Callable[[str, int, int], int] | None = None,
    *,
    tokenizer: TextTokenizer | None = None,
    vocab_size: int = 64,
    max_model_len: int = 512,
    eos_token_ids: tuple[int, ...] = (),
    num_blocks: int = 64,
    block_size: int = 4,
    recorder: EventSink | None = None,
    wrap: Callable[[Runner], Runner] = lambda runner: runner,
    seed: int = 0,
    **flags: Any,
) -> Engine:
    """The whole engine around a `ScriptedModel`; every invariant is checked after each step."""
    model = ScriptedModel(
        script or hash_script(vocab_size), num_blocks=num_blocks, block_size=block_size
    )
    return Engine(
        make_scheduler(num_blocks=num_blocks, block_size=block_size, recorder=recorder, **flags),
        wrap(model),
        tokenizer or TextTokenizer(character_tokenizer(vocab_size)),
        EngineLimits(vocab_size, max_model_len, eos_token_ids=eos_token_ids),
        recorder=recorder,
        seed=seed,
        paranoid=True,
    )


def tiny_engine(
    tiny: TinyRandom,
    *,
    num_blocks: int = 129,
    block_size: int = 4,
    max_model_len: int | None = None,
    recorder: EventSink | None = None,
    sampler: Any = None,
    seed: int = 0,
    **flags: Any,
) -> Engine:
    """The whole engine, real runner included, around a `TinyRandom`."""
    scheduler = make_scheduler(
        num_blocks=num_blocks, block_size=block_size, recorder=recorder, **flags
    )
    extra = {"sampler": sampler} if sampler else {}
    vocab_size = tiny.config.vocab_size
    return Engine(
        scheduler,
        tiny.runner(scheduler.config, num_blocks=num_blocks, block_size=block_size, **extra),
        TextTokenizer(character_tokenizer(vocab_size)),
        EngineLimits(vocab_size, max_model_len or tiny.config.max_position),
        recorder=recorder,
        seed=seed,
        paranoid=True,
    )


def drain(engine: Engine, max_steps: int = 2000) -> list[StepReport]:
    """Step until nothing is left to do; an error in a step is an error here."""
    reports = []
    while engine.has_unfinished_requests():
        reports.append(engine.step())
        if reports[-1].error is not None:
            raise reports[-1].error
        assert len(reports) < max_steps, "the engine does not come to an end"
    return reports


class Flaky:
    """A runner that fails at the steps that `fails(plan)` names, before or after running them."""

    def __init__(
        self, inner: Runner, fails: Callable[[StepPlan], BaseException | None], *, after: bool
    ) -> None:
        self.inner, self.fails, self.after = inner, fails, after

    def launch(self, plan: StepPlan) -> Any:
        error = self.fails(plan)
        if error is not None and not self.after:
            raise error
        handle = self.inner.launch(plan)
        if error is not None:
            raise error
        return handle


def run_plan(scheduler: Scheduler, runner: Runner) -> tuple[StepPlan, StepResult]:
    """One step of scheduler and runner without an engine, every invariant checked."""
    plan = scheduler.schedule()
    result = runner.launch(plan).result()
    scheduler.update(plan, result)
    scheduler.check()
    return plan, result
