"""What each row wants: the step from logits to tokens. Knows rows and logits, never text or blocks.

Plain rows (temperature, top_k, top_p, min_p) are served together: their numbers lie in persistent
tensors and are picked by row. A row that asks for more pays for itself:

```
 logits ──> allowed tokens, bias, ──> penalties ──> temperature, min_p, ──> token
   │        bad words, min_tokens     (counts of    top_k, top_p, draw
   │                                  own tokens)   (ops.sample)
   └──────> raw log-probabilities, for rows that ask
```

All that a step depends on is on the device (counts, the newest tokens) or known beforehand (rows,
positions), so the next step can start before this step's tokens are on the host.

**A sampler of your own**: `LLM(..., sampler=MySampler)` builds it with `Sampler`'s arguments and
calls `add`, `remove`, `draw`, `prompt_logprobs` and `profile`. Mostly a subclass with one method is
enough:

    class Coldest(Sampler):
        def choose(self, logits, rows, positions):
            return logits.argmax(-1)

Mirrors vllm/v1/sample/sampler.py, ops/penalties.py, ops/bad_words.py, ops/logprobs.py; left out:
logits processors as plug-ins, speculative drafts. Chapter 11 reads this file.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minivllm.kernels import ops
from minivllm.request import Logprob, SamplingParams, TokenLogprobs
from minivllm.sched.plan import NewRow, SampledToken

# Added to the logit of a banned token. Finite, so that a row whose every token is banned (its only
# allowed token is its end of sequence, before min_tokens) still draws one of them and no NaN.
BAN = -1e30


def on_device(
    values: Sequence[Any], device: torch.device, dtype: torch.dtype | None = None
) -> Tensor:
    """A small tensor on its way to the device. An ordinary copy would wait for all work there."""
    if device.type == "cpu":
        return torch.tensor(values, dtype=dtype)
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)


def _start_to_host(tensor: Tensor) -> Tensor:
    on_host = torch.empty_like(tensor, device="cpu", pin_memory=True)
    return on_host.copy_(tensor, non_blocking=True)


class Logprobs(NamedTuple):
    """Log-probabilities of chosen tokens and of the k best, as tensors on the device."""

    token_ids: Tensor  # [n] int64, the chosen tokens
    logprobs: Tensor  # [n] fp32
    ranks: Tensor  # [n] int64, 1 = best; equal ones share the better rank
    top_ids: Tensor  # [n, k] int64, best first
    top_logprobs: Tensor  # [n, k] fp32

    def to_host(self) -> list[TokenLogprobs]:
        """One dict a row: the chosen token first, then the best ones in order."""
        rows = []
        for token_id, logprob, rank, top_ids, top_logprobs in zip(
            *(t.tolist() for t in self), strict=True
        ):
            entry = {token_id: Logprob(logprob, rank)}
            for i, (top_id, top_logprob) in enumerate(zip(top_ids, top_logprobs, strict=True)):
                entry.setdefault(top_id, Logprob(top_logprob, i + 1))
            rows.append(entry)
        return rows


class Drawn(NamedTuple):
    """The tokens of a step, still on the device."""

    token_ids: Tensor  # [n] int64
    asking: list[int]  # indices into token_ids of the rows that want log-probabilities
    num_logprobs: list[int]  # how many alternatives each of them wants
    logprobs: Logprobs | None  # of the rows that ask

    def start_to_host(self) -> "Drawn":
        """The same in pinned memory, once the device has come so far. CUDA only."""
        logprobs = self.logprobs and Logprobs(*map(_start_to_host, self.logprobs))
        return self._replace(token_ids=_start_to_host(self.token_ids), logprobs=logprobs)

    def to_host(self) -> list[SampledToken]:
        """One `SampledToken` a row; waits for the device if the tensors are there."""
        sampled = [SampledToken(token_id) for token_id in self.token_ids.tolist()]
        if self.logprobs is not None:
            entries = self.logprobs.to_host()
            for i, k, entry in zip(self.asking, self.num_logprobs, entries, strict=True):
                token_id = sampled[i].token_id
                kept = {t: lp for t, lp in entry.items() if t == token_id or lp.rank <= k}
                sampled[i] = SampledToken(token_id, kept)
        return sampled


def _gather(logits: Tensor, token_ids: Tensor, k: int, num_valid_tokens: int) -> Logprobs:
    # The sum runs over the padding too, as the model's own softmax does.
    total = logits.logsumexp(-1, keepdim=True)
    logits = logits[:, :num_valid_tokens]
    chosen = logits.gather(-1, token_ids[:, None])
    ranks = (logits > chosen).sum(-1) + 1
    top = logits.topk(min(k, num_valid_tokens), dim=-1)
    return Logprobs(token_ids, (chosen - total).squeeze(-1), ranks, top.indices, top.values - total)


class _BadWords:
    """Token sequences that a row must not complete, and the row's newest output tokens.

    ```
     prefixes  -1 -1  5      a word [5, 9]: banned is 9 when the tail ends in 5
               -1 -1 -1      a word [7]: 7 is always banned
      tail     -2  3  5      (-1 matches anything; -2 is "no token yet" and matches only -1)
    ```
    """

    def __init__(
        self, words: Sequence[Sequence[int]], output: Sequence[int], device: torch.device
    ) -> None:
        length = max(map(len, words)) - 1
        padded = [[-1] * (length + 1 - len(word)) + list(word[:-1]) for word in words]
        tail = ([-2] * length + list(output))[len(output) :]
        self.prefixes = on_device(padded, device, torch.int64).view(len(words), length)
        self.last = on_device([word[-1] for word in words], device)
        self.tail = on_device(tail, device, torch.int64)

    def ban(self, logits: Tensor) -> None:
        """Ban the last token of each word whose other tokens were just drawn. logits: [vocab]."""
        matches = ((self.prefixes == self.tail) | (self.prefixes < 0)).all(-1)
        logits.index_add_(0, self.last, matches * BAN)

    def append(self, token_id: Tensor) -> None:
        """Take in the drawn token, [1] int64."""
        self.tail = torch.cat((self.tail, token_id))[1:]


class _Edits:
    """What a row does to its logits beside penalties."""

    def __init__(self, new: NewRow, vocab_size: int, device: torch.device) -> None:
        params, num_prompt = new.params, new.num_prompt_tokens
        self.addend: Tensor | None = None  # [vocab] fp32
        if params.allowed_token_ids is not None:
            self.addend = torch.full((vocab_size,), float("-inf"), device=device)
            self.addend[on_device(params.allowed_token_ids, device)] = 0
        if params.logit_bias:
            if self.addend is None:
                self.addend = torch.zeros(vocab_size, device=device)
            ids = on_device(list(params.logit_bias), device)
            bias = on_device(list(params.logit_bias.values()), device).float()
            self.addend[ids] += bias
        self.bad_words: _BadWords | None = None
        # An id outside the vocabulary can never be drawn: harmless, and no index.
        if words := [word for word in new.bad_words_ids if word[-1] < vocab_size]:
            self.bad_words = _BadWords(words, new.token_ids[num_prompt:], device)
        stop_ids = [i for i in new.stop_token_ids if i < vocab_size]
        self.stop_ids = on_device(stop_ids, device, torch.int64)
        self.first_stop_position = num_prompt + params.min_tokens if stop_ids else 0
        self.for_good = self.addend is not None or self.bad_words is not None

    def apply(self, logits: Tensor, position: int) -> None:
        """Change the logits of the token at `position`, in place. logits: [vocab]."""
        if self.addend is not None:
            logits += self.addend
        if self.bad_words:
            self.bad_words.ban(logits)
        if position < self.first_stop_position:
            logits[self.stop_ids] += BAN

    def append(self, token_id: Tensor) -> None:
        """Take in the drawn token, [1] int64."""
        if self.bad_words:
            self.bad_words.append(token_id)


class Sampler:
    """Draws the next token of rows, each as its `SamplingParams` say.

    Draws depend on (seed, position) only: not on the row, the batch or the step.

    Args:
        max_num_seqs: number of rows.
        vocab_size: width of the logits.
        num_valid_tokens: ids from here on are padding of the vocabulary and never drawn.
        device: where logits and all tensors live.
    """

    def __init__(
        self, max_num_seqs: int, vocab_size: int, num_valid_tokens: int, device: torch.device | str
    ) -> None:
        self.vocab_size, self.num_valid_tokens = vocab_size, num_valid_tokens
        self.device = torch.device(device)
        # Columns are rows of the batch, so that picking some gives contiguous vectors. One more is
        # for rows of padding: all zeros, that is greedy.
        self._floats = torch.zeros(6, max_num_seqs + 1, device=device)
        self._ints = torch.zeros(2, max_num_seqs + 1, dtype=torch.int64, device=device)
        # What a row with penalties has seen of each token: 1 if in the prompt + 2 per output token.
        self._seen: Tensor | None = None  # [max_num_seqs, vocab_size] int32, made when first asked
        self._random: set[int] = set()  # rows that are not greedy
        self._penalised: set[int] = set()
        self._edits: dict[int, _Edits] = {}
        self._num_logprobs: dict[int, int] = {}

    def add(self, *new_rows: NewRow) -> None:
        """Requests take rows; `token_ids` may hold output from before a preemption."""
        if not new_rows:
            return
        floats, ints = [], []
        for new in new_rows:
            self.remove(new.row)
            params, row = new.params, new.row
            # Limits keep every product finite in fp32; beyond them nothing would change.
            floats.append((
                min(params.temperature, 1e20), params.top_p, params.min_p,
                min(max(params.repetition_penalty, 1e-7), 1e7),
                params.presence_penalty, params.frequency_penalty,
            ))  # fmt: skip
            signed_seed = (new.seed + 2**63) % 2**64 - 2**63
            ints.append((row, min(max(params.top_k, 0), self.vocab_size), signed_seed))
            self._note_wishes(new)
        rows, *columns = on_device(ints, self.device).T
        self._ints[:, rows] = torch.stack(columns)
        self._floats[:, rows] = on_device(floats, self.device, torch.float32).T  # `1` is an int

    def _note_wishes(self, new: NewRow) -> None:
        """Remember what the row wants beyond the plain numbers."""
        params, row = new.params, new.row
        if not params.greedy:
            self._random.add(row)
        if params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty:
            self._penalised.add(row)
            self._count(new)
        if (
            params.allowed_token_ids is not None
            or params.logit_bias
            or new.bad_words_ids
            or params.min_tokens
        ):
            self._edits[row] = _Edits(new, self.vocab_size, self.device)
        if params.logprobs is not None:
            self._num_logprobs[row] = params.logprobs

    def remove(self, row: int) -> None:
        """The row is free; nothing of its request is left."""
        self._random.discard(row)
        self._penalised.discard(row)
        self._edits.pop(row, None)
        self._num_logprobs.pop(row, None)

    def __call__(
        self, logits: Tensor, rows: Sequence[int], positions: Sequence[int]
    ) -> list[SampledToken]:
        """Draw and wait: `draw(...).to_host()`."""
        return self.draw(logits, rows, positions).to_host()

    def draw(self, logits: Tensor, rows: Sequence[int], positions: Sequence[int]) -> Drawn:
        """Draw one token a row without waiting for the device.

        Args:
            logits: [n, vocab_size], may be changed in place.
            rows: n rows, each at most once.
            positions: index of the token being drawn within its request (prompt included).
        """
        if not self.draws_plainly(rows):
            logits = logits.float()  # sums and penalties want more than bf16 has
        asking = [i for i, row in enumerate(rows) if row in self._num_logprobs]
        raw = logits[asking] if asking else None  # a copy: log-probabilities are the model's own
        self._mask_padding(logits)
        if not self._edits.keys().isdisjoint(rows):
            for i, row in enumerate(rows):
                if edits := self._edits.get(row):
                    edits.apply(logits[i], positions[i])
                    if not edits.for_good and positions[i] + 1 >= edits.first_stop_position:
                        del self._edits[row]  # min_tokens are out: from here on the row is plain
        penalised = [i for i, row in enumerate(rows) if row in self._penalised]
        if penalised:
            self._penalise(logits, penalised, [rows[i] for i in penalised])
        token_ids = self.choose(logits, rows, positions)
        self._remember(token_ids, rows, penalised)
        num_logprobs = [self._num_logprobs[rows[i]] for i in asking]
        logprobs = None
        if raw is not None:
            most = max(num_logprobs)
            logprobs = _gather(raw, token_ids[asking], most, self.num_valid_tokens)
        return Drawn(token_ids, asking, num_logprobs, logprobs)

    def choose(self, logits: Tensor, rows: Sequence[int], positions: Sequence[int]) -> Tensor:
        """Pick a token a row from logits that are masked and penalised. Returns [n] int64."""
        if self._random.isdisjoint(rows):
            return logits.argmax(-1)
        index = on_device(rows, self.device)
        return self._sample(logits, index, on_device(positions, self.device))

    def _sample(self, logits: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
        temperature, top_p, min_p = self._floats[:3, rows]
        top_k, seeds = self._ints[:, rows]
        u = ops.uniform(seeds, positions)
        return ops.sample(logits, temperature, top_k, top_p, min_p, u)

    def draws_plainly(self, rows: Sequence[int]) -> bool:
        """Whether `draw_plain` does for these rows; never for a sampler of one's own."""
        return type(self) is Sampler and not any(
            row in asking
            for asking in (self._edits, self._penalised, self._num_logprobs)
            if asking
            for row in rows
        )

    def draw_plain(self, logits: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
        """`draw` for rows that ask for no more than `ops.sample` gives; fit for a CUDA graph.

        logits: [n, vocab_size], changed in place; rows, positions: [n] int64 on the device, rows
        may repeat the one after the last. Returns [n] int64.
        """
        self._mask_padding(logits)
        return self._sample(logits, rows, positions)

    def _mask_padding(self, logits: Tensor) -> None:
        if self.num_valid_tokens < self.vocab_size:
            logits[:, self.num_valid_tokens :] = float("-inf")

    def prompt_logprobs(self, logits: Tensor, token_ids: Tensor, k: int) -> list[TokenLogprobs]:
        """Log-probabilities of prompt tokens and of the k best, one dict a token.

        Args:
            logits: [n, vocab_size], the model's own, at the position before each token.
            token_ids: [n] int64, the prompt's own tokens.
            k: how many alternatives.
        """
        return _gather(logits.float(), token_ids, k, self.num_valid_tokens).to_host()

    def profile(self, logits: Tensor) -> None:
        """Run the costliest step, so that its memory can be measured; nothing of it is left.

        logits: [n, vocab_size] fp32, n at most max_num_seqs; no row is taken.
        """
        params = SamplingParams(top_p=0.9, repetition_penalty=1.1, logprobs=1)
        rows = range(logits.shape[0])
        for row in rows:
            self.add(NewRow("profile", row, (0,), 1, params, 0, frozenset()))
        self.draw(logits, rows, [1] * len(rows))
        for row in rows:
            self.remove(row)
        self._seen = None

    def _count(self, new: NewRow) -> None:
        """Count anew what the row has seen: after a preemption its output is in `token_ids`."""
        if self._seen is None:
            shape = self._floats.shape[1], self.vocab_size
            self._seen = torch.zeros(shape, dtype=torch.int32, device=self.device)
        ids = on_device(new.token_ids, self.device)
        prompt, output = ids[: new.num_prompt_tokens], ids[new.num_prompt_tokens :]
        seen = self._seen[new.row].zero_()
        seen[prompt] = 1
        seen.index_add_(0, output, torch.full_like(output, 2, dtype=torch.int32))

    def _penalise(self, logits: Tensor, indices: list[int], rows: list[int]) -> None:
        """Repetition penalty (Keskar et al. 2019), then frequency and presence, in place."""
        assert self._seen is not None, "a row with penalties was added without being counted"
        index, row_index = (on_device(x, self.device) for x in (indices, rows))
        repetition, presence, frequency = self._floats[3:, row_index].unsqueeze(-1)
        seen, chosen = self._seen[row_index], logits[index]
        num_output = seen >> 1
        factor = torch.where(chosen > 0, 1 / repetition, repetition)
        chosen = torch.where(seen > 0, chosen * factor, chosen)
        logits[index] = chosen - frequency * num_output - presence * (num_output > 0)

    def _remember(self, token_ids: Tensor, rows: Sequence[int], penalised: list[int]) -> None:
        """Take the drawn tokens into counts and tails, on the device."""
        if penalised:
            assert self._seen is not None, "a row with penalties was added without being counted"
            row_index = on_device([rows[i] for i in penalised], self.device)
            self._seen[row_index, token_ids[penalised]] += 2
        if not self._edits.keys().isdisjoint(rows):
            for i, row in enumerate(rows):
                if row in self._edits:
                    self._edits[row].append(token_ids[i : i + 1])
