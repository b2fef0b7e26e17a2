"""Sharp examples for pool, prefix index, KV manager and scheduler: each one names what it guards.

Random lives of requests are in test_properties.py.
"""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from doubles import make_request, make_scheduler, run_plan

import minivllm
from minivllm.base import UserError
from minivllm.cache.block import Block, FreeQueue, PrefixKey
from minivllm.cache.manager import KVCacheManager
from minivllm.cache.pool import NULL_BLOCK, BlockPool
from minivllm.cache.prefix import ROOT, PrefixIndex
from minivllm.request import FinishReason, Request, SamplingParams
from minivllm.runner.scripted import ScriptedModel, hash_script, token_script
from minivllm.runner.simulated import SimulatedRunner, linear_cost
from minivllm.sched.plan import NewRow, RowPlan, SampledToken, StepPlan, StepResult
from minivllm.sched.scheduler import Scheduler


def ids(blocks) -> list[int]:
    return [block.block_id for block in blocks]


# -- free queue and pool ---------------------------------------------------------------------------


def queue_of(count: int) -> tuple[FreeQueue, list[Block]]:
    queue, blocks = FreeQueue(), [Block(i) for i in range(count)]
    for block in blocks:
        queue.append(block)
    return queue, blocks


@pytest.mark.parametrize("taken", [0, 2, 4])
def test_queue_takes_a_block_out_of_head_middle_and_tail(taken: int) -> None:
    queue, blocks = queue_of(5)
    queue.remove(blocks[taken])
    left = [i for i in range(5) if i != taken]
    assert ids(queue) == left and len(queue) == 4
    queue.append(blocks[taken])  # it can come back, at the end
    assert [queue.popleft().block_id for _ in range(5)] == [*left, taken]
    assert len(queue) == 0 and list(queue) == []


def test_queue_refuses_what_would_break_its_links() -> None:
    queue, blocks = queue_of(2)
    with pytest.raises(AssertionError, match="already queued"):
        queue.append(blocks[0])
    queue.remove(blocks[0])
    with pytest.raises(AssertionError, match="is not queued"):
        queue.remove(blocks[0])
    queue.popleft()
    with pytest.raises(AssertionError, match="empty"):
        queue.popleft()


def test_pool_hands_out_all_but_the_null_block_or_nothing() -> None:
    pool = BlockPool(5)
    assert pool.num_usable == pool.num_free == 4
    assert pool.allocate(5) is None and pool.num_free == 4
    blocks = pool.allocate(4)
    assert blocks is not None and NULL_BLOCK not in ids(blocks)
    assert pool.allocate(1) is None and pool.allocate(0) == []
    pool.free(blocks)
    pool.check([])
    assert (pool.num_allocated, pool.num_freed) == (4, 4)


@pytest.mark.parametrize("num_blocks", [0, 1])
def test_pool_without_a_block_to_hand_out_is_refused(num_blocks: int) -> None:
    with pytest.raises(UserError, match="at least 2"):
        BlockPool(num_blocks)


def test_the_tail_of_a_table_is_evicted_first() -> None:
    pool = BlockPool(6)
    table = pool.allocate(3)
    assert table is not None
    pool.free(table)
    never_used = ids(pool.allocate(2) or [])
    assert not set(never_used) & set(ids(table)), "blocks that were never used go first"
    assert ids(pool.allocate(3) or []) == ids(reversed(table))


def test_a_freed_block_that_is_touched_leaves_the_middle_of_the_queue() -> None:
    pool = BlockPool(4)
    table = pool.allocate(3)
    assert table is not None
    pool.free(table)
    pool.touch([table[1]])
    pool.check([[table[1]]])
    assert ids(pool.allocate(2) or []) == [table[2].block_id, table[0].block_id]


def test_a_shared_block_is_free_when_the_last_owner_lets_go() -> None:
    pool = BlockPool(3)
    (block,) = pool.allocate(1) or []
    pool.touch([block])
    pool.free([block])
    assert pool.num_free == 1 and pool.num_freed == 0
    pool.free([block])
    assert pool.num_free == 2 and pool.num_freed == 1
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free([block])


def test_check_sees_a_lost_reference_and_a_stale_key() -> None:
    pool = BlockPool(4)
    (block,) = pool.allocate(1) or []
    pool.check([[block]])
    with pytest.raises(AssertionError, match="held by 0 tables"):
        pool.check([])
    block.key = PrefixKey(ROOT, (1, 2))  # carried, but not entered
    with pytest.raises(AssertionError, match="carry a key"):
        pool.check([[block]])


# -- prefix index ----------------------------------------------------------------------------------


