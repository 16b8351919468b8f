"""The mesh: the meaning of its axes, the order of its devices, the axes that split weights and examples."""
