"""Cuts batches into micro-batches, places their rows on devices, and joins what comes out of them."""