def enter(index: PrefixIndex, block: Block, parent: int, *tokens: int, **fields: str) -> int:
    return index.insert(PrefixKey(parent, tokens, **fields), block)


def test_keys_hold_parent_tokens_adapter_and_salt() -> None:  # KV-3: the typed key
    keys = {
        PrefixKey(0, (1, 2)),
        PrefixKey(1, (1, 2)),
        PrefixKey(0, (2, 1)),
        PrefixKey(0, (1, 2), adapter="a"),
        PrefixKey(0, (1, 2), salt="a"),
        PrefixKey(0, (1, 2), adapter="a", salt="a"),
    }
    assert len(keys) == 6
    index = PrefixIndex()
    for i, key in enumerate(sorted(keys, key=str)):
        index.insert(key, Block(i + 1))
    assert len(index) == 6, "two keys fell together"
    found = [index.get(key) for key in keys]
    assert len({block.block_id for block in found if block}) == 6


def test_a_match_is_a_chain_from_the_start_with_one_salt() -> None:
    index = PrefixIndex()
    first = enter(index, Block(1), ROOT, 1, 2)
    enter(index, Block(2), first, 3, 4)
    enter(index, Block(3), ROOT, 3, 4)

    def match(tokens: list[int], most: int = 9, salt: str | None = None) -> list[int]:
        return ids(index.match(tokens, 2, most if most < 9 else len(tokens) // 2, salt))

    assert match([1, 2, 3, 4, 5]) == [1, 2]
    assert match([3, 4, 3, 4]) == [3], "a child was found under another parent"
    assert match([1, 2, 9, 9]) == [1]
    assert match([9, 9, 3, 4]) == []
    assert match([1, 2, 3, 4], most=1) == [1]
    assert match([1, 2, 3, 4], salt="s") == []


def test_an_evicted_parent_never_matches_again_even_when_its_tokens_return() -> None:
    index = PrefixIndex()
    parent, child = Block(1), Block(2)
    entry = enter(index, parent, ROOT, 1, 2)
    enter(index, child, entry, 3, 4)
    index.remove(parent)
    assert index.match([1, 2, 3, 4], 2, 2, None) == []
    # The same tokens are computed again, elsewhere: the old child belongs to the old parent.
    assert enter(index, Block(3), ROOT, 1, 2) != entry
    assert ids(index.match([1, 2, 3, 4], 2, 2, None)) == [3]


def test_twins_share_an_entry_and_evicting_one_leaves_the_other() -> None:  # KV-2
    pool = BlockPool(4)
    one, two = pool.allocate(2) or []
    key = PrefixKey(ROOT, (1, 2))
    entry = pool.index.insert(key, one)
    assert pool.index.insert(key, two) == entry, "a twin's children hang on another parent"
    assert two.key is None and pool.index.get(key) is one
    pool.free([two])
    pool.allocate(2)  # takes the third block and the twin's
    assert pool.index.get(key) is one
    pool.free([one])
    pool.allocate(1)
    assert pool.index.get(key) is None


# -- KV manager ------------------------------------------------------------------------------------


def manager(num_blocks: int = 9, block_size: int = 4, caching: bool = True) -> KVCacheManager:
    return KVCacheManager(BlockPool(num_blocks), block_size, caching)


def compute(kv: KVCacheManager, request: Request, count: int) -> tuple[int, ...] | None:
    """What the scheduler does for a request's next tokens."""
    if not kv.block_ids(request) and request.num_computed_tokens == 0:
        cached = kv.find_cached_blocks(request)
        kv.adopt(request, cached)
        request.num_computed_tokens = len(cached) * kv.block_size
    new = kv.allocate_slots(request, count)
    if new is not None:
        request.num_computed_tokens += count
        kv.commit(request)
    return new


def test_slots_grow_block_by_block() -> None:
    kv = manager()
    request = make_request("a", 11)
    assert len(compute(kv, request, 3) or ()) == 1
    assert compute(kv, request, 1) == ()  # the block's last slot
    assert len(compute(kv, request, 1) or ()) == 1  # and its first neighbour
    assert len(compute(kv, request, 6) or ()) == 1
    assert len(kv.block_ids(request)) == 3
    kv.check([request])


def test_allocation_is_all_or_nothing() -> None:
    kv = manager(num_blocks=3)
    request = make_request("a", 12)
    kv.adopt(request, [])
    assert kv.allocate_slots(request, 12) is None
    assert kv.block_ids(request) == () and kv.pool.num_free == 2


@pytest.mark.parametrize(
    ("computed", "in_index"), [(3, 0), (4, 1), (5, 1), (7, 1), (8, 2), (11, 2), (12, 3)]
)
def test_a_block_is_entered_when_full_and_not_before(computed: int, in_index: int) -> None:
    kv = manager()
    request = make_request("a", 12)
    compute(kv, request, computed)
    assert len(kv.pool.index) == in_index
    kv.check([request])


@pytest.mark.parametrize(
    ("length", "cached"), [(1, 0), (15, 0), (16, 0), (17, 16), (32, 16), (33, 32), (34, 32)]
)
def test_at_least_one_token_is_left_to_compute(length: int, cached: int) -> None:  # KV-1
    kv = manager(block_size=16)
    first, again = make_request("a", range(length)), make_request("b", range(length))
    compute(kv, first, length)
    assert len(kv.find_cached_blocks(again)) * 16 == cached
    kv.free(first)
    assert len(kv.find_cached_blocks(again)) * 16 == cached, "freed blocks keep their content"


def test_no_hit_without_caching_with_another_salt_or_with_prompt_logprobs() -> None:
    kv, off = manager(), manager(caching=False)
    for cache in (kv, off):
        compute(cache, make_request("a", range(9)), 9)
    assert len(kv.find_cached_blocks(make_request("b", range(9)))) == 2
    assert off.find_cached_blocks(make_request("b", range(9))) == []
    assert kv.find_cached_blocks(make_request("b", range(9), salt="s")) == []
    wants = SamplingParams(prompt_logprobs=0)
    assert kv.find_cached_blocks(make_request("b", range(9), params=wants)) == []


def test_needed_blocks_count_cached_ones_that_nobody_holds() -> None:
    kv = manager()
    first, again = make_request("a", range(9)), make_request("b", range(9))
    compute(kv, first, 9)
    cached = kv.find_cached_blocks(again)
    assert kv.num_blocks_needed(9, cached) == 1  # two are shared with their owner
    kv.free(first)
    assert kv.num_blocks_needed(9, cached) == 3  # taking them out of the free queue costs two


def test_blocks_are_freed_tail_first_and_so_the_beginning_stays_longest() -> None:
    kv = manager(num_blocks=4)  # three usable
    first = make_request("a", range(12))
    compute(kv, first, 12)
    table = kv.block_ids(first)
    assert kv.free(first) == tuple(reversed(table))
    assert kv.free(first) == (), "a second time there is nothing to free"
    compute(kv, other := make_request("b", 4), 4)
    assert kv.block_ids(other) == (table[2],)
    assert ids(kv.find_cached_blocks(make_request("c", range(12)))) == list(table[:2])


def test_capacity_and_usage() -> None:
    kv = manager(num_blocks=5, block_size=4)
    assert (kv.capacity, kv.usage) == (16, 0.0)
    compute(kv, make_request("a", 8), 8)
    assert kv.usage == 0.5


def test_check_sees_a_shared_block_that_would_be_written() -> None:
    kv = manager()
    request = make_request("a", 6)
    compute(kv, request, 6)
    kv.pool.touch([kv.pool.blocks[kv.block_ids(request)[1]]])
    with pytest.raises(AssertionError):
        kv.check([request])


def test_overwritten_blocks_give_no_hit() -> None:  # KV-2
    scheduler = make_scheduler(num_blocks=5, block_size=4, max_num_batched_tokens=64)
    model = ScriptedModel(hash_script(97), num_blocks=5, block_size=4)
    runs = []
    for name, tokens in (("x", range(8)), ("y", range(100, 116)), ("z", range(8))):
        scheduler.add(request := make_request(name, tokens, max_tokens=1))
        while scheduler.has_work():
            run_plan(scheduler, model)
        runs.append(request)
    assert runs[2].num_cached_tokens == 0
    assert runs[2].output_token_ids == runs[0].output_token_ids


# -- scheduler: helpers ----------------------------------------------------------------------------


def model_for(scheduler: Scheduler) -> ScriptedModel:
    blocks = len(scheduler.kv.pool.blocks)
    return ScriptedModel(hash_script(97), num_blocks=blocks, block_size=scheduler.kv.block_size)


def add(scheduler: Scheduler, *requests: Request) -> None:
    for request in requests:
        request.arrival = len(scheduler.requests)
        request.sort_key = (request.priority, request.arrival)
        scheduler.add(request)


def ran(plan: StepPlan) -> dict[str, int]:
    return {row.request_id: row.num_tokens for row in plan.rows}


def drain(scheduler: Scheduler, model: ScriptedModel, watchdog: int = 200) -> list[StepPlan]:
    plans = []
    while scheduler.has_work():
        assert len(plans) < watchdog, "no end in sight"
        plan, _ = run_plan(scheduler, model)
        assert plan.rows, f"a step without progress: {plan}"
        assert len(set(plan.preempted)) == len(plan.preempted)
        plans.append(plan)
    return plans


# -- scheduler: whole prompt cached, sharing within a step -----------------------------------------


@pytest.mark.parametrize("length", [16, 32, 33, 15, 1])
@pytest.mark.parametrize("max_tokens", [4, 1])
def test_the_whole_prompt_is_cached(length: int, max_tokens: int) -> None:  # KV-1
    scheduler = make_scheduler(num_blocks=20, block_size=16)
    model = model_for(scheduler)
    requests = [make_request(name, range(length), max_tokens=max_tokens) for name in "abcd"]
    add(scheduler, requests[0])
    drain(scheduler, model)
    add(scheduler, requests[1])  # the same again
    plans = drain(scheduler, model)
    assert plans[0].rows[0].num_tokens == length - (length - 1) // 16 * 16 >= 1
    add(scheduler, requests[2], requests[3])  # and twice in one step
    assert set(ran(scheduler.schedule())) == {"c", "d"}
    scheduler.finish("c", FinishReason.ABORT)
    scheduler.finish("d", FinishReason.ABORT)
    add(scheduler, *(make_request(name, range(length), max_tokens=max_tokens) for name in "ef"))
    twins = list(scheduler.waiting)
    drain(scheduler, model)
    for request in (requests[1], *twins):
        assert request.output_token_ids == requests[0].output_token_ids
        assert request.num_cached_tokens <= length - 1
    assert scheduler.kv.pool.num_free == scheduler.kv.pool.num_usable


def test_equal_prompts_of_one_step_share_blocks() -> None:
    scheduler = make_scheduler(num_blocks=20, block_size=4)
    model = model_for(scheduler)
    a, b, c = (make_request(name, range(10), max_tokens=3) for name in "abc")
    c = make_request("c", range(10), max_tokens=3, salt="private")
    add(scheduler, a, b, c)
    plan, _ = run_plan(scheduler, model)
    assert ran(plan) == {"a": 10, "b": 2, "c": 10}
    tables = [scheduler.kv.block_ids(request) for request in (a, b, c)]
    assert tables[0][:2] == tables[1][:2] and tables[0][2] != tables[1][2]
    assert not set(tables[2]) & {*tables[0], *tables[1]}
    drain(scheduler, model)
    assert a.output_token_ids == b.output_token_ids == c.output_token_ids


def test_cached_tokens_do_not_count_against_the_budget() -> None:
    scheduler = make_scheduler(num_blocks=40, block_size=4, max_num_batched_tokens=24)
    model = model_for(scheduler)
    add(scheduler, make_request("warm", range(24), max_tokens=1))
    drain(scheduler, model)
    add(scheduler, *(make_request(name, range(24), max_tokens=1) for name in "abcdef"))
    plan, _ = run_plan(scheduler, model)
    assert ran(plan) == dict.fromkeys("abcdef", 4) and plan.num_tokens == 24
    assert all(row.start == 20 for row in plan.rows)


# -- scheduler: refusals (SCH-1) -------------------------------------------------------------------


def test_a_prompt_larger_than_the_pool_is_refused_with_the_numbers() -> None:  # SCH-1 a
    scheduler = make_scheduler(num_blocks=4, block_size=4)
    with pytest.raises(UserError, match=r"13 tokens needs 4 KV blocks, but the cache has 3"):
        scheduler.add(make_request("a", 13))
    assert not scheduler.has_work()
    scheduler.add(make_request("a", 12))  # and its id is free


@pytest.mark.parametrize(("prompt", "wanted", "got"), [(10, 50, 3), (12, 5, 1)])
def test_a_request_that_fills_the_pool_ends_by_length(prompt, wanted, got) -> None:  # SCH-1 b, c
    scheduler = make_scheduler(num_blocks=4, block_size=4)
    scheduler.add(request := make_request("a", prompt, max_tokens=wanted))
    drain(scheduler, model_for(scheduler))
    assert request.finish_reason is FinishReason.LENGTH
    assert request.num_output_tokens == got and request.num_preemptions == 0


def test_a_large_request_beside_short_ones() -> None:  # SCH-1 d
    scheduler = make_scheduler(num_blocks=4, block_size=4)
    requests = [make_request("large", 10, max_tokens=50), make_request("s1", 3, max_tokens=4),
                make_request("s2", 3, max_tokens=4)]  # fmt: skip
    add(scheduler, *requests)
    drain(scheduler, model_for(scheduler))
    assert [r.num_output_tokens for r in requests] == [3, 4, 4]
    assert {r.finish_reason for r in requests} == {FinishReason.LENGTH}


def test_other_refusals() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", 3))
    with pytest.raises(UserError, match="'a' is in use"):  # LIF-2
        scheduler.add(make_request("a", 3))
    with pytest.raises(UserError, match="scheduling_policy='priority'"):
        scheduler.add(make_request("b", 3, priority=1))
    strict = make_scheduler(enable_chunked_prefill=False, max_num_batched_tokens=16, num_blocks=99)
    with pytest.raises(UserError, match="17 tokens exceeds max_num_batched_tokens 16"):
        strict.add(make_request("a", 17))
    scheduler.check()
    assert list(scheduler.requests) == ["a"]


def test_without_chunks_a_request_never_outgrows_the_step_that_recomputes_it() -> None:
    scheduler = make_scheduler(
        enable_chunked_prefill=False, max_num_batched_tokens=16, num_blocks=8, block_size=4
    )
    requests = [make_request(name, 10, max_tokens=50) for name in "abc"]
    add(scheduler, *requests)
    drain(scheduler, model_for(scheduler))
    assert [r.num_output_tokens for r in requests] == [7, 7, 7]  # 16 computed, and one more drawn
    assert scheduler.num_preemptions > 0


# -- scheduler: budget, rows, chunks ---------------------------------------------------------------


def test_decodes_come_first_and_a_chunk_takes_what_is_left() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8, num_blocks=64)
    model = model_for(scheduler)
    add(scheduler, make_request("a", 3), make_request("b", 3))
    assert ran(run_plan(scheduler, model)[0]) == {"a": 3, "b": 3}
    add(scheduler, make_request("long", 20))
    plan, _ = run_plan(scheduler, model)
    assert ran(plan) == {"a": 1, "b": 1, "long": 6}
    assert [row.samples for row in plan.rows] == [True, True, False]
    assert ran(run_plan(scheduler, model)[0]) == {"a": 1, "b": 1, "long": 6}


def test_a_chunk_before_decodes_leaves_them_their_tokens() -> None:
    scheduler = make_scheduler(
        max_num_batched_tokens=4, num_blocks=64, scheduling_policy="priority"
    )
    model = model_for(scheduler)
    add(scheduler, make_request("a", 1), make_request("b", 1))
    run_plan(scheduler, model)
    add(scheduler, make_request("first", 9, priority=-1))
    run_plan(scheduler, model)
    assert scheduler.running[0].request_id == "first"
    assert ran(run_plan(scheduler, model)[0]) == {"first": 2, "a": 1, "b": 1}


def test_there_are_never_more_rows_than_tokens_in_a_step() -> None:
    """So whoever runs gets at least one token in each step."""
    scheduler = make_scheduler(max_num_batched_tokens=3, num_blocks=64, max_num_seqs=9)
    model = model_for(scheduler)
    add(scheduler, *(make_request(name, 2, max_tokens=6) for name in "abcdef"))
    for plan in drain(scheduler, model):
        assert plan.num_tokens <= 3 and len(scheduler.running) <= 3
        assert not {name for name, _ in plan.waited} & {r.request_id for r in scheduler.running}


def test_long_prompts_are_cut_to_the_threshold() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=20, long_prefill_token_threshold=6)
    model = model_for(scheduler)
    add(scheduler, make_request("a", 15), make_request("b", 15))
    assert ran(run_plan(scheduler, model)[0]) == {"a": 6, "b": 6}
    assert ran(run_plan(scheduler, model)[0]) == {"a": 6, "b": 6}
    assert ran(run_plan(scheduler, model)[0]) == {"a": 3, "b": 3}


