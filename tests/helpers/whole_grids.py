"""Names the cases that only `make test-all` runs, as others of their family prove the same by default.

A case is named by its file, its test and its id, never by its place. A name that is no longer there marks nothing, so
a case that was renamed runs by default again.
"""

OTHERS = (
    # A minute of the TPU's compiler; the rest of its file has what it adds up, `test_forecaster` forecasts for TPUs.
    "test_compiled_program.py::test_a_forecast_says_which_part_of_a_step_waits_for_links",
    # `test_its_choices_are_pipelines_that_train` compiles choices too.
    "test_search.py::test_its_first_choices_are_compiled_for_the_devices_at_hand_if_that_is_asked_for",
)
"""Tests of what only other tests need, or that others cover."""
MOVED: dict[str, tuple[str, ...]] = {
    # Either ends stay, whole backwards and split ones: own-v, shared-zero_bubble.
    "test_layer_loops.py::test_nothing_counts_that_idle_stages_compute_of_whatever_lies_there": (
        *("own-1f1b", "own-zero_bubble", "own-interleaved", "shared-1f1b", "shared-interleaved", "shared-v"),
    ),
    # The rest of PyTorch's files are read by default, and that of the most kinds of actions is run.
    "test_schedule.py::test_files_of_pytorch_are_run_exactly": (
        *("GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble"),
    ),
    # The other chips stay; 13 s of the TPU's compiler.
    "test_step_times.py::test_predictions_are_those_kept": ("v5e, K=4, 1024 wide, 1x1024, none, zero_bubble",),
    # An even and an odd number of rows; own ends and one stage.
    "test_ends.py::test_the_largest_of_a_shared_vocabulary_is_found_by_its_parts": ("6",),
    "test_ends.py::test_a_frozen_head_is_shared_too_and_one_stage_has_nothing_to_share": ("2",),
    # One stage differs from four, three and two by sizes alone.
    "test_connections.py::test_all_sorts_of_connections": ("(1, 2, '1f1b', 1, 'layer')", "(3, 4, 'gpipe', 1, 'layer')"),
    "test_metadata.py::test_leaves_of_one_shape_with_and_without_metadata": ("2-names1", "1-names0", "1-names2"),
    "test_frozen.py::test_running_averages_of_a_frozen_layer": ("kept",),
    "test_flops.py::test_layers_of_the_examples_take_what_the_compiler_counts": ("transformer_l-none",),
    "test_records.py::test_there_and_back_also_to_other_numbers_of_stages": (
        *("mixed-True-all of some", "linen-False-a part of each leaf"),
    ),
    # These pictures have the same bars at half the width.
    "test_figures.py::test_no_text_leaves_its_bar_or_the_picture": (
        "200-('1f1b', 16, 64, 1)",
        "200-('gpipe', 16, 64, 1)",
        "80-('gpipe', 16, 64, 1)",
    ),
    "test_loss.py::test_several_means_are_each_divided_by_their_own_weight": (
        "{'num_stages': 2, 'num_microbatches': 2}-{'data': 2}",
    ),
    "test_merging.py::test_rules_by_collection": (
        *(
            "order1-None-3.3333333333333335-7",
            "order0-mean-3.3333333333333335-7",
            "order0-last-7-7",
            "order1-sum-10-11",
        ),
    ),
    "test_figures.py::test_pictures_of_the_docs_are_what_their_scripts_draw": ("concepts",),
    # A schedule by name and by value, chunks and axes stay.
    "test_search.py::test_what_is_pinned_alone_has_the_rest_chosen_to_fit": (
        *("{'schedule': 'v'}", "{'schedule': 'gpipe'}", "{'shard_over': 'data'}"),
    ),
    # Each mode stays: none, layer, stage; full with one stage.
    "test_remat.py::test_every_layer_runs_as_often_as_its_mode_says_and_never_in_an_idle_tick": (
        *("none-interleaved-2-2-1", "full-1f1b-2-1-3"),
    ),
    "test_tracing.py::test_loops_that_split_keys_for_parameters_alone": ("remat_scan",),
    "test_loss.py::test_a_loss_with_a_key": ("{'num_stages': 2}",),
    "test_frozen.py::test_a_checkpoint_has_all": ("nnx",),
    "test_primitives.py::test_a_layer_of_it": ("layer-{}",),
    "test_memory_model.py::test_own_and_held_are_what_arrays_have": ("axes0-options0", "axes2-options2"),
}


def is_moved(file: str, test: str, case: str | None) -> bool:
    """Whether `make test` leaves out a case, or a test without cases.

    >>> is_moved("test_frozen.py", "test_a_checkpoint_has_all", "nnx")
    True
    """
    name = f"{file}::{test}"
    return name in OTHERS or case in MOVED.get(name, ())
