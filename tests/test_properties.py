"""Random lives of requests over the real control plane, compared with an oracle that has no engine.

The model is `ScriptedModel`: its next token depends on every token before it, read back from KV
memory through the block tables. So a block that is shared, reused or written wrongly changes the
answer, and the answer is known: a chain of hashes over the prompt and the tokens that follow.

`make test` runs a seeded sample of each property, `make test-full` (marker `slow`) the large one.
"""

import re
import zlib
from collections import Counter
from typing import Any

import pytest
from doubles import Flaky, make_engine, make_scheduler
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from minivllm.base import UserError, cdiv
from minivllm.cache.pool import NULL_BLOCK
from minivllm.request import (
    CompletionOutput,
    FinishReason,
    Request,
    RequestOutput,
    SamplingParams,
)
from minivllm.runner.scripted import ScriptedModel
from minivllm.sched.plan import StepPlan

VOCAB = 11
EOS = 3
MAX_MODEL_LEN = 60


def profile(examples: int, **kwargs: Any) -> settings:
    """Seeded: the same scenarios in every run."""
    return settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.explicit, Phase.generate, Phase.shrink),
        **kwargs,
    )


def examples(quick: int, full: int) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        "count",
        [quick, pytest.param(full, marks=[pytest.mark.slow, pytest.mark.timeout(3000)])],
    )


def script(name: str, index: int, fingerprint: int) -> int:
    """The next token: of the whole context, and of the request's name so that n answers differ."""
    return (fingerprint ^ zlib.crc32(name.encode())) % VOCAB


def oracle(name: str, prompt: list[int], count: int) -> list[int]:
    """The first `count` tokens after a prompt, by the chain alone."""
    chain, tokens = 0, []
    for token in prompt:
        chain = hash((chain, token))
    for index in range(count):
        tokens.append(script(name, index, chain))
        chain = hash((chain, tokens[-1]))
    return tokens


def until_eos(tokens: list[int]) -> list[int]:
    return tokens[: tokens.index(EOS) + 1] if EOS in tokens else tokens


# A few families of prompts that share beginnings, over an alphabet so small that tails agree too.
FAMILIES = [[(7 * family + 3 * i * i + i) % 5 for i in range(40)] for family in range(3)]
prompts = st.builds(
    lambda family, shared, tail: FAMILIES[family][:shared] + tail,
    st.integers(0, 2),
    st.integers(1, 40),
    st.lists(st.integers(0, 1), max_size=6),
)
flags = st.fixed_dictionaries(
    {
        "num_blocks": st.integers(2, 24),
        "block_size": st.integers(1, 16),
        "enable_prefix_caching": st.booleans() | st.just(True),
        "enable_chunked_prefill": st.booleans() | st.just(True),
        "max_num_batched_tokens": st.integers(1, 12) | st.integers(16, 64),
        "max_num_seqs": st.integers(1, 6),
        "long_prefill_token_threshold": st.just(0) | st.integers(1, 9),
        "scheduling_policy": st.sampled_from(["fcfs", "priority"]),
    }
)
SEEN: Counter[str] = Counter()  # what the scenarios reached; a sample that reaches nothing is red


