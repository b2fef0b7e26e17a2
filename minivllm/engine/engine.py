"""The engine: requests in, text out, one step at a time. The architecture is in `Engine.step`.

It owns what the two towers must not share: ids, seeds, the clock, the text. It talks to any
scheduler and any runner that keep the contract of `minivllm.sched.plan`.

Mirrors vllm/v1/engine/core.py, processor.py and output_processor.py in one file. Chapters 0 and 6
read it.
"""

import operator
import random
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from minivllm.base import UserError
from minivllm.cache.pool import BlockPool
from minivllm.engine.detokenizer import Detokenizer
from minivllm.request import (
    CompletionOutput,
    FinishReason,
    Logprob,
    Request,
    RequestOutput,
    SamplingParams,
    TokenLogprobs,
)
from minivllm.sched.plan import Runner, SampledToken, StepHandle, StepPlan, StepResult
from minivllm.sched.scheduler import Scheduler
from minivllm.trace import EventSink, NullRecorder, Refused, StepTimed


class TextTokenizer(Protocol):
    """What the engine needs of `minivllm.models.tokenizer.Tokenizer`."""

    @property
    def backend(self) -> Any:
        """A `tokenizers.Tokenizer`."""
        ...

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Text to ids."""
        ...

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Ids to text."""
        ...


@dataclass(frozen=True)
class EngineLimits:
    """What the engine must know of the model to check a request."""

    vocab_size: int  # ids that have a text; a padded vocabulary's rest is never used
    max_model_len: int
    max_logprobs: int = 20
    eos_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class StepReport:
    """What one step did. `outputs` are the live objects that grew or ended in it."""

    step: int
    ran: tuple[tuple[str, int], ...]  # (request id, tokens computed)
    waited: tuple[tuple[str, str], ...]  # (request id, why), for the head of each queue
    num_waiting: int
    preempted: tuple[str, ...]
    blocks_taken: int
    blocks_freed: int  # nobody refers to them any more
    blocks_hit: int  # found in the prefix index
    seconds: float
    outputs: tuple[RequestOutput, ...] = ()
    error: BaseException | None = None  # the step failed; its requests ended with "error"


class _NotLaunched:
    """Stands for a step whose launch failed."""

    def result(self) -> StepResult:
        """Never asked for."""
        raise RuntimeError("the step was never launched")


_NOT_LAUNCHED = _NotLaunched()


class EngineStepError(RuntimeError):
    """A step failed. The requests in it ended with finish_reason "error"; the engine is clean."""


@dataclass
class _Prompt:
    """One call's prompt: its output object, and which of its n continuations still run."""

    output: RequestOutput
    params: SamplingParams
    added: float
    live: dict[str, int] = field(default_factory=dict)  # child request id -> index
    requests: dict[str, Request] = field(default_factory=dict)
    text: dict[str, Detokenizer] = field(default_factory=dict)


