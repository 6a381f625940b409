"""Observes every kernel event and the resulting commands: digest of a run, oracles, and group losses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import blake2b

import msgspec

from vsched.config import Config, resolve_policies
from vsched.kernel import Scheduler
from vsched.kernel.commands import Accept, Command, Finish, Refuse
from vsched.kernel.events import Aborted, Event, GroupLost, GroupReady, GroupRetired, Submitted
from vsched.sim.invariants import Oracles
from vsched.sim.setup import Setup
from vsched.sim.world import World
from vsched.types import ModelInfo, Request


class GroupLoss(msgspec.Struct, frozen=True):
    """A group loss; `back_ns` is when the group was ready again, or None."""

    group: str
    at_ns: int
    reason: str
    planned: bool
    back_ns: int | None = None


class EngineObserver:
    """Takes the place of a kernel record; see `vsched.aio.shell.EventRecorder`.

    Attributes:
        kernel: The observed scheduler.
        losses: Group losses, in order.
        retired: Groups that did not return.
        on_event: Called after each event, before its commands are executed.
        on_accept: Called with the kernel's request number and the request.
    """

    def __init__(
        self,
        world: World,
        config: Config,
        info: ModelInfo,
        kernel: Scheduler,
        *,
        allow_policy_failures: bool = False,
    ) -> None:
        """Start observing; a policy failure is a violation unless `allow_policy_failures`."""
        self.kernel = kernel
        self.losses: list[GroupLoss] = []
        self.retired: list[str] = []
        self.on_event: Callable[[], None] = lambda: None
        self.on_accept: Callable[[int, Request], None] = lambda _number, _request: None
        self.events = 0
        self._world = world
        policies = resolve_policies(config)
        world.by_set = policies.scope != "item"
        setup = Setup(config=config, info=info, limits=kernel.limits, policies=policies)
        self._oracles = Oracles(setup, check_every=1)
        self._digest = blake2b(digest_size=16)
        self._encoder = msgspec.msgpack.Encoder(enc_hook=bytes)
        self._broken = False
        self._allow_policy_failures = allow_policy_failures
        self._failed_policies = 0
        self._ids: dict[str, bytes] = {}

    def note(self, event: Event, now_ns: int, commands: Sequence[Command]) -> None:
        """Record an event."""
        self.events += 1
        self._digest.update(self._words(event, now_ns, commands))
        self._follow(event, now_ns, commands)
        if not self._broken:
            try:
                self._oracles.see(now_ns, event, commands, self.kernel)
            except AssertionError as error:
                self._broken = True  # the oracles' state is invalid from here on
                self._world.violate(f"after {type(event).__name__}: {error}")
        if len(self.kernel.policy_failures) > self._failed_policies:
            self._note_policy_failures()
        self.on_event()

    def _note_policy_failures(self) -> None:
        """Report the first failure of each policy as a violation: the default policy decided instead."""
        failures = list(self.kernel.policy_failures.items())
        for name, trace in failures[self._failed_policies :]:
            if not self._allow_policy_failures:
                self._world.violate(f"policy {name} failed:\n{''.join(trace.format())}")
        self._failed_policies = len(failures)

    def close(self) -> None:
        """No-op."""

    @property
    def digest(self) -> str:
        """Digest of all events and commands so far, with their times."""
        return self._digest.hexdigest()

    def _words(self, event: Event, now_ns: int, commands: Sequence[Command]) -> bytes:
        """Encode an event and its commands, with random request ids replaced by their order of arrival."""
        words = self._encoder.encode((now_ns, type(event).__name__, event, list(commands)))
        named = [one for one in (event, *commands) if isinstance(one, _NAMED)]
        for one in named:
            name = one.request.request_id if isinstance(one, Submitted) else one.request_id
            number = self._ids.setdefault(name, b"#%d" % len(self._ids))
            words = words.replace(name.encode(), number)
        return words

    def _follow(self, event: Event, now_ns: int, commands: Sequence[Command]) -> None:
        match event:
            case Submitted(request):
                for command in commands:
                    if isinstance(command, Accept):
                        self._world.accept(command.number, request.items)
                        if command.request_id == request.request_id:
                            self.on_accept(command.number, request)
            case GroupLost(group, failure, planned):
                self.losses.append(GroupLoss(group, now_ns, str(failure), planned))
            case GroupReady(group):
                for place, loss in enumerate(self.losses):
                    if loss.group == group and loss.back_ns is None:
                        self.losses[place] = msgspec.structs.replace(loss, back_ns=now_ns)
            case GroupRetired(group):
                self.retired.append(group)
            case _:
                pass


_NAMED = (Submitted, Aborted, Accept, Refuse, Finish)
