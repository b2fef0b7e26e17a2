"""The command line: flags, errors, exit codes, streams; the demo and the doctor."""

import dataclasses
import fcntl
import io
import json
import os
import pty
import re
import select
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.cells import cell_len

from minivllm import EngineConfig, SamplingParams
from minivllm.cli import ENGINE_HELP, SAMPLING_HELP, _given, _parse, main
from minivllm.demo import load_prompts
from minivllm.doctor import Facts, judge
from minivllm.gpu import Driver, Gpu, read_driver
from minivllm.trace import (
    Added,
    Admitted,
    Allocated,
    CacheHit,
    Chunked,
    Freed,
    Preempted,
    Sampled,
    StepTimed,
    Waited,
    read_jsonl,
)
from minivllm.watch import Narrator, Tally

weights = pytest.mark.weights


def run(*arguments: str) -> int:
    """Exit code of a command line, whichever way it ends."""
    try:
        return main(arguments)
    except SystemExit as leaving:
        return int(leaving.code or 0)


# -- flags -----------------------------------------------------------------------------------


def test_every_setting_of_the_library_has_a_flag():
    assert set(ENGINE_HELP) == set(EngineConfig.argument_names()) - {"model"}
    fields = {field.name for field in dataclasses.fields(SamplingParams)}
    assert set(SAMPLING_HELP) == fields - {"seed"}  # there is one --seed, the engine's


def test_flags_reach_the_configs_with_their_types():
    line = "--block-size 8 --no-enable-prefix-caching --dtype=float32 --gpu-memory-utilization 0.5"
    line += " --temperature 0 --stop x --stop yz --stop-token-ids 1,2 --ignore-eos"
    line += " --no-async-scheduling --cudagraph-capture-sizes 1,2,8"
    parsed = _parse(["generate", "a prompt", *line.split(), "--logit-bias", '{"7": -1.5}'])
    assert parsed.prompts == ["a prompt"]
    engine, sampling = _given(parsed, ENGINE_HELP), _given(parsed, SAMPLING_HELP)
    config = EngineConfig.from_args("smollm2", **engine)
    assert (config.cache.block_size, config.cache.enable_prefix_caching) == (8, False)
    scheduler = config.scheduler
    assert (scheduler.async_scheduling, scheduler.cudagraph_capture_sizes) == (False, (1, 2, 8))
    assert scheduler.max_num_seqs == 256 and "max_num_seqs" not in engine  # not given: not passed
    params = SamplingParams(**sampling)
    assert params.stop == ["x", "yz"] and params.stop_token_ids == (1, 2)
    assert params.logit_bias == {7: -1.5} and params.ignore_eos and params.temperature == 0


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("generate x --temprature 0", "unknown flag --temprature (did you mean '--temperature'?)"),
        ("generate x --max_tokens=3", "unknown flag --max_tokens (did you mean '--max-tokens'?)"),
        ("generate x --frobnicate", "unknown flag --frobnicate (see"),
        ("chat hello there", "unexpected argument 'there'"),
        ("genrate x", "unknown command 'genrate' (did you mean 'generate'?)"),
        ("", "required: COMMAND"),
        ("generate", "no prompt"),
        ("generate x --max-tokens ten", "--max-tokens: invalid int value: 'ten'"),
        ("generate x --stop-token-ids 1,b", "invalid comma-separated list value: '1,b'"),
        ("generate x --logit-bias {", "invalid JSON object value"),
        ("generate x --temperature nan", "temperature must be a number"),
        ("generate x --max-tokens 0", "max_tokens must be an integer of at least 1"),
        ("generate x --block-size 0", "block_size must be a positive integer"),
        ("generate x --dtype int8", "dtype must be one of"),
        ("generate x --logprobs 2", "--logprobs is shown with --json only"),
        ("generate x --trace /nowhere/t.jsonl", "cannot write the trace /nowhere/t.jsonl"),
        ("chat --n 2", "unknown flag --n"),
        ("demo --seed 1", "unknown flag --seed"),
    ],
)
def test_a_wrong_command_line_is_one_sentence_and_exit_code_2(capsys, line, sentence):
    assert run(*line.split()) == 2
    printed = capsys.readouterr()
    assert sentence in printed.err and printed.err.count("\n") == 1
    assert printed.out == ""


