"""`ModelRunner`: executes plans with the real model. The bridge between the two towers.

It knows rows, not requests: what a request is, and which one goes next, the scheduler alone knows.

Mirrors vllm/v1/worker/gpu_model_runner.py. Chapter 6 reads this file.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from minivllm.base import cdiv
from minivllm.config import EngineConfig
from minivllm.kernels.batch import Batch
from minivllm.models.decoder import Decoder
from minivllm.request import TokenLogprobs
from minivllm.runner.batch import Rows, Step
from minivllm.runner.graphs import DecodeGraphs, default_sizes
from minivllm.runner.sampler import Drawn, Sampler, on_device
from minivllm.sched.plan import RowPlan, StepPlan, StepResult

PromptLogprobs = dict[str, tuple[int, list[TokenLogprobs]]]
LOGITS_AT_ONCE = 256  # rows of prompt logits in memory at a time: 50 MB at a vocabulary of 49k


class LaunchedStep:
    """A `StepHandle`: the drawn tokens are on their way to the host.

    The copy is ordered behind the step and before whatever is launched next, so waiting for it does
    not wait for that.
    """

    def __init__(
        self,
        plan: StepPlan,
        sampling: Sequence[RowPlan],  # in the order of `drawn`
        drawn: Drawn | None,
        prompt_logprobs: PromptLogprobs,
    ) -> None:
        self._plan, self._sampling, self._prompt_logprobs = plan, sampling, prompt_logprobs
        self._drawn, self._copied = drawn, None
        if drawn is not None and drawn.token_ids.is_cuda:
            self._drawn = drawn.start_to_host()
            self._copied = torch.cuda.Event()
            self._copied.record()

    def result(self) -> StepResult:
        """Wait for the tokens."""
        if self._copied is not None:
            self._copied.synchronize()
        tokens = self._drawn.to_host() if self._drawn is not None else []
        by_row = {planned.row: token for planned, token in zip(self._sampling, tokens, strict=True)}
        sampled = tuple([by_row.get(planned.row) for planned in self._plan.rows])
        return StepResult(self._plan.step, sampled, self._prompt_logprobs)


class ModelRunner:
    """A `Runner` over a decoder and its paged KV cache.

    Args:
        config: resolved.
        model: the decoder, weights loaded.
        kv_cache: K and V of each layer.
        sampler: draws tokens; see `minivllm.runner.sampler`.
        device: where model and cache live.
    """

    def __init__(
        self,
        config: EngineConfig,
        model: Decoder,
        kv_cache: list[tuple[Tensor, Tensor]],
        sampler: Sampler,
        device: torch.device,
    ) -> None:
        assert config.max_model_len is not None, "the config is not resolved"
        self.model, self.kv_cache, self.sampler = model, kv_cache, sampler
        block_size = config.cache.block_size
        self.rows = Rows(config.scheduler.max_num_seqs, config.max_model_len, block_size, device)
        self.graphs: DecodeGraphs | None = None
        if device.type == "cuda" and not config.enforce_eager:
            sizes = config.scheduler.cudagraph_capture_sizes
            sizes = list(sizes or default_sizes(config.scheduler.max_num_seqs))
            self.graphs = DecodeGraphs(
                model, kv_cache, self.rows, sampler, sizes, config.max_model_len
            )

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> "LaunchedStep":
        """Run the step: update rows, build the batch, forward, sample. Waits for nothing."""
        self.rows.apply(plan)
        for row in plan.freed_rows:
            self.sampler.remove(row)
        self.sampler.add(*plan.new_rows)
        if not plan.rows:
            return LaunchedStep(plan, (), None, {})
        if self.graphs is not None and self.graphs.covers(plan.rows):
            token_ids, ordered = self.graphs.launch(plan.rows)
            return LaunchedStep(plan, ordered, Drawn(token_ids, [], [], None), {})
        step = self.rows.build(plan)
        hidden = self.model(step.batch, self.kv_cache)  # [num_logits, hidden_size]
        num_sampling = len(step.sampling)
        drawn = self._sample(hidden[:num_sampling], step) if num_sampling else None
        prompt_logprobs = self._prompt_logprobs(hidden[num_sampling:], step.prompts)
        return LaunchedStep(plan, step.sampling, drawn, prompt_logprobs)

    def _sample(self, hidden: Tensor, step: Step) -> Drawn:
        """Draw the token after each sampling row's newest, and feed it to the next step."""
        row_ids = [planned.row for planned in step.sampling]
        positions = [planned.start + planned.num_tokens for planned in step.sampling]
        drawn = self.sampler.draw(self.model.compute_logits(hidden), row_ids, positions)
        self.rows.last_tokens[step.sampling_rows] = drawn.token_ids
        return drawn

    def _prompt_logprobs(
        self, hidden: Tensor, prompts: list[tuple[RowPlan, int]]
    ) -> PromptLogprobs:
        """Log-probabilities of the prompt tokens after each of `hidden`, a slice at a time."""
        found: PromptLogprobs = {}
        offset = 0
        for planned, count in prompts:
            new = self.rows.info[planned.row]
            assert new is not None and new.params.prompt_logprobs is not None
            first = planned.start + 1  # the position that the first of these states scores
            targets = on_device(new.token_ids[first : first + count], hidden.device)
            entries: list[TokenLogprobs] = []
            for begin in range(0, count, LOGITS_AT_ONCE):
                end = min(begin + LOGITS_AT_ONCE, count)
                logits = self.model.compute_logits(hidden[offset + begin : offset + end])
                entries += self.sampler.prompt_logprobs(
                    logits, targets[begin:end], new.params.prompt_logprobs
                )
            found[planned.request_id] = (first, entries)
            offset += count
        return found

    def profile(self, num_tokens: int, num_rows: int) -> int:
        """Run the largest step with throw-away input; returns the peak of its activations, bytes.

        Every token writes the null block. CUDA only.
        """
        device = self.rows.device
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        with torch.inference_mode():
            batch = self._dummy_batch(num_tokens, num_rows)
            logits = self.model.compute_logits(self.model(batch, self.kv_cache))
            self.sampler.profile(logits)
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before

    def _dummy_batch(self, num_tokens: int, num_rows: int) -> Batch:
        device = self.rows.device
        per_row = cdiv(num_tokens, num_rows)
        starts = torch.arange(num_rows + 1).mul_(per_row).clamp_(max=num_tokens)
        lengths = starts.diff()
        integers: dict[str, Any] = {"dtype": torch.int64, "device": device}
        return Batch(
            token_ids=torch.zeros(num_tokens, **integers),
            positions=torch.zeros(num_tokens, **integers),
            slot_mapping=torch.zeros(num_tokens, **integers),
            query_start=starts.to(device, torch.int32),
            seq_lens=lengths.to(device, torch.int32),
            block_tables=torch.zeros(
                num_rows, cdiv(per_row, self.rows.block_size), dtype=torch.int32, device=device
            ),
            logits_index=torch.zeros(num_rows, **integers),
            num_decode_rows=int((lengths == 1).sum()) if per_row == 1 else 0,
            max_query_len=per_row,
            max_seq_len=per_row,
        )
