"""Names the cases that only `make test-all` runs, as others of their family prove the same by default.

A case is named by its file, its test and its id, never by its place. A name that is no longer there marks nothing, so
a case that was renamed runs by default again.
"""

EXAMPLES = (
    "test_generate_example.py::test_it_trains_is_evaluated_and_goes_on",
    "test_learning.py::test_it_learns_what_it_is_shown",
    "test_learning.py::test_there_are_languages_enough_and_no_name_held_out_was_learnt",
    "test_example_loops.py::test_a_pipeline_prints_the_losses_of_the_plain_loop",
    "test_dit_stream.py::test_outputs_are_those_of_the_plain_model_and_ticks_those_of_the_formula",
    "test_dit_stream.py::test_runs_prints_and_draws",
)
"""Tests that run an example for seconds; continuous integration runs them besides."""
OTHERS = (
    # `test_amoebanet_d_has_the_parameters_of_table_1` counts those of the same cells.
    "test_models.py::test_amoebanet_b_has_the_parameters_of_the_paper",
    "test_models.py::test_amoebanet_gives_what_it_computes_in",
    # A minute of the TPU's compiler; the rest of its file has what it adds up, `test_forecaster` forecasts for TPUs.
    "test_compiled_program.py::test_a_forecast_says_which_part_of_a_step_waits_for_links",
    # `test_its_choices_are_pipelines_that_train` compiles choices too.
    "test_search.py::test_its_first_choices_are_compiled_for_the_devices_at_hand_if_that_is_asked_for",
)
"""Tests of what only other tests need, or that others cover."""
MOVED: dict[str, tuple[str, ...]] = {
    # Each remat and each place of ends stays: own-none, spread-layer, tied-full.
    "test_programs.py::test_layers_compute_the_same_to_the_bit": (
        *("own-layer", "own-full", "spread-none", "spread-full", "tied-none", "tied-layer"),
    ),
    # Either ends stay, whole backwards and split ones: own-v, shared-zero_bubble.
    "test_layer_loops.py::test_nothing_counts_that_idle_stages_compute_of_whatever_lies_there": (
        *("own-1f1b", "own-zero_bubble", "own-interleaved", "shared-1f1b", "shared-interleaved", "shared-v"),
    ),
    # A program for TPUs and one for GPUs stay; on CPUs nothing is moved.
    "test_executor.py::test_a_step_is_the_same_to_the_bit": (
        "linen-case3-none-offload3-gpu",
        "linen-case0-none-residuals-cpu",
    ),
    # What is clipped, skipped and summed up over steps stays, and one by layers.
    "test_by_slices.py::test_steps_are_the_same_to_the_bit": (
        *("adam", "momentum", "no state", "lion", "adafactor", "ratios of moments", "finite layers"),
        *("hyperparameters", "steps of layers", "several steps", "lamb"),
    ),
    "test_by_slices.py::test_sums_of_what_follows_from_the_state": ("several steps", "prodigy"),
    # Spread ends with parameters that are split over an explicit mesh's data axis stay.
    "test_by_slices.py::test_on_meshes": ("data-False", "sharded-False", "spread-False"),
    # The program for TPUs stays; `test_gpu` has one for GPUs that moves to hosts.
    "test_by_slices.py::test_programs_move_slices_beside_work": ("h100:8-adamw",),
    "test_by_slices.py::test_checkpoints_go_to_pipelines_without": (
        "adam-from the hosts",
        "lamb-from the devices",
        "adam-from the devices",
    ),
    # The rest of PyTorch's files are read by default, and that of the most kinds of actions is run.
    "test_schedule.py::test_files_of_pytorch_are_run_exactly": (
        *("GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble"),
    ),
    "test_pipeline.py::test_where_the_inputs_come_from": ("None-<lambda>1",),
    # K=2, K=2 with V=2, and shared ends stay.
    "test_decoding.py::test_equals_the_model_without_a_cache": (
        *(
            "K=4-greedy",
            "K=1-greedy",
            "K=2-greedy",
            "K=1, V=2-greedy",
            "v-greedy",
            "shared by one-greedy",
            "spread-greedy",
        ),
    ),
    # Two axes at once stay.
    "test_decoding.py::test_other_axes": ("axes1", "axes2"),
    "test_decoding.py::test_prompts_are_fed_several_tokens_at_a_time": ("2-5-K=2",),
    # The other chips stay; 13 s of the TPU's compiler.
    "test_step_times.py::test_predictions_are_those_kept": ("v5e, K=4, 1024 wide, 1x1024, none, zero_bubble",),
    # Continuous integration runs all pages.
    "test_docs.py::test_a_page_runs_and_prints_what_it_shows": (
        "docs/howto/generate.md",
        "docs/howto/several-hosts.md",
    ),
    "test_notebooks.py::test_runs_without_a_warning": ("2_bubble_and_schedules",),
    "test_files.py::test_training_goes_on_as_a_plain_run_does": (
        "adamw-options0",
        "values of parameters-options3",
    ),
    # An even and an odd number of rows; own ends and one stage.
    "test_ends.py::test_the_largest_of_a_shared_vocabulary_is_found_by_its_parts": ("6",),
    "test_ends.py::test_a_frozen_head_is_shared_too_and_one_stage_has_nothing_to_share": ("2",),
    # The optimiser's arrays are read as the layers' are.
    "test_checkpointer.py::test_a_damaged_checkpoint_is_passed_over_and_set_aside": ("optimizer-truncate",),
    # Mixed layers and a chain of one kind stay.
    "test_executor.py::test_equals_the_sequential_model": ("tied-4-4-options1-axes1",),
    "test_peers.py::test_pipelines_train_that_model": ("layer,zero_bubble",),
    # The narrowest type stays: 4-uint8.
    "test_decoding.py::test_prompts_of_any_integers": ("1-uint8", "1-int16", "4-int64", "1-int64", "4-int16"),
    # Each schedule and each remat stays: 1f1b with none and layer, interleaved with stage, naive with full.
    "test_stage.py::test_a_stage_computes_its_own_layers_only": (
        *("1f1b-4-1-stage", "1f1b-4-1-full", "naive-1-1-none", "naive-1-1-layer", "naive-1-1-stage"),
        *("interleaved-4-2-none", "interleaved-4-2-layer", "interleaved-4-2-full"),
    ),
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
    "test_decoding.py::test_blocks_with_numbers_of_their_own": ("numbers1-groups1",),
    "test_decoding.py::test_the_logits_among_several_outputs": ("{'data': 2}",),
    "test_checkpointer.py::test_any_optimisers_state_to_another_layout_and_back": ("noise",),
    "test_loss.py::test_several_means_are_each_divided_by_their_own_weight": (
        "{'num_stages': 2, 'num_microbatches': 2}-{'data': 2}",
    ),
    "test_models.py::test_models_train_in_stages": ("resnet",),
    "test_merging.py::test_rules_by_collection": (
        *(
            "order1-None-3.3333333333333335-7",
            "order0-mean-3.3333333333333335-7",
            "order0-last-7-7",
            "order1-sum-10-11",
        ),
    ),
    "test_optimizers.py::test_elementwise_transformations_need_nothing": ("sgd with momentum",),
    "test_figures.py::test_pictures_of_the_docs_are_what_their_scripts_draw": ("concepts",),
    # A schedule by name and by value, chunks and axes stay.
    "test_search.py::test_what_is_pinned_alone_has_the_rest_chosen_to_fit": (
        *("{'schedule': 'v'}", "{'schedule': 'gpipe'}", "{'shard_over': 'data'}"),
    ),
    "test_per_layer.py::test_per_layer_shows_each_layer_its_own_tree": ("multi_transform", "clipped by block"),
    # Each mode stays: none, layer, stage; full with one stage.
    "test_remat.py::test_every_layer_runs_as_often_as_its_mode_says_and_never_in_an_idle_tick": (
        *("none-interleaved-2-2-1", "full-1f1b-2-1-3"),
    ),
    "test_tracing.py::test_loops_that_split_keys_for_parameters_alone": ("remat_scan",),
    "test_loss.py::test_a_loss_with_a_key": ("{'num_stages': 2}",),
    "test_train_state.py::test_state_lies_with_its_layers": ("adamw", "chain"),
    "test_train_state.py::test_a_loop_of_ones_own_compiles_its_step_once": ("True",),
    "test_frozen.py::test_a_checkpoint_has_all": ("nnx",),
    "test_primitives.py::test_a_layer_of_it": ("layer-{}",),
    "test_memory_model.py::test_own_and_held_are_what_arrays_have": ("axes0-options0", "axes2-options2"),
    "test_dit_stream.py::test_forty_blocks_are_cut_into_equal_stages": ("4",),
    "test_files.py::test_a_layer_that_is_one_array": ("all",),
    "test_pipeline.py::test_boundaries_cross_by_permutation_alone": (
        *("masked-gpipe-3-1-stage-3-2", "alternating-interleaved-2-2-none-1-1"),
    ),
}


def is_moved(file: str, test: str, case: str | None) -> bool:
    """Whether `make test` leaves out a case, or a test without cases.

    >>> is_moved("test_frozen.py", "test_a_checkpoint_has_all", "nnx")
    True
    """
    name = f"{file}::{test}"
    return name in EXAMPLES + OTHERS or case in MOVED.get(name, ())
