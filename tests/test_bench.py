"""`minivllm bench`: the work is what it says, floors are exact, times start at the right moment."""

import importlib.util
import json
import math
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from minivllm.base import UserError
from minivllm.bench import fresh, kernels, record
from minivllm.bench.bench import COMMANDS
from minivllm.bench.engines import check_installed, open_engine
from minivllm.bench.open_loop import Served, Station, capacity, percentile, serve, summary
from minivllm.bench.plot import plot_ladder
from minivllm.bench.presets import SHAPES, byte_tokenizer, shape_folder
from minivllm.bench.roofline import (
    Ceiling,
    decode_steps,
    measure_ceiling,
    rate,
    share_of,
    workload_floor,
)
from minivllm.bench.workload import PRESETS, OpenLoop, Size, Work, Workload, closed
from minivllm.cache.manager import KVCacheManager
from minivllm.cache.pool import BlockPool
from minivllm.cli import main
from minivllm.config import SchedulerConfig
from minivllm.engine.engine import Engine, EngineLimits
from minivllm.models.hub import resolve_model
from minivllm.models.model_config import config_from_json
from minivllm.models.tokenizer import Tokenizer, load_tokenizer
from minivllm.request import SamplingParams
from minivllm.runner.simulated import SimulatedRunner, linear_cost
from minivllm.sched.scheduler import Scheduler

ROOT = Path(__file__).parent.parent
SMALL = Size(scale=0.02, vocab_size=512)
H200 = Ceiling(4.262e12, 750e12)  # as measured there
TINY = config_from_json(SHAPES["tiny"])


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Where shape folders go instead of the user's own."""
    return str(tmp_path_factory.mktemp("shapes"))


def greedy(output: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=output, ignore_eos=True)


# -- the work --------------------------------------------------------------------------------


def test_the_workloads_are_those_that_the_peers_were_measured_on():
    """Requests, prompt tokens, output tokens of the whole work, and of the first prompts of W1."""
    found = {
        name: (len(w.work), w.num_prompt_tokens, w.num_output_tokens)
        for name in ("W1", "W2", "W3", "W4", "W5")
        for w in [closed(name)]
    }
    assert found == {
        "W1": (256, 142_827, 133_966),
        "W2": (1, 128, 512),
        "W3": (512, 16_384, 131_072),
        "W4": (128, 262_144, 128),
        "W5": (256, 532_480, 16_384),
    }


def test_w1_draws_a_length_and_then_its_ids():
    """The order of nano-vllm's bench, written out a second time."""
    random.seed(0)
    prompts = [
        [random.randint(0, 10000) for _ in range(random.randint(100, 1024))] for _ in range(256)
    ]
    outputs = [random.randint(100, 1024) for _ in range(256)]
    work = closed("W1").work
    assert [w.prompt_token_ids for w in work] == prompts
    assert [w.num_output_tokens for w in work] == outputs
    assert {w.params.temperature for w in work} == {0.6}
    assert all(w.params.ignore_eos for w in work)


@pytest.mark.parametrize("name", ["W1", "W2", "W3", "W4", "W5"])
def test_a_repeat_has_the_same_lengths_and_shares_no_first_block(name):
    first, second = closed(name), closed(name, Size(run=1))
    lengths = [(len(w.prompt_token_ids), w.num_output_tokens) for w in first.work]
    assert [(len(w.prompt_token_ids), w.num_output_tokens) for w in second.work] == lengths
    blocks = [{tuple(w.prompt_token_ids[:16]) for w in run.work} for run in (first, second)]
    assert blocks[0] & blocks[1] == set()


def test_the_shared_prefix_is_all_that_w5_shares():
    work = closed("W5").work
    assert len({tuple(w.prompt_token_ids[:2048]) for w in work}) == 1
    assert len({tuple(w.prompt_token_ids[2048:]) for w in work}) == 256
    assert {len(w.prompt_token_ids) for w in work} == {2080}


