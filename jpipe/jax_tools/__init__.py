"""What is not about pipelines: jaxprs, loops, indices, dtypes, random keys.

Of jpipe it needs `seam`, `terminal` and `types` alone.
"""