class ControlPlane(RuleBasedStateMachine):
    """Scheduler, KV manager and pool, step by step; requests come and go as hypothesis likes."""

    @initialize(flags=flags)
    def start(self, flags: dict[str, Any]) -> None:
        self.scheduler = make_scheduler(**flags)
        self.config, self.kv = self.scheduler.config, self.scheduler.kv
        self.runner = ScriptedModel(
            script, num_blocks=flags["num_blocks"], block_size=flags["block_size"]
        )
        self.chunked = self.config.enable_chunked_prefill
        self.everybody: dict[str, Request] = {}
        self.arrivals = 0

    # -- what may happen ---------------------------------------------------------------------

    @rule(
        prompt=prompts,
        n=st.just(1) | st.integers(1, 3),
        max_tokens=st.integers(1, 14),
        priority=st.just(0) | st.integers(-2, 2),
        salt=st.sampled_from([None, None, None, "a", "b"]),
        ignore_eos=st.booleans(),
    )
    def add(
        self,
        prompt: list[int],
        n: int,
        max_tokens: int,
        priority: int,
        salt: str | None,
        ignore_eos: bool,
    ) -> None:
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=ignore_eos)
        for _ in range(n):
            self.arrivals += 1
            request = Request(
                f"r{self.arrivals}", prompt, params, arrival=self.arrivals, priority=priority,
                eos_token_ids=(EOS,), max_total_tokens=MAX_MODEL_LEN, salt=salt,
            )  # fmt: skip
            fits = cdiv(len(prompt), self.kv.block_size) <= self.kv.pool.num_usable
            fits &= self.chunked or len(prompt) <= self.config.max_num_batched_tokens
            fits &= priority == 0 or self.config.scheduling_policy == "priority"
            if fits:
                self.scheduler.add(request)
                self.everybody[request.request_id] = request
            else:
                with pytest.raises(UserError):
                    self.scheduler.add(request)
                SEEN["refused"] += 1

    @precondition(lambda self: self.scheduler.has_work())
    @rule(which=st.integers(0, 100))
    def abort(self, which: int) -> None:
        live = list(self.scheduler.requests)
        self.scheduler.finish(live[which % len(live)], FinishReason.ABORT)
        self.scheduler.check()
        SEEN["aborted"] += 1

    @precondition(lambda self: self.scheduler.has_work())
    @rule(times=st.integers(1, 6))
    def steps(self, times: int) -> None:
        for _ in range(times):
            self.step()

    @precondition(lambda self: self.scheduler.has_work())
    @rule(which=st.integers(0, 100))
    def step_with_an_abort_while_it_runs(self, which: int) -> None:
        live = list(self.scheduler.requests)
        self.step(abort=live[which % len(live)])

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        # The first request advances in every step; a request of higher priority may take its place.
        live = self.scheduler.requests.values()
        bound = sum(request.max_total_tokens for request in live) * (len(live) + 1)
        for _ in range(bound):
            if not self.scheduler.has_work():
                break
            self.step()
        assert not self.scheduler.has_work(), f"requests are left after {bound} steps"
        assert self.kv.pool.num_free == self.kv.pool.num_usable, "blocks leak"
        for name, request in self.everybody.items():
            self.check_end(name, request)

    # -- what must hold ----------------------------------------------------------------------

    def step(self, abort: str | None = None) -> None:
        scheduler = self.scheduler
        running, waiting = list(scheduler.running), list(scheduler.waiting)
        decodes = [r for r in running if r.num_tokens - r.num_computed_tokens == 1]
        plan = scheduler.schedule()
        self.check_plan(plan, running)
        self.check_fairness(plan, running, waiting, decodes)
        self.check_reasons(plan)
        result = self.runner.launch(plan).result()
        if abort is not None:
            scheduler.finish(abort, FinishReason.ABORT)
            SEEN["aborted in a step"] += abort in {row.request_id for row in plan.rows}
        scheduler.update(plan, result)
        scheduler.check()

    def check_plan(self, plan: StepPlan, running: list[Request]) -> None:
        config, requests = self.config, self.scheduler.requests
        assert plan.num_tokens == sum(row.num_tokens for row in plan.rows)
        assert plan.num_tokens <= config.max_num_batched_tokens
        assert len(plan.rows) <= config.max_num_seqs
        assert len({row.row for row in plan.rows}) == len(plan.rows)
        assert {new.request_id for new in plan.new_rows} <= {row.request_id for row in plan.rows}
        for row in plan.rows:
            request = requests[row.request_id]
            end = row.start + row.num_tokens
            assert row.num_tokens > 0 and end == request.num_computed_tokens
            assert row.samples == (end == len(request.token_ids))
            assert self.chunked or row.samples, "a part of a prompt without chunked prefill"
            longest = config.long_prefill_token_threshold
            assert not (self.chunked and longest) or row.num_tokens <= longest
            # The table is exactly as wide as the tokens need, and never holds the null block.
            table = self.kv.block_ids(request)
            assert len(table) == cdiv(end, self.kv.block_size)
            assert NULL_BLOCK not in table
            assert end <= request.max_total_tokens - 1 <= self.kv.capacity
            SEEN["chunked"] += not row.samples
        for new in plan.new_rows:
            request = requests[new.request_id]
            start = next(row.start for row in plan.rows if row.request_id == new.request_id)
            assert start < request.num_prompt_tokens + request.num_output_tokens
            assert start % self.kv.block_size == 0
            assert 0 <= request.num_cached_tokens < request.num_prompt_tokens
            SEEN["prefix hit"] += start > 0
            SEEN["resumed"] += request.num_preemptions > 0
        SEEN["same step sharing"] += self.shares_with_a_newcomer(plan, running)

    def shares_with_a_newcomer(self, plan: StepPlan, running: list[Request]) -> bool:
        """Whether a new row starts with blocks that another new row writes in this very step."""
        written: set[int] = set()
        for row in plan.rows[len(plan.rows) - len(plan.new_rows) :]:
            table = self.kv.block_ids(self.scheduler.requests[row.request_id])
            first = row.start // self.kv.block_size
            if written & set(table[:first]):
                return True
            written |= set(table[first:])
        return False

    def check_fairness(
        self,
        plan: StepPlan,
        running: list[Request],
        waiting: list[Request],
        decodes: list[Request],
    ) -> None:
        ran = {row.request_id for row in plan.rows}
        # Somebody always advances: the first who runs, or the first who waits if nobody runs.
        for first in (running or waiting)[:1]:
            assert first.request_id in ran, f"{first} got nothing"
        # Decodes are never starved by prefills: only the first request's one token may be missing.
        needed = len(decodes) + (bool(running) and running[0] not in decodes)
        if needed <= self.config.max_num_batched_tokens:
            missing = {r.request_id for r in decodes} - ran - set(plan.preempted)
            assert not missing, f"{missing} decode, and got nothing"
        # The last go first, once each, and get nothing in the step that preempts them.
        victims = list(plan.preempted)
        assert len(set(victims)) == len(victims)
        assert victims == [r.request_id for r in reversed(running)][: len(victims)]
        assert not ran & set(victims)
        SEEN["preempted"] += len(victims)

    def check_reasons(self, plan: StepPlan) -> None:
        ran = {row.request_id for row in plan.rows}
        for name in self.scheduler.requests:
            reason = self.scheduler.why_waiting(name)
            assert (reason is None) == (name in ran), f"{name} waits without a reason"
            assert reason is None or self.is_true(reason, plan), f"{name}: {reason}"
        assert all(reason for _, reason in plan.waited)

    def is_true(self, reason: str, plan: StepPlan) -> bool:
        """A reason is a claim with numbers; each of them can be looked up."""
        scheduler, budget = self.scheduler, self.config.max_num_batched_tokens
        numbers = [int(number) for number in re.findall(r"\d+", reason)]
        if reason.startswith("behind request"):
            return reason == f"behind request {scheduler.waiting[0].request_id}"
        if "max_num_seqs" in reason:
            return len(scheduler.running) == numbers[0] == self.config.max_num_seqs
        if "handed out" in reason:
            return plan.num_tokens == numbers[0] == budget
        if "KV blocks" in reason:
            return numbers[0] > numbers[1] == self.kv.pool.num_free
        if "in one go" in reason:
            return not self.chunked and numbers[0] > numbers[1] == budget - plan.num_tokens
        return "just preempted" in reason and bool(plan.preempted)

    def check_end(self, name: str, request: Request) -> None:
        prompt = list(request.prompt_token_ids)
        limit = min(len(prompt) + (request.params.max_tokens or 0), MAX_MODEL_LEN)
        limit = min(limit, self.kv.capacity + 1)
        if not self.chunked:
            limit = min(limit, self.config.max_num_batched_tokens + 1)
        expected = oracle(name, prompt, limit - len(prompt))
        if not request.params.ignore_eos:
            expected = until_eos(expected)
        got = request.output_token_ids
        if request.finish_reason is FinishReason.ABORT:
            assert got == expected[: len(got)]
            return
        assert got == expected, f"{request} differs from the oracle"
        stopped = not request.params.ignore_eos and expected[-1] == EOS
        assert request.finish_reason == (FinishReason.STOP if stopped else FinishReason.LENGTH)
        SEEN["stopped"] += stopped