@pytest.mark.parametrize("name", ["W1", "W3", "W4", "W5"])
def test_scaled_work_is_small_and_its_ids_are_legal(name):
    work = closed(name, SMALL).work
    whole = closed(name)
    assert len(work) == round(0.02 * len(whole.work))
    assert all(0 <= i < 512 for w in work for i in w.prompt_token_ids)
    share = sum(len(w.prompt_token_ids) for w in work) / whole.num_prompt_tokens
    assert 0 < share < 0.001  # fewer, and each shorter: about 0.02 squared


def test_open_loop_arrivals_are_poisson_with_a_long_prompt_a_second():
    offered = OpenLoop().arrivals(rate=50.0, seconds=40.0)
    times = [w.arrival for w in offered]
    assert times == sorted(times) and 0 <= times[0] and times[-1] < 40
    long = [w.arrival for w in offered if len(w.prompt_token_ids) == 8192]
    assert long == [i + 0.5 for i in range(40)]
    short = [w for w in offered if len(w.prompt_token_ids) == 512]
    assert len(short) + len(long) == len(offered)
    assert len(short) == pytest.approx(2000, abs=4 * math.sqrt(2000))
    gaps = [b.arrival - a.arrival for a, b in zip(short, short[1:], strict=False)]
    mean = sum(gaps) / len(gaps)
    deviation = math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps))
    assert deviation == pytest.approx(mean, rel=0.1)  # exponential; evenly spaced would give 0


def test_unknown_work_is_refused():
    with pytest.raises(UserError, match="workload 'W8' is unknown"):
        closed("W8")


# -- shapes ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "parameters"), [("qwen3-0.6b", 596_049_920), ("qwen3-8b", 8_190_735_360)]
)
def test_the_shapes_are_those_of_the_published_models(name, parameters):
    assert config_from_json(SHAPES[name]).num_parameters() == parameters


def test_a_shape_folder_is_written_once_and_every_id_has_a_text(home):
    folder = shape_folder("tiny", home)
    before = (folder / "tokenizer.json").stat().st_mtime_ns
    assert shape_folder("tiny", home) == folder
    assert (folder / "tokenizer.json").stat().st_mtime_ns == before
    tokenizer = load_tokenizer(resolve_model(str(folder), load_format="dummy"))
    assert tokenizer.vocab_size == SHAPES["tiny"]["vocab_size"]
    assert tokenizer.decode([300, 511]) == "<300><511>"
    text = "bytes: ä, 好"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_tokenizer_of_the_largest_vocabulary_has_an_entry_for_each_id():
    tokenizer = byte_tokenizer(SHAPES["qwen3-8b"]["vocab_size"])
    assert Tokenizer(tokenizer, {}).vocab_size == 151_936


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot write the shape of tiny"):
        shape_folder("tiny", str(tmp_path / "file"))


# -- floors ----------------------------------------------------------------------------------


def test_the_floors_are_those_of_the_published_table():
    """Figures that were computed independently of this code, for the rates of one H200."""
    for name, shape, wanted in (
        ("W1", "qwen3-0.6b", 36_016), ("W3", "qwen3-0.6b", 200_630),
        ("W1", "qwen3-8b", 12_762), ("W3", "qwen3-8b", 44_339),
    ):  # fmt: skip
        work, model = closed(name), config_from_json(SHAPES[shape])
        floor = workload_floor(work, model, H200, dtype="bfloat16").seconds
        assert work.num_output_tokens / floor == pytest.approx(wanted, rel=1e-3)
    model = config_from_json(SHAPES["qwen3-0.6b"])
    assert workload_floor(closed("W1"), model, H200, dtype="bfloat16").decode_bytes == (
        pytest.approx(15.07e12, rel=1e-3)
    )
    alone = workload_floor(closed("W2"), model, H200, dtype="bfloat16").decode_s / 511
    assert alone * 1e3 == pytest.approx(0.290, abs=5e-4)
    prefill = workload_floor(closed("W4"), model, H200, dtype="bfloat16").seconds
    assert 262_144 / prefill == pytest.approx(672_082, rel=1e-3)
    apart = workload_floor(closed("W5"), model, H200, dtype="bfloat16", share=False).seconds
    assert apart == pytest.approx(0.95, abs=0.005)
    assert workload_floor(closed("W5"), model, H200, dtype="bfloat16").seconds == (
        pytest.approx(0.067, abs=5e-4)
    )


