"""`SimulatedRunner`: a GPU that exists as a cost function. No model, no torch, no waiting.

The real scheduler drives it; time is a number that each step moves on. Ten thousand requests take
seconds, so policies and limits can be compared before a GPU is at hand. Chapters 6 and 16.
"""

from collections.abc import Callable

from minivllm.runner.scripted import Finished
from minivllm.sched.plan import SampledToken, StepPlan, StepResult

Cost = Callable[[StepPlan], float]  # seconds that the step would take


def linear_cost(per_step: float, per_token: float) -> Cost:
    """A fixed cost a step (weights, launches) plus one a token (arithmetic). Seconds."""
    return lambda plan: per_step + per_token * plan.num_tokens


class SimulatedRunner:
    """A `Runner` that samples `token_id` for every row; `clock` is simulated time in seconds."""

    def __init__(self, cost: Cost, *, token_id: int = 0) -> None:
        self.cost = cost
        self.clock = 0.0
        self.busy = 0.0  # seconds spent in steps
        self._token = SampledToken(token_id)

    def launch(self, plan: StepPlan) -> Finished:
        """Move the clock on by the step's cost."""
        seconds = self.cost(plan)
        self.clock += seconds
        self.busy += seconds
        sampled = tuple([self._token if row.samples else None for row in plan.rows])
        return Finished(StepResult(plan.step, sampled))
