"""Each row gets the token that its parameters say, whoever its neighbours are.

The oracle, `naive_token`, handles one row with Python loops in the documented order; it shares
nothing with the sampler but the uniform number of a (seed, position).
"""

import math
import random
from collections import Counter
from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor

from minivllm.base import UserError
from minivllm.kernels import ops
from minivllm.request import SamplingParams
from minivllm.runner.sampler import Sampler
from minivllm.sched.plan import NewRow, SampledToken

VOCAB = 40
NUM_VALID = 37  # ids 37 to 39 are padding


@dataclass
class Row:
    """A request as the tests see it: the same logits at every step, and what came out."""

    params: SamplingParams
    seed: int = 0
    prompt: tuple[int, ...] = (3, 5, 3)
    stop_token_ids: frozenset[int] = frozenset()
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    output: list[int] = field(default_factory=list)

    def new_row(self, row: int) -> NewRow:
        return NewRow(
            "name",
            row,
            (*self.prompt, *self.output),
            len(self.prompt),
            self.params,
            self.seed,
            self.stop_token_ids,
            self.bad_words_ids,
        )

    @property
    def position(self) -> int:
        return len(self.prompt) + len(self.output)


def step(sampler: Sampler, rows: dict[int, Row], logits: Tensor) -> list[SampledToken]:
    """Draw one token for each of these rows, logits [n, vocab] in their order."""
    positions = [row.position for row in rows.values()]
    sampled = sampler(logits.clone(), list(rows), positions)
    for row, token in zip(rows.values(), sampled, strict=True):
        row.output.append(token.token_id)
    return sampled


def run_alone(row: Row, logits: Tensor, num_steps: int) -> list[int]:
    """The output of a fresh copy of the row, in a sampler of its own. logits: [vocab]."""
    alone = Row(row.params, row.seed, row.prompt, row.stop_token_ids, row.bad_words_ids)
    sampler = make_sampler()
    sampler.add(alone.new_row(0))
    for _ in range(num_steps):
        step(sampler, {0: alone}, logits[None])
    return alone.output


def make_sampler(max_num_seqs: int = 8, vocab: int = VOCAB, num_valid: int = NUM_VALID) -> Sampler:
    return Sampler(max_num_seqs, vocab, num_valid, "cpu")


def draw_many(params: SamplingParams, logits: list[float], count: int = 2000) -> Counter[int]:
    """Tokens drawn from the same logits by `count` rows that differ in their seed."""
    sampler = make_sampler(count, len(logits), len(logits))
    for i in range(count):
        sampler.add(Row(params, seed=i).new_row(i))
    batch = torch.tensor(logits).expand(count, -1).clone()
    return Counter(t.token_id for t in sampler(batch, range(count), [3] * count))


def naive_token(row: Row, logits: Tensor) -> int:
    """One token of one row, by the order that `SamplingParams` documents."""
    p, x = row.params, [float(v) for v in logits[:NUM_VALID]]
    for i in range(len(x)):
        if p.allowed_token_ids is not None and i not in p.allowed_token_ids:
            x[i] = -math.inf
        x[i] += (p.logit_bias or {}).get(i, 0.0)
        for word in row.bad_words_ids:
            before = list(word[:-1])
            if i == word[-1] and row.output[len(row.output) - len(before) :] == before:
                x[i] = -math.inf
        if i in row.stop_token_ids and len(row.output) < p.min_tokens:
            x[i] = -math.inf
        if i in row.prompt or i in row.output:
            x[i] = x[i] / p.repetition_penalty if x[i] > 0 else x[i] * p.repetition_penalty
        x[i] -= p.frequency_penalty * row.output.count(i)
        x[i] -= p.presence_penalty * (i in row.output)
    if p.greedy:
        return x.index(max(x))
    x = [v / p.temperature for v in x]
    probs = [math.exp(v - max(x)) for v in x]
    probs = [q if q >= p.min_p * max(probs) else 0.0 for q in probs]
    if p.top_k > 0:
        kth = sorted(probs, reverse=True)[min(p.top_k, len(probs)) - 1]
        probs = [q if q >= kth else 0.0 for q in probs]
    if p.top_p < 1:
        mass = 0.0
        for q in sorted(probs, reverse=True):
            mass += q
            if mass >= p.top_p * sum(probs):
                probs = [r if r >= q else 0.0 for r in probs]
                break
    u = ops.uniform(torch.tensor([row.seed]), torch.tensor([row.position])).item()
    left = u * sum(probs)
    for i, q in enumerate(probs):
        left -= q
        if left < 0:
            return i
    raise AssertionError("the uniform number is not below 1")


