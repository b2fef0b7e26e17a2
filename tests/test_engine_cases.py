"""The engine's cases, with names from the public faults that they guard against.

Scripted tokens where the text or the life of a request matters; where numbers matter, the real
runner over `TinyRandom`, whose dense `generate()` shares no code with the engine.
"""

import functools
import gc
import math
import os
import signal
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from doubles import Flaky, drain, make_engine, pieces, tiny_engine

from minivllm import LLM, SamplingParams
from minivllm.base import EngineDeadError, UserError
from minivllm.cache.pool import BlockPool
from minivllm.engine.engine import EngineStepError, snapshot
from minivllm.kernels import reference
from minivllm.request import RequestOutput
from minivllm.runner.sampler import Sampler
from minivllm.runner.scripted import token_script
from minivllm.runner.tiny import TinyRandom
from minivllm.sched.scheduler import Scheduler
from minivllm.trace import Preempted, Recorder

sys.path.insert(0, str(Path(__file__).parent.parent / "scripts"))
from bad_inputs import CONTEXT, TABLE  # noqa: E402

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


@functools.cache
def tiny(kind: str = "llama") -> TinyRandom:
    overrides: dict[str, dict[str, Any]] = {
        "llama": {},
        "qwen2": {"architecture": "qwen2", "qkv_bias": True, "tie_word_embeddings": True},
        "qwen3": {"architecture": "qwen3", "qk_norm": True},
        "mistral": {"architecture": "mistral", "sliding_window": 7},
    }
    return TinyRandom(**overrides[kind])


def tokens_of(*outputs: RequestOutput) -> list[list[int]]:
    return [completion.token_ids for output in outputs for completion in output.outputs]


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return [(seed * 97 + 31 * i + i * i) % 512 for i in range(length)]


# -- text: OUT-3, STP-1 ----------------------------------------------------------------------------


def test_a_stop_token_does_not_take_the_last_word_along() -> None:  # OUT-3 a
    engine = make_engine(
        token_script({"0": [1, 2, 3, 4]}, end_token=4),
        tokenizer=pieces("?", "A", "B", "C", "S"), vocab_size=5,
    )  # fmt: skip
    output = engine.add_request([0], SamplingParams(stop_token_ids=[4]))
    texts = []
    while not output.finished:
        engine.step()
        texts.append(output.outputs[0].text)
    assert texts == ["A", "AB", "ABC", "ABC"]
    completion = output.outputs[0]
    assert completion.token_ids == [1, 2, 3, 4], "the stop token counts as an output token"
    assert (completion.finish_reason, completion.stop_reason) == ("stop", 4)


@pytest.mark.parametrize(("include", "text"), [(False, "one"), (True, "one;")])
def test_include_stop_str_in_output(include: bool, text: str) -> None:  # OUT-3 b
    engine = make_engine(
        token_script({"0": [1, 2, 3]}, end_token=0),
        tokenizer=pieces("?", "one", ";", "two"), vocab_size=4,
    )  # fmt: skip
    params = SamplingParams(stop=[";"], include_stop_str_in_output=include)
    output = engine.add_request([0], params)
    deltas = []
    while not output.finished:
        deltas += [live.outputs[0].delta for live in engine.step().outputs]
    completion = output.outputs[0]
    assert "".join(deltas) == completion.text == text
    assert (completion.finish_reason, completion.stop_reason) == ("stop", ";")
    assert completion.token_ids == [1, 2]


def test_each_of_several_ends_of_sequence_stops() -> None:  # STP-1
    ends = {"0": 2, "1": 9, "2": 7}
    engine = make_engine(
        token_script({name: [20, 21, end, 30] for name, end in ends.items()}, end_token=40),
        eos_token_ids=(2, 7, 9),
    )  # fmt: skip
    outputs = [engine.add_request([1], SamplingParams()) for _ in ends]
    ignoring = engine.add_request([1], SamplingParams(ignore_eos=True, max_tokens=4))
    drain(engine)
    for output, end in zip(outputs, ends.values(), strict=True):
        completion = output.outputs[0]
        assert completion.token_ids == [20, 21, end]
        assert (completion.finish_reason, completion.stop_reason) == ("stop", None)
        assert completion.text == engine.tokenizer.decode([20, 21])
    assert ignoring.outputs[0].finish_reason == "length"


def test_ends_of_sequence_come_from_all_three_files(tmp_path: Path) -> None:  # STP-1
    folder = tiny().save(tmp_path)
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 9]}')
    (folder / "tokenizer_config.json").write_text('{"eos_token": "\'"}')  # id 7
    with LLM(str(folder), paranoid=True) as llm:
        assert llm.engine.limits.eos_token_ids == (1, 7, 9)
        for end in (1, 7, 9, 8):
            params = SamplingParams(allowed_token_ids=[end], max_tokens=3)
            completion = llm.generate("hello", params, use_tqdm=False)[0].outputs[0]
            expected = ([8] * 3, "(((", "length") if end == 8 else ([end], "", "stop")
            assert (completion.token_ids, completion.text, completion.finish_reason) == expected


