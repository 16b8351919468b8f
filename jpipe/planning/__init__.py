"""What is decided once, from the shapes of the first batch: costs, cuts, layouts. Knows `memory` and what it knows."""
