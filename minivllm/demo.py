"""`minivllm demo`: ten prompts, four rows, thirty blocks. Watch an engine share what is too little.

Everything shown comes from two places: the trace (what happened, and why) and the engine's own
queues and blocks (how it stands). Nothing is acted, and nothing is slowed down to be seen.

Chapter 0 draws the same run in the notebook.
"""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any, TextIO

from rich.console import Console
from rich.live import Live
from rich.table import Table

from minivllm.base import format_seconds
from minivllm.engine.engine import EngineStepError
from minivllm.engine.llm import LLM
from minivllm.request import RequestOutput, SamplingParams
from minivllm.trace import Allocated, Recorder
from minivllm.watch import Narrator, Tally, flat, head, screen

# Small on purpose: with the default sizes nobody would ever have to wait.
TIGHT = {"num_gpu_blocks_override": 31, "max_num_seqs": 4, "max_num_batched_tokens": 64}
FRAME_SECONDS = 0.08  # between two frames in which nothing but text changed
TRY_NEXT = (
    ("minivllm demo --num-gpu-blocks-override 200", "room for all, no preemption"),
    ("minivllm demo --no-enable-prefix-caching", "nothing is shared"),
    ("minivllm demo --max-num-batched-tokens 16", "smaller steps, more chunks"),
    ("minivllm demo --trace run.jsonl", "every event as JSON"),
    ("minivllm chat", "talk to the model"),
)


@dataclass(frozen=True)
class DemoPrompt:
    """One request of the demo."""

    letter: str
    messages: list[dict[str, str]]
    max_tokens: int


def load_prompts() -> list[DemoPrompt]:
    """The prompts that come with the package."""
    data = json.loads((resources.files("minivllm") / "data" / "demo.json").read_text("utf-8"))
    prompts = []
    for letter, entry in zip("ABCDEFGHIJKLMNOPQRSTUVWXYZ", data["prompts"], strict=False):
        messages = [{"role": "user", "content": entry["text"]}]
        if "system" in entry:
            messages.insert(0, {"role": "system", "content": data["systems"][entry["system"]]})
        prompts.append(DemoPrompt(letter, messages, entry["max_tokens"]))
    return prompts


class _Console(Console):
    """Rich ends the process with 1 when nobody reads any more; the caller knows better."""

    def on_broken_pipe(self) -> None:
        """Let the caller hear of it."""
        raise BrokenPipeError


def run_demo(
    model: str,
    engine_args: dict[str, Any],
    *,
    recorder: Recorder,
    file: TextIO,
    plain: bool = False,
) -> int:
    """Run the demo and print its report. Returns the exit code.

    Args:
        model: any model that `LLM` takes.
        engine_args: take the place of the tight defaults; then nothing is promised to happen.
        recorder: receives the events.
        file: where everything is written.
        plain: lines, even in a terminal.

    Raises:
        UserError: a setting is wrong or the model cannot be used.
    """
    console = _Console(file=file, highlight=False, markup=False, emoji=False)
    live = console.is_terminal and not console.is_dumb_terminal and not plain
    console.soft_wrap = not live  # a frame must fit the screen, a line need not
    console.print(f"Loading {model} …")
    started = time.perf_counter()
    with LLM(model, recorder=recorder, **{**TIGHT, **engine_args}) as llm:
        loaded = time.perf_counter() - started
        config = llm.config
        console.print(
            f"Ready in {format_seconds(loaded)}: {llm.model_config.num_parameters() / 1e6:.1f} M "
            f"parameters, {config.dtype} on {config.device}. Small on purpose: "
            f"{config.scheduler.max_num_seqs} rows, {config.scheduler.max_num_batched_tokens} "
            f"tokens a step, {llm.memory.num_blocks - 1} KV blocks of {config.cache.block_size}."
        )
        prompts = load_prompts()
        asked = {prompt.letter: prompt.messages[-1]["content"] for prompt in prompts}
        outputs = [_add(llm, prompt) for prompt in prompts]
        started = time.perf_counter()
        tally = (_watch if live else _tell)(llm, outputs, asked, recorder, console)
        seconds = time.perf_counter() - started
        if not live:
            for output in outputs:
                console.print(f"{output.request_id}: {flat(output.outputs[0].text)}")
        report(console, llm, outputs, tally, seconds)
    if all(happened for happened, _ in tally.shown()):
        return 0
    if engine_args:
        console.print("With settings of your own, not everything above has to happen.")
        return 0
    console.print("Something above did not happen; the sizes are tuned for the default model.")
    return 1