class Engine:
    """A scheduler, a runner, and the text around them. Single-threaded; `step()` does everything.

    Args:
        scheduler: plans steps.
        runner: executes them.
        tokenizer: turns ids into text, prompts into ids.
        limits: what a request may ask.
        recorder: takes trace events; the scheduler and the pool should have the same one.
        seed: of the seeds that requests without one get.
        clock: seconds, monotonic.
        paranoid: check every invariant after each step.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        tokenizer: TextTokenizer,
        limits: EngineLimits,
        *,
        recorder: EventSink | None = None,
        seed: int = 0,
        clock: Callable[[], float] = time.perf_counter,
        paranoid: bool = False,
    ) -> None:
        self.scheduler, self.runner, self.tokenizer = scheduler, runner, tokenizer
        self.limits = limits
        self.recorder: EventSink = recorder or NullRecorder()
        self.clock = clock
        self.paranoid = paranoid
        self._random = random.Random(seed)
        self._num_added = 0  # numbers requests and orders them by arrival
        self._prompts: dict[str, _Prompt] = {}
        self._owner: dict[str, str] = {}  # child request id -> prompt's request id
        self._grown: list[CompletionOutput] = []  # those whose delta is of the last step
        self._under_way: deque[tuple[StepPlan, StepHandle]] = deque()  # launched, oldest first
        self._planning = False  # the scheduler is at work: its requests are half planned
        self._started = 0.0  # when the step at hand began
        self._block_counts = (0, 0, 0)  # taken, freed, hit when it began

    # -- requests ----------------------------------------------------------------------------

    def add_request(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        salt: str | None = None,
        stream: bool = True,
    ) -> RequestOutput:
        """Queue a prompt (text or token ids). Returns its output object, which later steps fill.

        Args:
            prompt: text, or token ids.
            params: how to sample and when to stop.
            request_id: a name of one's own, unique among live requests; None = a number.
            priority: smaller goes first, under the policy "priority".
            salt: blocks are shared only between requests with the same one.
            stream: fill the output step by step; False = all at once at the end, which is cheaper.

        Raises:
            UserError: the request can never run; the sentence says why. Nothing is queued.
        """
        while request_id is None and str(self._num_added) in self._prompts:
            self._num_added += 1  # somebody chose this number as a name
        name = str(self._num_added) if request_id is None else request_id
        try:
            _check_names(request_id, priority, salt)
            if name in self._prompts or self._is_under_way(_child_names(name, params.n)):
                raise UserError(f"request id {name!r} is in use: wait for it or take another id")
            ids = self._token_ids(prompt)
            self._check(ids, params)
            children = self._children(name, ids, params, priority, salt)
            entry = self._entry(name, prompt if isinstance(prompt, str) else None, ids, params)
            entry.live = {child.request_id: index for index, child in enumerate(children)}
            entry.requests = {child.request_id: child for child in children}
            watched = stream or params.logprobs is not None or bool(params.stop_strings)
            for child in children:
                child.watched = watched
            entry.text = {
                name: Detokenizer(self.tokenizer.backend, params, ids) for name in entry.live
            }
            self._queue(children)  # last: nothing after it can fail
        except UserError as error:
            if self.recorder.enabled:
                self.recorder.emit(Refused(self.scheduler.step, str(name), str(error)))
            raise
        self._prompts[name] = entry
        self._owner |= dict.fromkeys(entry.live, name)
        return entry.output

    def _is_under_way(self, names: list[str]) -> bool:
        """Whether a step that still runs knows one of these ids, although its request ended."""
        known = {row.request_id for plan, _ in self._under_way for row in plan.rows}
        return not known.isdisjoint(names)

    def _token_ids(self, prompt: Any) -> list[int]:
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        if isinstance(prompt, Sequence) and not isinstance(prompt, (bytes, bytearray)):
            # numpy's integers become Python's; what is no integer is refused by name, later.
            return [operator.index(i) if hasattr(i, "__index__") else i for i in prompt]
        raise UserError(f"a prompt is a text or a list of token ids, not {prompt!r}")

    def _entry(
        self, name: str, text: str | None, ids: list[int], params: SamplingParams
    ) -> _Prompt:
        output = RequestOutput(name, text, ids, [CompletionOutput(i) for i in range(params.n)])
        if params.prompt_logprobs is not None:
            output.prompt_logprobs = [None] * len(ids)
        if params.logprobs is not None:
            for completion in output.outputs:
                completion.logprobs, completion.cumulative_logprob = [], 0.0
        return _Prompt(output, params, self.clock())

    def _children(
        self, name: str, ids: list[int], params: SamplingParams, priority: int, salt: str | None
    ) -> list[Request]:
        """The n requests of one prompt: they share its blocks and differ in their seeds."""
        bad_words = tuple(self._bad_words(params.bad_words or ()))
        children = []
        for index, child in enumerate(_child_names(name, params.n)):
            seed = self._random.getrandbits(64) if params.seed is None else params.seed + index
            children.append(
                Request(
                    child,
                    ids,
                    params,
                    arrival=self._num_added,
                    priority=priority,
                    seed=(seed + 2**63) % 2**64 - 2**63,  # as a signed 64-bit number
                    eos_token_ids=self.limits.eos_token_ids,
                    max_total_tokens=self.limits.max_model_len,
                    bad_words_ids=bad_words,
                    salt=salt,
                )
            )
            self._num_added += 1
        return children

    def _queue(self, children: list[Request]) -> None:
        for i, child in enumerate(children):
            try:
                self.scheduler.add(child)
            except UserError:
                for queued in children[:i]:
                    self.scheduler.finish(queued.request_id, FinishReason.ABORT)
                raise

    def _bad_words(self, words: Iterable[str]) -> Iterable[tuple[int, ...]]:
        """Each word as token ids, as it is written at the start of a text and after a space."""
        for word in words:
            forms = {
                tuple(self.tokenizer.encode(form, add_special_tokens=False))
                for form in (word, " " + word.lstrip())
            }
            yield from sorted(forms - {()})

    def _check(self, ids: list[int], params: SamplingParams) -> None:
        """Refuse what could never run, naming value, limit and remedy."""
        limits = self.limits
        if not ids:
            raise UserError("the prompt is empty: it must hold at least one token")
        for token_id in ids:
            known = isinstance(token_id, int) and not isinstance(token_id, bool)
            if not known or not 0 <= token_id < limits.vocab_size:
                raise UserError(
                    f"prompt token id {token_id!r} is not in the vocabulary "
                    f"(0 to {limits.vocab_size - 1})"
                )
        if len(ids) >= limits.max_model_len:
            raise UserError(
                f"the prompt has {len(ids):,} tokens, but max_model_len is "
                f"{limits.max_model_len:,} and one must be left to generate: shorten the prompt "
                f"or raise max_model_len"
            )
        if params.max_tokens is not None and len(ids) + params.max_tokens > limits.max_model_len:
            raise UserError(
                f"the prompt has {len(ids):,} tokens and max_tokens is {params.max_tokens:,}, "
                f"together more than max_model_len {limits.max_model_len:,}: lower max_tokens or "
                f"leave it out"
            )
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(params, name)
            if value is not None and value > limits.max_logprobs:
                raise UserError(
                    f"{name} {value} exceeds max_logprobs {limits.max_logprobs}: ask for fewer or "
                    f"raise max_logprobs"
                )
        for name, listed in (
            ("logit_bias", params.logit_bias),
            ("allowed_token_ids", params.allowed_token_ids),
        ):
            for token_id in listed or ():
                if token_id >= limits.vocab_size:
                    raise UserError(
                        f"{name} names token {token_id}, which is not in the vocabulary "
                        f"(0 to {limits.vocab_size - 1})"
                    )

    def abort(self, request_ids: str | Iterable[str]) -> None:
        """Give requests up, wherever they stand. Unknown ids are ignored: they have ended."""
        for name in [request_ids] if isinstance(request_ids, str) else list(request_ids):
            entry = self._prompts.get(name)
            for child in list(entry.live) if entry else []:
                self._end(child, FinishReason.ABORT)

    def has_unfinished_requests(self) -> bool:
        """Whether a step has anything to do."""
        return bool(self._prompts)

    # -- a step ------------------------------------------------------------------------------

    def step(self) -> StepReport:
        """Schedule, run, update, and turn tokens into text.

        An exception ends the requests of the step (all of them, if it came while there was no
        plan yet) with "error" and leaves the engine clean; it comes back in the report. Only an
        interrupt is raised again.
        """
        return self._guarded(ahead=0)

    def step_overlapped(self) -> StepReport:
        """The same, but the next step is planned and launched before this one is looked at.

        ```
         step              plan 1  .......  update 1  plan 2  .......  update 2       host
                                   [run 1]                    [run 2]                 device

         step_overlapped   plan 1  plan 2  .  update 1  plan 3  .  update 2           host
                                   [run 1] [run 2]              [run 3]               device
        ```

        That a request has stopped is seen one step late: its extra token is dropped.
        """
        return self._guarded(ahead=1)

    def _step(self, ahead: int) -> StepReport:
        """Launch until `ahead` steps run beside the oldest, then take in the oldest's tokens."""
        while len(self._under_way) <= ahead and self._launch():
            pass
        if not self._under_way:
            return self._report(StepPlan(self.scheduler.step, (), (), (), 0), [])
        plan, handle = self._under_way[0]
        outputs = self._collect(plan, handle.result())
        self._under_way.popleft()
        while self._under_way and not self._prompts:  # a step of requests that have just ended
            self.scheduler.update(self._under_way[0][0], self._under_way[0][1].result())
            self._under_way.popleft()
        if self.paranoid:
            self.check()
        return self._report(plan, outputs)

    def _launch(self) -> bool:
        """Plan and start a step; False if there was nothing to run."""
        self._planning = True
        plan = self.scheduler.schedule()
        self._planning = False
        self._under_way.append((plan, _NOT_LAUNCHED))
        self._under_way[-1] = (plan, self.runner.launch(plan))
        if not plan.rows:  # but rows may have been freed, and the runner was told
            self._under_way.pop()
            self.scheduler.retell(StepPlan(plan.step, (), (), (), 0))
        return bool(plan.rows)

    def _guarded(self, ahead: int) -> StepReport:
        """`_step`, with the clock set before it and an exception in it taken care of."""
        self._started, pool = self.clock(), self.scheduler.kv.pool
        self._block_counts = (pool.num_allocated, pool.num_freed, pool.num_touched)
        while self._grown:
            self._grown.pop().delta = ""
        try:
            return self._step(ahead)
        except BaseException as error:
            plan, outputs = self._fail(error)
            if not isinstance(error, Exception):
                raise
            return self._report(plan, outputs, error)

    def _collect(self, plan: StepPlan, result: StepResult) -> list[RequestOutput]:
        """Append what was sampled to scheduler and text; the outputs that changed."""
        now = self.clock()
        changed: dict[str, RequestOutput] = {}
        for child, (first, entries) in result.prompt_logprobs.items():
            if child in self._owner:
                self._add_prompt_logprobs(child, first, entries)
        for request, sampled in self.scheduler.update(plan, result):
            if not request.watched and request.finish_reason is None:
                if request.num_output_tokens > 1:
                    continue  # its tokens are taken over together, at its end
            name = self._owner[request.request_id]
            entry = self._prompts[name]
            if entry.output.time_to_first_token is None:
                entry.output.time_to_first_token = now - entry.added
                entry.output.num_cached_tokens = max(0, request.num_cached_tokens)
            self._grow(entry, request, sampled)
            changed[name] = entry.output
        return list(changed.values())

    def _grow(self, entry: _Prompt, request: Request, sampled: SampledToken) -> None:
        """New tokens of one continuation: their ids, their text, its end."""
        child = request.request_id
        completion = entry.output.outputs[entry.live[child]]
        if sampled.logprobs is not None and completion.logprobs is not None:
            completion.logprobs.append(self._with_text(sampled.logprobs))
            assert completion.cumulative_logprob is not None
            completion.cumulative_logprob += sampled.logprobs[sampled.token_id].logprob
        text = self._take_over(entry, request, completion)
        if text.stopped_by is not None:
            request.finish_reason, request.stop_reason = FinishReason.STOP, text.stopped_by
            self.scheduler.finish(child, FinishReason.STOP, text.stopped_by)
        if request.finish_reason is not None:
            self._close(entry, child, request.finish_reason, request.stop_reason)

    def _take_over(
        self, entry: _Prompt, request: Request, completion: CompletionOutput
    ) -> Detokenizer:
        """Bring ids and text of a continuation up to what its request has."""
        text = entry.text[request.request_id]
        new = request.token_ids[request.num_prompt_tokens + len(completion.token_ids) :]
        completion.token_ids += new
        stopped = request.finish_reason is FinishReason.STOP  # by a token, which is not shown
        if stopped and not entry.params.include_stop_str_in_output:
            new = new[:-1]
        delta = text.append(new, finished=request.finish_reason is not None)
        completion.text = text.text
        if request.watched:
            completion.delta = delta
            self._grown.append(completion)
        return text

    def _add_prompt_logprobs(self, child: str, first: int, entries: list[TokenLogprobs]) -> None:
        known = self._prompts[self._owner[child]].output.prompt_logprobs
        assert known is not None, f"{child} did not ask for prompt_logprobs"
        known[first : first + len(entries)] = [self._with_text(entry) for entry in entries]

    def _with_text(self, logprobs: TokenLogprobs) -> TokenLogprobs:
        """Fill in the text of each token."""
        decode = self.tokenizer.decode
        return {
            token_id: Logprob(entry.logprob, entry.rank, decode([token_id], False))
            for token_id, entry in logprobs.items()
        }

    def _end(self, child: str, reason: FinishReason, stop_reason: str | None = None) -> None:
        """End one continuation from outside; its text keeps what it has.

        The scheduler may have ended it already, in the very step that then failed.
        """
        self.scheduler.finish(child, reason, stop_reason)
        entry = self._prompts[self._owner[child]]
        request = entry.requests[child]
        request.finish_reason = reason
        try:
            self._take_over(entry, request, entry.output.outputs[entry.live[child]])
        except Exception:
            if reason is not FinishReason.ERROR:
                raise  # else the text may be what failed: it keeps what it has
        self._close(entry, child, reason, stop_reason)

    def _close(
        self, entry: _Prompt, child: str, reason: FinishReason, stop_reason: int | str | None
    ) -> None:
        """Write down how a continuation ended; the prompt's entry goes with its last one."""
        output = entry.output
        completion = output.outputs[entry.live.pop(child)]
        completion.finish_reason, completion.stop_reason = reason.value, stop_reason
        del self._owner[child], entry.text[child]
        if not entry.live:
            output.finished, output.elapsed = True, self.clock() - entry.added
            del self._prompts[output.request_id]

    def _fail(self, error: BaseException) -> tuple[StepPlan, list[RequestOutput]]:
        """A step went wrong: end its requests, forget every cached block it may have spoilt.

        With it go the steps launched after it. Returns a plan to report on, and the outputs.
        """
        self.scheduler.kv.pool.reset_index()
        plans = [plan for plan, _ in self._under_way]
        self._under_way.clear()
        failed: dict[str, RequestOutput] = {}
        names = [row.request_id for plan in plans for row in plan.rows]
        for child in names if plans and not self._planning else list(self._owner):
            if child in self._owner:
                output = self._prompts[self._owner[child]].output
                failed[output.request_id] = output
                self._end(child, FinishReason.ERROR, f"{type(error).__name__}: {error}")
        self._planning = False
        empty = StepPlan(self.scheduler.step, (), (), (), 0)
        for plan in (*plans, empty):
            self.scheduler.retell(plan)
        return next(iter(plans), empty), list(failed.values())

    def _report(
        self, plan: StepPlan, outputs: list[RequestOutput], error: BaseException | None = None
    ) -> StepReport:
        scheduler, pool = self.scheduler, self.scheduler.kv.pool
        seconds = self.clock() - self._started
        waiting = len(scheduler.waiting)
        if self.recorder.enabled:
            running, free = len(scheduler.running), pool.num_free
            self.recorder.emit(
                StepTimed(plan.step, "", seconds, plan.num_tokens, running, waiting, free)
            )
        taken, freed, hit = self._block_counts
        return StepReport(
            step=plan.step,
            ran=tuple([(row.request_id, row.num_tokens) for row in plan.rows]),
            waited=plan.waited,
            num_waiting=waiting,
            preempted=plan.preempted,
            blocks_taken=pool.num_allocated - taken,
            blocks_freed=pool.num_freed - freed,
            blocks_hit=pool.num_touched - hit,
            seconds=seconds,
            outputs=tuple(outputs),
            error=error,
        )

    def why_waiting(self, request_id: str) -> str | None:
        """Why a request got nothing in the last step; None if it ran or has ended."""
        entry = self._prompts.get(request_id)
        reasons = [self.scheduler.why_waiting(child) for child in entry.live] if entry else []
        return None if None in reasons else next(iter(reasons), None)

    def check(self) -> None:
        """Assert every invariant of the engine and of what it drives."""
        self.scheduler.check()
        assert set(self._owner) == set(self.scheduler.requests), "engine and scheduler disagree"
        live = [child for entry in self._prompts.values() for child in entry.live]
        assert sorted(live) == sorted(self._owner), "a continuation is lost"
        if not self._prompts:
            pool: BlockPool = self.scheduler.kv.pool
            assert pool.num_free == pool.num_usable, "the idle engine holds blocks"


def snapshot(output: RequestOutput) -> RequestOutput:
    """A copy that later steps do not change."""
    return replace(
        output,
        outputs=[
            replace(c, token_ids=list(c.token_ids), logprobs=c.logprobs and list(c.logprobs))
            for c in output.outputs
        ],
    )


def _child_names(name: str, n: int) -> list[str]:
    """Ids of the n requests of one prompt."""
    return [name] if n == 1 else [f"{name}-{index}" for index in range(n)]


def _check_names(request_id: object, priority: object, salt: object) -> None:
    """Refuse what would fail later, inside a step that others share."""
    for name, value, kind in (
        ("request_id", request_id, str),
        ("priority", priority, int),
        ("cache salt", salt, str),
    ):
        if value is not None and (not isinstance(value, kind) or isinstance(value, bool)):
            raise UserError(f"{name} must be of type {kind.__name__}, not {value!r}")
