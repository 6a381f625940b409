"""The settings that an exam is sat under: everything that must not change an answer, and the clamp, which may."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from vsched.errors import ConfigError

COMMON = (
    "model.dtype=float32",
    "generate.slots=32",
    'generate.memory={use="pinned", tokens=16384}',
)
"""Under all settings.

In bfloat16 the last bits of a row's logits depend on the batch around it, so two answers that are nearly equally likely
may swap; no setting could then be told from luck. A KV cache of a given size spares every start the search for one.
"""
BLOCK_TOKENS = 4
"""KV blocks where preemption is forced: so small that even a short answer needs a new one.

The KV cache then holds the longest request and no more, or a few short ones, while many wait.
"""


class Variant(msgspec.Struct, frozen=True, kw_only=True):
    """A named setting.

    Attributes:
        passes: How often the exam is sat in one engine: where a cache is looked at, again with all pictures known.
        clamp: Most tokens of an image; 0 for no clamp. Only a clamp may change an answer.
        starved: The KV cache holds so little that requests must preempt each other.
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
        sets=("encode.encoding.use=eager", NO_PREFIX_CACHE),
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
"""All settings but the clamps; the answers under the first are what the others are compared with."""


def clamped(tokens: int) -> Variant:
    """Return the setting in which an image has at most `tokens` tokens."""
    return Variant(
        name=f"clamp-{tokens}",
        summary=f"at most {tokens} tokens an image",
        sets=(f"encode.admission.max_tokens={tokens}",),
        clamp=tokens,
    )


def choose(names: Sequence[str], clamps: Iterable[int]) -> list[Variant]:
    """Return the settings of these names, all without any, and the clamps, largest first; always the reference.

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
    """Return all assignments under a setting; `own` are those of the command line, `longest_tokens` a longest request.

    What the command line says replaces what is common to all settings, and a setting goes before both.
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