def random_row(rng: random.Random) -> Row:
    """Any mixture of wants; about half of the rows are plain."""

    def maybe(value):
        return value if rng.random() < 0.3 else None

    params = {
        "temperature": rng.choice([0.0, 0.3, 0.8, 1.0, 1.7]),
        "top_p": maybe(rng.uniform(0.05, 0.95)),
        "top_k": maybe(rng.choice([-1, 1, 3, 10, 1000])),
        "min_p": maybe(rng.uniform(0.01, 0.5)),
        "repetition_penalty": maybe(rng.uniform(0.5, 2)),
        "presence_penalty": maybe(rng.uniform(-2, 2)),
        "frequency_penalty": maybe(rng.uniform(-2, 2)),
        "logit_bias": maybe({rng.randrange(NUM_VALID): rng.uniform(-5, 5) for _ in range(3)}),
        "allowed_token_ids": maybe(rng.sample(range(NUM_VALID), 12)),
        "min_tokens": maybe(rng.randrange(1, 5)),
        "logprobs": maybe(rng.randrange(4)),
    }
    words = [tuple(rng.choices(range(6), k=rng.randint(1, 3))) for _ in range(rng.randint(0, 3))]
    return Row(
        SamplingParams(**{name: value for name, value in params.items() if value is not None}),
        seed=rng.getrandbits(62),
        prompt=tuple(rng.choices(range(NUM_VALID), k=rng.randint(1, 6))),
        stop_token_ids=frozenset(rng.sample(range(NUM_VALID), 2)),
        bad_words_ids=tuple(words) if rng.random() < 0.3 else (),
    )


def test_any_mixture_of_wants_equals_the_naive_loop() -> None:
    """Rows come, go, are preempted and counted anew elsewhere; each draws its own token."""
    rng, generator = random.Random(7), torch.Generator().manual_seed(7)
    sampler, rows = make_sampler(), {}
    for _ in range(250):
        for slot in range(8):
            if slot in rows and rng.random() < 0.1:
                preempted = rows.pop(slot)
                sampler.remove(slot)
                free = rng.choice([s for s in range(8) if s not in rows])
                if rng.random() < 0.6:  # comes back, in any free row, with what it has so far
                    rows[free] = preempted
                    sampler.add(preempted.new_row(free))
            elif slot not in rows and rng.random() < 0.3:
                rows[slot] = random_row(rng)
                sampler.add(rows[slot].new_row(slot))
        chosen = rng.sample(sorted(rows), rng.randint(0, len(rows)))  # the others only prefill
        if chosen:
            logits = torch.randn(len(chosen), VOCAB, generator=generator) * 2
            logits[:, :6] += 2  # tokens of the bad words come often
            active = {slot: rows[slot] for slot in chosen}
            expected = [naive_token(row, x) for row, x in zip(active.values(), logits, strict=True)]
            assert [t.token_id for t in step(sampler, active, logits)] == expected