# -- limits: SCH-2; ids: LIF-2 ---------------------------------------------------------------------


@pytest.mark.parametrize("length", [63, 64, 65, 5000])
@pytest.mark.parametrize("max_tokens", [1, 10, None])
def test_a_prompt_too_long_is_answered(length: int, max_tokens: int | None) -> None:  # SCH-2
    engine = make_engine(max_model_len=64)
    prompt, params = [i % 64 for i in range(length)], SamplingParams(max_tokens=max_tokens)
    if length == 63 and max_tokens != 10:
        output = engine.add_request(prompt, params)
        drain(engine)
        assert len(output.outputs[0].token_ids) == 1
        assert output.outputs[0].finish_reason == "length"
    else:
        with pytest.raises(UserError) as caught:
            engine.add_request(prompt, params)
        assert f"{length:,} tokens" in str(caught.value) and "64" in str(caught.value)
    after = engine.add_request([1, 2, 3], SamplingParams(max_tokens=2))
    drain(engine)
    assert len(after.outputs[0].token_ids) == 2


def test_a_live_id_is_refused_and_an_old_one_is_free() -> None:  # LIF-2
    engine = make_engine()
    params = SamplingParams(max_tokens=3)
    first = engine.add_request([1, 2], params, request_id="mine")
    with pytest.raises(UserError, match="'mine' is in use"):
        engine.add_request([1, 2], params, request_id="mine")
    drain(engine)
    second = engine.add_request([1, 2], params, request_id="mine")
    drain(engine)
    assert first is not second and tokens_of(first) == tokens_of(second)


@pytest.mark.parametrize("n", [1, 2])
def test_an_id_is_free_when_no_step_under_way_knows_it(n: int) -> None:  # LIF-2
    engine = make_engine()
    params = SamplingParams(n=n, max_tokens=5)
    engine.add_request([1, 2], params, request_id="mine")
    engine.step_overlapped()
    engine.abort("mine")
    with pytest.raises(UserError, match="'mine' is in use"):
        engine.add_request([1, 2], params, request_id="mine")
    engine.step_overlapped()  # the step that was under way, and brings nothing any more
    again = engine.add_request([1, 2], params, request_id="mine")
    drain(engine)
    assert [len(completion.token_ids) for completion in again.outputs] == [5] * n


def test_numbers_given_out_avoid_names_that_somebody_chose() -> None:  # LIF-2
    engine = make_engine()
    params = SamplingParams(max_tokens=3)
    names = [engine.add_request([1], params, request_id=name).request_id for name in "21"]
    names += [engine.add_request([1], params).request_id for _ in range(3)]
    assert len(set(names)) == 5
    with pytest.raises(UserError, match="in use"):  # a continuation's id counts as well
        engine.add_request([1], SamplingParams(n=2, max_tokens=2), request_id="x")
        engine.add_request([1], params, request_id="x-1")
    drain(engine)


def test_generate_gives_whole_texts_and_no_deltas(tmp_path: Path) -> None:
    folder = TinyRandom().save(tmp_path / "tiny")
    with LLM(str(folder)) as llm:
        params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
        whole = llm.generate([[1, 2]], params, use_tqdm=False)[0].outputs[0]
        pieces = [output.outputs[0].delta for output in llm.stream([1, 2], params)]
    assert whole.delta == "" and len(whole.text) > 0
    assert "".join(pieces) == whole.text


def test_generate_twice_and_after_a_refusal(llm: LLM) -> None:  # LIF-2
    prompts = ["one", "two", "three"]
    expected = [tiny().generate(llm.tokenizer.encode(text), 24) for text in prompts]
    assert tokens_of(*llm.generate(prompts, GREEDY, use_tqdm=False)) == expected
    with pytest.raises(UserError):  # the last prompt is wrong: the others do not stay behind
        llm.generate([*prompts, ""], GREEDY, use_tqdm=False)
    assert not llm.has_unfinished_requests()
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert tokens_of(*outputs) == expected
    assert [output.prompt for output in outputs] == prompts


# -- the same answer: chunks x prefix cache x preemption x block sizes x budgets -------------------

PROMPTS = [
    prompt_of(1),
    prompt_of(40),
    prompt_of(40)[:33] + prompt_of(30, seed=1),
    prompt_of(16),
    prompt_of(32),
    prompt_of(33, seed=2),
    prompt_of(90, seed=3),
    prompt_of(15),
]
BLOCKS_OF_LARGEST = {1: 114, 8: 15, 16: 8, 24: 5, 32: 4}  # 90 + 24 tokens, the last not stored


@functools.cache
def answers(kind: str) -> list[list[int]]:
    return [tiny(kind).generate(prompt, 24) for prompt in PROMPTS]


