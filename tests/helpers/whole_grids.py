"""Names the cases that only `make test-all` runs, as others of their family prove the same by default.

A case is named by its file, its test and its id, never by its place. A name that is no longer there marks nothing, so
a case that was renamed runs by default again.
"""

MOVED: dict[str, tuple[str, ...]] = {
    # K=4; K=2 with V=2; orders, unrolled, spread and shared ends stay.
    "test_decoding.py::test_equals_the_model_without_a_cache": ("K=1-greedy", "K=2-greedy", "K=1, V=2-greedy"),
    # Each type and each number of stages stays: 1-int64, 4-int16, 4-uint8.
    "test_decoding.py::test_prompts_of_any_integers": ("1-uint8", "1-int16", "4-int64"),
    # Each schedule and each remat stays: 1f1b with none and layer, interleaved with stage, naive with full.
    "test_stage.py::test_a_stage_computes_its_own_layers_only": (
        *("1f1b-4-1-stage", "1f1b-4-1-full", "naive-1-1-none", "naive-1-1-layer", "naive-1-1-stage"),
        *("interleaved-4-2-none", "interleaved-4-2-layer", "interleaved-4-2-full"),
    ),
    # Each value of both options stays: False-use, True-step.
    "test_fsdp.py::test_gradients_of_split_parameters": ("False-step", "True-use"),
    # One stage differs from four, three and two by sizes alone.
    "test_connections.py::test_all_sorts_of_connections": ("(1, 2, '1f1b', 1, 'layer')",),
}


def is_moved(file: str, test: str, case: str) -> bool:
    """Whether only `make test-all` runs a case.

    >>> is_moved("test_fsdp.py", "test_gradients_of_split_parameters", "True-use")
    True
    """
    return case in MOVED.get(f"{file}::{test}", ())
