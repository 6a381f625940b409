"""Drafts of a second, smaller model of the same vocabulary, which each rank has beside the one that it serves.

It is a generate worker like the other, with a KV cache of as many blocks, and a position of a sequence lies in the same
block of both: the kernel shares out blocks once. It computes only what is asked for. So for a sequence that nobody
wants drafts of it costs nothing, and one that it is asked about for the first time it has to catch up with, a chunk a
step. Of blocks that the prefix cache hands on it knows which it has filled, so a second turn is caught up with quickly.

It draws as the other model does, by seed and position from its own logits. Where both think alike, the same luck draws
the same token, so drafts prove right at a temperature, too.

It reads text alone: what stands for an image in a prompt is to it the token that it is. Nothing that it lacks, not an
image, an adapter or the mask of a grammar, can make an answer wrong; drafts prove wrong more often.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from vsched.types import ModelInfo
from vsched.worker.contract import Batch, Chunk, GenerateWorker, SequenceState
from vsched.worker.slots import SlotTable

ROWS_MAX = 2
"""So many tokens are caught up with in decode rows: the last draft and what came after it, where all proved right."""


class DraftWorker(NamedTuple):
    """The worker of a draft model, and the facts of its checkpoint; its KV is this rank's share."""

    worker: GenerateWorker
    info: ModelInfo


@dataclass(slots=True)
class Followed:
    """A sequence as the draft model has it.

    Attributes:
        sequence: Its tokens, drafts behind them; `length` of them were what the request has.
        done: Positions of them whose KV the draft model has.
    """

    sequence: SequenceState
    done: int