@pytest.mark.parametrize("block_size", BLOCKS_OF_LARGEST)
@pytest.mark.parametrize("budget", [16, 64, 2048])
@pytest.mark.parametrize("small_pool", [False, True])
def test_greedy_equals_the_dense_oracle(block_size: int, budget: int, small_pool: bool) -> None:
    num_blocks = BLOCKS_OF_LARGEST[block_size] + 1 if small_pool else 2048 // block_size
    for caching in (True, False):
        engine = tiny_engine(
            tiny(),
            block_size=block_size,
            num_blocks=num_blocks,
            max_num_batched_tokens=budget,
            enable_prefix_caching=caching,
        )
        for run in ("cold", "warm"):
            outputs = [engine.add_request(prompt, GREEDY) for prompt in PROMPTS]
            drain(engine)
            assert tokens_of(*outputs) == answers("llama"), (caching, run)
        assert (engine.scheduler.num_preemptions > 0) == small_pool
        pool = engine.scheduler.kv.pool
        assert (pool.num_touched > 0) == caching


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "mistral"])
def test_every_kind_equals_the_dense_oracle(kind: str) -> None:
    for flags in (
        {"block_size": 5, "max_num_batched_tokens": 23, "num_blocks": 40},
        {"block_size": 16, "enable_chunked_prefill": False, "max_num_batched_tokens": 512},
        {"block_size": 4, "max_num_seqs": 2, "long_prefill_token_threshold": 7},
        {"block_size": 3, "scheduling_policy": "priority", "num_blocks": 45},
    ):
        engine = tiny_engine(tiny(kind), **flags)
        ranks = [-i % 3 if "scheduling_policy" in flags else 0 for i in range(len(PROMPTS))]
        outputs = [
            engine.add_request(prompt, GREEDY, priority=rank)
            for prompt, rank in zip(PROMPTS, ranks, strict=True)
        ]
        drain(engine)
        assert tokens_of(*outputs) == answers(kind)


# -- preemption: SCH-3 -----------------------------------------------------------------------------


def preempting(params: SamplingParams, num_blocks: int, **flags: Any) -> tuple[Any, Any, list[str]]:
    """Four requests of 8 tokens, all deltas joined; with 12 blocks of 4 they cannot all stay."""
    engine = tiny_engine(tiny(), block_size=4, num_blocks=num_blocks + 1, **flags)
    outputs = [engine.add_request(prompt_of(8, seed), params) for seed in range(4)]
    deltas = [""] * 4
    first_token_times = {}
    while engine.has_unfinished_requests():
        for output in engine.step().outputs:
            deltas[int(output.request_id)] += output.outputs[0].delta
            first_token_times.setdefault(output.request_id, output.time_to_first_token)
    assert [o.time_to_first_token for o in outputs] == [first_token_times[str(i)] for i in range(4)]
    return engine, outputs, deltas


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0, max_tokens=30),
        SamplingParams(temperature=0, max_tokens=30, logprobs=1),
        SamplingParams(temperature=0.9, seed=5, max_tokens=30, logprobs=0),
        SamplingParams(temperature=0, max_tokens=30, repetition_penalty=1.5, min_tokens=20),
        SamplingParams(temperature=0, max_tokens=30, bad_words=["a", "б"], presence_penalty=0.5),
    ],
)
def test_preempted_requests_give_the_whole_answer(params: SamplingParams) -> None:  # SCH-3
    roomy, expected, _ = preempting(params, 999)
    engine, outputs, deltas = preempting(params, 12)
    assert roomy.scheduler.num_preemptions == 0 and engine.scheduler.num_preemptions > 0
    assert tokens_of(*outputs) == tokens_of(*expected)
    if params.temperature == 0 and params.repetition_penalty == 1 and not params.bad_words:
        assert tokens_of(*outputs) == [tiny().generate(prompt_of(8, s), 30) for s in range(4)]
    for output, alone, delta in zip(outputs, expected, deltas, strict=True):
        one, other = output.outputs[0], alone.outputs[0]
        assert delta == one.text == other.text, "a token was streamed twice, or never"
        if params.logprobs is not None:
            assert len(one.logprobs) == len(one.token_ids) == 30
            assert one.cumulative_logprob == pytest.approx(other.cumulative_logprob, abs=1e-4)


def test_preempted_twice_and_before_the_first_token() -> None:  # SCH-3
    recorder = Recorder()
    engine = tiny_engine(
        tiny(), block_size=4, num_blocks=18, max_num_batched_tokens=8, recorder=recorder,
        scheduling_policy="priority",
    )  # fmt: skip
    wanted = [(prompt_of(6, 1), 40), (prompt_of(6, 2), 40), (prompt_of(50, 3), 10)]
    outputs = [
        engine.add_request(prompt, SamplingParams(temperature=0, max_tokens=count), priority=rank)
        for rank, (prompt, count) in enumerate(wanted)
    ]
    drain(engine)
    assert tokens_of(*outputs) == [tiny().generate(prompt, count) for prompt, count in wanted]
    victims = [event for event in recorder.events if isinstance(event, Preempted)]
    assert max(map([e.request_id for e in victims].count, "012")) >= 2, "nobody twice"
    assert any(e.num_tokens < 50 for e in victims if e.request_id == "2"), "none in its prompt"


