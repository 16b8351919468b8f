"""What is not about pipelines: jaxprs, loops, indices, dtypes, random keys. Knows JAX and NumPy alone."""