def test_a_model_that_cannot_be_used_is_exit_code_1(capsys, tmp_path):
    assert run("generate", "x", "--model", str(tmp_path)) == 1
    assert run("demo", "--model", "smolm2", "--plain") == 1
    printed = capsys.readouterr().err.splitlines()
    assert "holds no model" in printed[0] and "did you mean 'smollm2'?" in printed[1]


def test_version_and_help_go_to_stdout(capsys):
    assert run("--version") == 0 and run("chat", "--help") == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("minivllm 0.") and printed.err == ""


def test_a_reader_that_left_is_no_error():
    """As in `minivllm doctor | true`: no traceback, and the code that shells give for it."""
    process = subprocess.Popen(
        [sys.executable, "-m", "minivllm", "doctor"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait() == 141


# -- generate and chat, on the real model ------------------------------------------------------


@weights
def test_generate_prints_results_only_and_writes_the_trace(capsys, monkeypatch, tmp_path):
    trace = tmp_path / "run.jsonl"
    monkeypatch.setattr(sys, "stdin", io.StringIO("One, two, three, four,\n\nThe sea is\n"))
    line = "generate --stdin --json --logprobs 2 --temperature 0 --max-tokens 4"
    assert run(*line.split(), "--trace", str(trace)) == 0
    printed = capsys.readouterr()
    outputs = [json.loads(line) for line in printed.out.splitlines()]
    assert [output["prompt"] for output in outputs] == ["One, two, three, four,", "The sea is"]
    assert outputs[0]["outputs"][0]["text"] == " five, six,"
    assert [len(output["outputs"][0]["logprobs"]) for output in outputs] == [4, 4]
    assert printed.err == ""
    assert sum(isinstance(event, Sampled) for event in read_jsonl(trace)) == 8


@weights
def test_generate_as_text(capsys, caplog):
    """One prompt: its text alone. A request that can never run: exit code 2."""
    line = ["--temperature", "0", "--max-tokens", "4"]
    assert run("generate", "One, two, three, four,", *line, "--verbose") == 0
    assert capsys.readouterr().out == " five, six,\n"
    assert "Model loading took" in caplog.text and "KV cache size" in caplog.text
    assert run("generate", "", *line) == 2
    assert "the prompt is empty" in capsys.readouterr().err


@weights
def test_chat_with_piped_questions_keeps_the_conversation(capsys, monkeypatch):
    questions = "What is the capital of France?\n\nAnd of Italy?\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO(questions))
    assert run("chat", "--temperature", "0") == 0
    printed = capsys.readouterr()
    assert printed.out == "The capital of France is Paris.\nThe capital of Italy is Rome.\n"
    assert printed.err == ""


class Terminal:
    """`minivllm chat` in a pseudo-terminal, as a person has it."""

    def __init__(self, *arguments: str) -> None:
        self.screen, side = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "minivllm", *arguments],
            stdin=side, stdout=side, stderr=side, start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )  # fmt: skip
        os.close(side)
        self.text = ""

    def wait_for(self, words: str) -> None:
        """Read until the screen shows `words` (after what was waited for before)."""
        end = time.monotonic() + 120
        while words not in self.text:
            ready = select.select([self.screen], [], [], max(0, end - time.monotonic()))[0]
            assert ready, f"{words!r} did not come, but {self.text!r}"
            self.text += os.read(self.screen, 4096).decode(errors="replace")
        self.text = self.text.partition(words)[2]

    def type(self, keys: str) -> None:
        os.write(self.screen, keys.encode())


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    made = Terminal("chat", "--temperature", "0")
    yield made
    made.process.kill()
    made.process.wait()
    os.close(made.screen)


@weights
def test_ctrl_c_stops_an_answer_and_ctrl_d_ends(terminal: Terminal):
    terminal.wait_for("> ")
    terminal.type("Write a very long story about a river, as long as you can.\n")
    terminal.wait_for("as you can.\r\n")
    terminal.wait_for(" ")  # the answer has begun
    terminal.type("\x03")
    terminal.wait_for("(stopped)")
    terminal.wait_for("> ")
    terminal.type("What is the capital of France?\n")
    terminal.wait_for("Paris")
    terminal.wait_for("prompt tokens cached)")
    terminal.wait_for("> ")
    time.sleep(0.5)  # readline shows the prompt first and listens a moment later
    terminal.type("\x03")
    terminal.wait_for("(Ctrl-D ends the conversation)")
    terminal.wait_for("> ")
    terminal.type("\x04")
    assert terminal.process.wait(timeout=60) == 0