def test_preemption_under_a_stop_string() -> None:  # SCH-3
    texts = [output.outputs[0].text for output in preempting(GREEDY, 999)[1]]
    stops = [text[18:20] for text in texts]
    params = SamplingParams(temperature=0, max_tokens=24, stop=stops)
    engine, outputs, deltas = preempting(params, 8)
    assert engine.scheduler.num_preemptions > 0
    for output, delta, text in zip(outputs, deltas, texts, strict=True):
        cut = min(text.find(stop) for stop in stops if stop in text)
        assert delta == output.outputs[0].text == text[:cut]
        assert output.outputs[0].finish_reason == "stop"


# -- sampling at the engine's level: SAM-2, SAM-3, n -----------------------------------------------

RIVER = SamplingParams(temperature=0.9, seed=7, max_tokens=24)


def run_with(*company: tuple[list[int], SamplingParams], place: int = 0, **flags: Any) -> list[int]:
    """Tokens of the seeded request among others, at a place in the order of arrival."""
    engine = tiny_engine(tiny(), **flags)
    requests = list(company)
    requests.insert(place, (prompt_of(13), RIVER))
    outputs = [engine.add_request(prompt, params) for prompt, params in requests]
    drain(engine)
    return outputs[place].outputs[0].token_ids


def test_a_seed_does_not_depend_on_the_batch() -> None:  # SAM-2
    alone = run_with()
    assert len(alone) == 24 and alone != tiny().generate(prompt_of(13), 24)
    other = (prompt_of(9, 1), SamplingParams(temperature=1.2, max_tokens=20))
    assert run_with(other) == alone
    assert run_with(other, place=1) == alone
    assert run_with((prompt_of(13), SamplingParams(temperature=0.9, seed=8, max_tokens=9))) == alone
    long = (prompt_of(300, 2), SamplingParams(temperature=0, max_tokens=3))
    assert run_with(long, max_num_batched_tokens=32) == alone
    assert run_with(long, place=1, max_num_batched_tokens=32) == alone
    assert run_with(other, other, place=2, block_size=4, num_blocks=13) == alone


def test_unseeded_requests_differ_and_an_engine_repeats_itself() -> None:  # SAM-2
    params = SamplingParams(temperature=0.9, max_tokens=24)

    def run(seed: int) -> list[list[int]]:
        engine = tiny_engine(tiny(), seed=seed)
        outputs = [engine.add_request(prompt_of(13), params) for _ in range(3)]
        drain(engine)
        return tokens_of(*outputs)

    one, again, other = run(0), run(0), run(1)
    assert one == again
    assert len({tuple(tokens) for tokens in one + other}) == 6


def test_n_continuations_are_n_requests_that_share_their_prompt() -> None:
    engine = tiny_engine(tiny(), block_size=4)
    seeded = SamplingParams(n=3, temperature=0.9, seed=7, max_tokens=12)
    together = engine.add_request(prompt_of(21), seeded)
    assert engine.step().blocks_hit == 2 * 5, "two of them find the five full blocks of the first"
    drain(engine)
    single = [
        engine.add_request(
            prompt_of(21), SamplingParams(temperature=0.9, seed=7 + i, max_tokens=12)
        )
        for i in range(3)
    ]
    drain(engine)
    assert tokens_of(together) == tokens_of(*single)
    assert len({tuple(tokens) for tokens in tokens_of(together)}) == 3
    assert [completion.index for completion in together.outputs] == [0, 1, 2]


def test_penalties_do_not_leak_between_requests() -> None:  # SAM-3
    penalised = SamplingParams(temperature=0, repetition_penalty=1.8, max_tokens=20)
    short = SamplingParams(temperature=0, repetition_penalty=1.8, max_tokens=4)

    def run(*params: SamplingParams, max_num_seqs: int = 256) -> list[list[int]]:
        engine = tiny_engine(tiny(), max_num_seqs=max_num_seqs)
        outputs = [engine.add_request([71, 79, 0] * 3, p) for p in params]
        drain(engine)
        return tokens_of(*outputs)

    (p,), (q,) = run(penalised), run(GREEDY)
    assert p != q and q == tiny().generate([71, 79, 0] * 3, 24)
    assert run(penalised, GREEDY) == [p, q]
    assert run(GREEDY, penalised) == [q, p]
    # P ends early, and whoever waits takes its row.
    assert run(short, GREEDY, GREEDY, penalised, max_num_seqs=2) == [p[:4], q, q, p]


# -- log-probabilities -----------------------------------------------------------------------------


