"""The functions that are mutated, and the tests for them."""

from __future__ import annotations

CHECKS = (
    "tests/unit/kernel",
    "tests/unit/wire",
    "tests/unit/aio/leader",
    "tests/unit/worker/test_member.py",
    "tests/unit/rank/test_follow.py",
    "tests/unit/api/middleware/test_access_key.py",
    "tests/mutants/runs.py",
)
"""Of these, a mutant meets the tests that reach its line, except the slow ones."""

_FUNCTIONS: dict[str, str] = {
    "vsched.kernel.scheduler:Scheduler": """
        _on_stepped _on_aborted _on_open _on_group_lost _lose_generator _on_retired _on_drain
        _take_drained _awaited _plan_generate _notice_time _break_stall _at_rest
    """,
    "vsched.kernel.request_moves:RequestMoves": """
        enqueue claim_items items_ready requeue move_waiting move _suspend finish drop_claims
    """,
    "vsched.kernel.waiting_queue:OrderedQueue": "held_until put_new put remove __contains__",
    "vsched.kernel.waiting_queue:Holds": "note take_ended first_end _pop",
    "vsched.kernel.groups:DirtyGroups": "mark walk __contains__",
    "vsched.kernel.generate.request_queue:RequestQueue": "enqueue dequeue may_join unblock",
    "vsched.kernel.generate.group:GenerateGroup": """
        _reset takes add dequeue let_go _know_outputs complete_step remove _release_slot _preempt
        unblock_oldest lose
    """,
    "vsched.kernel.generate.in_flight:InFlightSteps": """
        note_read complete lost_reads await_last oldest_preempted drop_preempted take_requeueable gather trim
    """,
    "vsched.kernel.generate.in_flight:TokenLog": "append gather forget_before",
    "vsched.kernel.generate.quarantine:Quarantine": "admits begin end review blame",
    "vsched.kernel.generate.quarantine:": "is_suspect",
    "vsched.kernel.generate.swap_space:SwapSpace": "keep reach swap_in drop take_copies",
    "vsched.kernel.generate.chunks:": "chunk_stop pin_items drop_claims_before",
    "vsched.kernel.encode.stage:EncodeGroup": "complete lose",
    "vsched.kernel.encode.stage:EncodeStage": """
        _take complete fail lose free_orphaned _set_apart _retry
    """,
    "vsched.kernel.encode.embedding_cache:EmbeddingCache": """
        claim matches release is_ready pin unpin start_encoding finish_encoding requeue free_pages _allocate
        _preemptible _use _let_go _discard _drop _move_up
    """,
    "vsched.wire:LeaderLog": "append",
    "vsched.wire:FollowerLog": "accept",
    "vsched.wire:": "encode_report decode_report check_of",
    "vsched.worker.member:Member": "listen is_next carry_out _step",
    "vsched.worker.member:Following": "advance awaited left_s received_nothing",
    "vsched.aio.leader.failure_detector:ProcessLiveness": "receive",
    "vsched.aio.leader.failure_detector:FailureDetector": "expect due answered renew failure backlog",
    "vsched.aio.leader.failure_detector:ResultComparison": "add",
    "vsched.aio.leader.leader:Leader": """
        decide _append lose _on_frame _take_failure _begin _take_answer _take_beat _tick
    """,
    "vsched.api.middleware.access:": "_carries _digest",
}

PLACES: tuple[str, ...] = tuple(
    f"{owner}{'' if owner.endswith(':') else '.'}{name}"
    for owner, names in _FUNCTIONS.items()
    for name in names.split()
)
"""The code of loss, put-front, claims and digests, and the comparison of keys: `module:Class.method`."""
