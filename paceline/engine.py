"""The engine: a scheduler and an executor, stepped by whoever owns it.

    add / abort -> Scheduler -> StepPlan -> Executor -> StepResult -> Scheduler -> deltas

One thread, no queues, no clock but the executor's. The server's engine process and the offline
`LLM` both drive it through `add`, `abort` and `step`.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable

import msgspec

from paceline.cache.pool import PagePool
from paceline.checkpoint import Checkpoint
from paceline.config import EngineConfig
from paceline.exec.drafters import Resolved
from paceline.exec.executor import Executor
from paceline.exec.profile import measured_costs
from paceline.exec.startup import OnProgress, start
from paceline.plan.cost import CostTable
from paceline.plan.cost_file import CostFile
from paceline.plan.policy import SpeculationPolicy, policy_of, shape_of
from paceline.sched.scheduler import Limits, Scheduler
from paceline.trace import NO_TRACE, Header, Trace, TraceWriter, create
from paceline.types import AddRequest, Delta, EngineStats, Ready

logger = logging.getLogger("paceline")


class Engine:
    """Serves requests of token ids. `checked`: assert every invariant after each step (tests)."""

    def __init__(
        self,
        executor: Executor,
        scheduler: Scheduler,
        *,
        resolved: Resolved,
        checked: bool = False,
        trace: Trace = NO_TRACE,
        synthetic_acceptance: float | None = None,
    ) -> None:
        self.executor = executor
        self.scheduler = scheduler
        self.resolved = resolved
        self.checked = checked
        self.trace = trace
        self.synthetic_acceptance = synthetic_acceptance
        self._warned = False

    @classmethod
    def start(cls, config: EngineConfig, checkpoint: Checkpoint, on_progress: OnProgress) -> Engine:
        """Load everything. Raises ConfigError and CheckpointError."""
        policy_of(config)  # what makes no sense shows before anything is loaded
        if config.trace is not None:
            create(config.trace).close()
        executor, resolved = start(config, checkpoint, on_progress)

        @functools.cache
        def costs() -> CostTable:
            names = (str(checkpoint.path.resolve()), str(config.speculative_draft_model_path))
            return measured_costs(
                executor, resolved, mode=config.profile, names=names, on_progress=on_progress
            )

        policy = policy_of(config, costs)
        scheduler = make_scheduler(checkpoint, resolved, policy)
        return cls(
            executor,
            scheduler,
            resolved=resolved,
            trace=_trace(config, costs),
            synthetic_acceptance=config.synthetic_acceptance,
        )

    def close(self) -> None:
        """No step comes any more."""
        self.trace.close()

    @property
    def idle(self) -> bool:
        return self.scheduler.idle

    @property
    def stats(self) -> EngineStats:
        stats = self.scheduler.stats()
        speculation = msgspec.structs.replace(
            stats.speculation,
            suspect=stats.speculation.suspect or self.executor.drafter_rests,
            synthetic_acceptance=self.synthetic_acceptance,
        )
        return msgspec.structs.replace(
            stats,
            drafter_failures_total=self.executor.drafter_failures,
            speculation=speculation,
        )

    def add(self, message: AddRequest) -> Delta | None:
        """Queue a request; a delta comes back only if it is refused."""
        return self.scheduler.add(message)

    def abort(self, ids: tuple[str, ...]) -> None:
        self.scheduler.abort(ids)

    def step(self) -> list[Delta]:
        """Compute one step, if there is work. A step that fails ends its own requests only."""
        plan = self.scheduler.plan_step()
        if plan is None:
            return []
        try:
            result = self.executor.execute(plan)
        except Exception as error:
            logger.exception("a step of %d rows failed", len(plan.rows))
            deltas = self.scheduler.fail(plan, f"the step failed: {error}")
        else:
            deltas = self.scheduler.commit(result)
            self.trace.step(result)
        if self.checked:
            self.scheduler.check()
        if self.scheduler.counters.suspect and not self._warned:
            self._warned = True
            logger.warning(
                "hardly a draft of the %s drafter has been accepted lately: %s",
                self.executor.drafter.name,
                self.executor.drafter.advice,
            )
        return deltas

    def ready(self) -> Ready:
        """What clients may ask for, and one line for people."""
        r = self.resolved
        dtype = str(r.dtype).removeprefix("torch.")
        return Ready(
            max_model_len=r.max_model_len,
            kv_tokens=r.pages * r.page_size,
            description=(
                f"{dtype} on {r.device}, {self.executor.kernels.name} kernels, "
                f"up to {r.max_running} requests at a time, "
                f"{self.executor.drafter.name} drafter{self._warning}"
            ),
        )

    @property
    def _warning(self) -> str:
        drawn = self.synthetic_acceptance
        return "" if drawn is None else f", SYNTHETIC ACCEPTANCE {drawn:g}: texts mean nothing"


def _trace(config: EngineConfig, costs: Callable[[], CostTable]) -> Trace:
    if config.trace is None:
        return NO_TRACE
    header = Header(policy=config.policy, most=shape_of(config), costs=CostFile.of(costs()))
    return TraceWriter(config.trace, header)


def make_scheduler(
    checkpoint: Checkpoint, resolved: Resolved, policy: SpeculationPolicy
) -> Scheduler:
    limits = Limits(
        max_running=resolved.max_running,
        max_batched_tokens=resolved.max_batched_tokens,
        max_model_len=resolved.max_model_len,
        eos_token_ids=frozenset(checkpoint.config.eos_token_ids),
    )
    return Scheduler(limits, PagePool(resolved.pages, resolved.page_size), policy)
