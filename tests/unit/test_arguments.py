"""What a collective is given is checked before any rank waits for another."""

import pytest
import torch

from trainmover.runtime import arguments
from trainmover.runtime.wire import Op


def test_one_tensor_for_each_rank_of_one_size_and_dtype() -> None:
    like = torch.zeros(2, 3)
    row = [torch.zeros(6) for _ in range(4)]
    assert arguments.one_each(Op.GATHER, row, 4, like) is row
    with pytest.raises(ValueError, match="expected 4 tensors for GATHER, one a rank, got 3"):
        arguments.one_each(Op.GATHER, row[:3], 4, like)
    with pytest.raises(ValueError, match=r"of 6 torch.float32 for GATHER, got one of 6 torch.int"):
        arguments.one_each(Op.GATHER, [*row[:3], torch.zeros(6, dtype=torch.int32)], 4, like)
    with pytest.raises(ValueError, match=r"of 6 torch.float32 for GATHER, got one of 7"):
        arguments.one_each(Op.GATHER, [*row[:3], torch.zeros(7)], 4, like)


def test_sizes_may_differ_between_the_ranks_of_an_all_to_all() -> None:
    row = [torch.zeros(n) for n in range(4)]
    assert arguments.one_each(Op.ALL_TO_ALL, row, 4) is row


def test_equal_pieces_are_views_of_the_whole() -> None:
    whole = torch.zeros(4, 3)
    pieces = arguments.pieces(Op.ALL_GATHER, whole, 4, torch.zeros(3))
    pieces[2].fill_(1)
    assert whole[2].eq(1).all()
    with pytest.raises(ValueError, match=r"of 8 torch.float32 for ALL_GATHER, got one of 12"):
        arguments.pieces(Op.ALL_GATHER, whole, 4, torch.zeros(2))


def test_rows_follow_the_splits_and_are_even_without() -> None:
    tensor = torch.arange(12).view(6, 2)
    assert [len(r) for r in arguments.rows(Op.ALL_TO_ALL, tensor, [], 3)] == [2, 2, 2]
    assert [len(r) for r in arguments.rows(Op.ALL_TO_ALL, tensor, [1, 0, 5], 3)] == [1, 0, 5]
    for splits, size in (([], 4), ([1, 2], 3), ([1, 2, 4], 3), ([7, -1, 0], 3)):
        with pytest.raises(ValueError, match=f"expected {size} splits of 6 rows"):
            arguments.rows(Op.ALL_TO_ALL, tensor, splits, size)


def test_a_root_is_a_member() -> None:
    assert arguments.member(Op.BROADCAST, 3, 4) == 3
    for rank in (4, -1):
        with pytest.raises(ValueError, match=f"below 4 for BROADCAST, got {rank}"):
            arguments.member(Op.BROADCAST, rank, 4)


def test_an_output_that_cannot_be_written_in_parts_is_refused() -> None:
    with pytest.raises(ValueError, match=r"contiguous output for ALL_GATHER .* call contiguous"):
        arguments.contiguous(Op.ALL_GATHER, torch.zeros(4, 4).t())