def test_a_floor_equals_the_one_computed_by_hand():
    """Two requests of 3 and 2 prompt tokens, 3 and 2 outputs; the tiny shape in fp32.

    Rates are chosen so that the first decode step is bound by bytes and none by operations.
    """
    work = [Work([1, 2, 3], greedy(3)), Work([4, 5], greedy(2))]
    layer = 64 * 64 + 2 * 64 * 32 + 64 * 64 + 3 * 64 * 128  # q, k and v, o, gate up down
    head = 512 * 64
    weights = head + 2 * (layer + 2 * 64 + 2 * 16) + 64  # and norms
    kv = 2 * 2 * 2 * 16  # K and V of a token: two layers, two heads of 16
    # Step 1: both rows, with contexts of 4 and 3. Step 2: the first, with 5.
    by_hand = 4 * (weights + kv * (4 + 3)) + 4 * (weights + kv * 5)
    # Prompts: each token through the matrices, each row once through the head; 4 heads of 16.
    pairs = 3 * 4 // 2 + 2 * 3 // 2
    operations = 2 * (5 * 2 * layer + 2 * head) + 2 * 4 * 4 * 16 * pairs
    floor = workload_floor(Workload("x", "", work, 2), TINY, Ceiling(1e9, 1e15), dtype="float32")
    assert list(decode_steps(work)) == [[(1, 4), (1, 3)], [(1, 5)]]
    assert floor.decode_bytes == by_hand and floor.prefill_flops == operations
    assert floor.decode_s == pytest.approx(by_hand / 1e9)
    assert floor.prefill_s == pytest.approx(operations / 1e15)
    slow_math = workload_floor(
        Workload("x", "", work, 2), TINY, Ceiling(1e15, 1e9), dtype="float32"
    )
    decodes = 2 * (3 * 2 * layer + 3 * head) + 2 * 4 * 4 * 16 * (4 + 3 + 5)
    assert slow_math.decode_s == pytest.approx(decodes / 1e9)


def test_what_is_not_known_is_said_and_not_guessed():
    floor = workload_floor(closed("W2"), TINY, Ceiling(), dtype="float32")
    assert floor.seconds is None and floor.decode_bytes > 0
    assert share_of(None, 1.0) == rate(None, "B/s") == "unknown"
    assert share_of(0.5, 2.0) == "25%" and rate(4.262e12, "B/s") == "4,262 GB/s"
    assert measure_ceiling(torch.device("meta"), torch.float32) == Ceiling()


def test_the_ceiling_of_this_machine_is_measured():
    ceiling = measure_ceiling(torch.device("cpu"), torch.float32)
    assert 1e8 < ceiling.copy_bytes_per_s < 1e13 and 1e8 < ceiling.matmul_flops_per_s < 1e15


# -- the open loop ---------------------------------------------------------------------------


def test_percentiles_are_measured_values():
    values = [float(i) for i in range(1, 101)]
    assert [percentile(values, p) for p in (0, 50, 99, 100)] == [1, 50, 99, 100]
    assert percentile([3.0, 1.0], 50) == 1 and percentile([3.0, 1.0], 51) == 3
    assert percentile([*values, math.inf], 100) == math.inf
    assert math.isnan(percentile([], 50))


def simulated(home: str, cost, max_num_seqs: int = 4) -> tuple[Engine, SimulatedRunner]:
    """The real engine and scheduler on a simulated GPU; its clock is the engine's clock."""
    runner = SimulatedRunner(cost)
    kv = KVCacheManager(BlockPool(4096, None), 16, True)
    config = SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=16384)
    tokenizer = load_tokenizer(resolve_model(str(shape_folder("tiny", home)), load_format="dummy"))
    limits = EngineLimits(vocab_size=512, max_model_len=16384)
    scheduler = Scheduler(config, kv, None)
    return Engine(scheduler, runner, tokenizer, limits, clock=lambda: runner.clock), runner