def test_without_chunked_prefill_a_prompt_waits_until_it_fits_whole() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=10, enable_chunked_prefill=False)
    model = model_for(scheduler)
    add(scheduler, make_request("a", 6), make_request("b", 6), make_request("c", 2))
    assert ran(run_plan(scheduler, model)[0]) == {"a": 6}
    assert scheduler.why_waiting("b") == "6 tokens to compute in one go, 4 left in the step"
    assert scheduler.why_waiting("c") == "behind request b"
    assert ran(run_plan(scheduler, model)[0]) == {"a": 1, "b": 6, "c": 2}


def test_never_more_rows_than_max_num_seqs() -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    model = model_for(scheduler)
    add(scheduler, *(make_request(name, 2, max_tokens=i + 1) for i, name in enumerate("abc")))
    assert ran(run_plan(scheduler, model)[0]) == {"a": 2, "b": 2}
    assert scheduler.why_waiting("c") == "all 2 rows are taken (max_num_seqs)"
    plan, _ = run_plan(scheduler, model)  # a has ended: its row is c's
    assert ran(plan) == {"b": 1, "c": 2}
    assert plan.freed_rows == (0,) and [new.row for new in plan.new_rows] == [0]


# -- scheduler: reasons ----------------------------------------------------------------------------


def test_every_wait_has_its_reason() -> None:
    scheduler = make_scheduler(num_blocks=6, block_size=4, max_num_batched_tokens=12)
    model = model_for(scheduler)
    add(scheduler, make_request("a", 10), make_request("b", 13), make_request("c", 1))
    first = "it became the first of its queue after the last step was planned"
    assert scheduler.why_waiting("a") == first
    assert scheduler.why_waiting("b") == "behind request a"
    plan, _ = run_plan(scheduler, model)
    assert ran(plan) == {"a": 10, "b": 2}
    assert scheduler.why_waiting("a") is None and scheduler.why_waiting("unknown") is None
    assert scheduler.why_waiting("c") == "the step's 12 tokens are handed out"
    assert plan.waited == (("c", "the step's 12 tokens are handed out"),)


