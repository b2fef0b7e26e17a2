"""What happened, as typed events: the one source of every picture, metric and log line.

The engine emits events into a recorder. `NullRecorder` is the default: its `enabled` is False, and
nobody builds an event for it. An event holds numbers and, where a decision was made, its reason.

    recorder = Recorder()
    llm = LLM("smollm2", recorder=recorder)
    ...
    write_jsonl("run.jsonl", recorder.events)
    assert read_jsonl("run.jsonl") == recorder.events

Chapter 6 reads this file; the pictures of all chapters are drawn from it.
"""

import dataclasses
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from minivllm.base import UserError


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to `request_id` (or to nobody) in a step."""

    step: int
    request_id: str


@dataclass(frozen=True, slots=True)
class Added(Event):
    """A request joined the waiting queue."""

    num_prompt_tokens: int
    priority: int


@dataclass(frozen=True, slots=True)
class Refused(Event):
    """A request that could never run."""

    reason: str


@dataclass(frozen=True, slots=True)
class Admitted(Event):
    """A waiting request took a row, for the first time or again after a preemption."""

    row: int
    num_cached_tokens: int
    resumed: bool


@dataclass(frozen=True, slots=True)
class CacheHit(Event):
    """Full blocks with the request's first tokens were found in the prefix index."""

    block_ids: tuple[int, ...]
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Scheduled(Event):
    """A row computes tokens [start, start + num_tokens) in this step."""

    start: int
    num_tokens: int
    samples: bool


@dataclass(frozen=True, slots=True)
class Chunked(Event):
    """A prompt got only a part of the step."""

    num_tokens: int
    num_left: int
    reason: str


@dataclass(frozen=True, slots=True)
class Allocated(Event):
    """Blocks joined the end of the request's block table."""

    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Freed(Event):
    """The request let go of its blocks, tail first; cached ones keep their content for now."""

    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Evicted(Event):
    """A cached block lost its content to make room; `request_id` is empty."""

    block_id: int


@dataclass(frozen=True, slots=True)
class Preempted(Event):
    """A running request gave its blocks back and waits to be recomputed."""

    num_tokens: int
    reason: str


@dataclass(frozen=True, slots=True)
class Waited(Event):
    """The head of the waiting queue got nothing in this step; those behind it wait for it."""

    reason: str
    num_behind: int


@dataclass(frozen=True, slots=True)
class Sampled(Event):
    """A token came back from the runner."""

    token_id: int


@dataclass(frozen=True, slots=True)
class Finished(Event):
    """A request ended: stop, length or error."""

    reason: str
    num_output_tokens: int


@dataclass(frozen=True, slots=True)
class Aborted(Event):
    """The caller gave a request up."""

    num_output_tokens: int


@dataclass(frozen=True, slots=True)
class StepTimed(Event):
    """A step ended. `seconds` is wall time from schedule to update; `request_id` is empty."""

    seconds: float
    num_tokens: int
    num_running: int
    num_waiting: int
    num_free_blocks: int


_KINDS: dict[str, Any] = {kind.__name__: kind for kind in Event.__subclasses__()}


class Recorder:
    """Keeps every event in memory, in order."""

    enabled = True

    def __init__(self) -> None:
        self.events: list[Event] = []

    def emit(self, event: Event) -> None:
        """Take one event."""
        self.events.append(event)


class NullRecorder:
    """Keeps nothing. Emitters look at `enabled` first, so that an event is not even built."""

    enabled = False

    def emit(self, event: Event) -> None:
        """Take one event and forget it."""


class EventSink(Protocol):
    """Anything that takes events: a recorder, a metrics registry, a live page."""

    enabled: bool

    def emit(self, event: Event) -> None:
        """Take one event."""
        ...


def event_to_json(event: Event) -> dict[str, Any]:
    """`Added(3, "a", 5, 0)` -> `{"event": "Added", "step": 3, "request_id": "a", …}`."""
    return {"event": type(event).__name__, **dataclasses.asdict(event)}


def event_from_json(record: dict[str, Any]) -> Event:
    """The inverse of `event_to_json`.

    Raises:
        UserError: the record is not an event of ours.
    """
    try:
        kind, values = record["event"], {k: v for k, v in record.items() if k != "event"}
        for name, value in values.items():
            values[name] = tuple(value) if isinstance(value, list) else value
        event: Event = _KINDS[kind](**values)
        return event
    except (AttributeError, KeyError, TypeError) as error:
        raise UserError(f"not a trace event: {record!r} ({error})") from None


def write_jsonl(path: str | Path, events: Iterable[Event]) -> None:
    """Write events to a file, one JSON object a line."""
    with open(path, "w", encoding="utf-8") as file:
        for event in events:
            file.write(json.dumps(event_to_json(event)) + "\n")


def read_jsonl(path: str | Path) -> list[Event]:
    """Read a file that `write_jsonl` wrote.

    Raises:
        UserError: a line is not one of our events.
    """
    with open(path, encoding="utf-8") as file:
        try:
            return [event_from_json(json.loads(line)) for line in file if line.strip()]
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise UserError(f"{path} is not a trace: {error}") from None
