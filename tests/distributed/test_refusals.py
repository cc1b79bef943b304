"""What cannot be served on ranks is refused when the accumulator is made, on all ranks alike, with the remedy."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import refusals
import torch
from ranks import Ranks

REFUSALS = [
    (refusals.last_of_shards, 'PlacementError: sync="last" keeps whole sums on every rank.*Use sync="every"'),
    (refusals.old_fsdp, "PlacementError: module '0' is a FullyShardedDataParallel.*use fully_shard"),
    (refusals.inner_wrapper, "PlacementError: module '0' is a DistributedDataParallel.*give the plain module"),
    (refusals.own_hook, "PlacementError: module '' has an all-reduce hook of its own"),
    (refusals.unequal_replicas, r"ContractError: .*parameter '1\.bias' is not the same on all ranks"),
    (refusals.unequal_replicas_of_shards, r"ContractError: .*parameter '1\.bias' is not the same on all ranks"),
    (refusals.no_memory, r"ContractError: rank 1: .*parameter '0\.weight' has no memory yet.*to_empty"),
    (refusals.other_shape, r"ContractError: parameter '0\.bias' is .*\[3\].* on rank 0 and .*\[4\].* on rank 1: build"),
    (refusals.other_argument, r"ContractError: loss_scale is .*1\.0.* on rank 0 and .*2\.0.* on rank 1"),
    (refusals.other_policy, "ContractError: unused is 'error' on rank 0 and 'zero' on rank 1"),
    (refusals.part_of_the_ranks, "PlacementError: .*there are 2 ranks: pass the mesh of all of them, mesh="),
    (refusals.strange_mesh, "PlacementError: .*is no part of .*pass it as mesh="),
    (refusals.split_over_data, "PlacementError: .*'split' is split over axis 'shard', whose ranks share a batch"),
    (refusals.sparse_kind, "PlacementError: .*'strange' is a Strange; only plain tensors and DTensors"),
    (refusals.partial_parameter, "PlacementError: .*a parameter cannot be partial"),
    (refusals.other_deal, "PlacementError: .*dealt to rank 0 of 1, and the accumulator adds up as rank . of 2"),
    (refusals.no_graph, "TallyError: the total of term 'loss' has no graph"),
]


@pytest.mark.parametrize(("case", "words"), REFUSALS, ids=lambda one: getattr(one, "__name__", ""))
def test_a_refusal_says_what_to_do(ranks2: Ranks, case: Callable[[], str], words: str) -> None:
    """Every rank refuses, in the same words where all of them can know; the message names the place and the remedy."""
    told = ranks2.run(case)
    for one in told:
        assert re.search(words, one), one


POLICIES = [
    ({"param_dtype": torch.bfloat16}, "float32", "torch.bfloat16"),
    ({"reduce_dtype": torch.bfloat16}, "float32", "torch.bfloat16"),
    ({"param_dtype": torch.bfloat16, "reduce_dtype": torch.float16}, "float32", "torch.float16"),
    ({}, "float64", "torch.float32"),
]


@pytest.mark.parametrize(("policy", "dtype", "found"), POLICIES)
def test_a_reduction_narrower_than_the_sums_is_refused(
    ranks2: Ranks, policy: dict[str, torch.dtype], dtype: str, found: str
) -> None:
    """FSDP2 would round before anything is summed: refused with the dtype that serves."""
    for told in ranks2.run(refusals.narrow, policy, dtype):
        assert f"PlacementError: module '' adds its ranks' gradients up in {found}" in told
        assert f"reduce_dtype=torch.{dtype}" in told


@pytest.mark.parametrize("switch", ["factor", "force", "unused", "sync", "all-reduce"])
def test_averages_are_never_taken_for_sums(ranks2: Ranks, switch: str) -> None:
    """A switch that is set back after the construction is an error before any gradient is taken."""
    for told in ranks2.run(refusals.switched_back, switch):
        assert "PlacementError: module '' does not add up its ranks' gradients now" in told
