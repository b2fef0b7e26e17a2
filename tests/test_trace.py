"""The trace is complete: block counts, reports and outputs can be rebuilt from its events alone."""

import json
from collections import Counter
from pathlib import Path

import pytest
from doubles import drain, make_engine

from minivllm.base import UserError
from minivllm.engine.engine import Engine, StepReport
from minivllm.request import RequestOutput, SamplingParams
from minivllm.trace import (
    Aborted,
    Added,
    Admitted,
    Allocated,
    CacheHit,
    Chunked,
    Event,
    Evicted,
    Finished,
    Freed,
    NullRecorder,
    Preempted,
    Recorder,
    Refused,
    Sampled,
    Scheduled,
    StepTimed,
    Waited,
    event_from_json,
    event_to_json,
    read_jsonl,
    write_jsonl,
)


def busy_run(recorder) -> tuple[Engine, list[StepReport], list[RequestOutput]]:
    """Everything that an engine does, in a pool of twelve blocks."""
    ticks = iter(range(10**6))
    engine = make_engine(
        num_blocks=13, max_num_batched_tokens=12, max_num_seqs=4, recorder=recorder
    )
    engine.clock = lambda: next(ticks) / 8
    outputs = [
        engine.add_request(list(range(20)), SamplingParams(max_tokens=12)),
        engine.add_request(list(range(14)), SamplingParams(max_tokens=15, n=2)),
        engine.add_request([7] * 6, SamplingParams(max_tokens=20)),
        engine.add_request([9], SamplingParams(max_tokens=20)),
    ]
    with pytest.raises(UserError):
        engine.add_request([1] * 60, SamplingParams())
    reports = [engine.step() for _ in range(4)]
    engine.abort("3")
    reports += drain(engine)
    outputs.append(engine.add_request(list(range(20)), SamplingParams(max_tokens=2)))
    return engine, reports + drain(engine), outputs


@pytest.fixture(scope="module")
def run():
    recorder = Recorder()
    return recorder.events, *busy_run(recorder)


def test_a_busy_run_emits_every_kind(run) -> None:
    events, *_ = run
    kinds = Counter(type(event) for event in events)
    assert set(kinds) == {
        Aborted, Added, Admitted, Allocated, CacheHit, Chunked, Evicted, Finished, Freed, Preempted,
        Refused, Sampled, Scheduled, StepTimed, Waited,
    }  # fmt: skip
    assert set(Event.__subclasses__()) >= set(kinds)


def test_jsonl_gives_back_the_same_events(run, tmp_path: Path) -> None:
    events, *_ = run
    path = tmp_path / "run.jsonl"
    write_jsonl(path, events)
    assert read_jsonl(path) == events
    lines = path.read_text(encoding="utf-8").splitlines()
    assert len(lines) == len(events)
    assert json.loads(lines[0]) == {
        "event": "Added", "step": 0, "request_id": "0", "num_prompt_tokens": 20, "priority": 0,
    }  # fmt: skip
    assert all(event_from_json(event_to_json(event)) == event for event in events)


def test_replayed_blocks_are_those_of_pool_and_reports(run) -> None:
    """References counted from Allocated, CacheHit and Freed give every number of every step."""
    events, engine, reports, _ = run
    references: Counter[int] = Counter()
    cached: set[int] = set()
    taken, hit, freed = Counter(), Counter(), Counter()
    free_after = {}
    for event in events:
        match event:
            case Allocated(step, _, block_ids):
                assert not any(references[block] for block in block_ids), "given out twice"
                references.update(block_ids)
                taken[step] += len(block_ids)
            case CacheHit(step, _, block_ids, num_tokens):
                assert num_tokens == 4 * len(block_ids)
                references.update(block_ids)
                hit[step] += len(block_ids)
                cached |= set(block_ids)
            case Evicted(_, _, block):
                assert references[block] == 0, "a block in use lost its content"
                cached.discard(block)
            case Freed(step, _, block_ids):
                references.subtract(block_ids)
                assert all(references[block] >= 0 for block in block_ids), "freed too often"
                freed[step] += sum(references[block] == 0 for block in block_ids)
            case StepTimed(step, _, _, _, _, _, num_free):
                free_after[step] = num_free
                assert num_free == 12 - sum(count > 0 for count in references.values())
    assert len(free_after) == len(reports)
    for report in reports:
        assert report.blocks_taken == taken[report.step]
        assert report.blocks_hit == hit[report.step]
    aborted = next(event.step for event in events if isinstance(event, Aborted))
    for report in reports:  # what an abort frees is freed between two steps
        assert report.blocks_freed == freed[report.step] or report.step == aborted
    pool = engine.scheduler.kv.pool
    assert sum(taken.values()) == pool.num_allocated
    assert sum(freed.values()) == pool.num_freed
    assert not +references, "somebody still holds a block"


