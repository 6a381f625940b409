"""Everything that a policy author imports: base classes, their views (inputs), and the plain values that they return.

A policy is a keyword-only frozen struct whose fields are its configuration. A class subclasses `RequestPolicy`,
`ImagePolicy`, `CachePolicy`, `RoutingPolicy`, `MemoryPolicy`, `DraftingPolicy` or `PruningPolicy` and overrides one
method or several.
Policies do no I/O and have no clock and no randomness: the view has `now_ns` and the history that the decision needs.
The kernel validates each returned value; after an invalid one or an exception, which is counted and logged, the default
decides.

Units, unless an attribute says otherwise: `*_ns` are nanoseconds, times of the monotonic clock of `now_ns`; `tokens`
are tokens of the language model (for an image: encoder output tokens); `blocks` are KV blocks of `generate.block_size`
tokens; `pages` are pages of the embedding arena. A larger `priority` is more urgent. `tenant` is empty for a request
without a tenant.
"""

from __future__ import annotations

from vsched.policy.base import Count as Count
from vsched.policy.base import Decision as Decision
from vsched.policy.base import Fraction as Fraction
from vsched.policy.base import Policy as Policy
from vsched.policy.base import PositiveCount as PositiveCount
from vsched.policy.base import Seconds as Seconds
from vsched.policy.base import WaitingEntry as WaitingEntry
from vsched.policy.cache import CachePolicy as CachePolicy
from vsched.policy.cache import EvictionOrder as EvictionOrder
from vsched.policy.cache import InsertionView as InsertionView
from vsched.policy.cache import Key as Key
from vsched.policy.cache import RecordableOrder as RecordableOrder
from vsched.policy.drafter import DRAFT_TOKENS_MAX as DRAFT_TOKENS_MAX
from vsched.policy.drafter import Draft as Draft
from vsched.policy.drafter import DraftingPolicy as DraftingPolicy
from vsched.policy.drafter import DraftingView as DraftingView
from vsched.policy.images import Dispatch as Dispatch
from vsched.policy.images import DispatchView as DispatchView
from vsched.policy.images import EncodeGroupView as EncodeGroupView
from vsched.policy.images import EncodingView as EncodingView
from vsched.policy.images import ImagePolicy as ImagePolicy
from vsched.policy.images import ItemSpan as ItemSpan
from vsched.policy.images import ReadyEmbedding as ReadyEmbedding
from vsched.policy.images import ReclaimView as ReclaimView
from vsched.policy.measured import Measured as Measured
from vsched.policy.memory import Attempt as Attempt
from vsched.policy.memory import AttemptOutcome as AttemptOutcome
from vsched.policy.memory import Build as Build
from vsched.policy.memory import MemoryPlan as MemoryPlan
from vsched.policy.memory import MemoryPolicy as MemoryPolicy
from vsched.policy.memory import MemoryView as MemoryView
from vsched.policy.memory import Probe as Probe
from vsched.policy.memory import RankMemory as RankMemory
from vsched.policy.memory import Reservation as Reservation
from vsched.policy.requests import Admission as Admission
from vsched.policy.requests import AdmissionView as AdmissionView
from vsched.policy.requests import Admit as Admit
from vsched.policy.requests import ArrivalDecision as ArrivalDecision
from vsched.policy.requests import ArrivalView as ArrivalView
from vsched.policy.requests import ArrivingRequest as ArrivingRequest
from vsched.policy.requests import EncodeLimits as EncodeLimits
from vsched.policy.requests import Hold as Hold
from vsched.policy.requests import Preemption as Preemption
from vsched.policy.requests import PreemptionMode as PreemptionMode
from vsched.policy.requests import PreemptionView as PreemptionView
from vsched.policy.requests import PrefillView as PrefillView
from vsched.policy.requests import Redirect as Redirect
from vsched.policy.requests import RequestPolicy as RequestPolicy
from vsched.policy.requests import RunningView as RunningView
from vsched.policy.requests import Shed as Shed
from vsched.policy.requests import StepShares as StepShares
from vsched.policy.requests import StepView as StepView
from vsched.policy.router import ReplicaView as ReplicaView
from vsched.policy.router import RoutingPolicy as RoutingPolicy
from vsched.policy.router import RoutingView as RoutingView
from vsched.policy.seats import DECISIONS as DECISIONS
from vsched.policy.seats import KERNEL_TABLES as KERNEL_TABLES
from vsched.policy.seats import POLICY_TABLES as POLICY_TABLES
from vsched.policy.seats import SEVERAL as SEVERAL
from vsched.policy.seats import TABLES as TABLES
from vsched.policy.seats import decisions_of as decisions_of
from vsched.policy.seats import join_seats as join_seats
from vsched.policy.seats import seats_in as seats_in
from vsched.policy.seats import shares_policy as shares_policy
from vsched.policy.seats import tables_of as tables_of
from vsched.policy.seats import without_seats as without_seats
from vsched.policy.videos import PruningPolicy as PruningPolicy
from vsched.policy.videos import PruningView as PruningView
