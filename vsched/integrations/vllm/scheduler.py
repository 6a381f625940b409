"""vLLM's scheduler with vsched's policies for admission, the shares of a step, and preemption.

Nothing of vLLM is patched. Before each `schedule()`, this arranges its queue and running requests, and it overrides
methods that `schedule()` calls. An override with a cost per running request is in place only in steps that need it.

| decision | hook |
|---|---|
| admission | `self.waiting` is a `ChosenQueue`: it shows `schedule()` the chosen requests only |
| step: order | order of `self.running` |
| step: tokens, time | `_reserve_prefill_lookahead`, called for each request before its blocks are allocated |
| preemption | `allocate_slots` returns None for a running request: the victim's `priority` becomes the largest |

Whatever fails here, in a policy or in the bridge, vLLM's own order decides.
"""

from __future__ import annotations

import itertools
import operator
import time
from collections.abc import Mapping, Sequence
from typing import Any, Self

import msgspec
import vllm
from vllm.logger import init_logger
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.core.sched.scheduler import Scheduler as VllmScheduler
from vllm.v1.request import Request, RequestStatus

from vsched.integrations.vllm.hooks import TESTED_VERSIONS, missing_hooks
from vsched.integrations.vllm.queue import ChosenQueue, Entry
from vsched.integrations.vllm.settings import SCHEDULER, read_settings, statistics_path, write_file
from vsched.policy import AdmissionView, PreemptionView, StepView
from vsched.policy.measured import StepTime
from vsched.policy.requests import pairs_of
from vsched.policy_host import (
    HostMeasured,
    PolicyHost,
    PolicySeat,
    PrefillBudget,
    StepTimeModel,
    decide_shares,
)
from vsched.policy_host.step_times import NONE_ADVANCES, limit_share
from vsched.policy_host.stuck_calls import StuckCalls
from vsched.sim.cost.host_runs import HostRecorder, RunHeader

logger = init_logger("vllm.vsched")
CHUNK_MIN = 16
"""Minimum tokens of a chunk that is cut by time; blocks of 128, as on a CPU, take too long next to decodes."""
LOOK_AGAIN_STEPS = 16
"""Steps after which the prefix cache is searched again for a waiting request."""
LOOKS_MAX = 4
"""Maximum number of such searches before a call of the admission policy; one takes tens of microseconds."""
ASK_AGAIN_STEPS = 64
"""Steps after which the policy is asked although nothing has changed since the front of the queue did not fit."""
LOG_NS = 1_000_000_000
"""Minimum time between two lines of the log, and two writes of the figures."""
ENDED = (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)
order_of = operator.attrgetter("vsched.order")
Base: Any = object