def test_logprobs_are_the_models_own_one_entry_a_token() -> None:
    engine = tiny_engine(tiny(), block_size=4, num_blocks=20, max_num_batched_tokens=10)
    wants = [
        SamplingParams(temperature=0, max_tokens=12, logprobs=3),
        SamplingParams(temperature=1.3, seed=1, top_k=9, max_tokens=12, logprobs=0),
        SamplingParams(temperature=0, max_tokens=12, logprobs=2, repetition_penalty=1.9),
    ]
    outputs = [engine.add_request(prompt_of(14, i), params) for i, params in enumerate(wants)]
    drain(engine)
    for output, params in zip(outputs, wants, strict=True):
        completion = output.outputs[0]
        entries = completion.logprobs
        assert len(entries) == len(completion.token_ids) == 12
        known = tiny().logits(output.prompt_token_ids + completion.token_ids).log_softmax(-1)
        total = 0.0
        for i, (token, entry) in enumerate(zip(completion.token_ids, entries, strict=True)):
            row = known[len(output.prompt_token_ids) - 1 + i]
            assert next(iter(entry)) == token
            assert len(entry) - params.logprobs in (0, 1)
            for other, logprob in entry.items():
                assert logprob.logprob == pytest.approx(row[other].item(), abs=1e-4)
                assert logprob.rank == int((row > row[other]).sum()) + 1
                assert logprob.decoded_token == engine.tokenizer.decode([other])
            total += entry[token].logprob
        assert completion.cumulative_logprob == pytest.approx(total, abs=1e-6)


def test_snapshots_do_not_grow() -> None:
    engine = tiny_engine(tiny())
    output = engine.add_request(prompt_of(5), SamplingParams(max_tokens=6, logprobs=1))
    taken = []
    while not output.finished:
        engine.step()
        taken.append(snapshot(output).outputs[0])
    assert [len(c.token_ids) for c in taken] == [len(c.logprobs) for c in taken] == [*range(1, 7)]


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"max_num_batched_tokens": 7},  # chunks
        {"max_num_batched_tokens": 9, "num_blocks": 13},  # chunks and preemptions
        {"enable_prefix_caching": False, "block_size": 1},
    ],
)
def test_prompt_logprobs_equal_the_oracles(flags: dict[str, Any]) -> None:
    engine = tiny_engine(tiny(), **{"block_size": 4, **flags})
    params = SamplingParams(temperature=0, max_tokens=9, prompt_logprobs=2)
    prompts = [prompt_of(30), prompt_of(30), prompt_of(17, 1)]
    for _ in ("cold", "warm"):
        outputs = [engine.add_request(prompt, params) for prompt in prompts]
        drain(engine)
        for output in outputs:
            ids, entries = output.prompt_token_ids, output.prompt_logprobs
            assert output.outputs[0].token_ids == tiny().generate(ids, 9)
            assert len(entries) == len(ids) and entries[0] is None
            known = tiny().logits(ids).log_softmax(-1)
            for i in range(1, len(ids)):
                best = known[i - 1].topk(2).indices.tolist()
                assert set(entries[i]) == {ids[i], *best}
                for token, logprob in entries[i].items():
                    expected = known[i - 1][token].item()
                    assert logprob.logprob == pytest.approx(expected, abs=1e-4)
    assert (engine.scheduler.num_preemptions > 0) == ("num_blocks" in flags)


def test_score_equals_the_oracle(llm: LLM) -> None:
    def expected(text: str, first: int) -> list[float]:
        ids = llm.tokenizer.encode(text)
        known = tiny().logits(ids).log_softmax(-1)
        return [known[i - 1][ids[i]].item() for i in range(first, len(ids))]

    plain, other = llm.score(["hello world", "xy"])
    assert plain.logprobs == pytest.approx(expected("hello world", 1), abs=1e-4)
    assert other.logprobs == pytest.approx(expected("xy", 1), abs=1e-4)
    assert plain.token_ids == llm.tokenizer.encode("ello world")
    assert plain.log_likelihood == pytest.approx(sum(plain.logprobs))
    mean = sum(plain.logprobs) / len(plain.logprobs)
    assert plain.perplexity == pytest.approx(math.exp(-mean))
    (after,) = llm.score("world", context="hello ")
    assert after.logprobs == pytest.approx(expected("hello world", 6), abs=1e-4)
    with pytest.raises(UserError, match="two tokens"):
        llm.score("x")


# -- LLM: streams, parts of one's own, memory ------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny().save(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def llm(folder: Path):
    with LLM(str(folder), block_size=4, num_gpu_blocks_override=200, paranoid=True) as llm:
        yield llm
        assert not llm.has_unfinished_requests(), "a test left a request behind"


def test_streams_join_to_the_text_even_when_interleaved(llm: LLM) -> None:
    expected = [o.outputs[0].text for o in llm.generate(["one", "two"], GREEDY, use_tqdm=False)]
    pairs = list(zip(llm.stream("one", GREEDY), llm.stream("two", GREEDY), strict=True))
    assert len(pairs) == 24
    for i, text in enumerate(expected):
        states = [pair[i].outputs[0] for pair in pairs]
        assert "".join(state.delta for state in states) == states[-1].text == text
        assert [len(state.token_ids) for state in states] == list(range(1, 25))
        assert [state.finish_reason for state in states] == [None] * 23 + ["length"]