def test_a_step_needs_no_token_on_the_host() -> None:
    """Steps drawn at once and read at the end: counts and bad words follow on the device."""
    rng, generator = random.Random(3), torch.Generator().manual_seed(3)
    rows = {slot: random_row(rng) for slot in range(8)}
    steps = torch.randn(12, 8, VOCAB, generator=generator)
    waiting, running = make_sampler(), make_sampler()
    for slot, row in rows.items():
        waiting.add(row.new_row(slot))
        running.add(row.new_row(slot))
    positions = [row.position for row in rows.values()]
    drawn = [
        running.draw(x.clone(), list(rows), [p + i for p in positions]) for i, x in enumerate(steps)
    ]
    expected = [step(waiting, rows, x) for x in steps]
    assert [d.to_host() for d in drawn] == expected


@pytest.mark.parametrize("temperature", [0, 1e-40, 9e-6])
def test_tiny_temperatures_are_greedy(temperature) -> None:  # SAM-1
    params = SamplingParams(temperature=temperature, top_p=0.3, top_k=0)
    assert draw_many(params, [60.0, -60.0, 59.9, 0.0], 50) == {0: 50}


def test_temperatures_from_small_to_huge() -> None:  # SAM-1
    logits = [60.0, -60.0, 59.9, 0.0]
    assert set(draw_many(SamplingParams(temperature=1e-5), logits, 50)) == {0}
    assert set(draw_many(SamplingParams(temperature=1.0), logits)) == {0, 2}
    for huge in (1e6, 1e300):
        counts = draw_many(SamplingParams(temperature=huge), logits)
        assert all(400 < counts[i] < 600 for i in range(4))
    for invalid in (-0.1, math.nan, math.inf, "hot"):
        with pytest.raises(UserError, match="temperature"):
            SamplingParams(temperature=invalid)


def test_masked_tokens_stay_out_at_any_temperature() -> None:
    """Also padding, and with penalties that multiply or divide by anything."""
    for params in (
        SamplingParams(temperature=1e30, min_tokens=9, repetition_penalty=1e300),
        SamplingParams(temperature=1e30, min_tokens=9, repetition_penalty=1e-300),
    ):
        sampler = make_sampler(500)
        for i in range(500):
            row = Row(params, i, (1,), frozenset({2, 10**9}), ((3,), (4,)))
            sampler.add(row.new_row(i))
        drawn = {t.token_id for t in sampler(torch.randn(500, VOCAB), range(500), [1] * 500)}
        assert not drawn & {2, 3, 4, 37, 38, 39}
        assert len(drawn) > 1 or params.repetition_penalty < 1


def test_seed_does_not_depend_on_the_batch() -> None:  # SAM-2
    """The same request alone, at another place of the batch, in another row, after a preemption."""
    logits = torch.randn(VOCAB)
    a = Row(SamplingParams(temperature=0.9, seed=7), seed=7)
    b = Row(SamplingParams(temperature=0.9), seed=8)
    greedy = Row(SamplingParams(temperature=0))
    expected = run_alone(a, logits, 24)
    assert len(set(expected)) > 3
    assert run_alone(b, logits, 24) != expected
    for order in ((a, b), (b, a), (greedy, a, b), (a, greedy)):
        sampler = make_sampler()
        rows = {7 - i: Row(row.params, row.seed, row.prompt) for i, row in enumerate(order)}
        for slot, row in rows.items():
            sampler.add(row.new_row(slot))
        mine = next(slot for slot, row in rows.items() if row.params is a.params)
        for i in range(24):
            if i == 10:  # preempted, comes back elsewhere
                sampler.remove(mine)
                rows[0] = rows.pop(mine)
                sampler.add(rows[0].new_row(0))
                mine = 0
            step(sampler, rows, logits.expand(len(rows), -1))
        assert rows[mine].output == expected


def test_seeds_of_64_bits_and_below_zero() -> None:
    logits = torch.randn(VOCAB)
    outputs = [
        run_alone(Row(SamplingParams(), seed=seed), logits, 12)
        for seed in (0, 1, -1, 2**63, 2**64 - 2, -(2**63) + 1)
    ]
    assert len({tuple(output) for output in outputs}) == len(outputs)


