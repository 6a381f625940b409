"""Mutants that survive because they change nothing observable, each with the reason."""

from __future__ import annotations

_KERNEL = "vsched.kernel"
_GROUP = f"{_KERNEL}.generate.group:GenerateGroup"
_STEPS = f"{_KERNEL}.generate.in_flight:InFlightSteps"
_LOG = f"{_KERNEL}.generate.in_flight:TokenLog"
_QUARANTINE = f"{_KERNEL}.generate.quarantine:Quarantine"
_STAGE = f"{_KERNEL}.encode.stage:EncodeStage"
_CACHE = f"{_KERNEL}.encode.embedding_cache:EmbeddingCache"
_SWAP = f"{_KERNEL}.generate.swap_space:SwapSpace"

_SMALL_INTEGERS = (
    "a set of small integers happens to have them in order; the kernel may not count on it"
)
_STEPS_FROM_ONE = "steps count from 1, and a negative number stands for none"
_QUICKER = "it is the quicker of two ways to the same result"
_UNREACHED = "no state leads there: at rest, a front joins where no prefill is stalled, and stalled ones are younger"
_EVEN = "both have the same length"
_PER_ENTRY = "no two entries have the same place"

EQUIVALENT: dict[str, str] = {
    f"{_KERNEL}.scheduler:Scheduler._break_stall: return False -> pass #1": "None is as false",
    f"{_KERNEL}.request_moves:RequestMoves.drop_claims: sorted -> list #1": _SMALL_INTEGERS,
    f"{_GROUP}.complete_step: return [] -> pass #1": _QUICKER,
    f"{_GROUP}.remove: state.first_step >= 0 -> state.first_step > 0 #1": _STEPS_FROM_ONE,
    f"{_GROUP}.remove: 0 -> 1 #2": _STEPS_FROM_ONE,
    f"{_GROUP}.unblock_oldest: youngest is None or youngest.order < self.queue.entries[0].order -> "
    "False or youngest.order < self.queue.entries[0].order #1": _UNREACHED,
    f"{_GROUP}.unblock_oldest: youngest is None or youngest.order < self.queue.entries[0].order -> "
    "youngest is None or False #1": _UNREACHED,
    f"{_GROUP}.unblock_oldest: youngest.order < self.queue.entries[0].order -> "
    "youngest.order <= self.queue.entries[0].order #1": _PER_ENTRY,
    f"{_GROUP}.unblock_oldest: return False -> pass #2": _UNREACHED,
    f"{_GROUP}.unblock_oldest: False -> True #2": _UNREACHED,
    f"{_GROUP}.lose: 0 -> 1 #1": "a request without a slot gets another `computed` when it joins, before it is read",
    f"{_GROUP}.lose: 1 -> 2 #1": "any negative slot is none",
    f"{_STEPS}.gather: state.first_step >= 0 -> state.first_step > 0 #1": _STEPS_FROM_ONE,
    f"{_STEPS}.gather: 0 -> 1 #1": _STEPS_FROM_ONE,
    f"{_STEPS}.gather: 1 -> 2 #1": _STEPS_FROM_ONE,
    f"{_STEPS}.trim: 1 -> 2 #1": "nothing is kept of the steps after the last that is done",
    f"{_STEPS}.trim: step >= 0 -> step > 0 #1": _STEPS_FROM_ONE,
    f"{_STEPS}.trim: 0 -> 1 #1": _STEPS_FROM_ONE,
    f"{_LOG}.gather: start == 0 and stop == len(self.batches) -> start == 0 and True #1": (
        "the kernel gathers up to the last step that is done, which is the last of the log"
    ),
    f"{_LOG}.gather: stop == len(self.batches) -> stop != len(self.batches) #1": _QUICKER,
    f"{_LOG}.gather: return array('i', [batch[slot] for batch in self.batches]) -> pass #1": _QUICKER,
    f"{_QUARANTINE}.review: 0 <= state.first_step <= done + 1 - QUARANTINE_TOKENS -> "
    "0 < state.first_step <= done + 1 - QUARANTINE_TOKENS #1": _STEPS_FROM_ONE,
    f"{_QUARANTINE}.review: 0 -> 1 #1": _STEPS_FROM_ONE,
    f"{_SWAP}.keep: True -> False #2": _EVEN,
    f"{_SWAP}.drop: True -> False #2": _EVEN,
    f"{_STAGE}.complete: sorted -> list #1": _SMALL_INTEGERS,
    f"{_STAGE}._retry: sorted -> list #1": _SMALL_INTEGERS,
    f"{_STAGE}._set_apart: 1 -> 2 #1": "a number that no other batch has, whichever it is",
    f"{_CACHE}.claim: return False -> pass #1": "what follows changes nothing of a new entry, which is not ready",
    f"{_CACHE}.release: sorted -> list #1": _SMALL_INTEGERS,
    f"{_CACHE}._allocate: missing > 0 -> missing >= 0 #1": "where nothing is missing, there are no victims",
    f"{_CACHE}._move_up: order < entry.order -> order <= entry.order #1": "it is put back where it was",
    "vsched.aio.leader.leader:Leader._take_answer: self._ranks > 1 -> self._ranks >= 1 #1": (
        "the only rank agrees with itself; not to ask spares a digest a step"
    ),
}
"""By the key of the mutant: `place: before -> after #number`."""