def test_leaving_a_stream_aborts_its_request(llm: LLM) -> None:
    stream = llm.stream("one", GREEDY)
    next(stream)
    assert llm.has_unfinished_requests()
    stream.close()
    assert not llm.has_unfinished_requests()


def test_n_streams_tell_who_grew(llm: LLM) -> None:
    params = SamplingParams(n=3, seed=1, max_tokens=12, stop=["a", "е", "и", "о"])
    joined = ["", "", ""]
    for state in llm.stream("one", params):
        for i, completion in enumerate(state.outputs):
            joined[i] += completion.delta
    assert joined == [completion.text for completion in state.outputs]


class ShortestFirst(Scheduler):
    """A learner's scheduler: the shortest prompt goes first, whenever it came."""

    def add(self, request) -> None:
        request.sort_key = (request.num_prompt_tokens, request.arrival)
        super().add(request)


class NewestFirst(BlockPool):
    """A learner's pool: takes the block that was freed last."""

    num_taken = 0

    def allocate(self, num_blocks: int):
        if num_blocks <= self.num_free:
            for block in list(self._free)[len(self._free) - num_blocks :]:
                self._free.remove(block)
                block.next = block.previous = None
                first = self._free._head.next
                self._free._head.next, block.previous = block, self._free._head
                block.next, first.previous = first, block
                self._free._count += 1
            self.num_taken += num_blocks
        return super().allocate(num_blocks)


class Coldest(Sampler):
    """A learner's sampler: the best token, whatever the temperature."""

    def choose(self, logits, rows, positions):
        return logits.argmax(-1)


def test_a_scheduler_of_ones_own(folder: Path) -> None:
    with LLM(str(folder), scheduler=ShortestFirst, max_num_seqs=1, paranoid=True) as llm:
        outputs = [llm.add_request("x" * length, GREEDY) for length in (30, 10, 20)]
        order = []
        while llm.has_unfinished_requests():
            order += [output.request_id for output in llm.step().outputs if output.finished]
        assert order == ["1", "2", "0"]
    ids = [output.prompt_token_ids for output in outputs]
    assert tokens_of(*outputs) == [tiny().generate(prompt, 24) for prompt in ids]


def test_a_pool_an_attention_and_a_sampler_of_ones_own(folder: Path) -> None:
    calls = []

    def attention(q, k_cache, v_cache, batch, scale, sliding_window):
        calls.append(batch.num_rows)
        return reference.attention(q, k_cache, v_cache, batch, scale, sliding_window)

    with LLM(str(folder), block_pool=NewestFirst, attention=attention, sampler=Coldest,
             num_gpu_blocks_override=9, block_size=8, paranoid=True) as llm:  # fmt: skip
        hot = SamplingParams(temperature=5, max_tokens=24)
        texts = ["one", "two" * 9, "three" * 5, "one"]
        outputs = llm.generate(texts, hot, use_tqdm=False)
        pool = llm.engine.scheduler.kv.pool
        assert isinstance(pool, NewestFirst) and pool.num_taken == pool.num_allocated > 0
    assert calls
    ids = [output.prompt_token_ids for output in outputs]
    assert tokens_of(*outputs) == [tiny().generate(prompt, 24) for prompt in ids]


def test_a_gpu_is_chosen_from_outside(folder: Path) -> None:
    """Streams and kernels go to the current device: another one would be half used."""
    with pytest.raises(UserError, match="CUDA_VISIBLE_DEVICES=1"):
        LLM(str(folder), device="cuda:1")


def test_two_engines_share_nothing(folder: Path) -> None:  # PRC-1
    other = TinyRandom(seed=1)
    engines = [tiny_engine(tiny(), num_blocks=20), tiny_engine(other, num_blocks=20)]
    for engine in engines:
        assert engine.add_request(prompt_of(20), GREEDY).request_id == "0"
    outputs = [engine._prompts["0"].output for engine in engines]
    while any(engine.has_unfinished_requests() for engine in engines):
        for engine in engines:
            engine.step()
    assert tokens_of(*outputs) == [m.generate(prompt_of(20), 24) for m in (tiny(), other)]
    engines[0].scheduler.check()
    again = engines[1].add_request(prompt_of(20), GREEDY)
    drain(engines[1])
    assert tokens_of(again) == [other.generate(prompt_of(20), 24)]


@pytest.mark.parametrize("how", ["close", "del"])
def test_a_closed_engine_gives_everything_back(folder: Path, how: str) -> None:  # PRC-1
    process = psutil.Process()

    def once() -> weakref.ref:
        llm = LLM(str(folder), num_gpu_blocks_override=50)
        llm.generate(["one", "two"], GREEDY, use_tqdm=False)
        held = weakref.ref(llm.engine.runner.model)
        if how == "close":
            llm.close()
            llm.close()
            with pytest.raises(EngineDeadError, match="closed"):
                llm.generate("one")
        return held

    once()  # whatever libraries start on first use
    before = (threading.active_count(), process.num_threads(), process.num_fds())
    for _ in range(3):
        held = once()
        gc.collect()
        assert held() is None, "the model is still held"
    assert not process.children()
    assert (threading.active_count(), process.num_threads(), process.num_fds()) == before