@examples(400, 3000)
def test_control_plane(count: int) -> None:
    SEEN.clear()
    run_state_machine_as_test(ControlPlane, settings=profile(count, stateful_step_count=25))
    reached = ("refused", "aborted", "aborted in a step", "chunked", "prefix hit", "resumed",
               "same step sharing", "preempted", "stopped")  # fmt: skip
    assert {name: SEEN[name] for name in reached if SEEN[name] < 10} == {}


# -- the engine: text, stop strings, aborts and failing steps --------------------------------------

adds = st.fixed_dictionaries(
    {
        "prompt": prompts,
        "n": st.sampled_from([1, 1, 1, 2, 3]),
        "max_tokens": st.integers(1, 12),
        "stop": st.lists(st.text("#$%&", min_size=1, max_size=3), max_size=2),
        "include": st.booleans(),
        "salt": st.sampled_from([None, None, "a"]),
    }
)
actions = st.lists(
    st.one_of(
        adds,
        adds,
        st.integers(1, 4),  # steps
        st.tuples(st.just("abort"), st.integers(0, 20)),
    ),
    min_size=1,
    max_size=16,
)
failures = st.lists(st.tuples(st.integers(1, 25), st.booleans()), max_size=3)


def expected_child(name: str, prompt: list[int], want: dict[str, Any], limit: int) -> tuple:
    """(token ids, text, finish reason) of an undisturbed continuation, by looking at every step.

    Token i shows as chr(32 + i). The end of sequence, "#", shows only where stops are included.
    """
    tokens = until_eos(oracle(name, prompt, limit - len(prompt)))
    text = ""
    for i, token in enumerate(tokens):
        if token == EOS:
            return tokens, text + "#" * want["include"], "stop"
        text += chr(32 + token)
        found = [stop for stop in want["stop"] if text.endswith(stop)]
        if found:
            cut = 0 if want["include"] else len(max(found, key=len))
            return tokens[: i + 1], text[: len(text) - cut], "stop"
    return tokens, text, "length"


