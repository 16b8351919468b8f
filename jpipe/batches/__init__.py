"""Cuts batches into micro-batches, places their rows on devices, and joins their outputs."""