def test_penalties_do_not_leak_between_rows() -> None:  # SAM-3
    """P is penalised, Q is not; either order, alone, and Q in the row that P has left."""
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(1)) + 1
    go = (11, 11, 11)
    p = Row(SamplingParams(temperature=0, repetition_penalty=1.8), prompt=go)
    q = Row(SamplingParams(temperature=0), prompt=go)
    # One penalised row follows another: nothing of the first one's counts may be left.
    r = Row(SamplingParams(temperature=0, frequency_penalty=0.5), prompt=go)
    alone = {id(row.params): run_alone(row, logits, 20) for row in (p, q, r)}
    assert len(set(map(tuple, alone.values()))) == 3
    for first, second, third in ((p, q, r), (q, p, r), (r, p, q), (p, r, p)):
        sampler = make_sampler(2)
        rows = {i: Row(row.params, prompt=row.prompt) for i, row in enumerate((first, second))}
        for slot, row in rows.items():
            sampler.add(row.new_row(slot))
        for _ in range(6):
            step(sampler, rows, logits.expand(2, -1))
        sampler.remove(0)
        rows[0] = Row(third.params, prompt=third.prompt)
        sampler.add(rows[0].new_row(0))
        for _ in range(14):
            step(sampler, rows, logits.expand(2, -1))
        assert rows[1].output == alone[id(second.params)]
        assert rows[0].output == alone[id(third.params)][:14]


PROBS = [0.5, 0.3, 0.15, 0.05]


@pytest.mark.parametrize(
    ("wants", "kept"),
    [
        ({"top_p": 0.7}, {0, 1}),
        ({"top_p": 0.5 - 1e-6}, {0}),
        ({"top_p": 0.0001}, {0}),
        ({"top_p": 1.0}, {0, 1, 2, 3}),
        ({"top_p": 0.81}, {0, 1, 2}),
        ({"top_k": 2}, {0, 1}),
        ({"top_k": 4}, {0, 1, 2, 3}),
        ({"top_k": 10**30}, {0, 1, 2, 3}),
        ({"top_k": -1}, {0, 1, 2, 3}),
        ({"min_p": 0.25}, {0, 1, 2}),
        ({"min_p": 1.0}, {0}),
        # Of what top_k leaves, 0.5 is 0.625: top_p counts mass after top_k, ...
        ({"top_k": 2, "top_p": 0.6}, {0}),
        # ... and after the temperature: at 2 the mass of the best is 0.38, at 0.5 it is 0.68.
        ({"temperature": 2.0, "top_p": 0.4}, {0, 1}),
        ({"temperature": 0.5, "top_p": 0.6}, {0}),
        ({"temperature": 2.0, "min_p": 0.5}, {0, 1, 2}),
        # ... and after penalties: token 0, seen in the prompt, is no longer the best.
        ({"repetition_penalty": 10.0, "top_k": 1}, {1}),
    ],
)
def test_nucleus_boundaries(wants, kept) -> None:  # SAM-4
    """Also unsorted, and with every other row of the batch wanting something else."""
    for order in ([0, 1, 2, 3], [2, 0, 3, 1]):
        logits = [math.log(PROBS[i]) for i in order]
        place = {i: order.index(i) for i in range(4)}
        sampler = make_sampler(2000, 4, 4)
        for i in range(2000):
            params = SamplingParams(**wants) if i % 2 else SamplingParams(top_p=0.96, top_k=3)
            sampler.add(Row(params, seed=i, prompt=(place[0],)).new_row(i))
        batch = torch.tensor(logits).expand(2000, -1).clone()
        drawn = [t.token_id for t in sampler(batch, range(2000), [1] * 2000)]
        assert set(drawn[1::2]) == {place[i] for i in kept}
        assert set(drawn[::2]) == {place[i] for i in (0, 1, 2)}


