"""Cuts a model that is one module into layers, at the narrow places of its trace."""
