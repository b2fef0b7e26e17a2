"""The scheduler: which tokens of which requests run in the next step.

There is no prefill phase and no decode phase. A request has `num_tokens` and `num_computed_tokens`;
every step hands out tokens, at most `max_num_batched_tokens` in all, until the second catches up
with the first. A chunk of a prompt, a single decode, what a prefix hit left over, the recompute
after a preemption: all are the same line of code.

Order within a step: running requests before waiting ones, and in both (priority, arrival). When the
pool is empty the last running request is preempted, so the first one always advances.

Knows no torch, no clock, no device. Mirrors vllm/v1/core/sched/scheduler.py; left out: encoder
budgets, KV transfer, structured output, speculation. Chapters 6 to 9 read this file.
"""

from bisect import bisect_left, insort
from heapq import heappop, heappush
from operator import attrgetter

from minivllm.base import UserError, cdiv
from minivllm.cache.manager import KVCacheManager
from minivllm.config import SchedulerConfig
from minivllm.request import FinishReason, Request
from minivllm.sched.plan import NewRow, RowPlan, SampledToken, StepPlan, StepResult
from minivllm.trace import (
    Aborted,
    Added,
    Admitted,
    Allocated,
    CacheHit,
    Chunked,
    EventSink,
    Finished,
    Freed,
    NullRecorder,
    Preempted,
    Sampled,
    Scheduled,
    Waited,
)

_ORDER = attrgetter("sort_key")


