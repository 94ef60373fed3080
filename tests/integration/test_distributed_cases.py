"""torch's own cases of torch.distributed on our groups (distributed_cases.py runs them)."""

import json
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path

import pytest

LISTED = Path(__file__).with_name("distributed_cases.toml")
A_FEW = (
    "test_DistributedDataParallelCPU",
    "test_accumulate_gradients_no_sync_allreduce_with_then_hook",
    "test_all_gather_coalesced_complex",
    "test_all_gather_object_subgroup",
    "test_all_reduce_coalesced_group_max",
    "test_all_to_all_single_unequal_split_group",
    "test_batch_isend_irecv_gloo_tags",
    "test_ddp_create_graph",
    "test_gather_group",
    "test_isend",
    "test_monitored_barrier_wait_all_ranks",
    "test_new_subgroups_with_group_param",
    "test_reduce_group_min",
    "test_scatter_object_list",
    "test_send_recv_with_tag",
    "test_sparse_all_reduce_sum",
)


def results(limit_s: float, *cases: str) -> dict[str, tuple[str, str]]:
    """Case -> (passed, skipped or failed; why)."""
    command = [sys.executable, "-m", "tests.integration.distributed_cases", *cases]
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=limit_s, check=True)
    answers = [json.loads(line) for line in ended.stdout.splitlines()]
    return {answer["case"]: (answer["result"], answer["text"]) for answer in answers}


def failures(found: Mapping[str, tuple[str, str]]) -> dict[str, str]:
    return {case: why for case, (result, why) in found.items() if result == "failed"}


def listed() -> dict[str, str]:
    """Case -> why it does not pass."""
    tables = tomllib.loads(LISTED.read_text()).values()
    return {case: why for table in tables for case, why in table.items()}


@pytest.mark.concurrent
def test_cases_of_torch_pass_as_they_are() -> None:
    found = results(110, *A_FEW)
    assert {case: result for case, (result, _) in found.items()} == dict.fromkeys(A_FEW, "passed")


@pytest.mark.full
@pytest.mark.timeout(600)
def test_every_case_of_torch_passes_or_is_listed() -> None:
    found = results(580)
    failed = failures(found)
    unlisted = {case: why for case, why in failed.items() if case not in listed()}
    assert unlisted == {}
    assert {case for case in listed() if case not in failed} == set()
    assert sum(result == "passed" for result, _ in found.values()) >= 115