def test_a_full_pool_is_a_reason_with_numbers() -> None:
    scheduler = make_scheduler(num_blocks=5, block_size=4)
    model = model_for(scheduler)
    add(scheduler, make_request("a", 12), make_request("b", 8), make_request("c", 1))
    run_plan(scheduler, model)
    assert scheduler.why_waiting("b") == "needs 2 KV blocks, 1 are free"
    assert scheduler.why_waiting("c") == "behind request b"
    scheduler.finish("b", FinishReason.ABORT)
    assert "became the first" in (scheduler.why_waiting("c") or "")


# -- scheduler: preemption -------------------------------------------------------------------------


def two_that_do_not_fit(**flags) -> tuple[Scheduler, ScriptedModel]:
    """Four usable blocks of four; two requests of two blocks each want a third one."""
    scheduler = make_scheduler(num_blocks=5, block_size=4, **flags)
    return scheduler, model_for(scheduler)


def test_the_latest_is_preempted_and_recomputed() -> None:
    scheduler, model = two_that_do_not_fit()
    a, b = (make_request(name, 7, max_tokens=6) for name in "ab")
    add(scheduler, a, b)
    run_plan(scheduler, model)
    run_plan(scheduler, model)
    plan, _ = run_plan(scheduler, model)  # nine tokens each: the third block
    assert plan.preempted == ("b",) and ran(plan) == {"a": 1}
    assert b.row == -1 and b.num_computed_tokens == 0 and b.num_preemptions == 1
    assert (
        scheduler.why_waiting("b") == "the KV cache is full: a running request was just preempted"
    )
    assert scheduler.waiting == [b] and plan.freed_rows == (1,)
    assert b.num_output_tokens == 2, "what was generated is kept"
    drain(scheduler, model)
    alone = make_scheduler()
    twins = [make_request(name, 7, max_tokens=6) for name in "ab"]
    add(alone, *twins)
    drain(alone, model_for(alone))
    assert [a.output_token_ids, b.output_token_ids] == [t.output_token_ids for t in twins]
    assert scheduler.num_preemptions == 1


