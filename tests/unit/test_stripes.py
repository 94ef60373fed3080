"""Every byte is in place exactly once, whichever donor goes and when."""

import itertools
import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainmover.runtime.raw import CHUNK
from trainmover.runtime.transfer.chunks import MAX_RUN, Chunk, cut, pieces
from trainmover.runtime.transfer.stripes import Stripes

SIZES = st.lists(
    st.one_of(
        st.integers(0, 200),
        st.sampled_from([CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 3 * CHUNK + 16]),
    ),
    max_size=30,
)


def bytes_of(chunk: Chunk, sizes: Sequence[int]) -> tuple[int, int]:
    """First and last byte, all tensors one behind the other."""
    first = sum(sizes[: chunk.tensor]) + chunk.offset
    return first, first + chunk.length


@given(SIZES)
def test_chunks_have_every_byte_once_and_in_order(sizes: list[int]) -> None:
    chunks = cut(sizes)
    spans = [bytes_of(chunk, sizes) for chunk in chunks]
    assert [first for first, _ in spans] == [0, *(end for _, end in spans)][: len(spans)]
    assert (spans[-1][1] if spans else 0) == sum(sizes)
    assert all(0 < chunk.length <= CHUNK and chunk.offset % CHUNK == 0 for chunk in chunks)


@given(SIZES)
def test_the_pieces_of_a_chunk_are_within_their_tensors(sizes: list[int]) -> None:
    for chunk in cut(sizes):
        parts = list(pieces(chunk, sizes))
        assert sum(part.length for part in parts) == chunk.length
        assert all(p.length > 0 and p.offset + p.length <= sizes[p.tensor] for p in parts)
        assert all(part.offset == 0 for part in parts[1:])
        assert [p.tensor for p in parts] == sorted({p.tensor for p in parts})


def test_a_chunk_touches_a_limited_number_of_tensors() -> None:
    sizes = [4] * (2 * MAX_RUN + 1)
    assert [len(list(pieces(chunk, sizes))) for chunk in cut(sizes)] == [MAX_RUN, MAX_RUN, 1]


@pytest.mark.parametrize(
    "chunk", [(0, 0, 0), (0, 0, CHUNK + 1), (0, 9, 1), (1, 0, 5), (2, 0, 1), (0, 0, 13)]
)
def test_what_is_not_there_is_no_chunk(chunk: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match=r"[Cc]hunk"):
        list(pieces(Chunk(*chunk), [8, 4]))


CHUNKS = [Chunk(n, 0, 1 + n) for n in range(8)]


@pytest.mark.parametrize("seed", range(50))
def test_each_chunk_comes_once_whichever_stream_is_lost_when(seed: int) -> None:
    draw = random.Random(seed)
    stripes, came, again = Stripes(CHUNKS), list[Chunk](), 0
    out: dict[int, list[Chunk]] = {0: [], 1: [], 2: []}
    for name in itertools.count(3):
        if stripes.done:
            break
        stream = draw.choice(list(out))
        match draw.choice(("take", "take", "come", "lose")):
            case "take":
                if chunk := stripes.take(stream):
                    assert all(chunk not in chunks for chunks in out.values())
                    assert chunk not in came
                    out[stream].append(chunk)
            case "come" if out[stream]:
                chunk = out[stream].pop(0)
                stripes.came(stream, chunk)
                came.append(chunk)
            case "lose":
                again += sum(chunk.length for chunk in out.pop(stream))
                stripes.lost(stream)
                out[name] = []
    assert sorted(came) == CHUNKS
    assert stripes.take(0) is None
    assert stripes.again == again


def test_what_a_lost_stream_had_is_asked_for_first() -> None:
    stripes = Stripes(CHUNKS)
    assert [stripes.take("a"), stripes.take("b"), stripes.take("a")] == CHUNKS[:3]
    stripes.lost("a")
    assert [stripes.take("b"), stripes.take("b"), stripes.take("b")] == [
        CHUNKS[0],
        CHUNKS[2],
        CHUNKS[3],
    ]
    assert stripes.again == CHUNKS[0].length + CHUNKS[2].length


def test_a_chunk_that_a_stream_was_not_asked_for_is_none_of_its() -> None:
    stripes = Stripes(CHUNKS)
    chunk = stripes.take("a")
    assert chunk
    with pytest.raises(ValueError, match="not in list"):
        stripes.came("b", chunk)