# -- demo ------------------------------------------------------------------------------------


@weights
def test_the_demo_shows_its_four_things(capsys, tmp_path):
    trace = tmp_path / "demo.jsonl"
    assert run("demo", "--paranoid", "--trace", str(trace)) == 0
    out = capsys.readouterr().out
    assert out.count("✓") == 4 and "✗" not in out
    assert "F: 2 + 3 = 5" in out and "B: The capital of France is Paris." in out
    for prompt in load_prompts():
        assert f"{prompt.letter} starts, in row" in out and f"{prompt.letter} is done" in out
    # What it printed follows from the trace alone.
    tally = Tally()
    tally.take(read_jsonl(trace))
    assert all(happened for happened, _ in tally.shown())
    assert tally.peak_blocks == 30 and f"{tally.output_tokens} tokens in" in out
    assert all(sentence in out for _, sentence in tally.shown())


class TerminalFile(io.StringIO):
    """What rich takes for a terminal."""

    def isatty(self) -> bool:
        return True


@weights
def test_the_demo_draws_in_a_terminal(monkeypatch):
    """With a setting of one's own, what does not happen is said, and is no failure."""
    for name, value in (("TERM", "xterm"), ("COLUMNS", "80"), ("LINES", "30"), ("NO_COLOR", "1")):
        monkeypatch.setenv(name, value)
    screen = TerminalFile()
    monkeypatch.setattr(sys, "stdout", screen)
    assert run("demo", "--num-gpu-blocks-override", "60") == 0
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.getvalue())  # without the escape codes
    for words in (
        "waiting   E   F ",
        "running   A   B   C   D ",
        "of 59 blocks held",
        "▒▒▒",
        "∅",
        "□ cached",
    ):
        assert words in text, words
    assert "✗ preemption: 0 times" in text and "not everything above has to happen" in text
    assert max(cell_len(line) for line in re.split(r"[\r\n]", text)) <= 80


def test_the_tally_counts_from_events_alone():
    tally = Tally()
    tally.take(
        [
            Added(0, "a", 40, 0), Added(0, "b", 40, 0),
            Admitted(1, "a", 0, 0, False), Allocated(1, "a", (1, 2, 3)),
            Chunked(1, "a", 16, 24, "because"), Sampled(1, "a", 5),
            StepTimed(1, "", 0.1, 16, 1, 1, 0),
            Admitted(2, "b", 1, 32, False), CacheHit(2, "b", (1, 2), 32), Allocated(2, "b", (4,)),
            Preempted(3, "b", 40, "because"), Freed(3, "b", (4, 2, 1)), Allocated(3, "a", (4,)),
            Admitted(4, "b", 1, 0, True),
        ]
    )  # fmt: skip
    assert (tally.queued, tally.chunked, tally.hits) == ({"b"}, {"a"}, {"b"})
    assert (tally.chunks, tally.hit_tokens, tally.preemptions) == (1, 32, 1)
    assert (tally.steps, tally.output_tokens, tally.peak_blocks) == (1, 1, 4)
    assert [happened for happened, _ in Tally().shown()] == [False] * 4


def test_a_reason_to_wait_is_told_when_it_changes():
    tell = Narrator().tell
    first = Waited(1, "a", "needs 3 KV blocks, 2 are free", 4)
    assert tell(first) == "a waits: needs 3 KV blocks, 2 are free; 4 more behind it"
    assert tell(Waited(2, "a", "needs 3 KV blocks, 1 are free", 4)) is None
    assert tell(Waited(3, "a", "all 4 rows are taken", 0)) == "a waits: all 4 rows are taken"
    assert tell(Sampled(3, "a", 7)) is None


# -- doctor ----------------------------------------------------------------------------------