def station_of(engine: Engine, runner: SimulatedRunner) -> Station:
    return Station(engine, overlap=False, clock=lambda: runner.clock)


def sleeping(runner: SimulatedRunner):
    def sleep(seconds: float) -> None:
        runner.clock += seconds

    return sleep


def test_a_stall_counts_for_everybody_who_would_have_come_during_it(home):
    """Coordinated omission: steps take 1 s, requests are meant to come every 0.25 s.

    The loop can hand a request over only between steps. Those that came during a step have waited
    since their intended arrival, and that is in their latency.
    """
    engine, runner = simulated(home, linear_cost(1.0, 0.0), max_num_seqs=16)
    offered = [Work([1, 2, 3], greedy(2), arrival=0.25 * i) for i in range(5)]
    served = serve(station_of(engine, runner), offered, sleep=sleeping(runner))
    # The first has the steps that end at 1 and 2; the rest are seen at 1 and end at 2 and 3.
    assert [s.tokens for s in served] == [[1.0, 2.0]] + [[2.0, 3.0]] * 4
    assert [s.time_to_first_token for s in served] == [1.0, 1.75, 1.5, 1.25, 1.0]
    figures = summary(served, [1.0, 1.0, 1.0])
    assert figures["completed_share"] == 1 and figures["offered"] == 5
    assert figures["itl_p50_ms"] == figures["itl_p99_ms"] == 1000
    assert figures["ttft_p99_ms"] == 1750


def test_an_idle_engine_sleeps_until_the_next_arrival(home):
    engine, runner = simulated(home, linear_cost(0.5, 0.0))
    offered = [Work([1, 2], greedy(1), arrival=3.0), Work([1, 3], greedy(1), arrival=10.0)]
    served = serve(station_of(engine, runner), offered, sleep=sleeping(runner))
    assert [s.tokens for s in served] == [[3.5], [10.5]]
    assert runner.busy == 1.0


def test_what_an_overloaded_engine_leaves_undone_is_counted(home):
    """One row, a second a request; ten come in the first second, five seconds of grace."""
    engine, runner = simulated(home, linear_cost(1.0, 0.0), max_num_seqs=1)
    offered = [Work([1, 2, i], greedy(1), arrival=0.1 * i) for i in range(10)]
    served = serve(station_of(engine, runner), offered, sleep=sleeping(runner))
    assert len(served) == 10
    figures = summary(served, [1.0])
    assert figures["completed_share"] == 0.6  # those that end at 1, 2, … 6: the deadline is 5.9
    assert figures["ttft_p99_ms"] == math.inf
    assert not engine.has_unfinished_requests()


def test_capacity_is_the_rate_of_a_closed_loop(home):
    """A token of every row each 0.01 s: with 4 rows and 13 tokens a request, 4 / 0.13 s."""
    engine, runner = simulated(home, linear_cost(0.01, 0.0))
    loop = OpenLoop(Size(scale=0.1, vocab_size=512), max_num_seqs=4, long_every=1e9)
    found = capacity(station_of(engine, runner), loop, warm_up=1.0, seconds=20.0)
    assert found == pytest.approx(4 / 0.13, rel=0.03)
    assert not engine.has_unfinished_requests()


def test_capacity_leaves_room_for_long_prompts(home):
    cost = linear_cost(0.01, 1e-4)
    rates = []
    for long_every in (1e9, 0.5):
        engine, runner = simulated(home, cost)
        loop = OpenLoop(
            Size(scale=0.1, vocab_size=512), max_num_seqs=4, max_num_batched_tokens=2048,
            long_every=long_every,
        )  # fmt: skip
        rates.append(capacity(station_of(engine, runner), loop, warm_up=1.0, seconds=20.0))
    assert 0.5 * rates[0] < rates[1] < 0.95 * rates[0]