def test_ties_at_a_threshold_stay_together() -> None:  # SAM-4
    assert set(draw_many(SamplingParams(top_k=2), [2.0, 1.0, 1.0, 1.0, 0.0])) == {0, 1, 2, 3}
    # 0.8 of [0.5, 0.3, ...] is a tie that rounding decides; either side, but the same for all rows.
    assert set(draw_many(SamplingParams(top_p=0.8), [math.log(p) for p in PROBS])) in (
        {0, 1},
        {0, 1, 2},
    )


def test_frequencies_are_right_in_a_mixed_batch() -> None:
    """Chi-square of top_p draws beside rows that are greedy, penalised or ask for logprobs."""
    others = [
        SamplingParams(temperature=0),
        SamplingParams(frequency_penalty=1.0, logprobs=2),
        SamplingParams(top_k=1),
    ]
    logits = torch.randn(30, generator=torch.Generator().manual_seed(0)) * 1.5
    count = 6000
    sampler = make_sampler(count, 30, 30)
    for i in range(count):
        params = others[i % 6 // 2] if i % 2 else SamplingParams(top_p=0.85, temperature=1.3)
        sampler.add(Row(params, seed=i).new_row(i))
    sampled = sampler(logits.expand(count, -1).clone(), range(count), [5] * count)
    drawn = Counter(t.token_id for t in sampled[::2])
    probs, ids = (logits / 1.3).softmax(-1).sort(descending=True)
    size = int((probs.cumsum(-1) < 0.85).sum()) + 1
    expected = dict(
        zip(
            ids[:size].tolist(),
            (probs[:size] / probs[:size].sum() * count / 2).tolist(),
            strict=True,
        )
    )
    assert set(drawn) <= set(expected)
    chi_square = sum((drawn[i] - e) ** 2 / e for i, e in expected.items())
    # Mean size - 1, variance twice that; five standard deviations, and the seeds are fixed.
    assert chi_square < size - 1 + 5 * math.sqrt(2 * (size - 1))


def test_impossible_stop_id_is_harmless() -> None:  # SAM-5
    row = Row(SamplingParams(temperature=0, min_tokens=2), stop_token_ids=frozenset({10**9, 4}))
    logits = torch.zeros(VOCAB)
    logits[4], logits[6] = 9.0, 5.0
    assert run_alone(row, logits, 4) == [6, 6, 4, 4]
    row = Row(SamplingParams(temperature=0), bad_words_ids=((10**9,), (4, VOCAB), (4,)))
    assert run_alone(row, logits, 2) == [6, 6]


def test_a_row_is_plain_once_its_min_tokens_are_out() -> None:
    row = Row(SamplingParams(temperature=0, min_tokens=2), stop_token_ids=frozenset({4}))
    biased = Row(replace(row.params, logit_bias={7: 1.0}), stop_token_ids=row.stop_token_ids)
    rows, sampler = {0: row, 1: biased}, make_sampler()
    sampler.add(row.new_row(0), biased.new_row(1))
    plain = []
    for _ in range(3):
        plain.append([sampler.draws_plainly([i]) for i in rows])
        step(sampler, rows, torch.randn(2, VOCAB))
    assert plain == [[False, False], [False, False], [True, False]]


def test_min_tokens_counts_output_across_a_preemption() -> None:
    row = Row(SamplingParams(temperature=0, min_tokens=3), stop_token_ids=frozenset({4}))
    logits = torch.zeros(VOCAB)
    logits[4], logits[6] = 9.0, 5.0
    sampler = make_sampler()
    sampler.add(row.new_row(1))
    for i in range(4):
        if i == 2:
            sampler.add(row.new_row(1))
        step(sampler, {1: row}, logits[None])
    assert row.output == [6, 6, 6, 4]


def test_bad_words_of_one_and_of_several_tokens() -> None:
    logits = torch.zeros(VOCAB)
    logits[9], logits[8], logits[7] = 3.0, 2.0, 1.0
    greedy = SamplingParams(temperature=0)
    assert run_alone(Row(greedy, bad_words_ids=((9,),)), logits, 3) == [8, 8, 8]
    assert run_alone(Row(greedy, bad_words_ids=((9, 9),)), logits, 4) == [9, 8, 9, 8]
    words = ((9, 9, 9), (9, 9, 8), (7, 9))
    assert run_alone(Row(greedy, bad_words_ids=words), logits, 7) == [9, 9, 7, 8, 9, 9, 7]
    # Only output counts: the prompt's end does not begin a bad word.
    assert run_alone(Row(greedy, prompt=(9,), bad_words_ids=((9, 9),)), logits, 1) == [9]


def test_allowed_ids_and_bias() -> None:
    logits = torch.zeros(VOCAB)
    logits[9] = 30.0
    greedy = {"temperature": 0}
    assert run_alone(Row(SamplingParams(**greedy, allowed_token_ids=[4])), logits, 2) == [4, 4]
    biased = SamplingParams(**greedy, logit_bias={5: 31.0, 9: 0.5})
    assert run_alone(Row(biased), logits, 1) == [5]
    both = SamplingParams(**greedy, allowed_token_ids=[4, 6], logit_bias={5: 100.0, 6: 1.0})
    assert run_alone(Row(both), logits, 1) == [6]
    drawn = draw_many(SamplingParams(allowed_token_ids=[1, 2]), [9.0, 0.0, 0.0, 9.0], 200)
    assert set(drawn) == {1, 2}


def test_bans_that_leave_nothing_yield_to_allowed_ids() -> None:
    """The only allowed token is the end, before min_tokens: it is drawn, not NaN, not padding."""
    for temperature in (0.0, 1.0):
        params = SamplingParams(
            temperature=temperature, top_p=0.9, allowed_token_ids=[4], min_tokens=5
        )
        row = Row(params, stop_token_ids=frozenset({4}), bad_words_ids=((4,),))
        assert run_alone(row, torch.randn(VOCAB), 3) == [4, 4, 4]


def test_padding_is_never_drawn() -> None:
    logits = torch.full((VOCAB,), -5.0)
    logits[NUM_VALID:] = 50.0
    for params in (SamplingParams(temperature=0), SamplingParams(temperature=100.0, top_k=5)):
        assert max(run_alone(Row(params), logits, 30)) < NUM_VALID


def test_logprobs_are_those_of_the_raw_distribution() -> None:
    """Whatever the row's other wants; the sampled token first, ranks from 1, no padding."""
    logits = torch.randn(5, VOCAB)
    logits[:, 38] = 9.0
    expected = logits.log_softmax(-1)
    wants = [
        {"logprobs": 3},
        {"logprobs": 0, "temperature": 0.0},
        {},
        {"logprobs": 2, "repetition_penalty": 2.0, "logit_bias": {7: 50.0}, "temperature": 0.1},
        {"logprobs": 1000, "top_k": 2},
    ]
    sampler = make_sampler()
    rows = {i: Row(SamplingParams(**want), seed=i) for i, want in enumerate(wants)}
    for slot, row in rows.items():
        sampler.add(row.new_row(slot))
    sampled = step(sampler, rows, logits)
    assert sampled[3].token_id == 7
    for want, token, row in zip(wants, sampled, expected, strict=True):
        if "logprobs" not in want:
            assert token.logprobs is None
            continue
        best = row[:NUM_VALID].argsort(descending=True).tolist()
        alternatives = best[: want["logprobs"]]
        assert list(token.logprobs) == list(dict.fromkeys([token.token_id, *alternatives]))
        for token_id, entry in token.logprobs.items():
            assert entry.logprob == pytest.approx(row[token_id].item(), abs=1e-5)
            assert entry.rank == best.index(token_id) + 1
            assert entry.decoded_token is None


def test_prompt_logprobs() -> None:
    logits = torch.randn(6, VOCAB)
    before = logits.clone()
    token_ids = [0, 36, 5, 5, 9, 1]
    entries = make_sampler().prompt_logprobs(logits, torch.tensor(token_ids), 2)
    assert torch.equal(logits, before)
    for token_id, entry, row in zip(token_ids, entries, logits.log_softmax(-1), strict=True):
        best = row[:NUM_VALID].argsort(descending=True).tolist()
        assert list(entry) == list(dict.fromkeys([token_id, *best[:2]]))
        for found, logprob in entry.items():
            assert logprob.logprob == pytest.approx(row[found].item(), abs=1e-5)
            assert logprob.rank == best.index(found) + 1


def test_prompt_logprobs_of_bf16_logits_are_no_coarser_than_the_logits() -> None:
    logits = torch.randn(6, VOCAB).bfloat16()
    token_ids = [0, 36, 5, 5, 9, 1]
    entries = make_sampler().prompt_logprobs(logits, torch.tensor(token_ids), 0)
    expected = logits.float().log_softmax(-1)
    for i, token_id in enumerate(token_ids):
        assert entries[i][token_id].logprob == pytest.approx(expected[i, token_id].item(), abs=1e-5)


def test_whole_numbers_may_be_written_as_integers() -> None:
    row = Row(
        SamplingParams(
            temperature=1, top_p=1, min_p=0,
            repetition_penalty=1, presence_penalty=0, frequency_penalty=0,
        )
    )  # fmt: skip
    logits = torch.randn(VOCAB)
    assert run_alone(row, logits, 5) == run_alone(Row(SamplingParams()), logits, 5)


def test_greedy_rows_are_one_argmax_even_beside_rows_that_left(monkeypatch) -> None:
    sampler = make_sampler()
    sampler.add(Row(SamplingParams()).new_row(0))
    sampler.add(Row(SamplingParams(temperature=0)).new_row(1))
    monkeypatch.setattr(ops, "sample", None)
    logits = torch.randn(1, VOCAB)
    expected = logits[0, :NUM_VALID].argmax().item()
    assert sampler(logits.clone(), [1], [3]) == [SampledToken(expected)]
    sampler.remove(0)
    sampler.add(Row(SamplingParams(temperature=0)).new_row(0))
    assert sampler(logits.clone(), [0], [3]) == [SampledToken(expected)]


def test_a_row_that_left_leaves_nothing() -> None:
    """A plain request in the row of one that wanted everything."""
    everything = SamplingParams(
        temperature=1.0,
        logprobs=2,
        min_tokens=9,
        frequency_penalty=2.0,
        allowed_token_ids=[1, 2],
    )
    logits = torch.randn(1, VOCAB)
    sampler = make_sampler()
    sampler.add(Row(everything, bad_words_ids=((1,),)).new_row(0))
    sampler(logits.clone(), [0], [3])
    sampler.remove(0)
    plain = Row(SamplingParams(temperature=0))
    sampler.add(plain.new_row(0))
    assert sampler(logits.clone(), [0], [3]) == [SampledToken(naive_token(plain, logits[0]))]


def test_profile_leaves_nothing() -> None:
    sampler = make_sampler(4)
    sampler.profile(torch.randn(4, VOCAB))
    logits = torch.randn(4, VOCAB)
    rows = {i: Row(SamplingParams(temperature=0)) for i in range(4)}
    for slot, row in rows.items():
        sampler.add(row.new_row(slot))
    expected = logits[:, :NUM_VALID].argmax(-1).tolist()
    assert sampler(logits, list(rows), [1] * 4) == [SampledToken(i) for i in expected]


def test_a_sampler_of_ones_own() -> None:
    class Coldest(Sampler):
        def choose(self, logits, rows, positions):
            return logits.argmax(-1)

    sampler = Coldest(2, VOCAB, NUM_VALID, "cpu")
    row = Row(SamplingParams(temperature=5.0, logprobs=1))
    sampler.add(row.new_row(0))
    logits = torch.randn(1, VOCAB)
    assert step(sampler, {0: row}, logits)[0].token_id == logits[0, :NUM_VALID].argmax().item()