def test_scheduled_tokens_are_those_of_the_reports(run) -> None:
    events, _, reports, _ = run
    for report in reports:
        rows = [e for e in events if isinstance(e, Scheduled) and e.step == report.step]
        assert tuple((e.request_id, e.num_tokens) for e in rows) == report.ran
        (timed,) = [e for e in events if isinstance(e, StepTimed) and e.step == report.step]
        assert timed.num_tokens == sum(count for _, count in report.ran) <= 12
        assert timed.seconds == report.seconds > 0
        assert timed.num_waiting == report.num_waiting
        assert (
            tuple(
                e.request_id for e in events if isinstance(e, Preempted) and e.step == report.step
            )
            == report.preempted
        )


def test_each_life_is_told_in_order(run) -> None:
    events, _, _, outputs = run
    for output in outputs:
        for completion in output.outputs:
            name = output.request_id
            name = name if len(output.outputs) == 1 else f"{name}-{completion.index}"
            life = [event for event in events if event.request_id == name]
            kinds = [type(event) for event in life]
            assert kinds[0] is Added and kinds[-1] in (Finished, Aborted)
            assert kinds.count(Admitted) == 1 + kinds.count(Preempted)
            assert [e.token_id for e in life if isinstance(e, Sampled)] == completion.token_ids
            assert life[-1].num_output_tokens == len(completion.token_ids)
            computed = 0
            for event in life:  # each step begins where the last one ended
                if isinstance(event, Admitted):
                    computed = event.num_cached_tokens
                elif isinstance(event, Scheduled):
                    assert event.start == computed
                    computed += event.num_tokens
                elif isinstance(event, Preempted):
                    assert event.num_tokens == computed
    assert all(e.reason for e in events if isinstance(e, (Waited, Preempted, Chunked, Refused)))


def test_chunks_and_waits_carry_their_numbers(run) -> None:
    events, *_ = run
    chunk = next(event for event in events if isinstance(event, Chunked))
    assert (chunk.request_id, chunk.num_tokens, chunk.num_left) == ("0", 12, 8)
    wait = next(event for event in events if isinstance(event, Waited))
    assert wait == Waited(1, "1-0", "the step's 12 tokens are handed out", 3)
    refused = next(event for event in events if isinstance(event, Refused))
    assert "60 tokens needs 15 KV blocks, but the cache has 12" in refused.reason


def test_without_a_recorder_no_event_is_built() -> None:
    class Silent(NullRecorder):
        def emit(self, event: Event) -> None:
            raise AssertionError(f"{event} was built although nobody listens")

    engine, _, outputs = busy_run(Silent())
    assert engine.scheduler.num_preemptions > 0 and outputs[0].finished


def test_the_recorder_changes_nothing(run) -> None:
    *_, outputs = run
    _, _, silent = busy_run(NullRecorder())
    assert [o.outputs for o in outputs] == [o.outputs for o in silent]


@pytest.mark.parametrize(
    "line",
    [
        b"{",
        b"5",
        b"[1]",
        b'{"step": 1}',
        b'{"event": "Nothing", "step": 1, "request_id": "a"}',
        b'{"event": ["Added"], "step": 1}',
        b'{"event": "Added", "step": 1, "request_id": "a"}',
        b'{"event": "Evicted", "step": 1, "request_id": "", "block_id": 1, "more": 2}',
        b"\xff\xfe",
    ],
)
def test_a_line_that_is_no_event_is_refused_in_a_sentence(line: bytes, tmp_path: Path) -> None:
    path = tmp_path / "broken.jsonl"
    path.write_bytes(b'{"event": "Evicted", "step": 1, "request_id": "", "block_id": 1}\n' + line)
    with pytest.raises(UserError, match="not a trace"):
        read_jsonl(path)