class DraftModel:
    """A draft model, and how far it has followed the sequence in each slot."""

    def __init__(
        self,
        draft: DraftWorker,
        *,
        vocabulary: int,
        blocks: int,
        block_size: int,
        chunk_tokens: int,
        batch_tokens: int,
    ) -> None:
        """Take a worker whose KV cache stands.

        `vocabulary` is that of the model it drafts for: what is beyond is no draft. `chunk_tokens` are the most tokens
        that it catches up with in a step, and `batch_tokens` those of a step together.
        """
        self._worker, self._info = draft
        self._vocabulary = vocabulary
        self._block_size = block_size
        self._chunk_tokens, self._batch_tokens = chunk_tokens, batch_tokens
        self._whole = np.zeros(blocks, np.bool_)
        """Of each block whether it has all positions of what lies there."""
        self._followed: dict[int, Followed] = {}
        self._none = np.zeros((1, 1, 1), np.uint8)

    def renew(self, blocks: Sequence[int] | npt.NDArray[np.int32]) -> None:
        """Other tokens lie in these blocks from now on."""
        self._whole[blocks] = False

    def leave(self, slot: int) -> None:
        """The sequence in a slot goes."""
        self._followed.pop(slot, None)

    def propose(
        self, asked: Mapping[int, int], sequences: Mapping[int, SequenceState], table: SlotTable
    ) -> dict[int, list[int]]:
        """Return what may come behind the known tokens of slots, at most so many of each.

        Raises:
            DeviceOutOfMemory: From the worker.
        """
        wanted = {
            slot: count
            for slot, count in sorted(asked.items())
            if table.length[slot] + count <= self._info.context_tokens
        }
        for slot in wanted:
            self._hear(slot, sequences[slot], table)
        found = self._catch_up(list(wanted), table)
        going = sorted(found)
        while going := [slot for slot in going if self._goes_on(slot, found, wanted)]:
            rows = []
            for slot in going:
                followed = self._followed[slot]
                followed.sequence.tokens[followed.done] = found[slot][-1]
                rows.append((slot, followed.done))
                followed.done += 1
            for slot, token in zip(going, self._run(rows, [], table), strict=True):
                found[slot].append(token)
        return {slot: self._known(tokens) for slot, tokens in found.items()}

    def _goes_on(
        self, slot: int, found: Mapping[int, list[int]], wanted: Mapping[int, int]
    ) -> bool:
        """Return whether more tokens are to follow: nothing comes after an end."""
        last = found[slot][-1]
        ends = last in self._followed[slot].sequence.stop_token_ids
        return len(found[slot]) < wanted[slot] and not ends

    def _known(self, tokens: list[int]) -> list[int]:
        """Return tokens up to the first that the other model has not."""
        size = self._vocabulary
        return tokens[: next((at for at, one in enumerate(tokens) if one >= size), len(tokens))]

    def _hear(self, slot: int, sequence: SequenceState, table: SlotTable) -> None:
        """Take what has become of a sequence; drafts that proved wrong are forgotten."""
        length = int(table.length[slot])
        tokens = np.minimum(sequence.tokens[:length], self._info.vocab_size - 1)
        followed = self._followed.get(slot)
        if followed is None:
            followed = self._followed[slot] = self._begin(slot, sequence, tokens, table)
        own = followed.sequence
        if followed.done > own.length:
            drafts = own.tokens[own.length : followed.done]
            came = tokens[own.length : followed.done]
            wrong = np.flatnonzero(drafts[: len(came)] != came)
            followed.done = own.length + (int(wrong[0]) if len(wrong) else len(came))
        own.tokens[own.length : length] = tokens[own.length :]
        own.length = length
        # The last token is run in any case: its row tells what follows.
        followed.done = min(followed.done, length - 1)

    def _begin(
        self,
        slot: int,
        sequence: SequenceState,
        tokens: npt.NDArray[np.int32],
        table: SlotTable,
    ) -> Followed:
        sampling = msgspec.structs.replace(
            sequence.sampling, grammar="", logprobs=None, prompt_logprobs=None
        )
        own = SequenceState(
            number=sequence.number,
            tokens=np.zeros(table.tokens.shape[1], np.int32),
            length=len(tokens),
            prompt_length=sequence.prompt_length,
            items=(),
            sampling=sampling,
            stop_token_ids=sequence.stop_token_ids,
        )
        own.tokens[: len(tokens)] = tokens
        self._worker.prepare(own)
        blocks = table.block_table[slot, : len(tokens) // self._block_size]
        lacking = np.flatnonzero(~self._whole[blocks])
        whole = int(lacking[0]) if len(lacking) else len(blocks)
        return Followed(own, whole * self._block_size)

    def _catch_up(self, slots: Sequence[int], table: SlotTable) -> dict[int, list[int]]:
        """Compute what lacks up to the last known token, as far as a step goes; return what follows, by slot."""
        rows: list[tuple[int, int]] = []
        chunks: list[Chunk] = []
        # Decode rows come first: memory is proved for so many rows in all.
        room = min(self._chunk_tokens, max(self._batch_tokens - ROWS_MAX * len(slots), 0))
        for slot in slots:
            followed = self._followed[slot]
            own, start = followed.sequence, followed.done
            lag = own.length - start
            if lag <= ROWS_MAX:
                rows += [(slot, position) for position in range(start, own.length)]
            elif room:
                stop = start + min(lag, room)
                room -= stop - start
                chunks.append(Chunk(slot, own, start, stop, stop == own.length, ()))
            else:
                continue
            followed.done = chunks[-1].stop if lag > ROWS_MAX else own.length
        if not rows and not chunks:
            return {}
        sampled = [slot for slot, _ in rows] + [one.slot for one in chunks if one.samples]
        tokens = self._run(rows, chunks, table)
        for slot in slots:
            filled = self._followed[slot].done // self._block_size
            self._whole[table.block_table[slot, :filled]] = True
        # Of two rows of a slot the last one counts.
        return {slot: [token] for slot, token in zip(sampled, tokens, strict=True)}

    def _run(
        self, rows: Sequence[tuple[int, int]], chunks: list[Chunk], table: SlotTable
    ) -> list[int]:
        """Run positions of slots, and chunks; return the token that follows each that yields one."""
        sequences = [self._followed[slot].sequence for slot, _ in rows]
        batch = Batch(
            decode_slots=np.array([slot for slot, _ in rows], np.int32),
            decode_tokens=np.array(
                [one.tokens[position] for one, (_, position) in zip(sequences, rows, strict=True)],
                np.int32,
            ),
            decode_positions=np.array([position for _, position in rows], np.int32),
            decode_sequences=sequences,
            block_tables=table.block_table,
            embeddings=self._none,
            chunks=chunks,
        )
        yielding = sequences + [chunk.sequence for chunk in chunks if chunk.samples]
        batch.special = [(row, one) for row, one in enumerate(yielding) if one.is_special]
        tokens: list[int] = self._worker.step(batch).tokens.tolist()
        return tokens