GPU = Gpu(0, "NVIDIA H200", (9, 0), 140 << 30, 139 << 30)
HEALTHY = Facts(
    torch="2.13.0+cu130", torch_cuda="13.0", torch_sees_gpu=True, triton="3.7.1",
    packages={"numpy": "2.4.6"}, driver=Driver("580.1", (13, 0), (GPU,)), cpus=2, threads=2,
    ram_total=24 << 30, ram_free=20 << 30, model_path="/m.gguf", model_bytes=7, model_expected=7,
    disk_free=9 << 30,
)  # fmt: skip


def test_a_healthy_machine_has_nothing_to_mend():
    findings = judge(HEALTHY)
    assert {finding.verdict for finding in findings} == {"ok"}
    assert "NVIDIA H200" in " ".join(finding.detail for finding in findings)


@pytest.mark.parametrize(
    ("changes", "subject", "verdict", "remedy"),
    [
        ({"python": (3, 10, 4)}, "Python", "problem", "install Python 3.11"),
        ({"python": (3, 14, 0)}, "Python", "note", "3.11 and 3.12"),
        ({"system": "Darwin"}, "platform", "note", "plain PyTorch"),
        ({"torch": None}, "torch", "problem", "pip install"),
        ({"torch_error": "OSError: libcuda"}, "torch", "problem", "pip install"),
        ({"torch": "2.9.1"}, "torch", "note", "2.11 to 2.13"),
        ({"torch_cuda": None}, "CUDA", "problem", "install a CUDA build of torch"),
        ({"torch_sees_gpu": False}, "CUDA", "problem", "CUDA_VISIBLE_DEVICES"),
        ({"torch_sees_gpu": False, "driver": Driver("1", (12, 4), (GPU,))}, "CUDA", "problem",
         "update the driver"),
        ({"driver": Driver(obstacle="none")}, "CUDA", "note", "runs on the CPU"),
        ({"triton": None}, "triton", "note", "slower plain PyTorch"),
        ({"triton": "3.9.0"}, "triton", "note", "3.6 to 3.7"),
        ({"packages": {"gguf": None}}, "gguf", "problem", "pip install"),
        ({"driver": Driver("1", (13, 0), (dataclasses.replace(GPU, capability=(7, 5)),))}, "GPU 0",
         "note", "older than 8.0"),
        ({"driver": Driver("1", (13, 0), (dataclasses.replace(GPU, free=1 << 30),))}, "GPU 0",
         "note", "nvidia-smi"),
        ({"threads": 64}, "CPU", "note", "OMP_NUM_THREADS=2"),
        ({"ram_free": 1 << 30}, "memory", "problem", "close something"),
        ({"model_bytes": None}, "default model", "note", "minivllm fetch"),
        ({"model_bytes": 6}, "default model", "problem", "fetch` again"),
        ({"model_bytes": None, "disk_free": 1 << 20}, "disk", "problem", "free 300 MiB"),
    ],
)  # fmt: skip
def test_what_is_wrong_gets_its_verdict_and_a_remedy(changes, subject, verdict, remedy):
    (finding,) = [f for f in judge(dataclasses.replace(HEALTHY, **changes)) if f.subject == subject]
    assert finding.verdict == verdict and remedy in finding.remedy


def test_the_doctor_reads_this_machine(capsys, tmp_path):
    code = run("doctor", "--json", "--download-dir", str(tmp_path / "models"))
    findings = json.loads(capsys.readouterr().out)
    by_subject = {finding["subject"]: finding for finding in findings}
    assert by_subject["Python"]["detail"].startswith("3.")
    assert by_subject["torch"]["verdict"] in ("ok", "note")
    assert by_subject["default model"]["verdict"] == "note"  # nothing in that folder
    assert code == any(finding["verdict"] == "problem" for finding in findings)


def test_the_driver_report_never_raises():
    driver = read_driver()
    assert driver.gpus or driver.obstacle is not None or driver.version is not None


def test_fetch_prints_where_the_model_is(capsys, tmp_path):
    """The path on stdout, for scripts. A model that is there already is not fetched again."""
    (tmp_path / "config.json").write_text("{}")
    assert run("fetch", str(tmp_path)) == 0
    assert Path(capsys.readouterr().out.strip()) == tmp_path