def test_a_resumed_request_brings_its_output_and_keeps_its_first_hit() -> None:
    scheduler, model = two_that_do_not_fit()
    a, b = (make_request(name, 7, max_tokens=6) for name in "ab")
    add(scheduler, a, b)
    plans = drain(scheduler, model)
    resumed = [new for plan in plans[1:] for new in plan.new_rows]
    assert len(resumed) == 1 and resumed[0].request_id == "b"
    assert resumed[0].token_ids == (*b.prompt_token_ids, *b.output_token_ids[:2])
    assert resumed[0].num_prompt_tokens == 7
    assert b.num_cached_tokens == 0


def test_the_lowest_priority_goes_first_whoever_came_first() -> None:
    scheduler, model = two_that_do_not_fit(scheduling_policy="priority")
    low, high = make_request("low", 7, priority=5), make_request("high", 7, priority=1)
    add(scheduler, low, high)
    preempted = [name for plan in drain(scheduler, model) for name in plan.preempted]
    assert preempted == ["low"]


def test_waiting_requests_are_ordered_by_priority_then_arrival() -> None:
    scheduler = make_scheduler(max_num_seqs=1, scheduling_policy="priority")
    model = model_for(scheduler)
    add(scheduler, make_request("a", 2, priority=1), make_request("b", 2, priority=-1),
        make_request("c", 2, priority=1), make_request("d", 2, priority=-1))  # fmt: skip
    order = [new.request_id for plan in drain(scheduler, model) for new in plan.new_rows]
    assert order == ["b", "d", "a", "c"]


