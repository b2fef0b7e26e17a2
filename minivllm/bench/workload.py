"""The work that is measured: W1 to W7, each a list of requests and the engine settings it needs.

```
 W1  mixed      256 requests, 100-1,024 in, 100-1,024 out    nano-vllm's own benchmark
 W2  one        1 request, 128 in, 512 out, greedy           what a single user feels
 W3  decode     512 requests, 32 in, 256 out
 W4  prefill    128 requests, 2,048 in, 1 out
 W5  shared     256 requests, 2,048 shared + 32 own in, 64 out
 W6  open loop  512 in, 128 out at 70 % of capacity, an 8k prompt every second
 W7  start-up   a fresh process to its first token
```

All draws come from `random.seed(0)`, so the work is the same on every machine and engine. A repeat
has the same lengths and other ids: `run` turns each id, and no cached prefix can help.

Mirrors vllm/benchmarks/datasets.py (RandomDataset). Chapter 1 reads this file.
"""

import dataclasses
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from minivllm.base import UserError, did_you_mean
from minivllm.request import SamplingParams

NUM_IDS = 10_001  # ids are randint(0, 10000)
TURN = 3_571  # how far one run's ids are turned from the last one's; shares no factor with NUM_IDS
SAMPLED, GREEDY = 0.6, 0.0  # temperatures


@dataclass(frozen=True)
class Work:
    """One request: what is asked, and when (seconds since the run began)."""

    prompt_token_ids: list[int]
    params: SamplingParams
    arrival: float = 0.0

    @property
    def num_output_tokens(self) -> int:
        """How many tokens it will generate: end of sequence is ignored."""
        assert self.params.max_tokens is not None
        return self.params.max_tokens


@dataclass(frozen=True)
class Workload:
    """Requests, and the least that the engine must be built with."""

    name: str
    what: str  # in words
    work: list[Work]
    max_num_seqs: int
    max_model_len: int = 4096
    max_num_batched_tokens: int = 16384
    shared_prefix: int = 0  # prompt tokens that all requests have in common

    @property
    def num_prompt_tokens(self) -> int:
        """Of all requests together."""
        return sum(len(work.prompt_token_ids) for work in self.work)

    @property
    def num_output_tokens(self) -> int:
        """Of all requests together."""
        return sum(work.num_output_tokens for work in self.work)


@dataclass(frozen=True)
class Size:
    """How much smaller than written a workload is run, and over which vocabulary."""

    scale: float = 1.0  # of the number of requests and of every length
    vocab_size: int = NUM_IDS  # ids are taken modulo this
    run: int = 0  # repeats differ in their ids only

    def of(self, count: int) -> int:
        """A count or a length, scaled; at least 1."""
        return max(1, round(count * self.scale))

    def ids(self, drawn: list[int]) -> list[int]:
        """The ids of this run: those drawn, turned by the run's number."""
        return [(i + self.run * TURN) % NUM_IDS % self.vocab_size for i in drawn]


def _sampling(max_tokens: int, temperature: float) -> SamplingParams:
    return SamplingParams(temperature=temperature, max_tokens=max_tokens, ignore_eos=True)


def _draw(rng: random.Random, count: int) -> list[int]:
    return [rng.randint(0, NUM_IDS - 1) for _ in range(count)]


def _uniform(
    size: Size, requests: int, prompt: int, output: int, temperature: float, shared: int = 0
) -> list[Work]:
    """Requests of one shape, `shared` tokens of the prompt in common."""
    rng = random.Random(0)
    common = size.ids(_draw(rng, size.of(shared))) if shared else []
    return [
        Work(
            common + size.ids(_draw(rng, size.of(prompt))),
            _sampling(size.of(output), temperature),
        )
        for _ in range(size.of(requests))
    ]


def _w1(size: Size) -> Workload:
    rng = random.Random(0)
    count = 256
    drawn = [_draw(rng, rng.randint(100, 1024)) for _ in range(count)]
    outputs = [rng.randint(100, 1024) for _ in range(count)]
    work = [
        Work(size.ids(ids[: size.of(len(ids))]), _sampling(size.of(output), SAMPLED))
        for ids, output in zip(drawn, outputs, strict=True)
    ][: size.of(count)]
    return Workload("W1", "256 requests, 100-1,024 in, 100-1,024 out", work, size.of(count))


def _w2(size: Size) -> Workload:
    work = _uniform(size, 1, 128, 512, GREEDY)
    return Workload("W2", "1 request, 128 in, 512 out, greedy", work, len(work))


def _w3(size: Size) -> Workload:
    work = _uniform(size, 512, 32, 256, SAMPLED)
    return Workload("W3", "512 requests, 32 in, 256 out", work, len(work))


def _w4(size: Size) -> Workload:
    work = _uniform(size, 128, 2048, 1, SAMPLED)
    return Workload("W4", "128 requests, 2,048 in, 1 out", work, len(work))


def _w5(size: Size) -> Workload:
    work = _uniform(size, 256, 32, 64, SAMPLED, shared=2048)
    what = "256 requests, 2,048 shared + 32 own in, 64 out"
    return Workload("W5", what, work, len(work), shared_prefix=size.of(2048))


CLOSED: dict[str, Callable[[Size], Workload]] = {
    "W1": _w1, "W2": _w2, "W3": _w3, "W4": _w4, "W5": _w5,
}  # fmt: skip
# Which command of `minivllm bench` runs which workloads; the first is its default.
PRESETS = {
    "throughput": ("W1", "W3", "W4", "W5"),
    "latency": ("W2", "W6"),
    "startup": ("W7",),
}


def closed(name: str, size: Size | None = None) -> Workload:
    """One of W1 to W5: every request is there at the start.

    Raises:
        UserError: there is no such workload.
    """
    if name not in CLOSED:
        raise UserError(f"workload {name!r} is unknown{did_you_mean(name, CLOSED)}: W1 to W5")
    return CLOSED[name](size or Size())


@dataclass(frozen=True)
class OpenLoop:
    """W6: short requests that come when they come, and a long prompt every second."""

    size: Size = field(default_factory=Size)
    max_num_seqs: int = 256
    max_model_len: int = 16384
    max_num_batched_tokens: int = 2048
    long_every: float = 1.0  # seconds

    def short(self) -> Iterator[Work]:
        """Without end: 512 in, 128 out."""
        return self._requests(random.Random(1), 512)

    def long(self) -> Iterator[Work]:
        """Without end: 8,192 in, 128 out, `long_every` apart; the first after half of that."""
        for number, work in enumerate(self._requests(random.Random(2), 8192)):
            yield dataclasses.replace(work, arrival=(number + 0.5) * self.long_every)

    def _requests(self, rng: random.Random, prompt: int) -> Iterator[Work]:
        while True:
            ids = self.size.ids(_draw(rng, self.size.of(prompt)))
            yield Work(ids, _sampling(self.size.of(128), SAMPLED))

    def arrivals(self, rate: float, seconds: float) -> list[Work]:
        """Everything offered within `seconds`: Poisson arrivals at `rate` a second, and long ones.

        In order of arrival.
        """
        rng, now, offered = random.Random(3), 0.0, []
        for work in self.short():
            now += rng.expovariate(rate)
            if now >= seconds:
                break
            offered.append(dataclasses.replace(work, arrival=now))
        for work in self.long():
            if work.arrival >= seconds:
                break
            offered.append(work)
        return sorted(offered, key=lambda work: work.arrival)
