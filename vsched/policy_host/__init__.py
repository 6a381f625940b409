"""Hosts of policies: the parts of a scheduler that call policies. Used by the kernel, and by other schedulers.

A *host* is a scheduler that calls policies. It builds a view (`vsched.policy`), calls `PolicySeat.decide`, and gets a
checked answer, or the default after a failure. A host has no clock: it is given the time with each event.

| module | contents |
|---|---|
| `seats` | `PolicySeats`, `PolicySeat`: calls, checks, defaults, state; `PolicyFaults`: failures |
| `host` | `PolicyHost`: seats with timing, notices and figures; `check_capabilities`: refusal of unsuitable policies |
| `requests` | `HostedRequest`: the facts of a request, and its views; `HostMeasured`: the latest times |
| `waiting` | `OrderedQueue`: the waiting entries, holds, and entries that were passed over for too long |
| `step_times` | `StepTimeModel`, `PrefillBudget`, `decide_shares`: step times, and the prefills that fit in a step |
| `eviction` | `GuardedOrder`: an eviction order with checked answers |
| `call_times` | `PolicyTimes`, `QueueClock`: times of calls; a slow policy is replaced |
| `stuck_calls` | `StuckCalls`: interrupts a call that does not return |
| `snapshot` | `encode_snapshot`, `restore_snapshot`: the state as bytes |

`vsched.testing.contracts.host.check_host` tests a host.
"""

from __future__ import annotations

from vsched.policy_host.call_times import PolicyTimes as PolicyTimes
from vsched.policy_host.call_times import QueueClock as QueueClock
from vsched.policy_host.eviction import GuardedOrder as GuardedOrder
from vsched.policy_host.host import HostCapabilities as HostCapabilities
from vsched.policy_host.host import PolicyHost as PolicyHost
from vsched.policy_host.host import check_capabilities as check_capabilities
from vsched.policy_host.host import check_table as check_table
from vsched.policy_host.requests import HostedRequest as HostedRequest
from vsched.policy_host.requests import HostMeasured as HostMeasured
from vsched.policy_host.seats import Ask as Ask
from vsched.policy_host.seats import PolicyFaults as PolicyFaults
from vsched.policy_host.seats import PolicySeat as PolicySeat
from vsched.policy_host.seats import PolicySeats as PolicySeats
from vsched.policy_host.seats import SeatPolicies as SeatPolicies
from vsched.policy_host.step_times import DecidedShares as DecidedShares
from vsched.policy_host.step_times import PrefillBudget as PrefillBudget
from vsched.policy_host.step_times import StepTimeModel as StepTimeModel
from vsched.policy_host.step_times import decide_shares as decide_shares
from vsched.policy_host.stuck_calls import StuckCalls as StuckCalls
from vsched.policy_host.waiting import OrderedQueue as OrderedQueue