def test_several_victims_in_one_step_from_the_end() -> None:
    scheduler, model = two_that_do_not_fit(
        scheduling_policy="priority", long_prefill_token_threshold=5
    )
    add(scheduler, *(make_request(name, 3, priority=1) for name in "ab"))
    run_plan(scheduler, model)
    add(scheduler, make_request("first", 9, priority=0))
    assert ran(run_plan(scheduler, model)[0]) == {"a": 1, "b": 1, "first": 5}
    plan, _ = run_plan(scheduler, model)  # everybody wants one more block, and none is free
    assert plan.preempted == ("b", "a") and ran(plan) == {"first": 4}
    drain(scheduler, model)


def test_no_request_is_preempted_for_ever() -> None:
    """Twelve requests in a pool that holds two: everyone ends, in bounded time."""
    scheduler = make_scheduler(num_blocks=9, block_size=2, max_num_batched_tokens=6)
    requests = [make_request(f"r{i}", 3, max_tokens=10) for i in range(12)]
    add(scheduler, *requests)
    plans = drain(scheduler, model_for(scheduler), watchdog=12 * 13)
    assert scheduler.num_preemptions > 3 and len(plans) < 12 * 13
    assert all(request.num_output_tokens == 10 for request in requests)


# -- scheduler: the runner's side of the contract --------------------------------------------------


