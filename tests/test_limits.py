"""The page of limits is true: the product prints each row's words, or a test elsewhere is named here."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn

from bridge import add_tvm_dispatch, stats
from tests.limit_cases import CASES

pytestmark = pytest.mark.cpu("most cases are of the host; tests/gpu has a GPU's")

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "limits.md"

ELSEWHERE = {
    "bridge/capture/test_higher_order.py": {
        "a draw in a branch or step": "draws_are_refused_where_eager_draws_anew_in_the_backward",
        "a `while_loop` without a step": "a_while_loop_without_a_step_is_refused_where_eager_differentiates_one",
        "second derivatives through these operators": "second_derivatives_are_of_the_control_flow_written_out",
    },
    "bridge/dynamo/test_higher_order.py": {
        'a graph of `torch.compile(backend="tvm_dispatch")` with branches': "more_branches_than_entries_run_eager",
    },
    "bridge/capture/test_flex_attention.py": {
        "`flex_attention` in training on a CPU": "eager_is_left_as_it_was",
        "`flex_attention` with a `score_mod`, or in float32": "no_scores_lie_in_a_gpus_memory",
        "a `BlockMask` argument with another `mask_mod` or block size": "a_mask_that_is_an_argument",
    },
    "bridge/capture/test_number_checks.py": {
        "a number of parameters, of draws or of more than a million elements": "a_branch_on_a_draw",
    },
    "bridge/dispatch/test_decided_by_draws.py": {
        "draws that decide (`if torch.rand([]) < p`), with `whole=True`": "whole_is_one_decision",
        "a model in parts because of draws": "layers_that_draws_skip",
    },
    "bridge/capture/test_unproven_loops.py": {
        "steps that are not proven to be equal": "what_is_not_proven_is_captured_as_it_is",
    },
    "bridge/capture/test_unrolled.py": {
        "more than 8,192 operators of unrolled steps on one parameter": "a_loop_of_too_many_operators_is_refused",
    },
    "bridge/aten/test_any_operator.py": {
        "operators without a fused form (`linalg.svd`, `istft`, special functions)": "it_is_named_in_the_program",
    },
    "bridge/dispatch/test_errors_of_unread_results.py": {
        "an unused result": "what_nobody_reads_raises",
    },
    "test_limits.py": {
        "an overwritten product with an infinite factor": "an_overwritten_product_has_no_gradient",
        "a parameter that forward changes": "gradients_of_two_calls_that_change_a_parameter",
    },
    "bridge/aten/test_indexing.py": {
        "an index out of range": "a_graph_layer_padded_with_minus_one_raises_as_eager",
    },
    "bridge/capture/test_opaque_functions.py": {
        "a custom `autograd.Function` that cannot be traced": "training_is_eagers",
    },
    "bridge/capture/test_custom_functions.py": {
        "one that changes a leaf": "refused_by_name",
        "one whose tensors are used elsewhere": "refused_by_name",
        "one that returns a view of an argument": "refused_by_name",
    },
    "bridge/dispatch/test_second_derivatives.py": {
        "`create_graph=True`, `is_grads_batched=True`": "batched_gradients",
    },
    "bridge/capture/test_derivatives.py": {
        "derivatives in forward, of a tensor with a graph from before the call": "a_graph_that_leads_out_of_the_call",
        "derivatives in forward, of overwritten tensors": "is_refused_by_name",
    },
    "bridge/composition/test_checkpoint.py": {
        "a checkpoint with `preserve_rng_state": "what_the_second_run_would_compute_otherwise_is_refused_by_name",
    },
    "bridge/dispatch/test_autograd.py": {
        "a backward of each of two results": "results_that_share_nothing_are_of_one_graph",
    },
    "bridge/dispatch/test_nodes.py": {
        "a hook that replaces a gradient": "a_gradient_between_the_nodes_that_was_replaced_is_noticed",
    },
    "bridge/capture/test_data_attribute.py": {
        "`create_graph=True` through a parameter": "a_second_derivative_through_a_written_parameter_is_told",
    },
    "bridge/dispatch/test_written_memory.py": {
        "memory changed by `.data` or NumPy between forward and backward": "gradients_read_what_eager_reads",
    },
    "bridge/guards/test_hidden_state.py": {
        "`print`, logs, warnings in forward": "what_forward_prints_is_said_once_and_printed_once",
    },
    "bridge/composition/test_trainer_uses.py": {
        "a cache of keys and values as an argument": "a_cache_as_an_argument_is_refused_and_says_what_to_do",
        '`TrainingArguments(torch_compile_backend="tvm_dispatch")`': "a_model_compiled_in_place",
    },
    "bridge/capture/test_thread_isolation.py": {
        "other threads while an entry is added": "eager_training_beside_a_capture_is_the_same_to_the_bit",
    },
    "bridge/base/test_interrupts.py": {
        "Ctrl-C while adding": "a_second_one_breaks_at_once",
    },
    "bridge/base/test_python_build.py": {
        "free-threaded Python": "a_free_threaded_build_is_refused_on_import",
    },
    "bridge/base/test_torch_internals.py": {
        "torch outside of 2.11": "a_missing_name_is_an_error_that_says_so_or_takes_its_fallback",
    },
    "bridge/dispatch/test_dynamic_entries.py": {
        "a size that cannot vary, found by misses": "what_was_refused_is_not_tried_again",
    },
    "bridge/dispatch/test_dynamic_attention.py": {
        "fused attention on a GPU, before torch 2.13": "draws_and_gradients",
    },
    "bridge/compile/test_symbolic_columns.py": {
        "the order of sums and the choice of a product's algorithm": "a_long_sum_has_two_stages_if_a_number_divides_it",
    },
    "bridge/rng/test_computed_draws.py": {
        "another thread that draws during a call with computed draws": "a_call_beside_a_thread_that_draws_is_eagers",
    },
    "bridge/rng/test_threads.py": {
        "systems whose generator lock is not found (not Linux)": "another_mutex_is_not_the_lock",
    },
    "bridge/rng/test_check_philox.py": {
        "a GPU whose Philox rule differs, float64, views that are not dense": "another_rule_is_found_and_told_once",
    },
    "bridge/parity/test_precision_casts.py": {
        "`nn.LSTM`, `nn.GRU`, `nn.RNN` with dropout": "operators_inside_which_autocast_casts"
    },
    "gpu/test_draws_at_offsets.py": {
        "a computed draw on the host in a module on a GPU": "a_host_computed_draw_is_refused_by_name",
    },
    "bridge/compile/test_piecewise.py": {
        "fused attention with dropout in a recorded program": "which_steps_are_between",
    },
    "gpu/test_parity.py": {
        "one module on several GPUs": "a_module_in_two_places_is_refused_by_name",
    },
    "gpu/test_attention_by_products.py": {
        "float32 attention": "who_forbids_the_formula_gets_the_kernel",
    },
    "bridge/compile/test_pad_products.py": {
        "a large product of half types": "which_products_are_padded_on_a_gpu",
    },
    "bridge/rng/test_capture.py": {
        "a first call inside of your own CUDA graph": "nothing_is_compiled",
    },
    "bridge/compile/test_recorded_graphs.py": {
        "[CUDA graphs](cuda_graphs.md)": "automatic_holds_only_so_much",
        "inputs whose addresses keep changing": "an_input_whose_address_never_returns_is_copied",
    },
    "gpu/test_recorded_graphs.py": {
        "programs with `torch.linalg.eigh`": "cusolver_is_not_captured",
    },
    "bridge/composition/test_distributed.py": {
        "FSDP1": "flat_shards_run_eager_with_a_reason",
        "FSDP2 with mixed precision": "mixed_precision_shards_run_eager_with_a_reason",
        "dispatch, then `fully_shard`": "layers_that_are_changed_inside_run_eager_with_a_reason",
    },
    "bridge/composition/test_tensor_parallel.py": {
        "a module with a tensor-parallel plan of its own": "what_cannot_be_is_refused_by_name",
        "DTensors as results": "what_cannot_be_is_refused_by_name",
        "sizes that the ranks do not divide": "what_cannot_be_is_refused_by_name",
        "draws on DTensors": "what_cannot_be_is_refused_by_name",
        "numbers read in a call with collectives": "what_cannot_be_is_refused_by_name",
        "a rank that misses": "a_rank_that_misses",
    },
    "gpu/test_functions.py": {
        "signs of zeros (`relu`, `maximum`), `addcdiv` of subnormals, on a GPU": "largest_and_smallest",
    },
    "bridge/compile/test_moments.py": {
        "rows whose squares overflow (±1e20 in float32)": "what_is_not_finite",
    },
    "bridge/aten/test_complex.py": {
        "infinite parts of complex numbers": "parts_that_are_not_finite",
    },
    "bridge/compile/test_products.py": {
        "the algorithm of a product": "deterministic_algorithms_take_torchs_products",
    },
    "bridge/dispatch/test_frozen.py": {
        "a frozen weight that changes by `.data` or NumPy": "what_torch_does_not_count_is_seen_when_added_again",
    },
    "bridge/export/test_load.py": {
        "another processor, GPU or version": "another_machine_or_version_is_told",
    },
}
"""File of tests → beginning of a row of the page: the test, without ``test_``."""


def rows() -> dict[str, str]:
    """Code → outcome, of all tables."""
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    cells = [line.strip("| ").split(" | ") for line in lines]
    return {each[0]: each[1] for each in cells if each[0] not in ("code", "---")}


def row_of(code: str) -> str:
    """The first cell of the row that begins with a text."""
    known = rows()
    (found,) = [code] if code in known else [each for each in known if each.startswith(code)]
    return found


def words(outcome: str) -> list[str]:
    """The quoted words of an outcome."""
    return re.findall(r'(?<!=)"([^"]+)"(?!\))', outcome)


@pytest.mark.parametrize("code", CASES)
def test_the_words_are_printed(code):
    printed = CASES[code]()
    for each in words(rows()[row_of(code)]):
        assert each in printed


def test_each_row_has_a_test():
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    elsewhere = [code for tests in ELSEWHERE.values() for code in tests]
    assert sorted(rows()) == sorted(map(row_of, [*CASES, *elsewhere]))
    assert all(words(rows()[row_of(code)]) for code in CASES)
    assert len(rows()) == len([line for line in lines if not line.startswith("| code |")])


@cache
def texts() -> str:
    """All string literals of the product, and its tests' of distributed runs."""
    found = []
    for path in [*(ROOT / "bridge").rglob("*.py"), *(ROOT / "tests" / "bridge" / "composition").glob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return "\n".join(found)


@pytest.mark.parametrize("file", ELSEWHERE)
def test_tests_elsewhere_exist(file):
    source = (ROOT / "tests" / file).read_text(encoding="utf-8")
    for code, name in ELSEWHERE[file].items():
        assert f"def test_{name}(" in source
        for each in words(rows()[row_of(code)]):
            assert each in texts() or each in source, each


def trained(module, calls):
    x = torch.ones(4, 4, requires_grad=True)
    results = [module(x) for _ in range(calls)]
    results[0].sum().backward()
    return x.grad


class Overwritten(nn.Module):
    def forward(self, x):
        y = x * float("inf")
        y.zero_()
        return y + x


def test_an_overwritten_product_has_no_gradient():
    module = Overwritten()
    assert trained(module, 1).isnan().all()
    assert torch.equal(trained(add_tvm_dispatch(module, torch.ones(4, 4, requires_grad=True)), 1), torch.ones(4, 4))
    assert stats(module).hits == 1


class Decays(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x):
        with torch.no_grad():
            self.weight.mul_(0.5)
        return x * self.weight


def test_gradients_of_two_calls_that_change_a_parameter():
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        trained(Decays(), 2)
    module = add_tvm_dispatch(Decays(), torch.ones(4, 4, requires_grad=True))
    assert torch.equal(trained(module, 2), torch.full((4, 4), 0.5)) and stats(module).hits == 2