class Scheduler:
    """Queues of requests in, one `StepPlan` a step out; `update` takes in what it brought.

    `schedule` may be called again before the `update` of the plan before: a token that is still
    being sampled counts, its id is not needed yet.
    """

    def __init__(
        self, config: SchedulerConfig, kv: KVCacheManager, recorder: EventSink | None = None
    ) -> None:
        self.config = config
        self.kv = kv
        self.recorder: EventSink = NullRecorder() if recorder is None else recorder
        self.step = 0
        self.requests: dict[str, Request] = {}
        self.running: list[Request] = []  # hold a row and blocks; sorted by (priority, arrival)
        self.waiting: list[Request] = []  # hold neither; sorted likewise
        self.num_preemptions = 0
        self._waited: dict[str, str] = {}  # request id -> why it got nothing in the last step
        self._free_rows = list(range(config.max_num_seqs))  # a heap: the lowest row goes first
        self._freed_rows: list[int] = []  # not yet told to the runner
        self._planned: dict[int, list[Request]] = {}  # step -> its requests, in the plan's order

    # -- requests come and go ----------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            UserError: its id is taken, its prompt exceeds the whole KV cache or, without chunked
                prefill, a step, or it has a priority although the policy is first come, first
                served.
        """
        if request.request_id in self.requests:
            raise UserError(
                f"request id {request.request_id!r} is in use: wait for it or take another id"
            )
        if request.priority and self.config.scheduling_policy != "priority":
            raise UserError(
                f"priority {request.priority} has no meaning under the policy "
                f"{self.config.scheduling_policy!r}: start with scheduling_policy='priority'"
            )
        needed = cdiv(request.num_prompt_tokens, self.kv.block_size)
        if needed > self.kv.pool.num_usable:
            raise UserError(
                f"the prompt of {request.num_prompt_tokens:,} tokens needs {needed} KV blocks, but "
                f"the cache has {self.kv.pool.num_usable}: shorten it or give the cache more memory"
            )
        longest = self.kv.capacity
        if not self.config.enable_chunked_prefill:
            # After a preemption prompt and output are computed in one go.
            longest = min(longest, self.config.max_num_batched_tokens)
            if request.num_prompt_tokens > longest:
                raise UserError(
                    f"the prompt of {request.num_prompt_tokens:,} tokens exceeds "
                    f"max_num_batched_tokens {longest:,} without chunked prefill: shorten it, "
                    f"raise the limit or enable chunked prefill"
                )
        # A lone request may fill the cache; the token sampled last needs no slot any more.
        request.max_total_tokens = min(request.max_total_tokens, longest + 1)
        self.requests[request.request_id] = request
        insort(self.waiting, request, key=_ORDER)
        if self.recorder.enabled:
            self.recorder.emit(
                Added(self.step, request.request_id, request.num_prompt_tokens, request.priority)
            )

    def finish(
        self, request_id: str, reason: FinishReason, stop_reason: int | str | None = None
    ) -> Request | None:
        """End a request wherever it stands and free what it holds; None if it is not here."""
        request = self.requests.pop(request_id, None)
        if request is None:
            return None
        request.finish_reason, request.stop_reason = reason, stop_reason
        if request.row >= 0:
            self._release(request)
            self.running.pop(bisect_left(self.running, request.sort_key, key=_ORDER))
        else:
            self.waiting.pop(bisect_left(self.waiting, request.sort_key, key=_ORDER))
        if self.recorder.enabled:
            count = request.num_output_tokens
            self.recorder.emit(
                Aborted(self.step, request_id, count)
                if reason is FinishReason.ABORT
                else Finished(self.step, request_id, reason.value, count)
            )
        return request

    def has_work(self) -> bool:
        """Whether any request is waiting or running."""
        return bool(self.requests)

    def why_waiting(self, request_id: str) -> str | None:
        """Why a request got nothing in the last step; None if it ran, or is not here."""
        if request_id in self._waited:
            return self._waited[request_id]
        request = self.requests.get(request_id)
        if request is None or request.row >= 0:
            return None
        head = self.waiting[0]
        if request is not head:
            return f"behind request {head.request_id}"
        return "it became the first of its queue after the last step was planned"

    # -- a step ------------------------------------------------------------------------------

    def schedule(self) -> StepPlan:
        """Plan the next step. What it computes counts as computed from here on."""
        self.step += 1
        self.kv.pool.step = self.step
        rows: list[RowPlan] = []
        new_rows: list[NewRow] = []
        preempted: list[str] = []
        self._planned[self.step] = []
        self._waited = {}
        budget = self._schedule_running(rows, preempted)
        if preempted:
            self._wait("the KV cache is full: a running request was just preempted")
        else:
            self._admit(rows, new_rows, budget)
        plan = StepPlan(
            step=self.step,
            new_rows=tuple(new_rows),
            rows=tuple(rows),
            freed_rows=tuple(self._freed_rows),
            num_tokens=sum([row.num_tokens for row in rows]),
            preempted=tuple(preempted),
            waited=tuple(self._waited.items()),
        )
        self._freed_rows = []
        return plan

    def _schedule_running(self, rows: list[RowPlan], preempted: list[str]) -> int:
        """Give every running request its next tokens; returns what is left of the budget.

        A chunk of a prompt takes only what the decodes leave, so decodes never starve; the first
        request gets a token in any case, so that somebody always advances.
        """
        budget = self.config.max_num_batched_tokens
        longest_chunk = self.config.long_prefill_token_threshold or budget
        running, allocate_slots = self.running, self.kv.allocate_slots
        num_left = [
            # Nothing for one that ends with the step under way, whatever its token will be.
            total - r.num_computed_tokens if total < r.max_total_tokens else 0
            for r in running
            if (total := len(r.token_ids) + r.num_pending)
        ]
        decodes_left = num_left.count(1)
        planned: list[Request] = []
        i = 0
        while i < len(running):  # the list shrinks at its end when somebody is preempted
            request, num_new = running[i], num_left[i]
            if num_new == 0:
                i += 1
                continue
            if num_new == 1:
                decodes_left -= 1
                num_new = min(1, budget)
            else:
                spare = max(budget - decodes_left, 1 if i == 0 else 0)
                num_new = min(num_new, spare, longest_chunk)
            i += 1
            if num_new == 0:
                self._waited[request.request_id] = (
                    "it runs, but the step's tokens went to other requests"
                )
                continue
            while (new_blocks := allocate_slots(request, num_new)) is None:
                victim = running[-1]
                preempted.append(victim.request_id)
                self._preempt(victim)
                if victim is request:
                    break
            if new_blocks is None:
                break  # it was the last one, and gave its own blocks back
            rows.append(self._plan_row(request, num_new, new_blocks))
            planned.append(request)
            budget -= num_new
        # Only now is it certain that these blocks will be written: let others find them.
        for request in planned:
            self.kv.commit(request)
        return budget

    def _admit(self, rows: list[RowPlan], new_rows: list[NewRow], budget: int) -> None:
        """Move waiting requests to free rows while rows, budget and blocks last."""
        config, kv = self.config, self.kv
        longest_chunk = config.long_prefill_token_threshold or config.max_num_batched_tokens
        while self.waiting:
            request = self.waiting[0]
            if request.num_pending:
                return self._wait("preempted while its last token was on its way")
            if not self._free_rows:
                return self._wait(f"all {config.max_num_seqs} rows are taken (max_num_seqs)")
            if budget == 0:
                return self._wait(
                    f"the step's {config.max_num_batched_tokens} tokens are handed out"
                )
            cached = kv.find_cached_blocks(request)
            num_cached = len(cached) * kv.block_size
            num_left = request.num_tokens - num_cached
            num_new = min(num_left, budget, longest_chunk)
            if num_new < num_left and not config.enable_chunked_prefill:
                if budget < num_left:
                    return self._wait(
                        f"{num_left} tokens to compute in one go, {budget} left in the step"
                    )
                num_new = num_left
            needed = kv.num_blocks_needed(num_cached + num_new, cached)
            if needed > kv.pool.num_free:
                return self._wait(f"needs {needed} KV blocks, {kv.pool.num_free} are free")
            kv.adopt(request, cached)
            del self.waiting[0]
            resumed = request.num_cached_tokens >= 0
            if not resumed:
                request.num_cached_tokens = num_cached
            request.num_computed_tokens = num_cached
            request.row = heappop(self._free_rows)
            insort(self.running, request, key=_ORDER)
            new_rows.append(self._new_row(request))
            if self.recorder.enabled:
                self._record_admission(request, resumed, num_cached)
            new_blocks = kv.allocate_slots(request, num_new)
            assert new_blocks is not None, f"{request} was promised {needed} blocks"
            rows.append(self._plan_row(request, num_new, kv.block_ids(request), new_blocks))
            kv.commit(request)
            budget -= num_new

    def _wait(self, reason: str) -> None:
        """Note why the head of the waiting queue got nothing; the others are behind it."""
        head = self.waiting[0].request_id
        self._waited[head] = reason
        if self.recorder.enabled:
            self.recorder.emit(Waited(self.step, head, reason, len(self.waiting) - 1))

    def _plan_row(
        self,
        request: Request,
        num_new: int,
        block_ids: tuple[int, ...],
        allocated: tuple[int, ...] | None = None,
    ) -> RowPlan:
        """Count `num_new` tokens as computed; `block_ids` are those that the runner lacks."""
        start = request.num_computed_tokens
        request.num_computed_tokens = end = start + num_new
        self._planned[self.step].append(request)
        num_left = len(request.token_ids) + request.num_pending - end
        samples = num_left == 0
        if samples:
            request.num_pending += 1
        if self.recorder.enabled:
            name = request.request_id
            new_blocks = block_ids if allocated is None else allocated
            if new_blocks:
                self.recorder.emit(Allocated(self.step, name, new_blocks))
            self.recorder.emit(Scheduled(self.step, name, start, num_new, samples))
            if num_left:
                reason = f"{num_new} tokens of the step's budget were left for it"
                self.recorder.emit(Chunked(self.step, name, num_new, num_left, reason))
        return RowPlan(request.request_id, request.row, start, num_new, block_ids, samples)

    def _new_row(self, request: Request) -> NewRow:
        return NewRow(
            request.request_id,
            request.row,
            tuple(request.token_ids),
            request.num_prompt_tokens,
            request.params,
            request.seed,
            request.stop_token_ids,
            request.bad_words_ids,
        )

    def _record_admission(self, request: Request, resumed: bool, num_cached: int) -> None:
        name = request.request_id
        self.recorder.emit(Admitted(self.step, name, request.row, num_cached, resumed))
        if num_cached:
            self.recorder.emit(CacheHit(self.step, name, self.kv.block_ids(request), num_cached))

    def _preempt(self, request: Request) -> None:
        """Take row and blocks from the last running request; it waits to be recomputed."""
        assert request is self.running[-1], f"{request} is not the last one"
        if self.recorder.enabled:
            reason = f"no free KV block for {self.running[0].request_id} and those after it"
            self.recorder.emit(
                Preempted(self.step, request.request_id, request.num_computed_tokens, reason)
            )
        self._release(request)
        self.running.pop()
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self.num_preemptions += 1
        insort(self.waiting, request, key=_ORDER)

    def _release(self, request: Request) -> None:
        freed = self.kv.free(request)
        heappush(self._free_rows, request.row)
        self._freed_rows.append(request.row)
        request.row = -1
        if self.recorder.enabled:
            self.recorder.emit(Freed(self.step, request.request_id, freed))

    def update(self, plan: StepPlan, result: StepResult) -> list[tuple[Request, SampledToken]]:
        """Append the sampled tokens and end what has ended.

        Returns the requests that got a token, with it, in the plan's order; those that ended carry
        a `finish_reason` and are no longer in the scheduler.
        """
        grown: list[tuple[Request, SampledToken]] = []
        recording = self.recorder.enabled
        for request, sampled in zip(self._planned.pop(plan.step), result.sampled, strict=True):
            # A request may have ended while the step ran: then its token is dropped.
            if sampled is None or request.finish_reason is not None:
                continue
            token_id = sampled.token_id
            request.num_pending -= 1
            token_ids = request.token_ids
            token_ids.append(token_id)
            grown.append((request, sampled))
            if recording:
                self.recorder.emit(Sampled(plan.step, request.request_id, token_id))
            if token_id in request.stop_token_ids:
                named = token_id in (request.params.stop_token_ids or ())
                self.finish(request.request_id, FinishReason.STOP, token_id if named else None)
            elif len(token_ids) >= request.max_total_tokens:
                self.finish(request.request_id, FinishReason.LENGTH)
        return grown

    def retell(self, plan: StepPlan) -> None:
        """A plan failed, in place of `update`: the runner may not have seen which rows are free."""
        self._planned.pop(plan.step, None)
        self._freed_rows = sorted({*plan.freed_rows, *self._freed_rows})

    def check(self) -> None:
        """Assert every invariant of queues, rows, tables and pool. Valid between steps."""
        self.kv.check(self.running)
        for queue in (self.running, self.waiting):
            keys = [request.sort_key for request in queue]
            assert keys == sorted(keys), "a queue is out of order"
        rows = [request.row for request in self.running]
        assert sorted(rows + self._free_rows) == list(range(self.config.max_num_seqs)), (
            "rows in use and free rows do not add up"
        )
        assert all(request.row == -1 for request in self.waiting), "a waiting request holds a row"
        assert len(self.running) + len(self.waiting) == len(self.requests), "a request is lost"
        for request in self.running:
            assert 0 < request.num_computed_tokens <= request.num_tokens, f"{request} ran ahead"