def test_gaps_are_between_tokens_of_one_request():
    served = Served(Work([1], greedy(3)), 0.0, [1.0, 1.5, 3.0])
    assert served.gaps == [0.5, 1.5] and served.completed and served.time_to_first_token == 1


# -- the command -----------------------------------------------------------------------------


def bench(capsys, home: str, *line: str) -> dict:
    """The last line of a run, parsed."""
    assert main(["bench", *line, "--download-dir", home]) == 0
    out = capsys.readouterr().out
    assert out.count("\n{") == 1, "the JSON object is one line, and the last"
    return json.loads(out.splitlines()[-1])


def test_throughput_on_the_real_engine(capsys, home):
    found = bench(
        capsys, home, "throughput", "--preset", "W1", "W5", "--model", "tiny",
        "--scale", "0.02", "--repeats", "2", "--max-num-batched-tokens", "64",
    )  # fmt: skip
    assert (found["bench"], found["engine"], found["model"]) == ("throughput", "minivllm", "tiny")
    assert found["command"].startswith("minivllm bench throughput --preset W1 W5 --model tiny")
    assert found["versions"]["torch"] == torch.__version__
    assert found["engine_args"]["max_num_batched_tokens"] == 64, "the flag wins"
    assert found["engine_args"]["max_model_len"] == 4096
    assert set(found["machine"]) == {"device", "cores", "system", "python"}
    for result, name in zip(found["results"], ("W1", "W5"), strict=True):
        work = closed(name, SMALL)
        assert (result["preset"], len(result["runs_s"])) == (name, 2)
        assert result["output_tokens"] == work.num_output_tokens
        assert min(result["runs_s"]) <= result["seconds"] <= max(result["runs_s"])
        rate_of = result["output_tokens"] / result["seconds"]
        assert result["output_tokens_per_s"] == pytest.approx(rate_of)
        assert 0 < result["floor_s"] < result["seconds"]


def test_latency_on_the_real_engine(capsys, home):
    found = bench(
        capsys, home, "latency", "--preset", "W2", "W6", "--model", "tiny", "--scale", "0.02",
        "--seconds", "0.6", "--repeats", "1",
    )  # fmt: skip
    alone, crowd = found["results"]
    assert 0 < alone["floor_ms_per_token"] < alone["ms_per_token"] < 1000
    assert 0 < alone["ttft_ms"] < 1000
    assert alone["engine_args"]["max_num_seqs"] == 1 and crowd["engine_args"]["max_num_seqs"] == 256
    assert crowd["capacity_requests_per_s"] > 0 and crowd["offered"] > 0
    assert crowd["itl_p50_ms"] <= crowd["itl_p99_ms"] <= crowd["itl_max_ms"]


def test_startup_and_ladder_run_in_processes_of_their_own(capsys, home):
    found = bench(capsys, home, "startup", "--model", "tiny", "--repeats", "1")
    (result,) = found["results"]
    for kind in ("cold", "warm"):
        assert 0 < result[kind]["imported_s"] < result[kind]["built_s"] < result[kind]["first_s"]
    found = bench(capsys, home, "ladder", "--model", "tiny", "--scale", "0.1")
    rungs = [(entry["rung"], entry["requests"]) for entry in found["results"]]
    if not torch.cuda.is_available():
        assert rungs == [(r, n) for r in ("plain PyTorch", "overlap") for n in (1, 8)]
    assert [entry["same_as_below"] for entry in found["results"]][:2] == [None, None]
    assert all(entry["same_as_below"] == 1.0 for entry in found["results"][2:])


def test_every_op_is_timed(capsys, home):
    found = bench(capsys, home, "kernels", "--model", "tiny")
    ops = " ".join(entry["op"] for entry in found["results"])
    for name in ("decode", "prefill", "add_rms_norm", "rope_and_cache", "silu_mul", "sample"):
        assert name in ops
    assert all(entry["seconds"] > 0 and entry["floor_s"] > 0 for entry in found["results"])


