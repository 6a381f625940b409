"""Policies for videos: the tokens to prune."""

from __future__ import annotations

from typing import Annotated

import msgspec

from vsched.policy.base import Policy, PolicyKey, decides


class PruningView(msgspec.Struct, frozen=True, kw_only=True):
    """Input of a pruning policy: a decoded video, before its frames are encoded.

    Attributes:
        groups: Number of frame groups, which are pairs of frames.
        rows: Rows of tokens in a frame.
        columns: Columns of tokens in a frame.
        changes: Read-only array of float32, [groups, rows, columns], for `numpy.asarray` or an index such as
            `changes[2, 0, 1]`: the mean difference of a token's pixels from those at the same place one group before, 0
            for equal pixels to 1 for black and white. Those of the first group are 1.
        tokens_max: Maximum number of tokens to keep, which follows from `rate`.
    """

    groups: int
    rows: int
    columns: int
    changes: memoryview[float]
    tokens_max: int


def check_kept(returned: bytes, groups: int, tokens: int, tokens_max: int) -> bytes:
    """Return the checked bytes for a video of `groups` groups of `tokens` tokens."""
    if type(returned) is not bytes:
        raise TypeError(f"{type(returned).__name__}, not bytes")
    if len(returned) != groups * tokens:
        raise ValueError(f"{len(returned)} bytes for {groups * tokens} tokens")
    if returned.translate(None, b"\0\1"):
        raise ValueError("a byte is neither 0 nor 1")
    if returned.count(0, 0, tokens):
        raise ValueError("a token of the first group is pruned")
    if (kept := returned.count(1)) > tokens_max:
        raise ValueError(f"{kept} tokens are kept, at most {tokens_max} may be")
    return returned


def default_kept(groups: int, tokens: int, tokens_max: int) -> bytes:
    """Keep whole groups at equal distances."""
    count = max(tokens_max // tokens, 1)
    kept = {index * groups // count for index in range(min(count, groups))}
    return b"".join(bytes([index in kept]) * tokens for index in range(groups))


class PruningPolicy(Policy, frozen=True, kw_only=True):
    """Decides which tokens of a video are left out of the prompt."""

    rate: Annotated[float, msgspec.Meta(ge=0, lt=1)] | None = None
    """Minimum share of a video's tokens to prune, on which the size of a prompt is planned; None to prune no video."""

    @decides(
        "pruning",
        PolicyKey(
            "media.pruning",
            "most-changed",
            "Tokens of videos that are left out of prompts; none unless its `rate` is set. See "
            "[video pruning](video-pruning.md).",
        ),
        check=check_kept,
        default=default_kept,
        remembers=False,
        in_kernel=False,
    )
    def prune(self, view: PruningView) -> bytes:
        """Return a byte for each token, in the order of `view.changes`: 1 to keep it, 0 to prune it.

        All tokens of the first group are kept, and at most `view.tokens_max` in all. Called once for each video of a
        request, if `rate` is set. A function of the view alone: if another turn of a conversation prunes the same video
        otherwise, no cache helps. After a failure, whole frame groups are kept, at equal distances.
        """
        raise NotImplementedError