# -- interrupts and failing steps ------------------------------------------------------------------


@pytest.mark.parametrize("after", [False, True])
def test_an_interrupt_in_a_step_leaves_the_engine_clean(llm: LLM, after: bool) -> None:
    expected = tokens_of(*llm.generate(["one", "two"], GREEDY, use_tqdm=False))
    real, steps = llm.engine.runner, iter(range(100))
    llm.engine.runner = Flaky(
        real, lambda plan: KeyboardInterrupt() if next(steps) == 5 else None, after=after
    )
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["one", "two"], GREEDY, use_tqdm=False)
    assert not llm.has_unfinished_requests()
    llm.engine.check()
    assert tokens_of(*llm.generate(["one", "two"], GREEDY, use_tqdm=False)) == expected


INTERRUPTED = """
import signal, sys, time, threading, os
from minivllm import LLM, SamplingParams
from minivllm.runner.tiny import TinyRandom
from minivllm.trace import NullRecorder, StepTimed

class Watch(NullRecorder):
    enabled = True
    def emit(self, event):
        if isinstance(event, StepTimed) and event.step == 5:
            print("running", flush=True)

with LLM(sys.argv[1], recorder=Watch(), num_gpu_blocks_override=5000, paranoid=True) as llm:
    try:
        long = SamplingParams(temperature=0, max_tokens=30000, ignore_eos=True)
        llm.generate(["one", "two"], long, use_tqdm=False)
        print("was not interrupted")
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    assert not llm.has_unfinished_requests()
    llm.engine.check()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    greedy = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    (output,) = llm.generate("hello", greedy, use_tqdm=False)
    oracle = TinyRandom(max_position=40000).generate(output.prompt_token_ids, 20)
    assert output.outputs[0].token_ids == oracle
    print("served the next", flush=True)
"""


def test_ctrl_c_leaves_the_engine_clean(tmp_path: Path) -> None:
    folder = TinyRandom(max_position=40000).save(tmp_path)
    child = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, str(folder)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    try:
        assert child.stdout.readline() == "running\n"
        child.send_signal(signal.SIGINT)
        out, errors = child.communicate(timeout=120)
    finally:
        child.kill()
    assert out == "interrupted\nserved the next\n", errors
    assert child.returncode == 0


def test_a_failing_step_ends_its_requests_and_no_others(llm: LLM) -> None:
    real = llm.engine.runner
    llm.engine.runner = Flaky(
        real, lambda plan: ValueError("broken") if len(plan.rows) == 2 else None, after=True
    )
    with pytest.raises(EngineStepError, match=r"ValueError: broken.*were ended.*clean") as caught:
        llm.generate(["one", "two"], GREEDY, use_tqdm=False)
    assert isinstance(caught.value.__cause__, ValueError)
    llm.engine.check()
    output = llm.add_request("one", GREEDY)
    assert llm.step().error is None
    second = llm.add_request("two", GREEDY)
    report = llm.step()
    assert str(report.error) == "broken" and report.outputs == (output, second)
    for failed, count in ((output, 1), (second, 0)):
        assert failed.finished and len(failed.outputs[0].token_ids) == count
        completion = failed.outputs[0]
        assert completion.finish_reason == "error"
        assert completion.stop_reason == "ValueError: broken"
    assert len(llm.engine.scheduler.kv.pool.index) == 0, "spoilt blocks can still be found"
    llm.engine.runner = real
    (after,) = llm.generate("one", GREEDY, use_tqdm=False)
    assert tokens_of(after) == [tiny().generate(after.prompt_token_ids, 24)]
    assert after.num_cached_tokens == 0


def test_a_request_that_waits_survives_the_failing_step_of_others() -> None:
    engine = make_engine(
        max_num_seqs=1,
        wrap=lambda inner: Flaky(
            inner, lambda plan: OSError("x") if plan.step == 2 else None, after=False
        ),
    )
    params = SamplingParams(max_tokens=4)
    first, second = engine.add_request([1, 2], params), engine.add_request([1, 2], params)
    assert engine.step().error is None
    assert isinstance(engine.step().error, OSError)
    drain(engine)
    assert first.outputs[0].finish_reason == "error"
    assert second.outputs[0].finish_reason == "length"
    assert second.outputs[0].token_ids[:1] == first.outputs[0].token_ids


def test_a_failure_after_the_update_still_ends_everything() -> None:
    """The scheduler has ended a request already when its text fails: nothing may be left over."""

    class Broken:
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError("no text today")

    engine = make_engine()
    outputs = [engine.add_request([1, 2, i], SamplingParams(max_tokens=1)) for i in (3, 4)]
    for entry in engine._prompts.values():
        for stream in entry.text.values():
            stream._stream._tokenizer = Broken()
    report = engine.step()
    assert "no text today" in str(report.error)
    assert [output.outputs[0].finish_reason for output in outputs] == ["error", "error"]
    assert not engine.has_unfinished_requests()
    engine.check()