def test_the_amounts_of_the_timed_ops():
    """Bytes of a decode: K and V of every token; operations of a prefill: 4 d for each pair."""
    named = {case.name: case for case in kernels.cases(TINY, torch.device("cpu"), torch.float32)}
    assert named["attention decode 8 x 256"].num_bytes == 2 * 8 * 256 * 2 * 16 * 4
    assert named["attention prefill 1 x 256"].flops == 4 * 16 * 4 * 256 * 257 // 2
    assert named["sample 8 x 512 greedy"].num_bytes == 8 * 512 * 4


def test_transformers_does_the_same_work(home):
    """Greedy tokens of both engines, with the same weights, from a folder that both can read."""
    from minivllm.runner.tiny import TinyRandom

    folder = str(TinyRandom(seed=1).save(Path(home) / "weights"))
    work = fresh.uniform_work(3, 20, 6, 500)
    work[1] = Work(work[1].prompt_token_ids[:11], greedy(4))
    found = []
    for engine in ("minivllm", "transformers"):
        opened = open_engine(engine, folder, {"dtype": "float32"})
        opened.forget()
        found.append(opened.generate(work))
        opened.close()
    assert found[0] == found[1] and [len(ids) for ids in found[0]] == [6, 4, 6]


def test_a_prefix_cache_that_was_emptied_helps_nobody(home):
    engine = open_engine(
        "minivllm", str(shape_folder("tiny", home)), {"load_format": "dummy", "max_model_len": 128}
    )
    (work,) = fresh.uniform_work(1, 64, 1, 500)
    cached = []
    for forget in (False, False, True):
        if forget:
            engine.forget()
        output = engine.llm.generate([work.prompt_token_ids], work.params, use_tqdm=False)
        cached.append(output[0].num_cached_tokens)
    engine.close()
    assert cached == [0, 48, 0]


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("latency --preset W1", "W1 is run by `minivllm bench throughput`, not latency"),
        ("throghput", "(did you mean 'throughput'?)"),
        ("throughput --preset W9", "preset 'W9' is unknown"),
        ("throughput --engine vlm", "engine 'vlm' is unknown"),
        ("kernels --engine vllm", "only minivllm can run this here"),
        ("latency --preset W6 --engine transformers", "only minivllm can run this here"),
        ("startup --engine transformers", "transformers has no engine to start"),
        ("throughput --scale 2", "scale must be above 0 and at most 1"),
        ("throughput --repeats 0", "repeats must be at least 1"),
        ("latency --seconds nan", "seconds must be a positive number"),
        ("throughput --plot x.png", "--plot draws the ladder"),
        ("throughput --model nope", "there is no model 'nope'"),
        ("throughput --model tiny --max-num-seqs 0", "max_num_seqs must be a positive integer"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_a_sentence(capsys, home, line, sentence):
    assert main(["bench", *line.split(), "--download-dir", home]) in (1, 2)
    assert sentence in capsys.readouterr().err


def test_a_missing_peer_is_named():
    if importlib.util.find_spec("vllm"):
        pytest.skip("vLLM is installed here")
    with pytest.raises(UserError, match="vllm is not installed"):
        check_installed("vllm")


def test_every_preset_belongs_to_a_command():
    assert set(PRESETS) <= set(COMMANDS)
    assert sorted(name for names in PRESETS.values() for name in names) == [
        f"W{i}" for i in range(1, 8)
    ]


def test_a_failing_process_says_why(home):
    with pytest.raises(RuntimeError, match="there is no model 'nope'"):
        fresh.run_fresh("minivllm", "nope", {}, [(1, 4, 1)])


# -- what is written down --------------------------------------------------------------------


def test_the_commit_is_that_of_this_code(tmp_path):
    """Of a repository that tracks the package; one that merely surrounds it does not count."""
    run = lambda *words: subprocess.run(  # noqa: E731
        ["git", "-C", str(tmp_path), "-c", "user.name=x", "-c", "user.email=x@x", *words],
        check=True, capture_output=True, text=True,
    ).stdout.strip()  # fmt: skip
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    assert record.commit(package) is None
    run("init")
    assert record.commit(package) is None
    run("add", "package/__init__.py")
    run("commit", "-m", "x")
    head = run("rev-parse", "--short=12", "HEAD")
    assert record.commit(package) == head
    (package / "__init__.py").write_text("changed = True\n")
    assert record.commit(package) == head + "+"


def test_json_has_no_word_for_infinity():
    assert record.plain({"a": [math.inf, 1.5], "b": (math.nan,)}) == {"a": [None, 1.5], "b": [None]}


def test_the_ladder_is_drawn(tmp_path):
    entries = [
        {"rung": rung, "requests": n, "tokens_per_s": t * n, "floor_tokens_per_s": 50.0 * n}
        for rung, t in (("plain PyTorch", 10.0), ("overlap", 20.0))
        for n in (1, 8)
    ]
    plot_ladder(entries, "a title", str(tmp_path / "ladder.png"))
    assert (tmp_path / "ladder.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    with pytest.raises(UserError, match="cannot write the plot"):
        plot_ladder(entries, "a title", str(tmp_path / "nowhere" / "ladder.png"))


def test_a_plot_without_matplotlib_is_refused_before_anything_is_measured(
    capsys, home, monkeypatch
):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["bench", "ladder", "--plot", "x.png", "--download-dir", home]) == 2
    streams = capsys.readouterr()
    assert "needs matplotlib" in streams.err and streams.err.count("\n") == 1


# -- the table of peers ----------------------------------------------------------------------


def a_record(**changes) -> dict:
    results = [
        {"preset": "W1", "output_tokens": 133_966, "output_tokens_per_s": 30_000.0,
         "floor_s": 133_966 / 36_000},
        {"preset": "W2", "ms_per_token": 0.81, "ttft_ms": 4.0, "floor_ms_per_token": 0.29,
         "floor_ttft_ms": None},
    ]  # fmt: skip
    return {
        "engine": "minivllm", "model": "qwen3-0.6b", "scale": 1.0, "results": results,
        "machine": {"device": "NVIDIA H200"}, "command": "minivllm bench throughput",
        "date": "2026-12-02", "commit": "abc", "engine_args": {"max_num_batched_tokens": 16384},
        "versions": {"torch": "2.11.0"}, **changes,
    }  # fmt: skip


def peers_table(tmp_path: Path, *records: dict) -> subprocess.CompletedProcess:
    path = tmp_path / "results.jsonl"
    path.write_text("noise\n" + "\n".join(json.dumps(entry) for entry in records) + "\n")
    return subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "run_peers_table.py"), str(path)],
        capture_output=True, text=True,
    )  # fmt: skip


