"""What admission sees of waiting and preempted requests."""

from __future__ import annotations

from vsched.policy import Admission, AdmissionView
from vsched.testing import RequestAt, run_policy
from vsched_policies.admission import Tiers


class Shows(Tiers, frozen=True, kw_only=True):
    """Notes what admission sees."""

    def admit(self, view: AdmissionView) -> Admission:
        SHOWN.append(view)
        return super().admit(view)


SHOWN: list[AdmissionView] = []


def test_waiting_request_is_shown_with_its_size_limits_and_deadline() -> None:
    SHOWN.clear()
    asked = RequestAt(text_tokens=10, images=(40, 6), output_tokens=20, ttft_target_ms=500)
    run_policy(Shows(), asked)
    image = SHOWN[0].waiting[0]
    assert SHOWN[0].stage == "encode"
    assert (image.tokens, image.images, image.max_tokens) == (40, 0, 0)
    view = SHOWN[-1]
    (entry,) = view.waiting
    assert (entry.tokens, entry.blocks * view.block_tokens) == (56, 64)
    assert (entry.images, entry.image_tokens, entry.max_tokens, entry.outputs) == (2, 46, 20, 0)
    assert image.target_ns == entry.target_ns == entry.arrived_ns + 500_000_000


def test_preempted_request_is_shown_with_the_tokens_that_it_has() -> None:
    SHOWN.clear()
    batch = RequestAt(text_tokens=10, images=(6,), output_tokens=50)
    run_policy(Shows(), batch, RequestAt(at_s=0.2, priority=1, output_tokens=30), slots=1)
    (running,) = next(view.running_requests for view in SHOWN if view.eligible)
    assert (running.images, running.max_tokens) == (1, 50)
    assert running.tokens == 16 + running.outputs
    back = SHOWN[-1].waiting[0]
    assert 10 < running.outputs <= back.outputs <= running.outputs + 2
    assert back.tokens == back.outputs, "the block of the prompt is cached"