def test_rows_are_told_when_taken_and_when_freed() -> None:
    scheduler = make_scheduler()
    model = model_for(scheduler)
    add(scheduler, make_request("a", 6, max_tokens=1), make_request("b", 2, max_tokens=3))
    plan, _ = run_plan(scheduler, model)
    assert [(new.request_id, new.row) for new in plan.new_rows] == [("a", 0), ("b", 1)]
    assert plan.new_rows[0].token_ids == tuple(make_request("a", 6).token_ids)
    assert [len(row.new_block_ids) for row in plan.rows] == [2, 1]
    assert plan.freed_rows == ()
    scheduler.finish("b", FinishReason.ABORT)
    plan, _ = run_plan(scheduler, model)
    assert sorted(plan.freed_rows) == [0, 1] and plan.rows == ()
    assert run_plan(scheduler, model)[0].freed_rows == (), "told once"


def test_a_new_row_names_its_cached_blocks_as_new_to_the_runner() -> None:
    scheduler = make_scheduler(block_size=4)
    model = model_for(scheduler)
    add(scheduler, make_request("a", range(9), max_tokens=1))
    drain(scheduler, model)
    add(scheduler, b := make_request("b", range(9), max_tokens=3))
    plan, _ = run_plan(scheduler, model)
    assert plan.rows[0].new_block_ids == scheduler.kv.block_ids(b)
    assert (plan.rows[0].start, plan.rows[0].num_tokens) == (8, 1)
    assert run_plan(scheduler, model)[0].rows[0].new_block_ids == ()


def test_a_failed_plan_is_told_again() -> None:
    scheduler = make_scheduler()
    model = model_for(scheduler)
    add(scheduler, make_request("a", 3, max_tokens=1))
    run_plan(scheduler, model)
    add(scheduler, make_request("b", 3))
    plan = scheduler.schedule()  # never reaches the runner
    assert plan.freed_rows == (0,) and plan.new_rows[0].row == 0
    scheduler.finish("b", FinishReason.ERROR)
    scheduler.retell(plan)
    add(scheduler, make_request("c", 3))
    plan, _ = run_plan(scheduler, model)
    assert plan.freed_rows == (0,)


def test_update_ends_requests_by_stop_token_and_by_length() -> None:
    script = token_script({"a": [5, 6, 7], "b": [5, 5, 5], "c": [9]}, end_token=2)
    scheduler = make_scheduler()
    model = ScriptedModel(script, num_blocks=64, block_size=4)
    stop = SamplingParams(max_tokens=9, stop_token_ids=[7])
    a = make_request("a", 2, params=stop, eos_token_ids=(2,))
    b = make_request("b", 2, max_tokens=2, eos_token_ids=(2,))
    c = make_request("c", 2, max_tokens=9, eos_token_ids=(2,))
    add(scheduler, a, b, c)
    drain(scheduler, model)
    assert (a.output_token_ids, a.finish_reason, a.stop_reason) == ([5, 6, 7], "stop", 7)
    assert (b.output_token_ids, b.finish_reason, b.stop_reason) == ([5, 5], "length", None)
    assert (c.output_token_ids, c.finish_reason, c.stop_reason) == ([9, 2], "stop", None)