class EngineLife:
    """One scenario: actions, then drain; every continuation's deltas are collected on the way."""

    def __init__(
        self, flags: dict[str, Any], fails: list[tuple[int, bool]], overlapped: bool
    ) -> None:
        self.overlapped = overlapped
        self.fails = dict(fails)
        self.wants: dict[str, dict[str, Any]] = {}
        self.outputs: dict[str, RequestOutput] = {}
        self.deltas: dict[tuple[str, int], str] = {}
        self.failed: set[str] = set()
        self.engine = make_engine(
            script, vocab_size=VOCAB, max_model_len=MAX_MODEL_LEN, eos_token_ids=(EOS,),
            wrap=lambda runner: Flaky(Flaky(runner, self.fail(False), after=False),
                                      self.fail(True), after=True),
            **flags,
        )  # fmt: skip

    def fail(self, after: bool) -> Any:
        def fails(plan: StepPlan) -> Exception | None:
            return RuntimeError("on purpose") if self.fails.get(plan.step) is after else None

        return fails

    def act(self, action: Any) -> None:
        if isinstance(action, int):
            for _ in range(action):
                self.step()
        elif isinstance(action, tuple):
            names = list(self.outputs)
            if names:
                output = self.outputs[names[action[1] % len(names)]]
                live = [completion for completion in output.outputs if not completion.finished]
                self.engine.abort(output.request_id)
                self.engine.check()
                self.collect(output, live)
        else:
            self.add(action)

    def add(self, want: dict[str, Any]) -> None:
        params = SamplingParams(
            n=want["n"], max_tokens=want["max_tokens"], stop=want["stop"],
            include_stop_str_in_output=want["include"],
        )  # fmt: skip
        try:
            output = self.engine.add_request(want["prompt"], params, salt=want["salt"])
        except UserError:
            self.engine.check()
            SEEN["refused"] += 1
            return
        self.wants[output.request_id], self.outputs[output.request_id] = want, output

    def step(self) -> None:
        report = self.engine.step_overlapped() if self.overlapped else self.engine.step()
        self.engine.check()
        for output in report.outputs:
            self.collect(output, output.outputs)
        if report.error is not None:
            assert str(report.error) == "on purpose"
            ran = {name for name, _ in report.ran}
            if self.overlapped:  # the step launched after the failed one fails with it
                ran = {
                    output.request_id + (f"-{completion.index}" if len(output.outputs) > 1 else "")
                    for output in report.outputs
                    for completion in output.outputs
                    if completion.finish_reason == "error"
                }
            assert len(self.engine.scheduler.kv.pool.index) == 0, "spoilt blocks can be found"
            assert not ran & set(self.engine.scheduler.requests)
            self.failed |= ran
            SEEN["failed"] += bool(ran)
        if self.overlapped:
            SEEN["overlapped"] += len(self.engine.scheduler.running) > 0
            return  # the plan looked at is not the newest one
        for child in self.engine.scheduler.requests:
            ran_now = child in {name for name, _ in report.ran}
            assert (self.engine.scheduler.why_waiting(child) is None) == ran_now

    def collect(self, output: RequestOutput, completions: list[CompletionOutput]) -> None:
        for completion in completions:
            key = (output.request_id, completion.index)
            self.deltas[key] = self.deltas.get(key, "") + completion.delta

    def finish(self) -> None:
        for _ in range(4000):
            if not self.engine.has_unfinished_requests():
                break
            self.step()
        assert not self.engine.has_unfinished_requests(), "the engine does not come to an end"
        pool = self.engine.scheduler.kv.pool
        assert pool.num_free == pool.num_usable
        for name, output in self.outputs.items():
            for index in range(len(output.outputs)):
                self.check_child(name, index)

    def check_child(self, name: str, index: int) -> None:
        output, want = self.outputs[name], self.wants[name]
        completion = output.outputs[index]
        child = name if want["n"] == 1 else f"{name}-{index}"
        kv, config = self.engine.scheduler.kv, self.engine.scheduler.config
        limit = min(len(want["prompt"]) + want["max_tokens"], MAX_MODEL_LEN, kv.capacity + 1)
        if not config.enable_chunked_prefill:
            limit = min(limit, config.max_num_batched_tokens + 1)
        tokens, text, reason = expected_child(child, want["prompt"], want, limit)
        assert output.finished and completion.finished
        assert self.deltas[name, index] == completion.text, "deltas do not join to the text"
        if completion.finish_reason in ("abort", "error"):
            got = completion.token_ids
            assert got == tokens[: len(got)]
            assert completion.text == "".join(chr(32 + token) for token in got)
            assert (completion.finish_reason == "error") == (child in self.failed)
            SEEN[completion.finish_reason] += 1
        else:
            assert (completion.token_ids, completion.text) == (tokens, text)
            assert completion.finish_reason == reason
            SEEN["stop string"] += reason == "stop" and tokens[-1] != EOS
            SEEN["right after a failure"] += bool(self.failed)


@examples(300, 2500)
def test_engine(count: int) -> None:
    SEEN.clear()

    @profile(count)
    @given(flags=flags, actions=actions, fails=failures, overlapped=st.booleans())
    def live(
        flags: dict[str, Any], actions: list[Any], fails: list[tuple[int, bool]], overlapped: bool
    ) -> None:
        life = EngineLife(flags, fails, overlapped)
        for action in actions:
            life.act(action)
        life.finish()

    live()
    reached = ("refused", "abort", "error", "failed", "stop string", "right after a failure",
               "overlapped")  # fmt: skip
    assert {name: SEEN[name] for name in reached if SEEN[name] < 10} == {}
