"""Tools for JAX that know nothing of pipelines: jaxprs, loops, indices, dtypes, random keys."""