class PolicyScheduler(Base):  # type: ignore[misc]
    """The scheduler of `--scheduler-cls`; asynchronous if vLLM's configuration says so.

    Attributes:
        host: The seats of the policies, their failures and times.
        measured: Measurements for policies.
    """

    running: list[Any]

    def __new__(cls, vllm_config: Any, *_: Any, **__: Any) -> Self:
        """Create the synchronous or the asynchronous one."""
        if cls is PolicyScheduler:
            asynchronous = vllm_config.scheduler_config.async_scheduling
            cls = AsyncPolicyScheduler if asynchronous else SyncPolicyScheduler
        return object.__new__(cls)

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(vllm_config, *args, **kwargs)
        version: str = vllm.__version__.partition("+")[0]
        if version not in TESTED_VERSIONS:
            tested = ", ".join(TESTED_VERSIONS)
            logger.warning(
                "vLLM %s is not among the versions tested with vsched, %s", version, tested
            )
        settings = read_settings(vllm_config, version, SCHEDULER)
        if ignored := [name for name, table in settings.rest.items() if table]:
            logger.warning("tables without effect in vLLM: %s", ", ".join(ignored))
        policies, limits, target = settings.policies, settings.limits, settings.target
        keys = settings.vllm
        self.host = PolicyHost(
            policies,
            now_ns=time.perf_counter_ns,
            log=logger,
            budget_ms=limits.call_budget_ms,
            slow_max=limits.slow_calls_max,
            switched_off=missing_hooks(self, SCHEDULER),
        )
        self._stuck_calls = StuckCalls(limits.call_limit_s)
        self.measured = HostMeasured(
            blocks_total=self.cache_config.num_gpu_blocks,
            blocks_free=self.kv_cache_manager.block_pool.get_num_free_blocks,
            tokens_running=self._tokens_running,
        )
        self._admission, self._shares, self._preemption = map(self.host.seat, SCHEDULER)
        self._passed_over_ns = int(limits.passed_over_max_s * 1e9)
        self._chunk_min = min(self.block_size, CHUNK_MIN)
        self._times = StepTimeModel(
            int(target.step_target_ms * 1e6),
            target.step_target_ratio,
            self._chunk_min,
            int(target.prefill_target_ms * 1e6),
        )
        timed = target.step_target_ms > 0 or target.prefill_target_ms > 0
        timed = timed and "generate.step" not in self.host.switched_off
        self._limits_prefill = timed or self._shares is not None
        self._queue: ChosenQueue | None = None
        if self._admission is not None:
            self._queue = self.waiting = ChosenQueue(self._is_ready, self._view_entry)
        # vLLM preempts the last of `running`, which is the youngest only in its own order.
        fcfs = vllm_config.scheduler_config.policy == "fcfs"
        self._victims = self._preemption is not None or (fcfs and self._shares is not None)
        if self._victims:
            self.policy = SchedulingPolicy.PRIORITY  # only read when it chooses a victim
        self._allocate_slots = self.kv_cache_manager.allocate_slots
        self._numbers = itertools.count()
        self._step = self._asked_step = self._result_ns = 0
        self._prefilling: dict[str, Request] = {}
        self._flying: dict[int, tuple[int, int, int, Any, list[Request]]] = {}
        self._caps: Mapping[str, int] | None = None
        self._budget: PrefillBudget | None = None
        self._priorities: list[tuple[Request, int]] = []
        self._helped: Request | None = None
        header = RunHeader(
            host=f"vLLM {version}",
            slots=self._slots(),
            batch_tokens=self.max_num_scheduled_tokens,
            block_size=self.block_size,
            kv_tokens=self.cache_config.num_gpu_blocks * self.block_size,
            depth=getattr(vllm_config, "max_concurrent_batches", 1),
            prefix_cache=bool(self.cache_config.enable_prefix_caching),
            step_target_ms=target.step_target_ms,
            prefill_target_ms=target.prefill_target_ms,
        )
        self._recorder = HostRecorder(keys.trace, header) if keys.trace else None
        self._statistics = statistics_path(vllm_config) if keys.statistics else None
        self._logged_ns, self._logged = 0, ""

    # --- methods that vLLM calls ---

    def add_request(self, request: Request) -> None:
        if not hasattr(request, "vsched"):
            request.vsched = Entry(request, next(self._numbers))
            if self._recorder is not None:
                self._recorder.note_arrival(request.vsched, time.monotonic_ns())
        super().add_request(request)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Plan a step as vLLM does, with the requests, orders and limits of the policies."""
        now_ns, running = time.monotonic_ns(), len(self.running)
        decodes, self._step = running - len(self._prefilling), self._step + 1
        self._caps = self._budget = None
        self.host.guard("arranging a step", self._arrange, now_ns, decodes)
        try:
            output = super().schedule(*args, **kwargs)
        finally:
            left = self._tidy()
        self.host.guard("noting a step", self._note, output, now_ns, running, decodes, left)
        return output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        flying = self._flying.pop(id(scheduler_output), None)
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        if flying is not None:
            self.host.guard("noting the time of a step", self._learn, *flying)
        return outputs

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        self._restore_priorities()
        self._prefilling.pop(request.request_id, None)
        super()._preempt_request(request, *args, **kwargs)

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        self._prefilling.pop(request.request_id, None)
        if self._queue is not None:
            self._queue.changed = True
        self.host.guard("noting the end of a request", self._note_end, request)
        return super()._free_request(request, *args, **kwargs)

    def shutdown(self) -> None:
        if self._recorder is not None:
            self.host.guard("closing the trace", self._recorder.close)
        if self._statistics is not None:
            self._statistics.unlink(missing_ok=True)
        self._stuck_calls.close()
        super().shutdown()

    # --- before a step ---

    def _arrange(self, now_ns: int, decodes: int) -> None:
        room = max(self.max_num_scheduled_tokens - decodes * (1 + self.num_spec_tokens), 0)
        queue, prefilling, waits = self._queue, [*self._prefilling.values()], len(self.waiting)
        share = limit_share(decodes, len(prefilling) + waits)
        budget = self._budget = self._times.budget_for(room, decodes=decodes, share=share)
        planned = sum([one.num_tokens - one.num_computed_tokens for one in prefilling])
        timed = budget.time_ns is not None
        if self._shares is not None and (prefilling or (waits and timed)):
            planned = self._share(self._shares, prefilling, decodes, now_ns)
        if queue is not None and self._admission is not None and waits:
            self._admit(queue, self._admission, room - planned, now_ns)
        if self._limits_prefill and (self._caps is not None or timed) and (prefilling or waits):
            self._reserve_prefill_lookahead = self._limit_prefill
        if self._victims and self._blocks_are_scarce(room):
            self.kv_cache_manager.allocate_slots = self._allocate

    def _share(self, seat: PolicySeat, prefilling: list[Any], decodes: int, now_ns: int) -> int:
        """Order and limit the prefilling requests as the step policy says; return the tokens that they may take."""
        budget = self._budget
        assert budget is not None
        prefilling.sort(key=order_of)
        token_ns, pair_ns = self._times.costs
        late_ns, entries = now_ns - self._passed_over_ns, [one.vsched for one in prefilling]
        view = StepView(
            now_ns=now_ns,
            prefilling=tuple([entry.prefill_view() for entry in entries]),
            waiting=len(self.waiting) if len(self.running) < self._slots() else 0,
            decodes=decodes,
            tokens_free=budget.tokens,
            time_ns=budget.time_ns,
            decode_ns=self._times.decode_ns(decodes) if decodes else 0.0,
            token_ns=token_ns,
            pair_ns=pair_ns,
            chunk_min=self._chunk_min,
            overdue=tuple([i for i, one in enumerate(entries) if one.advanced_ns <= late_ns]),
            measured=self.measured,
            state=seat.state,
        )
        shares, _, unlimited = decide_shares(seat, view, budget)
        if prefilling and not decodes and not shares:
            seat.overrule(NONE_ADVANCES)
            shares = dict.fromkeys(range(len(prefilling)))
        ordered = [prefilling[index] for index in shares]
        if not unlimited or ordered != prefilling:
            left_out = [one for index, one in enumerate(prefilling) if index not in shares]
            others = [one for one in self.running if one.request_id not in self._prefilling]
            self.running = [*others, *ordered, *left_out]
        left = {index: view.prefilling[index].tokens for index in shares}
        most = [left[i] if limit is None else min(limit, left[i]) for i, limit in shares.items()]
        if not unlimited:
            limits = {one.request_id: count for one, count in zip(ordered, most, strict=True)}
            self._caps = {**dict.fromkeys(self._prefilling, 0), **limits}
        return sum(most)

    def _admit(self, queue: ChosenQueue, seat: PolicySeat, room: int, now_ns: int) -> None:
        """Show `schedule()` the requests that may join."""
        if queue.unready:
            queue.promote(self._becomes_ready)
        ordered, running, entries = queue.ordered, len(self.running), queue.ordered.entries
        slots = self._slots() - running - self.num_waiting_for_streaming_input
        due = queue.changed or not running or self._step - self._asked_step >= ASK_AGAIN_STEPS
        paused = self._pause_state != PauseState.UNPAUSED
        held = paused or ordered.held_until(now_ns) is not None
        if not (due and slots > 0 and room > 0 and entries) or held:
            queue.show((), now_ns)
            return
        self._asked_step, queue.changed = self._step, False
        self._look_again(queue, entries)
        waiting, overdue, helped = ordered.shown(), None, self._helped
        if helped is None or helped.status != RequestStatus.RUNNING:
            overdue = ordered.overdue(now_ns, self._passed_over_ns)
        view = AdmissionView(
            stage="generate",
            now_ns=now_ns,
            waiting=waiting,
            tokens_free=room,
            entries_free=slots,
            blocks_free=self.kv_cache_manager.block_pool.get_num_free_blocks(),
            running=running,
            divisible=self.scheduler_config.enable_chunked_prefill,
            default_tokens=self.max_num_scheduled_tokens,
            block_tokens=self.block_size,
            overdue=overdue,
            hold_max_ns=self._passed_over_ns,
            measured=self.measured,
            state=seat.state,
        )
        fits = entries[0].tokens <= view.blocks_free * self.block_size
        admission, put_first = ordered.admit(seat, view, entries, fits=fits)
        if put_first and overdue is not None:
            self._helped = entries[overdue].request
        queue.show([entries[index] for index in admission.indices[:slots]], now_ns)

    def _look_again(self, queue: ChosenQueue, entries: Sequence[Entry]) -> None:
        """Search the prefix cache again for a few of the first waiting requests."""
        old = [one for one in entries[:16] if self._step - one.looked >= LOOK_AGAIN_STEPS]
        for entry in old[:LOOKS_MAX] if self.cache_config.enable_prefix_caching else ():
            self._view_entry(entry)
            queue.ordered.renew_view(entry)

    def _view_entry(self, entry: Entry) -> None:
        """Renew the view of a waiting request, with its tokens that the prefix cache has now."""
        entry.looked = self._step
        found = self.host.guard("searching the prefix cache", self._cached_tokens, entry.request)
        entry.renew_view(found or 0, self.block_size)

    def _cached_tokens(self, request: Request) -> int:
        manager, hashes = self.kv_cache_manager, request.block_hashes
        if not (hashes and manager.prefix_cache_lookup_enabled(request)):
            return 0
        found: int = manager.coordinator.find_longest_cache_hit(hashes, request.num_tokens - 1)[1]
        return found

    def _blocks_are_scarce(self, room: int) -> bool:
        """Return False if the requests of this step will certainly get their blocks."""
        ahead = -(-(1 + self.num_spec_tokens + self.num_lookahead_tokens) // self.block_size)
        need = (len(self.running) + self._slots()) * (1 + ahead) + room // self.block_size
        free = self.kv_cache_manager.block_pool.get_num_free_blocks()
        return bool(free < need * len(self.kv_cache_config.kv_cache_groups))

    # --- during a step ---

    def _limit_prefill(self, request: Request, computed: int, tokens: int) -> int:
        """Limit a chunk to the share of its request, and to the time left in the step."""
        allowed: int = super()._reserve_prefill_lookahead(request, computed, tokens)
        prefills = request.request_id in self._prefilling
        if allowed <= 0 or (request.status == RequestStatus.RUNNING and not prefills):
            return allowed
        if not prefills and allowed <= 1 + self.num_spec_tokens:
            return allowed  # its prompt is cached, and vLLM may have padded it
        limited = self.host.guard("limiting a chunk", self._limited, request, computed, allowed)
        return allowed if limited is None else limited

    def _limited(self, request: Request, computed: int, allowed: int) -> int:
        budget = self._budget
        assert budget is not None
        most = min(allowed, budget.tokens_at(computed))
        if self._caps is not None:
            most = min(most, self._caps.get(request.request_id, most))
        if self.scheduler_config.disable_chunked_mm_input and 0 < most < allowed:
            for at in [one.mm_position for one in request.mm_features]:
                if (
                    at.offset < computed + most < at.offset + at.length
                ):  # cut before it, or not at all
                    most = max(at.offset - computed, 0) or allowed
        if most > 0:
            budget.add_chunk(computed, most)
        return most

    def _allocate(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        """Allocate blocks; if there are none for a running request, mark the victim for vLLM to find."""
        blocks = self._allocate_slots(request, *args, **kwargs)
        if blocks is None and request.status == RequestStatus.RUNNING:
            self.host.guard("choosing a victim", self._mark_victim, request)
        return blocks

    def _mark_victim(self, request: Request) -> None:
        running = sorted(self.running, key=order_of)
        victim = running[-1]
        if (seat := self._preemption) is not None:
            ids = self.kv_cache_manager.get_block_ids
            blocks = [sum(len(one) for one in ids(each.request_id)) for each in running]
            pairs = zip(running, blocks, strict=True)
            view = PreemptionView(
                now_ns=time.monotonic_ns(),
                running=tuple([one.vsched.running_view(count) for one, count in pairs]),
                in_need=running.index(request),
                block_tokens=self.block_size,
                measured=self.measured,
                state=seat.state,
            )
            victim = running[seat.decide(view, len(running)).victim]
            if order_of(victim) < order_of(request):
                seat.overrule("the victim was older than the request in need")
                victim = request  # the older one continues: this ensures progress
        self._priorities = [(one, one.priority) for one in running]
        for one in running:
            one.priority = int(one is victim)

    # --- after a step ---

    def _tidy(self) -> bool:
        """Undo the arrangement of a step; return True if a chosen request did not join."""
        self.__dict__.pop("_reserve_prefill_lookahead", None)
        if self._victims:
            self.kv_cache_manager.allocate_slots = self._allocate_slots
            self._restore_priorities()
        return self._queue is not None and self._queue.hide()

    def _restore_priorities(self) -> None:
        for request, priority in self._priorities:
            request.priority = priority
        self._priorities = []

    def _note(self, output: Any, now_ns: int, running: int, decodes: int, left: bool) -> None:
        """Note the chunks of a step, its first tokens, and the requests that joined."""
        scheduled: dict[str, int] = output.num_scheduled_tokens
        prefilling, tokens, pairs, firsts = self._prefilling, 0, 0.0, list[Request]()
        for request in self.running[running:]:
            prefilling[request.request_id] = request
            computed = request.num_computed_tokens - scheduled.get(request.request_id, 0)
            self.measured.tokens_cached += request.vsched.join(now_ns, computed)
        sizes = self._sizes(output) if self._recorder is not None else ()
        for name, request in [*prefilling.items()]:
            if count := scheduled.get(name, 0):
                tokens += count
                pairs += pairs_of(request.num_computed_tokens - count, count)
                request.vsched.advanced_ns = now_ns
                if not request.is_prefill_chunk:
                    firsts.append(prefilling.pop(name))
        if scheduled and (budget := self._budget) is not None:
            budget.prefilled, budget.pairs = tokens, pairs
            self._times.note_step(self._step, decodes, budget if tokens else None)
            self._flying[id(output)] = (self._step, now_ns, decodes, sizes, firsts)
        if (queue := self._queue) is not None and self._asked_step == self._step:
            timed = self._budget is not None and self._budget.time_ns is not None
            full = timed or tokens + decodes >= self.max_num_scheduled_tokens
            images = left and any(one.mm_features for one in itertools.islice(queue, 8))
            if not left or full or images or len(self.running) >= self._slots():
                queue.changed = True

    def _sizes(self, output: Any) -> tuple[int, list[int]]:
        """Return the tokens of the decoding requests of a step, and those of each image that it encodes."""
        decodes = [one for one in self.running if one.request_id not in self._prefilling]
        encoded = output.scheduled_encoder_inputs.items()
        images = [self.requests[name].vsched.images_at()[i] for name, some in encoded for i in some]
        return sum([one.num_computed_tokens for one in decodes]), [length for *_, length in images]

    def _learn(self, step: int, began_ns: int, decodes: int, sizes: Any, firsts: Any) -> None:
        now_ns = time.monotonic_ns()
        busy_ns = now_ns - max(began_ns, self._result_ns)
        gap_ns = now_ns - (self._result_ns if self._flying else began_ns)
        _, tokens, pairs = self._times.learn(step, busy_ns)
        self._result_ns = now_ns
        one = StepTime(now_ns, busy_ns, gap_ns, decodes, tokens, pairs)
        self.measured.note_step(one)
        if self._recorder is not None:
            self._recorder.note_step(one, *sizes)
        for request in firsts:
            if request.num_output_tokens and not request.vsched.first_ns:
                self.measured.note_first_token(request.vsched.first_token(now_ns))
        self.host.log_notices()
        due = now_ns - self._logged_ns > LOG_NS
        if due or (self._statistics is not None and not self.requests):
            self._log(now_ns, due=due)

    def _note_end(self, request: Request) -> None:
        now_ns, entry = time.monotonic_ns(), request.vsched
        ended = request.status in ENDED
        if ended:
            if not entry.first_ns and request.num_output_tokens:
                self.measured.note_first_token(entry.first_token(now_ns))
            self.measured.note_end(entry.end_time(now_ns))
        if self._recorder is not None:
            images, hashes = entry.images_at(), request.block_hashes
            self._recorder.note_end(entry, request.request_id, now_ns, hashes, images, kept=ended)

    def _log(self, now_ns: int, *, due: bool) -> None:
        """Log figures in which something has changed, if a line is due, and write them for the middleware."""
        figures = self.host.figures()
        if due:
            calls = {name: int(one["calls"]) for name, one in figures["policy_calls"].items()}
            text = f"calls {calls}, faults {figures['policy_faults']}, {figures['host_faults']}"
            if text != self._logged:
                logger.info("policies: %s", text)
            self._logged_ns, self._logged = now_ns, text
        if self._statistics is not None:
            figures |= {"running": len(self.running), "waiting": len(self.waiting)}
            write_file(self._statistics, msgspec.json.encode(figures))

    # --- for all of them ---

    def _slots(self) -> int:
        most: int = self.max_num_running_reqs
        return min(getattr(self, "max_num_active_reqs", most), most)

    def _is_ready(self, request: Request) -> bool:
        stale = getattr(request, "num_stale_output_tokens", 0) and not request.drop_stale_output
        return not (self._is_blocked_waiting_status(request.status) or stale)

    def _becomes_ready(self, request: Request) -> bool:
        blocked = self._is_blocked_waiting_status(request.status)
        if blocked and not self._handle_blocked_waiting_request(request):
            return False
        return self._is_ready(request)

    def _tokens_running(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for request in self.running:
            tenant = request.vsched.tenant
            found[tenant] = found.get(tenant, 0) + request.num_computed_tokens
        return found


class AsyncPolicyScheduler(PolicyScheduler, AsyncScheduler):  # type: ignore[misc]
    """With asynchronous scheduling."""


class SyncPolicyScheduler(PolicyScheduler, VllmScheduler):  # type: ignore[misc]
    """Without asynchronous scheduling."""