def test_the_table_takes_medians_and_says_what_is_met(tmp_path):
    records = [a_record() for _ in range(3)]
    records[1]["results"][0]["output_tokens_per_s"] = 10_000.0  # one slow process
    done = peers_table(tmp_path, *records)
    assert done.returncode == 0, done.stderr
    rows = {line.split(" | ")[0]: line for line in done.stdout.splitlines()}
    w1 = rows["| qwen3-0.6b W1 output tok/s"]
    assert "| **30,000** (3) | 83% | 36,000 | 23,526 | 1.28 |" in w1 and w1.endswith("| met |")
    w2 = rows["| qwen3-0.6b W2 ms/token"]
    assert "| **0.81** (3) | 36% | 0.29 | 1.62 | 2.00 |" in w2 and w2.endswith("| missed |")
    assert "unknown" in rows["| qwen3-0.6b W2 TTFT ms"]
    assert "commit abc" in done.stdout and "max_num_batched_tokens=16384" in done.stdout


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"scale": 0.1}, "scaled work is no figure"),
        ({"machine": {"device": "another"}}, "results of several machines"),
    ],
)
def test_what_cannot_be_compared_gets_no_table(tmp_path, changes, sentence):
    done = peers_table(tmp_path, a_record(), a_record(**changes))
    assert done.returncode == 1 and sentence in done.stderr and not done.stdout
