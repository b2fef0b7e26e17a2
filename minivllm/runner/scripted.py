"""`ScriptedModel`: a runner that forces given tokens. No model, no torch; for tests and lessons.

It keeps KV memory as a real one does, but in place of K and V a slot holds a fingerprint of the
tokens up to it. Each step reads every context back through the block tables, so a scheduler, a
block pool or a prefix index that mixes up blocks is caught in the step in which it happens.

    model = ScriptedModel(token_script({"a": [5, 6, 7]}, end_token=2), num_blocks=64, block_size=16)
    engine = Engine(scheduler, model, ...)
"""

from collections.abc import Callable, Mapping, Sequence

from minivllm.request import Logprob
from minivllm.sched.plan import NewRow, RowPlan, SampledToken, StepPlan, StepResult

# (request id, index of the output token, fingerprint of the context) -> token id
Script = Callable[[str, int, int], int]


def hash_script(vocab_size: int) -> Script:
    """A "model" whose next token depends on every token before it, and on nothing else."""
    return lambda request_id, index, fingerprint: fingerprint % vocab_size


def token_script(tokens: Mapping[str, Sequence[int]], end_token: int) -> Script:
    """Force `tokens[request_id]`, then `end_token`."""

    def script(request_id: str, index: int, fingerprint: int) -> int:
        forced = tokens.get(request_id, ())
        return forced[index] if index < len(forced) else end_token

    return script


class Finished:
    """A `StepHandle` whose result is there already."""

    def __init__(self, result: StepResult) -> None:
        self._result = result

    def result(self) -> StepResult:
        """Return at once."""
        return self._result


class _Row:
    """What the double knows of one row."""

    def __init__(self, new: NewRow) -> None:
        self.new = new
        self.tokens = list(new.token_ids)
        self.chain: list[int] = []  # chain[i] = fingerprint of tokens[: i + 1]
        self.block_ids: list[int] = []

    def fingerprint(self, length: int) -> int:
        """The fingerprint of the first `length` tokens."""
        for token in self.tokens[len(self.chain) : length]:
            self.chain.append(hash((self.chain[-1] if self.chain else 0, token)))
        return self.chain[length - 1]


class ScriptedModel:
    """A `Runner` that answers from a script and checks the plan against its memory.

    Raises:
        AssertionError: from `launch`, when a plan breaks the contract; the message says how.
    """

    def __init__(self, script: Script, *, num_blocks: int, block_size: int) -> None:
        self.script = script
        self.block_size = block_size
        self.num_steps = 0
        self._memory = [[0] * block_size for _ in range(num_blocks)]
        self._rows: dict[int, _Row] = {}

    def launch(self, plan: StepPlan) -> Finished:
        """Execute the plan at once."""
        self.num_steps += 1
        for row_id in plan.freed_rows:
            self._rows.pop(row_id, None)
        for new in plan.new_rows:
            assert new.row not in self._rows, f"row {new.row} is given away twice"
            self._rows[new.row] = _Row(new)
        # As in a real layer, all rows write before any row reads.
        for planned in plan.rows:
            row = self._rows[planned.row]
            assert row.new.request_id == planned.request_id, f"row {planned.row} has another owner"
            row.block_ids += planned.new_block_ids
            end = planned.start + planned.num_tokens
            assert end <= len(row.tokens), f"{planned} computes tokens that do not exist yet"
            row.fingerprint(end)
            for position in range(planned.start, end):
                block_id = row.block_ids[position // self.block_size]
                assert block_id != 0, f"{planned} would write the null block"
                self._memory[block_id][position % self.block_size] = row.chain[position]
        return Finished(StepResult(plan.step, tuple(map(self._run_row, plan.rows))))

    def _run_row(self, planned: RowPlan) -> SampledToken | None:
        row, end = self._rows[planned.row], planned.start + planned.num_tokens
        for i, start in enumerate(range(0, end, self.block_size)):
            expected = row.chain[start : min(start + self.block_size, end)]
            held = self._memory[row.block_ids[i]][: len(expected)]
            assert held == expected, (
                f"{planned.request_id}: block {row.block_ids[i]} (number {i} of its table) does "
                f"not hold the KV of its tokens {start} to {start + len(expected) - 1}"
            )
        assert planned.samples == (end == len(row.tokens)), f"{planned} samples at the wrong token"
        if not planned.samples:
            return None
        index = end - row.new.num_prompt_tokens
        token = self.script(planned.request_id, index, row.fingerprint(end))
        row.tokens.append(token)
        wanted = row.new.params.logprobs is not None
        return SampledToken(token, {token: Logprob(0.0, 1)} if wanted else None)
