"""The bridge's contract: what the scheduler tells the runner, and what comes back.

Both are plain values: printable, comparable, picklable. A runner needs nothing else, so a simulated
GPU, a scripted model and the real thing are interchangeable behind `Runner`.

Mirrors vllm/v1/core/sched/output.py and `ModelRunnerOutput`. Left out: encoder inputs, KV transfer,
structured output. Chapter 6 reads this file.
"""

from typing import NamedTuple, Protocol

from minivllm.request import SamplingParams, TokenLogprobs


class NewRow(NamedTuple):
    """A request takes a row of the runner: all that the runner will ever know about it."""

    request_id: str
    row: int
    token_ids: tuple[int, ...]  # prompt, and after a preemption the output so far
    num_prompt_tokens: int
    params: SamplingParams
    seed: int  # 64 bits; draws depend on (seed, position) only
    stop_token_ids: frozenset[int]  # masked until min_tokens are out
    bad_words_ids: tuple[tuple[int, ...], ...] = ()  # token sequences that must not be completed


class RowPlan(NamedTuple):
    """What one row computes in this step: tokens [start, start + num_tokens) of its request."""

    request_id: str
    row: int
    start: int
    num_tokens: int
    new_block_ids: tuple[int, ...]  # appended to the row's block table before the step
    samples: bool  # the last of these tokens is the newest: draw the one after it


class StepPlan(NamedTuple):
    """One step. Rows that only decode need no token ids: the last one sampled is on the device."""

    step: int
    new_rows: tuple[NewRow, ...]
    rows: tuple[RowPlan, ...]
    freed_rows: tuple[int, ...]  # finished, aborted or preempted since the last plan
    num_tokens: int  # sum over rows; never above max_num_batched_tokens
    preempted: tuple[str, ...] = ()
    waited: tuple[tuple[str, str], ...] = ()  # (request id, why it got nothing); heads of queues


class SampledToken(NamedTuple):
    """One drawn token, with log-probabilities when its request asked for them."""

    token_id: int
    logprobs: TokenLogprobs | None = None


class StepResult(NamedTuple):
    """What a step brought: for each row of the plan a token, or None where nothing was sampled."""

    step: int
    sampled: tuple[SampledToken | None, ...]
    # request id -> (position of the first entry, one entry per prompt token computed in this step)
    prompt_logprobs: dict[str, tuple[int, list[TokenLogprobs]]] = {}


class StepHandle(Protocol):
    """A step under way."""

    def result(self) -> StepResult:
        """Wait for the step and return what it brought."""
        ...


class Runner(Protocol):
    """Anything that can execute plans."""

    def launch(self, plan: StepPlan) -> StepHandle:
        """Start the step. Returns without waiting where the device allows it."""
        ...