def _add(llm: LLM, prompt: DemoPrompt) -> RequestOutput:
    tokenizer = llm.tokenizer
    if tokenizer.chat_template is None:  # a base model: let it continue the bare words
        ids = tokenizer.encode("\n".join(message["content"] for message in prompt.messages))
    else:
        text = tokenizer.apply_chat_template(prompt.messages, add_generation_prompt=True)
        ids = tokenizer.encode(text, add_special_tokens=False)
    params = SamplingParams(temperature=0, max_tokens=prompt.max_tokens)
    return llm.add_request(ids, params, request_id=prompt.letter)


def _step(llm: LLM) -> None:
    report = llm.step()
    if report.error is not None:
        raise EngineStepError(f"step {report.step} failed: {report.error}") from report.error


def _tell(
    llm: LLM,
    outputs: Sequence[RequestOutput],
    asked: Mapping[str, str],
    recorder: Recorder,
    console: Console,
) -> Tally:
    """Run to the end, one plain line an event."""
    tally, narrator, seen = Tally(), Narrator(), 0
    for output in outputs:
        name, count = output.request_id, len(output.prompt_token_ids)
        console.print(f"{name} asks with {count} tokens: {head(asked[name], 60)}")
    while llm.has_unfinished_requests():
        _step(llm)
        for event in recorder.events[seen:]:
            sentence = narrator.tell(event)
            if sentence:
                console.print(f"step {event.step:3}  {sentence}")
        tally.take(recorder.events[seen:])
        seen = len(recorder.events)
    return tally


def _watch(
    llm: LLM,
    outputs: Sequence[RequestOutput],
    asked: Mapping[str, str],
    recorder: Recorder,
    console: Console,
) -> Tally:
    """Run to the end, drawing frames."""
    tally, narrator, seen = Tally(), Narrator(), 0
    told: list[str] = []
    started, drawn = time.perf_counter(), 0.0
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        while llm.has_unfinished_requests():
            _step(llm)
            events, before = recorder.events[seen:], len(told)
            seen = len(recorder.events)
            told += [f"step {e.step:3}  {s}" for e in events if (s := narrator.tell(e))]
            tally.take(events)
            now = time.perf_counter()
            if (
                len(told) > before
                or now - drawn > FRAME_SECONDS
                or not llm.has_unfinished_requests()
            ):
                new = [b for e in events if isinstance(e, Allocated) for b in e.block_ids]
                size = (console.width, console.height)
                frame = screen(llm, outputs, asked, told, tally, now - started, size, new)
                live.update(frame, refresh=True)
                drawn = now
    return tally


def report(
    console: Console,
    llm: LLM,
    outputs: Sequence[RequestOutput],
    tally: Tally,
    seconds: float,
) -> None:
    """What the run came to, whether it showed what it should, and what to try next."""
    first = [output.time_to_first_token or 0.0 for output in outputs]
    prompt_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold")
    for name, value in (
        ("requests", f"{len(outputs)}, with {prompt_tokens} prompt tokens"),
        ("output", f"{tally.output_tokens} tokens in {format_seconds(seconds)}: "
                   f"{tally.output_tokens / seconds:.1f} tokens/s"),
        ("time to first token", f"mean {format_seconds(sum(first) / len(first))}, "
                                f"longest {format_seconds(max(first))}"),
        ("KV blocks at peak", f"{tally.peak_blocks} of {llm.memory.num_blocks - 1}"),
        ("from the prefix cache", f"{tally.hit_tokens} tokens"),
        ("preemptions", str(tally.preemptions)),
        ("chunks", str(tally.chunks)),
        ("evicted blocks", str(tally.evictions)),
        ("steps", str(tally.steps)),
    ):  # fmt: skip
        table.add_row(name, value)
    console.print()
    console.print(table)
    console.print("\nDid it happen?")
    for happened, sentence in tally.shown():
        console.print(f"  {'✓' if happened else '✗'} {sentence}")
    console.print("\nWhat to try next")
    for command, effect in TRY_NEXT:
        console.print(f"  {command:44} {effect}")
