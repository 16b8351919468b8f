"""The mesh: what its axes mean, which device goes where, what weights and examples split. Knows `partitioner`."""
