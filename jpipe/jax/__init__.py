"""Does what JAX leaves to its users: loops in place, pytrees, jaxprs; `inside` has all that isn't public in JAX."""
