"""The mesh: what its axes mean, which device goes where, what weights and examples are split over."""