def test_an_abort_between_plan_and_update_drops_the_token() -> None:
    scheduler = make_scheduler()
    model = model_for(scheduler)
    add(scheduler, a := make_request("a", 3), b := make_request("b", 3))
    plan = scheduler.schedule()
    result = model.launch(plan).result()
    scheduler.finish("a", FinishReason.ABORT)
    grown = scheduler.update(plan, result)
    assert [request for request, _ in grown] == [b] and a.output_token_ids == []
    scheduler.check()
    assert scheduler.finish("a", FinishReason.ABORT) is None


def test_check_sees_a_lost_request_and_a_lost_row() -> None:
    scheduler = make_scheduler()
    add(scheduler, make_request("a", 3))
    lost = scheduler.waiting.pop()
    with pytest.raises(AssertionError, match="a request is lost"):
        scheduler.check()
    scheduler.waiting.append(lost)
    scheduler._free_rows.pop()
    with pytest.raises(AssertionError, match="do not add up"):
        scheduler.check()


# -- the scripted model finds what is wrong --------------------------------------------------------


def row(name: str, start: int, count: int, blocks: tuple[int, ...], samples: bool) -> RowPlan:
    return RowPlan(name, 0, start, count, blocks, samples)


@pytest.mark.parametrize(
    ("planned", "complaint"),
    [
        (row("a", 0, 4, (0,), True), "null block"),
        (row("a", 0, 5, (1, 2), True), "do not exist yet"),
        (row("b", 0, 4, (1,), True), "another owner"),
        (row("a", 0, 3, (1,), True), "samples at the wrong token"),
        (row("a", 0, 4, (1,), False), "samples at the wrong token"),
        (row("a", 2, 2, (1,), True), "does not hold the KV"),
    ],
)
def test_the_scripted_model_refuses_a_broken_plan(planned: RowPlan, complaint: str) -> None:
    model = ScriptedModel(hash_script(9), num_blocks=4, block_size=4)
    new = NewRow("a", 0, (1, 2, 3, 4), 4, SamplingParams(), 0, frozenset())
    with pytest.raises(AssertionError, match=complaint):
        model.launch(StepPlan(1, (new,), (planned,), (), planned.num_tokens))


def test_the_scripted_model_sees_a_row_given_away_twice() -> None:
    model = ScriptedModel(hash_script(9), num_blocks=4, block_size=4)
    new = NewRow("a", 0, (1, 2), 2, SamplingParams(), 0, frozenset())
    model.launch(StepPlan(1, (new,), (), (), 0))
    with pytest.raises(AssertionError, match="given away twice"):
        model.launch(StepPlan(2, (new,), (), (), 0))


def test_forced_tokens_and_logprobs_of_the_scripted_model() -> None:
    model = ScriptedModel(token_script({"a": [5]}, end_token=2), num_blocks=4, block_size=4)
    params = SamplingParams(logprobs=0)
    new = NewRow("a", 0, (1, 2), 2, params, 0, frozenset())
    plan = StepPlan(1, (new,), (row("a", 0, 2, (1,), True),), (), 2)
    result: StepResult = model.launch(plan).result()
    assert result.sampled == (SampledToken(5, {5: (0.0, 1, None)}),)


def test_the_simulated_runner_moves_its_clock_by_the_cost_of_each_plan() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=16, num_blocks=999)
    runner = SimulatedRunner(linear_cost(per_step=0.5, per_token=0.25), token_id=7)
    add(scheduler, *(make_request(f"r{i}", 5, max_tokens=4) for i in range(9)))
    requests, tokens, steps = list(scheduler.requests.values()), 0, 0
    while scheduler.has_work():
        plan, _ = run_plan(scheduler, runner)
        tokens, steps = tokens + plan.num_tokens, steps + 1
    assert tokens == 9 * (5 + 3)
    assert runner.clock == runner.busy == 0.5 * steps + 0.25 * tokens
    assert all(request.output_token_ids == [7] * 4 for request in requests)


# -- two towers ------------------------------------------------------------------------------------

CONTROL_PLANE = ("base", "config", "request", "trace", "cache", "sched", "runner/scripted",
                 "runner/simulated")  # fmt: skip


def test_the_control_plane_imports_no_torch_and_no_numpy() -> None:
    """Neither in its files nor through what they import."""
    package = Path(minivllm.__file__).parent
    files = [
        file
        for part in CONTROL_PLANE
        for file in ([package / f"{part}.py"], (package / part).glob("*.py"))[
            (package / part).is_dir()
        ]
    ]
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {name.split(".")[0] for name in names} & {"torch", "numpy"}, file
    code = (
        "import sys, minivllm.sched.scheduler, minivllm.runner.simulated\n"
        "assert not {'torch', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
