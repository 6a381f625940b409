"""Settings of the exam: all that must not change an answer, and the image token limit, which may."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from vsched.errors import ConfigError

COMMON = (
    "model.dtype=float32",
    "generate.slots=32",
    'generate.memory={use="pinned", tokens=16384}',
)
"""Common to all settings.

In bfloat16 the last bits of a row's logits depend on its batch, so two almost equally likely
answers may swap, which would hide the effect of a setting. A fixed KV cache size saves every start
the search for one.
"""
BLOCK_TOKENS = 4
"""KV block size for forced preemption: so small that even a short answer needs another block.

The KV cache then holds only the longest request, or a few short ones, while many wait.
"""


class Variant(msgspec.Struct, frozen=True, kw_only=True):
    """A named setting.

    Attributes:
        passes: Number of exam runs in one engine: two for settings of caches, the second with all
            pictures cached.
        clamp: Maximum tokens of an image; 0 for no limit. Only this may change an answer.
        starved: Whether the KV cache is so small that requests must be preempted.
    """

    name: str
    summary: str
    sets: tuple[str, ...] = ()
    passes: int = 1
    clamp: int = 0
    starved: bool = False


def _chunks(tokens: int) -> Variant:
    return Variant(
        name=f"chunk-{tokens}",
        summary=f"prompts cut into chunks of {tokens} tokens, images too",
        sets=(f"generate.chunk_tokens={tokens}",),
    )


REFERENCE = Variant(
    name="default", summary="both caches, chunks of 512, images as chunks need them", passes=2
)
NO_EMBEDDING_CACHE = "encode.eviction.use=none"
NO_PREFIX_CACHE = "generate.prefix_cache=false"
UNCLAMPED = (
    REFERENCE,
    Variant(
        name="no-embedding-cache",
        summary="no embedding outlives its request",
        sets=(NO_EMBEDDING_CACHE,),
        passes=2,
    ),
    Variant(
        name="no-prefix-cache",
        summary="no KV block outlives its request; embeddings do",
        sets=(NO_PREFIX_CACHE,),
        passes=2,
    ),
    Variant(
        name="no-cache",
        summary="neither cache",
        sets=(NO_EMBEDDING_CACHE, NO_PREFIX_CACHE),
        passes=2,
    ),
    _chunks(16),
    _chunks(48),
    Variant(
        name="eager",
        summary="images encoded on arrival; no prefix cache",
        sets=("encode.encoding.look_ahead_chunks=100", NO_PREFIX_CACHE),
    ),
    Variant(
        name="combined",
        summary="all images of a request encoded as one; no prefix cache",
        sets=("encode.encoding.use=combined", NO_PREFIX_CACHE),
    ),
    Variant(
        name="tensor-parallel-2",
        summary="two ranks share the model, in both stages",
        sets=("encode.tensor_parallel=2", "generate.tensor_parallel=2"),
    ),
    Variant(
        name="preempted",
        summary=f"a KV cache of the longest request, in blocks of {BLOCK_TOKENS} tokens",
        sets=(f"generate.block_size={BLOCK_TOKENS}",),
        passes=2,
        starved=True,
    ),
)
"""All settings without an image token limit; the first is the reference."""


def clamped(tokens: int) -> Variant:
    """Return the setting with at most `tokens` tokens per image."""
    return Variant(
        name=f"clamp-{tokens}",
        summary=f"at most {tokens} tokens an image",
        sets=(f"encode.admission.max_tokens={tokens}",),
        clamp=tokens,
    )


def choose(names: Sequence[str], clamps: Iterable[int]) -> list[Variant]:
    """Return the named settings, by default all, and the token limits, largest first.

    The reference is always included.

    Raises:
        ConfigError: When a name is unknown.
    """
    known = {variant.name: variant for variant in UNCLAMPED}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ConfigError(f"--only: {unknown[0]!r} is not one of {', '.join(known)}")
    wanted = [REFERENCE.name, *names] if names else list(known)
    chosen = [variant for name, variant in known.items() if name in wanted]
    return [*chosen, *(clamped(tokens) for tokens in sorted(set(clamps), reverse=True))]


def merged_sets(
    variant: Variant, own: Sequence[str], *, path: str, longest_tokens: int
) -> list[str]:
    """Return all assignments for a setting.

    `own` comes from the command line, `longest_tokens` is the length of the longest request. The
    command line overrides the common settings, and the setting overrides both.
    """
    said = [_key(assignment) for assignment in own]
    common = [
        assignment
        for assignment in COMMON
        if not any(
            key == _key(assignment) or key.startswith(f"{_key(assignment)}.") for key in said
        )
    ]
    sets = [*common, *own, f"model.path={path}", *variant.sets]
    if variant.starved:
        blocks = -(-longest_tokens // BLOCK_TOKENS)
        sets.append(f'generate.memory={{use="pinned", tokens={blocks * BLOCK_TOKENS}}}')
    return sets


def _key(assignment: str) -> str:
    return assignment.partition("=")[0].strip()
