"""A run, watched: its events counted, told in sentences, and drawn in a terminal.

`Tally` and `Narrator` look at events only; a frame also looks at the engine's queues and blocks.

```
 request = a colour and a letter   A      block = a square      A+ shared   □ cached, held by none
 grey = preempted, waits           E      bold = new this step  ·  free     ∅ null block
```

Used by `minivllm demo`.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from rich.console import Group
from rich.text import Text

from minivllm.base import format_seconds
from minivllm.engine.llm import LLM
from minivllm.request import Request, RequestOutput
from minivllm.trace import (
    Added,
    Admitted,
    Allocated,
    CacheHit,
    Chunked,
    Event,
    Evicted,
    Finished,
    Freed,
    Preempted,
    Sampled,
    StepTimed,
    Waited,
)

# Eight hues that colour-blind readers can tell apart; the letter says it too.
HUES = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#7f6bc4")


@dataclass
class Tally:
    """Counts of a run, from its events alone."""

    steps: int = 0
    queued: set[str] = field(default_factory=set)  # had to wait for a row, budget or blocks
    chunks: int = 0
    chunked: set[str] = field(default_factory=set)
    hit_tokens: int = 0
    hits: set[str] = field(default_factory=set)
    preemptions: int = 0
    evictions: int = 0
    peak_blocks: int = 0
    output_tokens: int = 0
    _references: dict[int, int] = field(default_factory=dict)  # block id -> tables that hold it
    _arrived: dict[str, int] = field(default_factory=dict)  # request id -> step at which it came

    def take(self, events: Iterable[Event]) -> None:
        """Count more events; call it with each event once, in order."""
        for event in events:
            name = event.request_id
            match event:
                case Added():
                    self._arrived[name] = event.step
                case Admitted(resumed=False) if event.step > self._arrived.get(name, 0) + 1:
                    self.queued.add(name)
                case Chunked():
                    self.chunks += 1
                    self.chunked.add(name)
                case CacheHit(block_ids=blocks, num_tokens=count):
                    self.hit_tokens += count
                    self.hits.add(name)
                    self._hold(blocks, 1)
                case Allocated(block_ids=blocks):
                    self._hold(blocks, 1)
                case Freed(block_ids=blocks):
                    self._hold(blocks, -1)
                case Preempted():
                    self.preemptions += 1
                case Evicted():
                    self.evictions += 1
                case Sampled():
                    self.output_tokens += 1
                case StepTimed():
                    self.steps += 1

    def _hold(self, block_ids: Iterable[int], change: int) -> None:
        for block_id in block_ids:
            self._references[block_id] = self._references.get(block_id, 0) + change
        held = sum(count > 0 for count in self._references.values())
        self.peak_blocks = max(self.peak_blocks, held)

    def shown(self) -> list[tuple[bool, str]]:
        """The four things that the demo is there to show: did they happen, and how often."""
        return [
            (
                bool(self.queued),
                f"queueing: {len(self.queued)} requests had to wait for their turn",
            ),
            (
                bool(self.chunks),
                f"chunked prefill: {self.chunks} times the prompt of {_names(self.chunked)} was "
                f"cut to what the step had left",
            ),
            (
                bool(self.hits),
                f"prefix hits: {len(self.hits)} requests found {self.hit_tokens} tokens in cached "
                f"blocks and did not compute them",
            ),
            (
                bool(self.preemptions),
                f"preemption: {self.preemptions} times a request gave its blocks back and was "
                f"recomputed later",
            ),
        ]


def _names(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "nobody"


class Narrator:
    """Turns events into short sentences, and says a reason to wait only when it changes."""

    def __init__(self) -> None:
        self._waited: tuple[str, str] | None = None

    def tell(self, event: Event) -> str | None:
        """The event as a sentence; None for those that would only fill the screen."""
        name = event.request_id
        match event:
            case Admitted(row=row, resumed=True, num_cached_tokens=cached):
                return f"{name} is back, in row {row}; {cached} of its tokens are still cached"
            case Admitted(row=row):
                return f"{name} starts, in row {row}"
            case CacheHit(block_ids=blocks, num_tokens=count):
                return f"{name} finds {count} tokens in {_blocks(len(blocks))} of the prefix cache"
            case Chunked(num_tokens=count, num_left=left, reason=reason):
                return f"{name} computes a chunk of {count}, {left} left: {reason}"
            case Preempted(num_tokens=count, reason=reason):
                return f"{name} is preempted, its {count} tokens will be recomputed: {reason}"
            case Finished(reason=reason, num_output_tokens=count):
                return f"{name} is done after {count} tokens ({reason})"
            case Waited(reason=reason, num_behind=behind):
                kind = (name, re.sub(r"\d+", "", reason))
                if kind == self._waited:
                    return None
                self._waited = kind
                return f"{name} waits: {reason}" + (f"; {behind} more behind it" if behind else "")
        return None


def _blocks(count: int) -> str:
    return f"{count} block" + "s" * (count != 1)


# -- the screen ------------------------------------------------------------------------------


def _style(name: str) -> str:
    return HUES[(ord(name[0]) - ord("A")) % len(HUES)]


def _letters(requests: Iterable[Request]) -> Text:
    text = Text()
    for request in requests:
        preempted = request.num_preemptions and request.row < 0
        hue = "grey50" if preempted else _style(request.request_id)
        text.append(f" {request.request_id} ", f"bold reverse {hue}").append(" ")
    return text


def lanes(llm: LLM, done: Sequence[str]) -> Text:
    """The queues: who waits and why, who runs, who is done."""
    scheduler = llm.engine.scheduler
    text = Text("waiting  ").append_text(_letters(scheduler.waiting))
    if scheduler.waiting:
        head = scheduler.waiting[0].request_id
        text.append(f" {head}: {scheduler.why_waiting(head)}", "italic")
    text.append("\nrunning  ").append_text(_letters(scheduler.running)).append("\ndone     ")
    for name in done:
        text.append(f" {name} ", _style(name)).append(" ")
    return text


def block_map(llm: LLM, new: Iterable[int], width: int) -> Text:
    """Every block of the KV cache as a square: whose it is, shared, cached, free."""
    kv = llm.engine.scheduler.kv
    owner: dict[int, str] = {}
    for request in reversed(llm.engine.scheduler.running):  # the first owner names a shared block
        owner |= dict.fromkeys(kv.block_ids(request), request.request_id)
    blocks, fresh = kv.pool.blocks, set(new)
    shared = sum(block.ref_count > 1 for block in blocks)
    held = sum(block.ref_count > 0 for block in blocks)
    cached = sum(block.ref_count == 0 and block.key is not None for block in blocks)
    usable = kv.pool.num_usable
    text = Text(
        f"KV cache: {held} of {usable} blocks held ({shared} shared), {cached} □ cached, "
        f"{usable - held - cached} · free\n"
    )
    per_line = max(8, min(16, (width - 9) // 3))
    for i, block in enumerate(blocks[:256]):  # as many as a screen can show
        if block.block_id in owner:
            name = owner[block.block_id]
            mark = f"{name}{'+' if block.ref_count > 1 else ' '}"
            bold = "bold underline " if block.block_id in fresh else ""
            text.append(mark, f"{bold}reverse {_style(name)}")
        elif block.block_id == 0:
            text.append("∅ ", "dim")
        else:
            text.append("□ " if block.key is not None else "· ", "dim")
        text.append("\n" if i % per_line == per_line - 1 else " ")
    text.rstrip()
    return text


def texts(llm: LLM, outputs: Sequence[RequestOutput], asked: Mapping[str, str], width: int) -> Text:
    """One line a request: prompt + output tokens, how far it is, and the end of its text."""
    text = Text()
    for output in outputs:
        name, completion = output.request_id, output.outputs[0]
        request = llm.engine.scheduler.requests.get(name)
        text.append(f" {name} ", f"bold reverse {_style(name)}")
        counts = f" {len(output.prompt_token_ids):3}+{len(completion.token_ids):<3}"
        text.append(counts, "dim")
        if request is not None and request.row >= 0 and not completion.token_ids:
            # Prefill is hatched, as in every picture of the course.
            share = request.num_computed_tokens / request.num_prompt_tokens
            text.append("▒" * round(20 * share) + " " * (20 - round(20 * share)), _style(name))
            text.append(f" read {request.num_computed_tokens} of {request.num_prompt_tokens}")
        elif request is not None and request.row < 0 and request.num_preemptions:
            text.append(_tail(completion.text, width - 24) + " (preempted)", "grey50")
        elif request is not None and not completion.token_ids:
            text.append(head(asked[name], width - 12), "dim italic")
        else:
            text.append(_tail(completion.text, width - 12))
        text.append("\n")
    text.rstrip()
    return text


def flat(text: str) -> str:
    """The text on one line."""
    return " ".join(text.split())


def _tail(text: str, width: int) -> str:
    text = flat(text)
    return text if len(text) <= width else "…" + text[1 - width :]


def head(text: str, width: int) -> str:
    """The beginning of a text, at most `width` characters."""
    text = flat(text)
    return text if len(text) <= width else text[: width - 1] + "…"


def screen(
    llm: LLM,
    outputs: Sequence[RequestOutput],
    asked: Mapping[str, str],
    told: Sequence[str],
    tally: Tally,
    seconds: float,
    size: tuple[int, int],
    new: Iterable[int] = (),
) -> Group:
    """One frame.

    Args:
        llm: the engine, for its queues and blocks.
        outputs: the requests.
        asked: request id -> the words of its prompt.
        told: sentences about what happened, the newest last.
        tally: counts so far.
        seconds: since the start.
        size: the terminal's width and height.
        new: blocks that were just taken.
    """
    width, height = size
    title = f"step {tally.steps}   {format_seconds(seconds)}   {tally.output_tokens} tokens out"
    done = [output.request_id for output in outputs if output.finished]
    parts = [
        Text(title, "bold"),
        lanes(llm, done),
        Text(),
        block_map(llm, new, width),
        Text(),
        texts(llm, outputs, asked, width),
        Text(),
    ]
    used = sum(part.plain.count("\n") + 1 for part in parts)
    last = told[-max(1, height - used - 1) :]
    return Group(*parts, Text("\n".join(last), "italic", no_wrap=True, overflow="ellipsis"))