def test_a_broken_part_of_ones_own_cannot_lose_a_request() -> None:
    class NoTouch(BlockPool):
        def touch(self, blocks) -> None:
            if list(blocks):
                raise RuntimeError("touch is not written yet")

    engine = make_engine(block_pool=NoTouch)
    params = SamplingParams(max_tokens=1)
    engine.add_request(list(range(6)), params)
    drain(engine)
    waiting = engine.add_request(list(range(6)), params)
    report = engine.step()
    assert "not written yet" in str(report.error)
    assert waiting.outputs[0].finish_reason == "error"
    engine.check()


def test_a_plan_half_made_beside_a_step_under_way_ends_everything() -> None:
    """A request that got tokens or a row in it would go on as if the runner had computed them."""

    class NoTouch(BlockPool):
        def touch(self, blocks) -> None:
            if list(blocks):
                raise RuntimeError("touch is not written yet")

    engine = make_engine(block_pool=NoTouch)
    params = SamplingParams(max_tokens=9)
    engine.add_request(list(range(6)), SamplingParams(max_tokens=1))
    drain(engine)
    outputs = [engine.add_request([9] * 3, params)]
    assert engine.step_overlapped().error is None
    outputs += [engine.add_request(prompt, params) for prompt in ([7] * 3, list(range(6)))]
    assert "not written yet" in str(engine.step_overlapped().error)
    assert [output.outputs[0].finish_reason for output in outputs] == ["error"] * 3
    engine.check()
    after = engine.add_request([7] * 3, params)
    while engine.has_unfinished_requests():
        assert engine.step_overlapped().error is None
    assert after.outputs[0].finish_reason == "length"


# -- reports ---------------------------------------------------------------------------------------


def test_a_step_report_says_who_ran_who_waited_and_what_it_took() -> None:
    engine = make_engine(block_size=4, num_blocks=7, max_num_batched_tokens=10, max_num_seqs=2)
    params = SamplingParams(max_tokens=3)
    for length in (9, 3, 2):
        engine.add_request([length] * length, params)
    report = engine.step()
    assert report.ran == (("0", 9), ("1", 1))
    assert report.waited == (("2", "all 2 rows are taken (max_num_seqs)"),)
    assert report.num_waiting == 1 and report.preempted == ()
    assert (report.blocks_taken, report.blocks_freed, report.blocks_hit) == (4, 0, 0)
    assert [output.request_id for output in report.outputs] == ["0"]
    assert engine.why_waiting("2") == "all 2 rows are taken (max_num_seqs)"
    assert engine.why_waiting("0") is None and engine.why_waiting("unknown") is None
    reports = [report, *drain(engine)]
    again = engine.add_request([9] * 9, SamplingParams(max_tokens=1))
    reports += drain(engine)
    assert reports[-1].blocks_hit == 2 and again.num_cached_tokens == 8
    assert sum(r.blocks_taken + r.blocks_hit - r.blocks_freed for r in reports) == 0
    assert [r.step for r in reports] == list(range(1, len(reports) + 1))


def test_a_step_without_requests_does_nothing() -> None:
    engine = make_engine()
    report = engine.step()
    assert (report.ran, report.waited, report.outputs, report.error) == ((), (), (), None)


# -- bad inputs ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("bad")
    path = TinyRandom(max_position=CONTEXT).save(folder / "tiny")
    with LLM(str(path), paranoid=True) as llm:
        yield llm, folder


@pytest.mark.parametrize("bad", TABLE, ids=[bad.code for bad in TABLE])
def test_bad_input_gets_a_sentence_and_the_next_request_is_served(small, bad) -> None:
    llm, folder = small
    before = llm.generate("hello", GREEDY, use_tqdm=False)[0]
    with pytest.raises(UserError) as caught:
        bad.call(llm, folder)
    sentence = str(caught.value)
    assert bad.sentence in sentence
    assert "\n" not in sentence and len(sentence) < 400
    assert not llm.has_unfinished_requests()
    assert tokens_of(llm.generate("hello", GREEDY, use_tqdm=False)[0]) == tokens_of(before)


def test_there_are_at_least_twenty_bad_inputs() -> None:
    assert len({bad.code for bad in TABLE}) == len(TABLE) >= 20


def test_tiny_random_touches_no_global_state_and_refuses_what_it_does_not_know() -> None:
    torch.manual_seed(3)
    state = torch.get_rng_state()
    one, two = TinyRandom(seed=5), TinyRandom(seed=5)
    assert torch.equal(torch.get_rng_state(), state)
    assert one.generate([1, 2], 9) == two.generate([1, 2], 9) != tiny().generate([1, 2], 9)
    with pytest.raises(UserError, match="no biases"):
        TinyRandom(mlp_bias=True)
    with pytest.raises(UserError, match="only a Llama"):
        tiny("qwen3").save(Path("unused"))
